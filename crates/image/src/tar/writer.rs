//! Writes entries as ustar, with a PAX header where a field does not fit.

use std::io::{self, Write};

use super::{Entry, Kind, RECORD_BYTES};

/// Sizes and owners that octal digits of a header can hold.
const SIZE_MAX: u64 = 0o77_777_777_777;
const ID_MAX: u32 = 0o7_777_777;
const NAME_BYTES: usize = 100;

/// An archive under way. Nothing is valid before [`Writer::finish`].
#[derive(Debug)]
pub struct Writer<W: Write> {
    sink: W,
    /// Data of the current entry that is still to come, and what fills it up.
    missing: u64,
    padding: usize,
}

impl<W: Write> Writer<W> {
    pub fn new(sink: W) -> Writer<W> {
        Writer {
            sink,
            missing: 0,
            padding: 0,
        }
    }

    /// Begins an entry. Caller: the last one's data was written whole.
    pub fn entry(&mut self, entry: &Entry) -> io::Result<()> {
        debug_assert_eq!(self.missing, 0, "data of the last entry is missing");
        let records = pax_records(entry);
        if !records.is_empty() {
            let mut header = header(b"PaxHeader", b"", b'x');
            octal(&mut header[100..108], 0o644);
            octal(&mut header[124..136], records.len() as u64);
            self.record(header)?;
            self.sink.write_all(&records)?;
            self.pad(records.len() as u64)?;
        }
        let mut header = header(&entry.path, &entry.link, type_flag(entry.kind));
        octal(&mut header[100..108], u64::from(entry.mode));
        octal(
            &mut header[108..116],
            u64::from(if entry.uid > ID_MAX { 0 } else { entry.uid }),
        );
        octal(
            &mut header[116..124],
            u64::from(if entry.gid > ID_MAX { 0 } else { entry.gid }),
        );
        octal(
            &mut header[124..136],
            if entry.size > SIZE_MAX { 0 } else { entry.size },
        );
        octal(&mut header[136..148], header_seconds(entry));
        octal(&mut header[329..337], u64::from(entry.major));
        octal(&mut header[337..345], u64::from(entry.minor));
        self.record(header)?;
        self.missing = entry.size;
        self.padding = (entry.size.next_multiple_of(RECORD_BYTES as u64) - entry.size) as usize;
        Ok(())
    }

    /// Writes some of the current entry's data.
    pub fn data(&mut self, data: &[u8]) -> io::Result<()> {
        debug_assert!(data.len() as u64 <= self.missing, "more data than the entry has");
        self.sink.write_all(data)?;
        self.missing -= data.len() as u64;
        if self.missing == 0 {
            self.sink.write_all(&[0; RECORD_BYTES][..self.padding])?;
            self.padding = 0;
        }
        Ok(())
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<W> {
        self.sink.write_all(&[0; 2 * RECORD_BYTES])?;
        self.sink.flush()?;
        Ok(self.sink)
    }

    fn record(&mut self, mut header: [u8; RECORD_BYTES]) -> io::Result<()> {
        header[148..156].fill(b' ');
        let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum();
        octal(&mut header[148..155], sum);
        self.sink.write_all(&header)
    }

    fn pad(&mut self, length: u64) -> io::Result<()> {
        let rest = length.next_multiple_of(RECORD_BYTES as u64) - length;
        self.sink.write_all(&[0; RECORD_BYTES][..rest as usize])
    }
}

fn header(name: &[u8], link: &[u8], type_flag: u8) -> [u8; RECORD_BYTES] {
    let mut header = [0; RECORD_BYTES];
    let name = &name[..name.len().min(NAME_BYTES)];
    header[..name.len()].copy_from_slice(name);
    let link = &link[..link.len().min(NAME_BYTES)];
    header[157..157 + link.len()].copy_from_slice(link);
    header[156] = type_flag;
    header[257..265].copy_from_slice(b"ustar\x0000");
    header
}

fn octal(field: &mut [u8], value: u64) {
    let digits = field.len() - 1;
    field[..digits].copy_from_slice(format!("{value:0digits$o}").as_bytes());
    field[digits] = 0;
}

fn header_seconds(entry: &Entry) -> u64 {
    u64::try_from(entry.mtime.seconds).unwrap_or(0).min(SIZE_MAX)
}

fn type_flag(kind: Kind) -> u8 {
    match kind {
        Kind::Regular => b'0',
        Kind::HardLink => b'1',
        Kind::Symlink => b'2',
        Kind::CharDevice => b'3',
        Kind::BlockDevice => b'4',
        Kind::Directory => b'5',
        Kind::Fifo => b'6',
    }
}

/// What the header of the entry cannot hold.
fn pax_records(entry: &Entry) -> Vec<u8> {
    let mut records = Vec::new();
    if entry.path.len() > NAME_BYTES {
        put(&mut records, b"path", &entry.path);
    }
    if entry.link.len() > NAME_BYTES {
        put(&mut records, b"linkpath", &entry.link);
    }
    if entry.size > SIZE_MAX {
        put(&mut records, b"size", entry.size.to_string().as_bytes());
    }
    for (key, id) in [(&b"uid"[..], entry.uid), (b"gid", entry.gid)] {
        if id > ID_MAX {
            put(&mut records, key, id.to_string().as_bytes());
        }
    }
    if entry.mtime.nanoseconds != 0 || u64::try_from(entry.mtime.seconds) != Ok(header_seconds(entry)) {
        put(&mut records, b"mtime", time_text(entry).as_bytes());
    }
    for (name, value) in &entry.attributes {
        put(&mut records, &[b"SCHILY.xattr.", &name[..]].concat(), value);
    }
    records
}

fn time_text(entry: &Entry) -> String {
    let time = entry.mtime;
    let (sign, seconds, nanoseconds) = match (time.seconds < 0, time.nanoseconds) {
        (true, 1..) => ("-", (time.seconds + 1).unsigned_abs(), 1_000_000_000 - time.nanoseconds),
        (negative, _) => (
            if negative { "-" } else { "" },
            time.seconds.unsigned_abs(),
            time.nanoseconds,
        ),
    };
    match nanoseconds {
        0 => format!("{sign}{seconds}"),
        _ => format!("{sign}{seconds}.{nanoseconds:09}")
            .trim_end_matches('0')
            .to_owned(),
    }
}

/// A record, whose length counts its own digits.
fn put(records: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + 1;
    while length != rest + length.to_string().len() {
        length = rest + length.to_string().len();
    }
    records.extend_from_slice(length.to_string().as_bytes());
    records.push(b' ');
    records.extend_from_slice(key);
    records.push(b'=');
    records.extend_from_slice(value);
    records.push(b'\n');
}

#[cfg(test)]
mod test {
    use std::collections::BTreeMap;

    use super::super::Reader;
    use super::*;
    use crate::ext4::Time;

    fn entry(path: &[u8]) -> Entry {
        Entry {
            kind: Kind::Regular,
            path: path.to_vec(),
            link: Vec::new(),
            mode: 0o4755,
            uid: 1000,
            gid: 70_000,
            mtime: Time {
                seconds: 1_700_000_000,
                nanoseconds: 0,
            },
            atime: None,
            size: 5,
            pieces: None,
            major: 0,
            minor: 0,
            attributes: BTreeMap::new(),
        }
    }

    #[test]
    fn what_was_written_is_read() {
        let mut long = entry(&[b'n'; 300]);
        long.uid = u32::MAX;
        long.mtime = Time {
            seconds: -2,
            nanoseconds: 750_000_000,
        };
        long.attributes.insert(b"user.a".to_vec(), vec![10; 1000]);
        let mut writer = Writer::new(Vec::new());
        for entry in [&entry(b"short"), &long] {
            writer.entry(entry).unwrap();
            writer.data(b"hello").unwrap();
        }
        let archive = writer.finish().unwrap();
        let mut reader = Reader::new(&archive[..]);
        assert_eq!(reader.next_entry().unwrap(), Some(entry(b"short")));
        let mut data = [0; 5];
        reader.read_data(&mut data).unwrap();
        assert_eq!(&data, b"hello");
        assert_eq!(reader.next_entry().unwrap(), Some(long));
        assert_eq!(reader.next_entry().unwrap(), None);
    }
}
