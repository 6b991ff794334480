//! Identities that are given as text, or that follow from what they identify.

use aenv_layers::Uuid;
use sha2::{Digest as _, Sha256};

/// Reads 32 hexadecimal digits, hyphens where they usually are or nowhere.
pub fn parse_uuid(text: &str) -> Option<Uuid> {
    let hyphens_fit = match text.len() {
        32 => !text.contains('-'),
        36 => [8, 13, 18, 23].iter().all(|&at| text.as_bytes()[at] == b'-'),
        _ => false,
    };
    let digits: Vec<u8> = text
        .chars()
        .filter(|&digit| digit != '-')
        .map(|digit| digit.to_digit(16).and_then(|digit| u8::try_from(digit).ok()))
        .collect::<Option<_>>()?;
    if !hyphens_fit || digits.len() != 32 {
        return None;
    }
    Some(Uuid::from_bytes(std::array::from_fn(|at| {
        digits[2 * at] << 4 | digits[2 * at + 1]
    })))
}

/// The identity of what `parts` describe: equal parts, equal identity.
pub(crate) fn derived(parts: &[&[u8]]) -> Uuid {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let digest = hash.finalize();
    let mut bytes: [u8; 16] = std::array::from_fn(|at| digest[at]);
    // Version and variant bits: the format's other tools look at them. They know no hashed kind, so it says "random".
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    Uuid::from_bytes(bytes)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn both_forms_are_read_and_nothing_else() {
        let text = "0123ABcd-4567-4def-8123-0123456789ab";
        let uuid = parse_uuid(text).unwrap();
        assert_eq!(uuid.to_string().to_lowercase(), text.to_lowercase());
        assert_eq!(parse_uuid(&text.replace('-', "")), Some(uuid));
        for wrong in [
            "",
            "0123",
            "0123abcd-4567-4def-81230-123456789ab",
            &"g".repeat(32),
            "é".repeat(18).as_str(),
        ] {
            assert_eq!(parse_uuid(wrong), None, "{wrong}");
        }
    }
}
