//! One header record of 512 bytes.
//!
//! ```text
//! 0 name 100, mode 8, uid 8, gid 8, size 12, mtime 12, checksum 8, type 1, link 100 | 257 magic 8, owner 32, group 32,
//! major 8, minor 8 | ustar: prefix 155 | GNU: atime 12, ctime 12, ... 386 sparse 4 x 24, more 1, real size 12
//! ```

use super::RECORD_BYTES;

pub type Record = [u8; RECORD_BYTES];

/// Why a field is refused.
pub type Malformed = &'static str;

/// A view on a record with the meaning of its fields.
#[derive(Debug, Clone, Copy)]
pub struct Header<'a>(pub &'a Record);

impl<'a> Header<'a> {
    pub fn name(self) -> &'a [u8] {
        until_nul(&self.0[..100])
    }

    pub fn link(self) -> &'a [u8] {
        until_nul(&self.0[157..257])
    }

    /// The folders of a long name, in ustar only: GNU has other fields there.
    pub fn prefix(self) -> &'a [u8] {
        let ustar = &self.0[257..263] == b"ustar\0";
        // Star's own variant is marked at the end and has times where the prefix ends.
        let star = &self.0[508..512] == b"tar\0";
        match (ustar, star) {
            (true, false) => until_nul(&self.0[345..500]),
            (true, true) => until_nul(&self.0[345..476]),
            _ => &[],
        }
    }

    pub fn type_flag(self) -> u8 {
        self.0[156]
    }

    pub fn mode(self) -> Result<u64, Malformed> {
        unsigned(&self.0[100..108])
    }

    pub fn uid(self) -> Result<u64, Malformed> {
        unsigned(&self.0[108..116])
    }

    pub fn gid(self) -> Result<u64, Malformed> {
        unsigned(&self.0[116..124])
    }

    pub fn size(self) -> Result<u64, Malformed> {
        unsigned(&self.0[124..136])
    }

    pub fn mtime(self) -> Result<i64, Malformed> {
        number(&self.0[136..148])
    }

    /// Numbers of a device; the oldest archives have no such field.
    pub fn device(self) -> Result<(u64, u64), Malformed> {
        match &self.0[257..262] == b"ustar" {
            true => Ok((unsigned(&self.0[329..337])?, unsigned(&self.0[337..345])?)),
            false => Ok((0, 0)),
        }
    }

    /// Both ways to sum are found in archives: bytes without a sign, and with one.
    pub fn checksum_is_right(self) -> bool {
        let Ok(stored) = number(&self.0[148..156]) else {
            return false;
        };
        let (mut unsigned_sum, mut signed_sum) = (0i64, 0i64);
        for (at, &byte) in self.0.iter().enumerate() {
            let byte = if (148..156).contains(&at) { b' ' } else { byte };
            unsigned_sum += i64::from(byte);
            signed_sum += i64::from(byte as i8);
        }
        stored == unsigned_sum || stored == signed_sum
    }
}

/// The bytes before the first NUL.
pub fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or(field)
}

/// A number that may not be negative.
pub fn unsigned(field: &[u8]) -> Result<u64, Malformed> {
    u64::try_from(number(field)?).map_err(|_| "a field holds a negative number")
}

/// Octal digits, or with the first bit set GNU's big-endian binary.
pub fn number(field: &[u8]) -> Result<i64, Malformed> {
    if field[0] & 0x80 != 0 {
        return binary(field);
    }
    let text: &[u8] = field.trim_ascii();
    let text = match text.iter().position(|&byte| byte == 0) {
        Some(end) => text[..end].trim_ascii(),
        None => text,
    };
    text.iter().try_fold(0i64, |value, &digit| match digit {
        b'0'..=b'7' => value
            .checked_mul(8)
            .map(|value| value + i64::from(digit - b'0'))
            .ok_or("a field holds too large a number"),
        _ => Err("a field holds no octal number"),
    })
}

fn binary(field: &[u8]) -> Result<i64, Malformed> {
    let negative = field[0] & 0x40 != 0;
    let mut value: i128 = if negative { -1 } else { 0 };
    for (at, &byte) in field.iter().enumerate() {
        // The first bit only marks the encoding; of a negative number it is part of the sign.
        let byte = if at == 0 && !negative { byte & 0x7f } else { byte };
        value = value << 8 | i128::from(byte);
        if i64::try_from(value).is_err() {
            return Err("a field holds too large a number");
        }
    }
    i64::try_from(value).map_err(|_| "a field holds too large a number")
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn octal_numbers_may_be_padded_either_way() {
        assert_eq!(number(b"0000644\0"), Ok(0o644));
        assert_eq!(number(b"   644 \0"), Ok(0o644));
        assert_eq!(number(b"\0\0\0\0\0\0\0\0"), Ok(0));
        assert!(number(b"0000648\0").is_err());
    }

    #[test]
    fn binary_numbers_have_a_sign_and_a_limit() {
        assert_eq!(number(&[0x80, 0, 0, 0, 0, 1, 0, 0]), Ok(65536));
        assert_eq!(number(&[0xff; 12]), Ok(-1));
        assert_eq!(number(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe]), Ok(-2));
        assert!(number(&[0x80, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]).is_err());
        assert!(unsigned(&[0xff; 12]).is_err());
    }
}
