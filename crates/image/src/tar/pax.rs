//! PAX headers: records of `length key=value` with a line's end, which override fields of the next entry.

use std::collections::BTreeMap;

use super::PATH_BYTES_MAX;
use super::header::Malformed;
use crate::ext4::Time;

const ATTRIBUTE_PREFIX: &[u8] = b"SCHILY.xattr.";
/// Longest name of an extended attribute, the kernel's limit.
const ATTRIBUTE_NAME_MAX: usize = 255;

/// What the headers before an entry said about it.
#[derive(Debug, Default)]
pub struct Overrides {
    pub path: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    pub size: Option<u64>,
    pub uid: Option<u64>,
    pub gid: Option<u64>,
    pub mtime: Option<Time>,
    pub atime: Option<Time>,
    pub attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    pub sparse: SparseFields,
}

/// `GNU.sparse.*`, of its three versions.
#[derive(Debug, Default)]
pub struct SparseFields {
    pub major: Option<u64>,
    pub minor: Option<u64>,
    pub name: Option<Vec<u8>>,
    pub real_size: Option<u64>,
    /// Offsets and lengths in turn: version 0.0 repeats two keys, version 0.1 has a list.
    pub map: Option<Vec<u64>>,
}

impl Overrides {
    /// Takes over all records of one header. Errors: a record that is none, or a value that its key cannot have.
    pub fn read(&mut self, mut records: &[u8]) -> Result<(), Malformed> {
        // Some writers fill the header up with NULs.
        while records.first().is_some_and(|&byte| byte != 0) {
            let (key, value, rest) = split_record(records)?;
            self.apply(key, value)?;
            records = rest;
        }
        Ok(())
    }

    fn apply(&mut self, key: &[u8], value: &[u8]) -> Result<(), Malformed> {
        if let Some(name) = key.strip_prefix(ATTRIBUTE_PREFIX) {
            if name.is_empty() || name.len() > ATTRIBUTE_NAME_MAX || name.contains(&0) {
                return Err("the name of an extended attribute is empty, too long or holds a NUL");
            }
            // An empty value takes the record back, as of every key.
            match value {
                b"" => drop(self.attributes.remove(name)),
                value => drop(self.attributes.insert(name.to_vec(), value.to_vec())),
            }
            return Ok(());
        }
        match key {
            // An empty value takes the override back.
            b"path" => self.path = path(value)?,
            b"linkpath" => self.link = path(value)?,
            b"size" => self.size = optional(value, decimal)?,
            b"uid" => self.uid = optional(value, decimal)?,
            b"gid" => self.gid = optional(value, decimal)?,
            b"mtime" => self.mtime = optional(value, time)?,
            b"atime" => self.atime = optional(value, time)?,
            b"GNU.sparse.major" => self.sparse.major = optional(value, decimal)?,
            b"GNU.sparse.minor" => self.sparse.minor = optional(value, decimal)?,
            b"GNU.sparse.name" => self.sparse.name = path(value)?,
            b"GNU.sparse.realsize" | b"GNU.sparse.size" => self.sparse.real_size = optional(value, decimal)?,
            b"GNU.sparse.offset" | b"GNU.sparse.numbytes" => self.sparse_number(decimal(value)?)?,
            b"GNU.sparse.map" => {
                self.sparse.map = Some(
                    value
                        .split(|&byte| byte == b',')
                        .map(decimal)
                        .collect::<Result<_, _>>()?,
                );
            }
            _ => {}
        }
        Ok(())
    }

    fn sparse_number(&mut self, number: u64) -> Result<(), Malformed> {
        self.sparse.map.get_or_insert_default().push(number);
        Ok(())
    }
}

/// A record's key and value, and what comes after it.
type Record<'a> = (&'a [u8], &'a [u8], &'a [u8]);

fn split_record(records: &[u8]) -> Result<Record<'_>, Malformed> {
    const MALFORMED: Malformed = "a record of a PAX header is malformed";
    let space = records
        .iter()
        .take(20)
        .position(|&byte| byte == b' ')
        .ok_or(MALFORMED)?;
    let length = usize::try_from(decimal(&records[..space])?).map_err(|_| MALFORMED)?;
    let record = records.get(space + 1..length).ok_or(MALFORMED)?;
    let (end, record) = record.split_last().ok_or(MALFORMED)?;
    let equals = record.iter().position(|&byte| byte == b'=').ok_or(MALFORMED)?;
    match *end == b'\n' && equals > 0 {
        true => Ok((&record[..equals], &record[equals + 1..], &records[length..])),
        false => Err(MALFORMED),
    }
}

fn optional<T>(value: &[u8], parse: impl Fn(&[u8]) -> Result<T, Malformed>) -> Result<Option<T>, Malformed> {
    match value.is_empty() {
        true => Ok(None),
        false => parse(value).map(Some),
    }
}

fn path(value: &[u8]) -> Result<Option<Vec<u8>>, Malformed> {
    if value.contains(&0) || value.len() > PATH_BYTES_MAX {
        return Err("a name is longer than 4096 bytes or holds a NUL");
    }
    Ok((!value.is_empty()).then(|| value.to_vec()))
}

/// Decimal digits and nothing else.
pub fn decimal(text: &[u8]) -> Result<u64, Malformed> {
    const MALFORMED: Malformed = "a PAX header holds no decimal number where one must be";
    if text.is_empty() || !text.iter().all(u8::is_ascii_digit) {
        return Err(MALFORMED);
    }
    text.iter()
        .try_fold(0u64, |value, digit| {
            value.checked_mul(10)?.checked_add(u64::from(digit - b'0'))
        })
        .ok_or(MALFORMED)
}

/// Seconds with an optional sign and fraction; what is finer than a nanosecond is cut off.
fn time(text: &[u8]) -> Result<Time, Malformed> {
    const MALFORMED: Malformed = "a PAX header holds no time where one must be";
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let mut parts = text.splitn(2, |&byte| byte == b'.');
    let whole = decimal(parts.next().unwrap_or_default()).map_err(|_| MALFORMED)?;
    let fraction = parts.next().unwrap_or_default();
    if !fraction.iter().all(u8::is_ascii_digit) {
        return Err(MALFORMED);
    }
    let digits = fraction.iter().chain(std::iter::repeat(&b'0')).take(9);
    let nanoseconds = digits.fold(0u32, |value, digit| value * 10 + u32::from(digit - b'0'));
    let seconds = i64::try_from(whole).map_err(|_| MALFORMED)?;
    Ok(match (negative, nanoseconds) {
        (false, _) => Time { seconds, nanoseconds },
        (true, 0) => Time {
            seconds: -seconds,
            nanoseconds,
        },
        // Nanoseconds always count forward.
        (true, _) => Time {
            seconds: -seconds - 1,
            nanoseconds: 1_000_000_000 - nanoseconds,
        },
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn records_are_taken_over() {
        let mut overrides = Overrides::default();
        let records = b"18 path=long/name\n31 SCHILY.xattr.user.key=a\nb=\0\n23 mtime=1500000000.25\n";
        overrides.read(records).unwrap();
        assert_eq!(overrides.path.as_deref(), Some(&b"long/name"[..]));
        assert_eq!(overrides.attributes[&b"user.key"[..]], b"a\nb=\0");
        let mtime = overrides.mtime.unwrap();
        assert_eq!((mtime.seconds, mtime.nanoseconds), (1_500_000_000, 250_000_000));
    }

    #[test]
    fn times_before_1970_count_forward() {
        assert_eq!(
            time(b"-1.25"),
            Ok(Time {
                seconds: -2,
                nanoseconds: 750_000_000
            })
        );
        assert!(time(b"1e5").is_err());
    }

    #[test]
    fn malformed_records_are_refused() {
        for records in [
            &b"99 path=x\n"[..],
            b"5 a=b\n",
            b"x",
            b"0 a=b\n",
            b"11 path=a\0b\n",
            b"7 =abc\n",
        ] {
            assert!(Overrides::default().read(records).is_err(), "{records:?}");
        }
    }
}
