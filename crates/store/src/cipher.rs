//! The key of encryption at rest.

/// The master key of the configuration. Each layer has a key of its own, derived from it.
#[derive(Clone)]
pub struct Cipher {
    master: [u8; 32],
}

impl Cipher {
    pub fn new(master: [u8; 32]) -> Cipher {
        Cipher { master }
    }
}

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher")
    }
}
