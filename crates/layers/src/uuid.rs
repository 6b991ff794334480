//! The identity of a layer, as 16 bytes in memory and as 36 characters in the file.

use std::fmt;

/// Text form and its terminating NUL, as the format stores it.
pub(crate) const UUID_FIELD_BYTES: usize = 37;

/// Positions of the hyphens in the text form.
const HYPHENS: [usize; 4] = [8, 13, 18, 23];

/// A random (version 4) identifier, or nil where a layer has no parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Uuid([u8; 16]);

impl Uuid {
    pub const NIL: Uuid = Uuid([0; 16]);

    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Uuid(bytes)
    }

    pub const fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// A new random identifier from the kernel.
    pub fn random() -> std::io::Result<Self> {
        let mut bytes = [0u8; 16];
        let mut filled = 0;
        while filled < bytes.len() {
            filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        // Version and variant bits of RFC 9562; upstream's validator looks at the version.
        bytes[6] = (bytes[6] & 0x0f) | 0x40;
        bytes[8] = (bytes[8] & 0x3f) | 0x80;
        Ok(Uuid(bytes))
    }

    /// The field of a header: upper-case text and a NUL, as upstream writes it.
    pub(crate) fn to_field(self) -> [u8; UUID_FIELD_BYTES] {
        let mut field = [0u8; UUID_FIELD_BYTES];
        field[..36].copy_from_slice(self.to_string().as_bytes());
        field
    }

    /// Reads a header's field. Anything but a well-formed text is nil, since upstream leaves the field unset in some
    /// files and no look-up depends on it.
    pub(crate) fn from_field(field: &[u8]) -> Self {
        Self::parse(field.get(..36).unwrap_or(&[])).unwrap_or_default()
    }

    fn parse(text: &[u8]) -> Option<Self> {
        if text.len() != 36 || HYPHENS.iter().any(|&at| text[at] != b'-') {
            return None;
        }
        let mut digits = text.iter().enumerate().filter(|(at, _)| !HYPHENS.contains(at));
        let mut bytes = [0u8; 16];
        for byte in &mut bytes {
            let high = char::from(*digits.next()?.1).to_digit(16)?;
            let low = char::from(*digits.next()?.1).to_digit(16)?;
            *byte = u8::try_from(high << 4 | low).ok()?;
        }
        Some(Uuid(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (position, byte) in self.0.iter().enumerate() {
            if matches!(position, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02X}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn text_and_bytes_are_each_others_inverse() {
        let id = Uuid::random().unwrap();
        assert_eq!(Uuid::from_field(&id.to_field()), id);
        assert_eq!(id.to_string().as_bytes()[14], b'4');
    }

    #[test]
    fn a_malformed_field_is_nil() {
        assert_eq!(Uuid::from_field(&[0; 37]), Uuid::NIL);
        assert_eq!(Uuid::from_field(b"0123456789abcdef0123456789abcdef0123\0"), Uuid::NIL);
        assert_eq!(Uuid::from_field(b"short"), Uuid::NIL);
    }
}
