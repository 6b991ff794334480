//! Reads entries from a stream, with the data of each.

use std::io::Read;

use super::header::{Header, Malformed, Record, until_nul};
use super::pax::Overrides;
use super::sparse::{self, LeadingMap, Pieces};
use super::{EXTENSION_BYTES_MAX, Entry, Kind, PATH_BYTES_MAX, RECORD_BYTES, TarError};
use crate::ext4::Time;

/// Headers in a row that only describe the next entry.
const EXTENSIONS_MAX: usize = 16;

/// A tar archive that is read from front to back.
#[derive(Debug)]
pub struct Reader<R> {
    source: R,
    offset: u64,
    /// Bytes of the current entry's data that were not read, and what fills them up to whole records.
    unread: u64,
    padding: u64,
}

impl<R: Read> Reader<R> {
    pub fn new(source: R) -> Reader<R> {
        Reader {
            source,
            offset: 0,
            unread: 0,
            padding: 0,
        }
    }

    /// The stream behind the archive: what follows the archive's end is still in it.
    pub fn into_inner(self) -> R {
        self.source
    }

    pub fn get_ref(&self) -> &R {
        &self.source
    }

    /// The next entry; what the caller left of the last one's data is passed over. None at the archive's end, which is a
    /// record of zeros or the end of the stream.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, TarError> {
        self.skip_rest()?;
        let mut overrides = Overrides::default();
        for _ in 0..=EXTENSIONS_MAX {
            let Some(record) = self.header()? else {
                return Ok(None);
            };
            let header = Header(&record);
            match header.type_flag() {
                // Describes all entries that follow; the tools of this field read no such thing from it.
                b'g' => drop(self.extension(header)?),
                b'x' => {
                    let content = self.extension(header)?;
                    overrides.read(&content).map_err(|what| self.malformed(what))?;
                }
                b'L' => overrides.path = Some(self.long_name(header)?),
                b'K' => overrides.link = Some(self.long_name(header)?),
                _ => return self.entry(&record, overrides).map(Some),
            }
        }
        Err(self.malformed("too many headers describe one entry"))
    }

    /// Fills `buf` from the current entry's data, of which there must be as much.
    pub fn read_data(&mut self, buf: &mut [u8]) -> Result<(), TarError> {
        debug_assert!(buf.len() as u64 <= self.unread, "more than the entry holds");
        self.read_exact(buf)?;
        self.unread = self.unread.saturating_sub(buf.len() as u64);
        Ok(())
    }

    /// Passes over what is left of the current entry.
    fn skip_rest(&mut self) -> Result<(), TarError> {
        let mut rest = self.unread + self.padding;
        (self.unread, self.padding) = (0, 0);
        let mut buf = [0; 32 * RECORD_BYTES];
        while rest > 0 {
            let count = buf.len().min(usize::try_from(rest).unwrap_or(usize::MAX));
            self.read_exact(&mut buf[..count])?;
            rest -= count as u64;
        }
        Ok(())
    }

    /// The next header, its checksum proved.
    fn header(&mut self) -> Result<Option<Record>, TarError> {
        let mut record = [0; RECORD_BYTES];
        if !self.read_record_or_end(&mut record)? || record == [0; RECORD_BYTES] {
            return Ok(None);
        }
        match Header(&record).checksum_is_right() {
            true => Ok(Some(record)),
            false => Err(self.malformed("the checksum of a header is wrong")),
        }
    }

    fn entry(&mut self, record: &Record, overrides: Overrides) -> Result<Entry, TarError> {
        let header = Header(record);
        let path = entry_path(header, &overrides);
        let kind = self.kind(header, &path)?;
        let stored = match (kind, overrides.size) {
            (Kind::Regular, Some(size)) => size,
            (Kind::Regular, None) => header.size().map_err(|what| self.malformed(what))?,
            // Links, directories and devices have no data, whatever their headers say.
            _ => 0,
        };
        if stored > i64::MAX as u64 - RECORD_BYTES as u64 {
            return Err(self.malformed("an entry is too large"));
        }
        self.unread = stored;
        self.padding = stored.next_multiple_of(RECORD_BYTES as u64) - stored;
        let (size, pieces) = match kind {
            Kind::Regular => self.sparse_map(record, &overrides)?,
            _ => (0, None),
        };
        let entry = describe(header, overrides, kind, path).map_err(|what| self.malformed(what))?;
        Ok(Entry { size, pieces, ..entry })
    }

    fn kind(&self, header: Header<'_>, path: &[u8]) -> Result<Kind, TarError> {
        Ok(match header.type_flag() {
            // The oldest archives mark a directory by its name alone.
            0 if path.ends_with(b"/") => Kind::Directory,
            0 | b'0' | b'7' | b'S' => Kind::Regular,
            b'1' => Kind::HardLink,
            b'2' => Kind::Symlink,
            b'3' => Kind::CharDevice,
            b'4' => Kind::BlockDevice,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            type_flag => {
                let offset = self.offset - RECORD_BYTES as u64;
                return Err(TarError::UnknownType { offset, type_flag });
            }
        })
    }

    /// Size of the file and its pieces, whichever way the archive says them. Reads what stands in front of the data.
    fn sparse_map(&mut self, record: &Record, overrides: &Overrides) -> Result<(u64, Option<Pieces>), TarError> {
        let fields = &overrides.sparse;
        let (real_size, pieces) = if record[156] == b'S' {
            let (real_size, mut pieces, mut more) = sparse::old_header(record).map_err(|what| self.malformed(what))?;
            while more {
                let mut next = [0; RECORD_BYTES];
                self.read_exact(&mut next)?;
                more = sparse::old_record(&next, &mut pieces).map_err(|what| self.malformed(what))?;
            }
            (Some(real_size), pieces)
        } else if fields.major == Some(1) && fields.minor == Some(0) {
            (fields.real_size, self.leading_map()?)
        } else if let Some(map) = &fields.map {
            (
                fields.real_size,
                sparse::pairs(map).map_err(|what| self.malformed(what))?,
            )
        } else {
            return Ok((self.unread, None));
        };
        let real_size = real_size.ok_or_else(|| self.malformed("a sparse file has no size"))?;
        sparse::check(&pieces, real_size, self.unread).map_err(|what| self.malformed(what))?;
        Ok((real_size, Some(pieces)))
    }

    fn leading_map(&mut self) -> Result<Pieces, TarError> {
        let mut map = LeadingMap::default();
        loop {
            if self.unread < RECORD_BYTES as u64 {
                return Err(self.malformed("the map of a sparse file is longer than its data"));
            }
            let mut record = [0; RECORD_BYTES];
            self.read_data(&mut record)?;
            if let Some(pieces) = map.push(&record).map_err(|what| self.malformed(what))? {
                return Ok(pieces);
            }
        }
    }

    /// The content of a header that describes the next entry.
    fn extension(&mut self, header: Header<'_>) -> Result<Vec<u8>, TarError> {
        let size = header.size().map_err(|what| self.malformed(what))?;
        if size > EXTENSION_BYTES_MAX {
            return Err(self.malformed("a header that describes the next entry is larger than 1 MiB"));
        }
        let mut content = vec![0; size.next_multiple_of(RECORD_BYTES as u64) as usize];
        self.read_exact(&mut content)?;
        content.truncate(size as usize);
        Ok(content)
    }

    fn long_name(&mut self, header: Header<'_>) -> Result<Vec<u8>, TarError> {
        let content = self.extension(header)?;
        let name = until_nul(&content);
        match name.len() <= PATH_BYTES_MAX {
            true => Ok(name.to_vec()),
            false => Err(self.malformed("a name is longer than 4096 bytes")),
        }
    }

    fn read_exact(&mut self, buf: &mut [u8]) -> Result<(), TarError> {
        match self.read_up_to(buf)? {
            count if count == buf.len() => Ok(()),
            _ => Err(TarError::Truncated { offset: self.offset }),
        }
    }

    /// False at the end of the stream. Errors: also an end inside of the record.
    fn read_record_or_end(&mut self, record: &mut Record) -> Result<bool, TarError> {
        match self.read_up_to(record)? {
            0 => Ok(false),
            RECORD_BYTES => Ok(true),
            _ => Err(TarError::Truncated { offset: self.offset }),
        }
    }

    fn read_up_to(&mut self, buf: &mut [u8]) -> Result<usize, TarError> {
        let mut done = 0;
        while done < buf.len() {
            match self.source.read(&mut buf[done..]) {
                Ok(0) => break,
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(TarError::Read(error)),
            }
        }
        self.offset += done as u64;
        Ok(done)
    }

    fn malformed(&self, what: Malformed) -> TarError {
        let offset = self.offset;
        TarError::Malformed { offset, what }
    }
}

/// All that does not depend on the data: the caller sets size and pieces.
fn describe(header: Header<'_>, overrides: Overrides, kind: Kind, path: Vec<u8>) -> Result<Entry, Malformed> {
    let (major, minor) = header.device()?;
    let seconds = header.mtime()?;
    let nanoseconds = 0;
    Ok(Entry {
        kind,
        path,
        link: overrides.link.unwrap_or_else(|| header.link().to_vec()),
        mode: (header.mode()? & 0o7777) as u16,
        uid: id(overrides.uid, header.uid())?,
        gid: id(overrides.gid, header.gid())?,
        mtime: overrides.mtime.unwrap_or(Time { seconds, nanoseconds }),
        atime: overrides.atime,
        size: 0,
        pieces: None,
        major: device_number(major)?,
        minor: device_number(minor)?,
        attributes: overrides.attributes,
    })
}

fn entry_path(header: Header<'_>, overrides: &Overrides) -> Vec<u8> {
    if let Some(path) = overrides.sparse.name.as_ref().or(overrides.path.as_ref()) {
        return path.clone();
    }
    match header.prefix() {
        [] => header.name().to_vec(),
        prefix => [prefix, b"/", header.name()].concat(),
    }
}

fn id(over: Option<u64>, own: Result<u64, Malformed>) -> Result<u32, Malformed> {
    let id = match over {
        Some(id) => id,
        None => own?,
    };
    u32::try_from(id).map_err(|_| "an owner's number does not fit in 32 bits")
}

fn device_number(number: u64) -> Result<u32, Malformed> {
    u32::try_from(number).map_err(|_| "a device's number does not fit in 32 bits")
}
