//! The part of the kernel's FUSE interface that blockd speaks (include/uapi/linux/fuse.h, major 7).
//!
//! Owns layouts, opcodes and flags; owns no behaviour. Requests are read by offset from their bytes and answers are
//! built by appending fields, both in the host's byte order, as the interface has it.

pub const ROOT_INODE: u64 = 1;

/// Lengths in bytes: request header, answer header, and where the data of a WRITE begins.
pub const IN_HEADER_BYTES: usize = 40;
pub const OUT_HEADER_BYTES: usize = 16;
pub const WRITE_DATA_OFFSET: usize = 80;

pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    /// Everything that would change the tree: refused with EROFS rather than ENOSYS, which the kernel would remember.
    pub const CHANGES_TO_THE_TREE: [u32; 9] = [6, 8, 9, 10, 11, 12, 13, 35, 45];
}

/// Answered by OPEN.
pub mod open_flag {
    pub const DIRECT_IO: u32 = 1 << 0;
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Negotiated by INIT, low word then high word (`flags2`).
pub mod init_flag {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const BIG_WRITES: u64 = 1 << 5;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const HAS_RESEND: u64 = 1 << 39;
}

/// Messages that blockd sends of its own accord: `unique` 0, the code in the error field.
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    /// Linux 6.9: put requests that were read but not answered back into the queue.
    pub const RESEND: i32 = 7;
}

pub const SETATTR_SIZE: u32 = 1 << 3;

/// Modes of fallocate(2).
pub const FALLOC_KEEP_SIZE: u32 = 1;
pub const FALLOC_PUNCH_HOLE: u32 = 2;
pub const FALLOC_ZERO_RANGE: u32 = 0x10;

/// One request as the kernel wrote it, header first. A request shorter than its header cannot come from the kernel,
/// so offsets beyond the end read as zero rather than fail.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    bytes: &'a [u8],
}

impl<'a> Request<'a> {
    pub fn new(bytes: &'a [u8]) -> Request<'a> {
        Request { bytes }
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    pub fn opcode(&self) -> u32 {
        self.u32(4)
    }

    pub fn unique(&self) -> u64 {
        self.u64(8)
    }

    pub fn inode(&self) -> u64 {
        self.u64(16)
    }

    pub fn u32(&self, offset: usize) -> u32 {
        self.bytes
            .get(offset..offset + 4)
            .map_or(0, |b| u32::from_ne_bytes([b[0], b[1], b[2], b[3]]))
    }

    pub fn u64(&self, offset: usize) -> u64 {
        let wide = |b: &[u8]| u64::from_ne_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
        self.bytes.get(offset..offset + 8).map_or(0, wide)
    }

    /// The name that LOOKUP carries, without its final NUL.
    pub fn name(&self) -> &'a [u8] {
        let body = self.bytes.get(IN_HEADER_BYTES..).unwrap_or_default();
        body.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    /// Offset, length and open flags of a READ or WRITE.
    pub fn transfer(&self) -> (u64, usize, u32) {
        (self.u64(48), self.u32(56) as usize, self.u32(72))
    }

    pub fn write_data(&self) -> &'a [u8] {
        let length = self.u32(56) as usize;
        self.bytes
            .get(WRITE_DATA_OFFSET..WRITE_DATA_OFFSET + length)
            .unwrap_or_default()
    }

    /// Offset, length and mode of a FALLOCATE.
    pub fn fallocate(&self) -> (u64, u64, u32) {
        (self.u64(48), self.u64(56), self.u32(64))
    }
}

/// An answer's body, field by field.
#[derive(Debug, Default)]
pub struct Body {
    bytes: Vec<u8>,
}

impl Body {
    pub fn u16s(mut self, values: &[u16]) -> Body {
        values
            .iter()
            .for_each(|value| self.bytes.extend_from_slice(&value.to_ne_bytes()));
        self
    }

    pub fn u32s(mut self, values: &[u32]) -> Body {
        values
            .iter()
            .for_each(|value| self.bytes.extend_from_slice(&value.to_ne_bytes()));
        self
    }

    pub fn u64s(mut self, values: &[u64]) -> Body {
        values
            .iter()
            .for_each(|value| self.bytes.extend_from_slice(&value.to_ne_bytes()));
        self
    }

    /// `struct fuse_attr`, 88 bytes.
    pub fn attr(self, inode: u64, size_bytes: u64, mode: u32) -> Body {
        let links = 1;
        self.u64s(&[inode, size_bytes, size_bytes / 512, 0, 0, 0])
            .u32s(&[0, 0, 0, mode, links, 0, 0, 0, 4096, 0])
    }

    /// One directory entry, padded to eight bytes.
    pub fn entry(self, inode: u64, cookie: u64, kind: u32, name: &[u8]) -> Body {
        let length = u32::try_from(name.len()).unwrap_or(0);
        let mut body = self.u64s(&[inode, cookie]).u32s(&[length, kind]);
        body.bytes.extend_from_slice(name);
        body.bytes.resize(body.bytes.len().next_multiple_of(8), 0);
        body
    }

    pub fn name(mut self, name: &[u8]) -> Body {
        self.bytes.extend_from_slice(name);
        self.bytes.push(0);
        self
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

/// The sixteen bytes before every answer. `error` is zero or a negative errno; for a notification it is the code.
pub fn out_header(unique: u64, error: i32, body_bytes: usize) -> [u8; OUT_HEADER_BYTES] {
    let mut header = [0u8; OUT_HEADER_BYTES];
    let length = u32::try_from(OUT_HEADER_BYTES + body_bytes).unwrap_or(u32::MAX);
    header[0..4].copy_from_slice(&length.to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_lengths_that_the_kernel_expects() {
        assert_eq!(Body::default().attr(1, 0, 0).len(), 88);
        assert_eq!(Body::default().entry(1, 1, 4, b"abc").len(), 32);
        assert_eq!(
            out_header(9, -5, 0),
            [16, 0, 0, 0, 0xfb, 0xff, 0xff, 0xff, 9, 0, 0, 0, 0, 0, 0, 0]
        );
    }

    #[test]
    fn a_short_request_reads_as_zeros() {
        let request = Request::new(&[1, 0, 0, 0]);
        assert_eq!((request.opcode(), request.unique(), request.name().len()), (0, 0, 0));
        assert!(request.write_data().is_empty());
    }
}
