//! READ, WRITE and FALLOCATE on an export.
//!
//! Content is read and written in sectors. A file opened O_DIRECT must be used in sectors: the error tells QEMU the real
//! size. Otherwise anything goes, since the kernel cuts a long write into requests by the pages of the caller's buffer,
//! at any byte: the sectors at its ends are read, changed and written under a lock of the export, so that two halves of
//! one write cannot undo each other.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use aenv_wire::block::ExportKind;

use super::abi::{FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, Request, opcode};
use super::buffer::Buffer;
use super::session::Session;
use crate::export::{Content, Export, ExportError, layers_errno};
use crate::limits::{FULL_DISK_RETRY, FULL_DISK_WAIT, SECTOR_BYTES, TRANSFER_BYTES_MAX};
use crate::stats::Counter;

/// What to answer.
pub enum Done {
    Nothing,
    /// These bytes of the data buffer.
    Read(Range<usize>),
    Written(u32),
}

pub fn carry_out(
    session: &Session,
    export: &Arc<Export>,
    request: Request<'_>,
    data: &mut Buffer,
) -> Result<Done, i32> {
    let done = match request.opcode() {
        opcode::READ => read(session, export, request, data),
        opcode::WRITE => write(session, export, request, data),
        _ => fallocate(session, export, request, data),
    };
    if done.is_err() {
        session.counters.add(Counter::RequestFailed);
    }
    done
}

fn content(session: &Session, export: &Export) -> Result<Arc<Content>, i32> {
    export
        .content(&session.exports.layers)
        .map_err(|error: ExportError| error.errno())
}

fn failed(export: &Export, what: &str, error: &aenv_layers::Error) -> i32 {
    let errno = layers_errno(error);
    if errno == libc::EIO {
        export.tell_of_failure(what, error);
    }
    errno
}

/// The bytes that a READ is about.
#[derive(Debug)]
pub struct ReadRange {
    /// The sectors that have them, as bytes of the export.
    pub sectors: Range<u64>,
    /// Where in those sectors they begin, and how many there are: fewer than asked for at the end of the export.
    pub lead: usize,
    pub length: usize,
}

impl ReadRange {
    /// Errors: EINVAL for parts of sectors of a file that was opened O_DIRECT.
    pub fn of(export: &Export, request: Request<'_>) -> Result<ReadRange, i32> {
        let (offset, asked, flags) = request.transfer();
        let left = export.size_bytes.saturating_sub(offset);
        let length = usize::try_from(left).unwrap_or(usize::MAX);
        let length = length.min(asked).min(TRANSFER_BYTES_MAX);
        let sectors = whole_sectors(offset, length as u64);
        refuse_partial_sectors(offset, length, flags)?;
        Ok(ReadRange {
            lead: (offset - sectors.start) as usize,
            sectors,
            length,
        })
    }
}

fn read(session: &Session, export: &Export, request: Request<'_>, data: &mut Buffer) -> Result<Done, i32> {
    session.counters.add(Counter::read_of(export.kind));
    let ReadRange { sectors, lead, length } = ReadRange::of(export, request)?;
    if length > 0 {
        let content = content(session, export)?;
        session.exports.write_back.saw_read(export.inode);
        // It fits: the buffer has room for a whole transfer and a sector on either side.
        let span = data.first((sectors.end - sectors.start) as usize);
        read_content(session, export, &content, span, sectors.start).map_err(|error| failed(export, "read", &error))?;
    }
    session.counters.add_many(Counter::ReadBytes, length as u64);
    Ok(Done::Read(lead..lead + length))
}

/// Damage in a blob that only its format verifies may be what the store once gave and the cache kept: it is fetched
/// again, once.
fn read_content(
    session: &Session,
    export: &Export,
    content: &Content,
    span: &mut [u8],
    offset: u64,
) -> Result<(), aenv_layers::Error> {
    match content.read_at(span, offset) {
        Err(error) if export.is_remote && error.kind() == aenv_layers::ErrorKind::Corrupt => {
            match session.exports.layers.remote.distrust(&export.snapshot().layers) {
                true => content.read_at(span, offset),
                false => Err(error),
            }
        }
        outcome => outcome,
    }
}

/// The sectors that a range of bytes touches, as bytes.
fn whole_sectors(offset: u64, length: u64) -> Range<u64> {
    offset - offset % SECTOR_BYTES..(offset + length).next_multiple_of(SECTOR_BYTES)
}

fn is_whole(offset: u64, length: u64) -> bool {
    offset.is_multiple_of(SECTOR_BYTES) && length.is_multiple_of(SECTOR_BYTES)
}

fn refuse_partial_sectors(offset: u64, length: usize, open_flags: u32) -> Result<(), i32> {
    let direct = open_flags & libc::O_DIRECT as u32 != 0;
    if direct && !is_whole(offset, length as u64) {
        Err(libc::EINVAL)
    } else {
        Ok(())
    }
}

fn write(session: &Session, export: &Arc<Export>, request: Request<'_>, data: &mut Buffer) -> Result<Done, i32> {
    let (offset, length, flags) = request.transfer();
    if export.kind == ExportKind::Memory {
        return Err(libc::EROFS);
    }
    session.counters.add(Counter::DiskWrite);
    let bytes = request.write_data();
    refuse_partial_sectors(offset, length, flags)?;
    if bytes.len() != length || length > TRANSFER_BYTES_MAX {
        return Err(libc::EINVAL);
    }
    // A disk has its size; a write that would grow it is the guest's or the VMM's error.
    let fits = offset
        .checked_add(length as u64)
        .is_some_and(|end| end <= export.size_bytes);
    if !fits {
        return Err(libc::EFBIG);
    }
    let content = content(session, export)?;
    let result = when_there_is_room(export, || match is_whole(offset, length as u64) {
        true => content.write_at(bytes, offset),
        false => write_parts_of_sectors(export, &content, bytes, offset, data),
    });
    result.map_err(|error| failed(export, "write", &error))?;
    session
        .exports
        .write_back
        .wrote(export, whole_sectors(offset, length as u64));
    session.counters.add_many(Counter::WrittenBytes, length as u64);
    u32::try_from(length).map(Done::Written).map_err(|_| libc::EINVAL)
}

/// Holds a write back while the host's disk is full, and tries again: an error would make the guest's file system give
/// itself up for good, and a stall is over when somebody makes room. Only guests that write wait, each on a bounded
/// number of threads (`RUNNING_PER_EXPORT_MAX`); an abandoned export stops waiting.
fn when_there_is_room(
    export: &Export,
    mut write: impl FnMut() -> Result<(), aenv_layers::Error>,
) -> Result<(), aenv_layers::Error> {
    let begun = Instant::now();
    loop {
        match write() {
            Err(error)
                if layers_errno(&error) == libc::ENOSPC
                    && begun.elapsed() < FULL_DISK_WAIT
                    && !export.flight.is_abandoned() =>
            {
                export.tell_of_failure("write yet", &error);
                std::thread::sleep(FULL_DISK_RETRY);
            }
            done => return done,
        }
    }
}

/// Reads what lies around the bytes, puts them in and writes it all back. `scratch` holds a transfer and two sectors.
fn write_parts_of_sectors(
    export: &Export,
    content: &Content,
    bytes: &[u8],
    offset: u64,
    scratch: &mut Buffer,
) -> Result<(), aenv_layers::Error> {
    let _one_at_a_time = export.partial_sectors.lock().unwrap_or_else(PoisonError::into_inner);
    let sectors = whole_sectors(offset, bytes.len() as u64);
    let scratch = scratch.first((sectors.end - sectors.start) as usize);
    let (sector, last) = (SECTOR_BYTES as usize, scratch.len() - SECTOR_BYTES as usize);
    content.read_at(&mut scratch[..sector], sectors.start)?;
    content.read_at(&mut scratch[last..], sectors.end - SECTOR_BYTES)?;
    let lead = (offset - sectors.start) as usize;
    scratch[lead..lead + bytes.len()].copy_from_slice(bytes);
    content.write_at(scratch, sectors.start)
}

fn fallocate(session: &Session, export: &Export, request: Request<'_>, data: &mut Buffer) -> Result<Done, i32> {
    let (offset, length, mode) = request.fallocate();
    session.counters.add(Counter::DiskDiscard);
    let end = offset.checked_add(length).ok_or(libc::EINVAL)?;
    match mode & !FALLOC_KEEP_SIZE {
        // Room is never promised: an upper is sparse.
        0 if end <= export.size_bytes => return Ok(Done::Nothing),
        0 => return Err(libc::EFBIG),
        FALLOC_PUNCH_HOLE | FALLOC_ZERO_RANGE => {}
        _ => return Err(libc::EOPNOTSUPP),
    }
    let range = offset..end.min(export.size_bytes);
    if !range.is_empty() {
        let content = content(session, export)?;
        discard(export, &content, range, data).map_err(|error| failed(export, "discard", &error))?;
    }
    Ok(Done::Nothing)
}

/// Whole sectors are given back; parts of sectors at the ends are overwritten with zeros.
fn discard(export: &Export, content: &Content, range: Range<u64>, data: &mut Buffer) -> Result<(), aenv_layers::Error> {
    const ZEROS: [u8; SECTOR_BYTES as usize] = [0; SECTOR_BYTES as usize];
    let first = range.start.next_multiple_of(SECTOR_BYTES).min(range.end);
    let last = (range.end - range.end % SECTOR_BYTES).max(first);
    for (from, to) in [(range.start, first), (last, range.end)] {
        if from < to {
            write_parts_of_sectors(export, content, &ZEROS[..(to - from) as usize], from, data)?;
        }
    }
    if first < last {
        content.discard(first, last - first)
    } else {
        Ok(())
    }
}
