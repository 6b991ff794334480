//! Everything but content: INIT, names, attributes, opening, listing.

use aenv_wire::block::ExportKind;

use super::abi::{Body, ROOT_INODE, Request, SETATTR_SIZE, init_flag, opcode};
use super::open_flags;
use super::session::Session;
use crate::limits::{BACKGROUND_REQUESTS_MAX, CONGESTION_REQUESTS, TRANSFER_BYTES_MAX, TRANSFER_PAGES_MAX};
use crate::stats::Counter;

/// Attributes never change: size and inode are fixed for the life of an export.
const ATTRIBUTES_VALID_S: u64 = 3600;
/// Names are looked up each time: a name may be given to another export, whose inode is another.
const NAME_VALID_S: u64 = 0;

/// Newest minor version that we were written against; older kernels answer with theirs.
const MINOR: u32 = 40;

const DIRECTORY: u32 = 4;
const REGULAR: u32 = 8;

pub fn answer(session: &Session, request: Request<'_>) -> Result<Body, i32> {
    match request.opcode() {
        opcode::INIT => Ok(init(session, request)),
        opcode::LOOKUP => lookup(session, request),
        opcode::GETATTR => {
            let (size, mode) = attributes(session, request.inode())?;
            Ok(Body::default()
                .u64s(&[ATTRIBUTES_VALID_S, 0])
                .attr(request.inode(), size, mode))
        }
        opcode::SETATTR => set_attributes(session, request),
        opcode::OPEN => {
            attributes(session, request.inode())?;
            Ok(Body::default()
                .u64s(&[request.inode()])
                .u32s(&[open_flags(session.kind), 0]))
        }
        opcode::OPENDIR => Ok(Body::default().u64s(&[ROOT_INODE]).u32s(&[0, 0])),
        opcode::READDIR => Ok(list(session, request)),
        opcode::STATFS => Ok(Body::default().u64s(&[0; 5]).u32s(&[4096, 255, 4096, 0]).u32s(&[0; 6])),
        opcode::RELEASE | opcode::RELEASEDIR => Ok(Body::default()),
        // A flush is a barrier of order: every write that was answered is in a file of the host already.
        opcode::FSYNC => {
            session.counters.add(Counter::Flush);
            Ok(Body::default())
        }
        other if opcode::CHANGES_TO_THE_TREE.contains(&other) => Err(libc::EROFS),
        // The kernel remembers this per mount and does without: FLUSH, ACCESS, LSEEK, extended attributes...
        _ => Err(libc::ENOSYS),
    }
}

/// INIT may arrive at any blockd of a mount, not only the first: the one before may have died before it answered.
fn init(session: &Session, request: Request<'_>) -> Body {
    let offered = u64::from(request.u32(52)) | u64::from(request.u32(56)) << 32;
    let mut wanted = init_flag::ASYNC_READ
        | init_flag::BIG_WRITES
        | init_flag::PARALLEL_DIROPS
        | init_flag::MAX_PAGES
        | init_flag::INIT_EXT;
    if session.kind == ExportKind::Disk {
        wanted |= init_flag::ASYNC_DIO;
    }
    if offered & init_flag::HAS_RESEND == 0 {
        say!(
            "aenv-blockd: this kernel (before 6.9) cannot resend requests: those in flight when blockd dies never end"
        );
    }
    let flags = offered & wanted;
    let (low, high) = (flags as u32, (flags >> 32) as u32);
    let transfer = TRANSFER_BYTES_MAX as u32;
    Body::default()
        .u32s(&[7, request.u32(44).min(MINOR), transfer, low])
        .u16s(&[BACKGROUND_REQUESTS_MAX, CONGESTION_REQUESTS])
        .u32s(&[transfer, 1])
        .u16s(&[TRANSFER_PAGES_MAX, 0])
        .u32s(&[high, 0])
        .u16s(&[0; 12])
}

fn lookup(session: &Session, request: Request<'_>) -> Result<Body, i32> {
    if request.inode() != ROOT_INODE {
        return Err(libc::ENOTDIR);
    }
    let name = std::str::from_utf8(request.name()).map_err(|_| libc::ENOENT)?;
    let export = session.exports.by_name(name).map_err(|_| libc::ENOENT)?;
    let (size, mode) = attributes(session, export.inode).map_err(|_| libc::ENOENT)?;
    let generation = 0;
    let entry = Body::default()
        .u64s(&[export.inode, generation, NAME_VALID_S, ATTRIBUTES_VALID_S])
        .u32s(&[0, 0]);
    Ok(entry.attr(export.inode, size, mode))
}

/// Size and mode of an inode of this mount.
fn attributes(session: &Session, inode: u64) -> Result<(u64, u32), i32> {
    if inode == ROOT_INODE {
        return Ok((0, libc::S_IFDIR | 0o755));
    }
    let export = session
        .exports
        .by_inode(inode)
        .filter(|export| export.kind == session.kind);
    let export = export.ok_or(libc::ESTALE)?;
    let mode = if session.kind == ExportKind::Memory {
        0o444
    } else {
        0o600
    };
    Ok((export.size_bytes, libc::S_IFREG | mode))
}

/// Sizes are fixed. Times and modes of a disk are accepted and forgotten: a VMM may set them, nobody reads them.
fn set_attributes(session: &Session, request: Request<'_>) -> Result<Body, i32> {
    let (size, mode) = attributes(session, request.inode())?;
    if session.kind == ExportKind::Memory {
        return Err(libc::EROFS);
    }
    if request.u32(40) & SETATTR_SIZE != 0 && request.u64(56) != size {
        return Err(libc::EPERM);
    }
    Ok(Body::default()
        .u64s(&[ATTRIBUTES_VALID_S, 0])
        .attr(request.inode(), size, mode))
}

/// The cookie of an entry is its inode number, so that a listing goes on rightly while exports come and go.
fn list(session: &Session, request: Request<'_>) -> Body {
    let (after, room, _) = request.transfer();
    let exports = session.exports.all();
    let dots = [(1, ".".to_owned()), (2, "..".to_owned())];
    let dots = dots
        .into_iter()
        .map(|(cookie, name)| (ROOT_INODE, cookie, DIRECTORY, name));
    let files = exports.iter().filter(|export| export.kind == session.kind);
    let files = files.map(|export| (export.inode, export.inode, REGULAR, export.name.clone()));
    let mut body = Body::default();
    for (inode, cookie, kind, name) in dots.chain(files).filter(|(_, cookie, ..)| *cookie > after) {
        if body.len() + 24 + name.len().next_multiple_of(8) > room.min(TRANSFER_BYTES_MAX) {
            break;
        }
        body = body.entry(inode, cookie, kind, name.as_bytes());
    }
    body
}
