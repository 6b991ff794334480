//! What proto3's JSON form allows and serde does not do by itself.

use base64::Engine;
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::{GeneralPurposeConfig, STANDARD};
use serde::{Deserialize, Deserializer, de::Error};

/// Decoding takes base64 with and without padding, as proto3 JSON parsers must.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(base64::engine::DecodePaddingMode::Indifferent),
);

/// `null` means the default value.
pub fn null_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// A `bytes` field: base64 text, URL-safe alphabet allowed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Base64(pub Vec<u8>);

impl<'de> Deserialize<'de> for Base64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut text = String::deserialize(deserializer)?;
        if text.contains(['-', '_']) {
            text = text.replace('-', "+").replace('_', "/");
        }
        LENIENT.decode(text).map(Base64).map_err(D::Error::custom)
    }
}

/// Appends bytes as base64 text.
pub fn put_base64(out: &mut Vec<u8>, bytes: &[u8]) {
    let start = out.len();
    out.resize(start + bytes.len().div_ceil(3) * 4, 0);
    let written = out
        .get_mut(start..)
        .and_then(|space| STANDARD.encode_slice(bytes, space).ok());
    out.truncate(start + written.unwrap_or(0));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_takes_both_alphabets_and_missing_padding() {
        for text in ["\"+/8=\"", "\"+/8\"", "\"-_8\""] {
            assert_eq!(serde_json::from_str::<Base64>(text).unwrap().0, [0xfb, 0xff]);
        }
        assert!(serde_json::from_str::<Base64>("\"*\"").is_err());
    }

    #[test]
    fn base64_of_bytes_is_appended() {
        let mut out = b"x".to_vec();
        put_base64(&mut out, &[0xfb, 0xff]);
        assert_eq!(out, b"x+/8=");
    }
}
