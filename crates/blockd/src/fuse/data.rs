//! READ, WRITE and FALLOCATE on an export.
//!
//! Content is read and written in sectors. Reads may be unaligned unless the file was opened O_DIRECT, where the error
//! tells QEMU the real sector size; writes must be aligned, since half a sector would have to be read first and two
//! such writes could undo each other.

use std::ops::Range;

use aenv_wire::block::ExportKind;

use super::abi::{FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, Request, opcode};
use super::session::Session;
use crate::export::{Content, Export, ExportError, layers_errno};
use crate::limits::{SECTOR_BYTES, TRANSFER_BYTES_MAX};
use crate::stats::Counter;

/// What to answer.
pub enum Done {
    Nothing,
    /// These bytes of the data buffer.
    Read(Range<usize>),
    Written(u32),
}

pub fn carry_out(session: &Session, export: &Export, request: Request<'_>, data: &mut [u8]) -> Result<Done, i32> {
    let done = match request.opcode() {
        opcode::READ => read(session, export, request, data),
        opcode::WRITE => write(session, export, request),
        _ => fallocate(session, export, request),
    };
    if done.is_err() {
        session.counters.add(Counter::RequestFailed);
    }
    done
}

fn content(session: &Session, export: &Export) -> Result<std::sync::Arc<Content>, i32> {
    export.content(&session.exports.layers).map_err(|error: ExportError| error.errno())
}

fn failed(export: &Export, what: &str, error: &aenv_layers::Error) -> i32 {
    let errno = layers_errno(error);
    if errno == libc::EIO {
        eprintln!("aenv-blockd: {what} of export {} failed: {}", export.name, crate::control::chain(error));
    }
    errno
}

fn read(session: &Session, export: &Export, request: Request<'_>, data: &mut [u8]) -> Result<Done, i32> {
    let (offset, asked, flags) = request.transfer();
    session.counters.add(if export.kind == ExportKind::Memory { Counter::MemoryRead } else { Counter::DiskRead });
    let left = export.size_bytes.saturating_sub(offset);
    let length = usize::try_from(left).unwrap_or(usize::MAX).min(asked).min(TRANSFER_BYTES_MAX);
    let start = offset - offset % SECTOR_BYTES;
    let end = (offset + length as u64).next_multiple_of(SECTOR_BYTES);
    let aligned = start == offset && end == offset + length as u64;
    if !aligned && flags & libc::O_DIRECT as u32 != 0 {
        return Err(libc::EINVAL);
    }
    // Both fit: the buffer has room for a whole transfer and a sector on either side.
    let (lead, span) = ((offset - start) as usize, (end - start) as usize);
    if length > 0 {
        let result = content(session, export)?.read_at(&mut data[..span], start);
        result.map_err(|error| failed(export, "read", &error))?;
    }
    session.counters.add_many(Counter::ReadBytes, length as u64);
    Ok(Done::Read(lead..lead + length))
}

fn write(session: &Session, export: &Export, request: Request<'_>) -> Result<Done, i32> {
    let (offset, length, _) = request.transfer();
    if export.kind == ExportKind::Memory {
        return Err(libc::EROFS);
    }
    session.counters.add(Counter::DiskWrite);
    let bytes = request.write_data();
    if bytes.len() != length || !offset.is_multiple_of(SECTOR_BYTES) || !(length as u64).is_multiple_of(SECTOR_BYTES) {
        return Err(libc::EINVAL);
    }
    // A disk has its size; a write that would grow it is the guest's or the VMM's error.
    let fits = offset.checked_add(length as u64).is_some_and(|end| end <= export.size_bytes);
    if !fits {
        return Err(libc::EFBIG);
    }
    content(session, export)?.write_at(bytes, offset).map_err(|error| failed(export, "write", &error))?;
    session.counters.add_many(Counter::WrittenBytes, length as u64);
    u32::try_from(length).map(Done::Written).map_err(|_| libc::EINVAL)
}

fn fallocate(session: &Session, export: &Export, request: Request<'_>) -> Result<Done, i32> {
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
    let end = end.min(export.size_bytes);
    if !offset.is_multiple_of(SECTOR_BYTES) || !end.is_multiple_of(SECTOR_BYTES) {
        return Err(libc::EINVAL);
    }
    if offset < end {
        let result = content(session, export)?.discard(offset, end - offset);
        result.map_err(|error| failed(export, "discard", &error))?;
    }
    Ok(Done::Nothing)
}
