//! Which reads of a local layer go past the host's page cache.
//!
//! Whoever reads a layer through a stack caches what it read: a guest its disk, the kernel the pages of a memory image.
//! So a block that only one stack has read is read directly, which costs less and leaves no second copy behind. When a
//! second stack reads it, it is one that several use: from then on it is in the page cache, once for all of them.
//!
//! Never direct: what is in the page cache already when it is first asked for (wholly, or not on the disk yet), a small read that goes on where the last
//! one ended (the kernel's readahead serves it better), and what the file system cannot read directly.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use rustix::fs::{AtFlags, StatxFlags};

/// What the marks count in. Smaller reads share a mark.
const BLOCK_BYTES: u64 = 4096;

/// Marks that are allocated together, when one of them is first set: a page of them, for 16 MiB of the file.
const CHUNK_MARKS: usize = 4096;

/// Who reads: a number of a stack, not 0. Two stacks may have the same one, and are then taken for one; the block of a
/// hundred clones is cached all the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Reader(u8);

impl Reader {
    pub fn next() -> Reader {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Reader((NEXT.fetch_add(1, Ordering::Relaxed) % u64::from(SHARED - 1)) as u8 + 1)
    }
}

/// Marks of a block that nobody has read, and of one that is to be cached. All others are its only reader.
const UNREAD: u8 = 0;
const SHARED: u8 = u8::MAX;

/// A read that continues the last one and is shorter than this is part of a stream.
const STREAM_READ_BYTES_MAX: u64 = 64 << 10;

type Chunk = Box<[AtomicU8; CHUNK_MARKS]>;

/// The direct side of one local file that never changes.
#[derive(Debug)]
pub(crate) struct ColdReads {
    direct: File,
    /// What offset, length and address of a direct read must be multiples of, in bytes.
    align: u64,
    /// One mark for each block.
    marks: Box<[OnceLock<Chunk>]>,
    stream_end: AtomicU64,
    /// Set when the file system refused after all.
    refused: AtomicBool,
}

impl ColdReads {
    /// None where the file system, or a kernel before 6.5, cannot do what is needed.
    pub fn of(file: &File, length: u64) -> Option<ColdReads> {
        let align = alignment(file)?;
        Cached::of(file, 0, BLOCK_BYTES)?;
        // The same file whatever became of its name, by a description of its own: the flag belongs to that.
        let direct = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .ok()?;
        let chunks = length.div_ceil(BLOCK_BYTES * CHUNK_MARKS as u64);
        Some(ColdReads {
            direct,
            align,
            marks: (0..chunks).map(|_| OnceLock::new()).collect(),
            stream_end: AtomicU64::new(u64::MAX),
            refused: AtomicBool::new(false),
        })
    }

    /// The file to read `buf` from, past the page cache, if that is how `reader` is to do it. What is read directly may fail
    /// where a usual read would not; then read as usual.
    pub fn file_for(&self, reader: Reader, cached: &File, buf: &[u8], offset: u64) -> Option<&File> {
        let length = buf.len() as u64;
        let end = offset + length;
        let goes_on = self.stream_end.swap(end, Ordering::Relaxed) == offset;
        let is_aligned = (offset | length | buf.as_ptr() as u64).is_multiple_of(self.align);
        let wanted = is_aligned
            && !(goes_on && length < STREAM_READ_BYTES_MAX)
            && !self.refused.load(Ordering::Relaxed)
            && match self.mark(reader, offset, end) {
                Found::Own => true,
                Found::Unread => is_cold(cached, offset, length),
                Found::Shared => false,
            };
        wanted.then_some(&self.direct)
    }

    /// Fills `buf` past the page cache, if that is how `reader` is to do it. False: nothing is promised of `buf`, and the
    /// caller reads as usual, also to learn of an error.
    pub fn read(&self, reader: Reader, cached: &File, buf: &mut [u8], offset: u64) -> bool {
        let Some(direct) = self.file_for(reader, cached, buf, offset) else {
            return false;
        };
        match direct.read_at(buf, offset) {
            Ok(count) => count == buf.len(),
            Err(error) => {
                if error.raw_os_error() == Some(libc::EINVAL) {
                    self.refused.store(true, Ordering::Relaxed);
                }
                false
            }
        }
    }

    /// Marks the blocks of the range as read; what they were before.
    fn mark(&self, reader: Reader, offset: u64, end: u64) -> Found {
        let mut found = Found::Own;
        for block in offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES) {
            let (chunk, mark) = (block as usize / CHUNK_MARKS, block as usize % CHUNK_MARKS);
            // Beyond the length that the file had: its end will be an error.
            let Some(chunk) = self.marks.get(chunk) else {
                return Found::Shared;
            };
            let chunk = chunk.get_or_init(|| Box::new([const { AtomicU8::new(UNREAD) }; CHUNK_MARKS]));
            let before = chunk[mark].load(Ordering::Relaxed);
            // Two readers that race for one mark: either is right.
            let (of_block, after) = match before {
                UNREAD => (Found::Unread, reader.0),
                mark if mark == reader.0 => (Found::Own, mark),
                _ => (Found::Shared, SHARED),
            };
            found = found.max(of_block);
            if after != before {
                chunk[mark].store(after, Ordering::Relaxed);
            }
        }
        found
    }
}

/// What a range was: the last of these that holds for a block of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Own,
    Unread,
    Shared,
}

/// What direct reads must be aligned to; none if they are not possible. Kernels before 6.1 do not say.
fn alignment(file: &File) -> Option<u64> {
    let stat = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok()?;
    let align = u64::from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align));
    (stat.stx_dio_offset_align > 0 && align.is_power_of_two()).then_some(align)
}

/// What the page cache has of a range, in pages.
#[derive(Debug, Clone, Copy)]
struct Cached {
    pages: u64,
    /// Not on the disk yet: a direct read would have to wait until they are.
    unwritten: u64,
}

impl Cached {
    /// cachestat(2), Linux 6.5. None if the kernel does not say.
    fn of(file: &File, offset: u64, length: u64) -> Option<Cached> {
        const CACHESTAT: libc::c_long = 451;
        let range = [offset, length];
        // Pages cached, dirty, under write-back, evicted, recently evicted.
        let mut counts = [0u64; 5];
        // SAFETY: the descriptor is borrowed; `struct cachestat_range` is two 64-bit numbers, read only, and `struct
        // cachestat` five, written only.
        let outcome = unsafe { libc::syscall(CACHESTAT, file.as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0) };
        (outcome == 0).then_some(Cached {
            pages: counts[0],
            unwritten: counts[1] + counts[2],
        })
    }
}

/// Whether something of the range has to come from the disk, and the disk has all of it. What is there in part (the
/// kernel's readahead at the open) is read directly as well: else it would be completed, and read ahead from, for good.
fn is_cold(file: &File, offset: u64, length: u64) -> bool {
    let pages = (offset + length).div_ceil(BLOCK_BYTES) - offset / BLOCK_BYTES;
    Cached::of(file, offset, length).is_some_and(|cached| cached.unwritten == 0 && cached.pages < pages)
}

#[cfg(test)]
mod test {
    use super::*;

    const LENGTH: usize = 1 << 20;
    const MINE: Reader = Reader(1);
    const OTHER: Reader = Reader(2);

    /// A file of which nothing is in the page cache, and its direct side. None where direct reads are not possible (the
    /// folder of temporary files may be in memory).
    fn cold_file() -> Option<(File, ColdReads)> {
        let file = tempfile::tempfile_in(concat!(env!("CARGO_MANIFEST_DIR"), "/src")).unwrap();
        let content: Vec<u8> = (0..LENGTH).map(|at| (at / 4096) as u8).collect();
        file.write_all_at(&content, 0).unwrap();
        file.sync_all().unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        let cold = ColdReads::of(&file, LENGTH as u64)?;
        Some((file, cold))
    }

    /// A block with an address that direct reads can use.
    #[repr(align(4096))]
    struct Block([u8; 8192]);

    #[test]
    fn a_block_is_read_directly_until_a_second_reader_asks() {
        let Some((file, cold)) = cold_file() else { return };
        let mut block = Block([0; 8192]);
        for _ in 0..2 {
            assert!(cold.read(MINE, &file, &mut block.0[..4096], 40 * 4096));
            assert_eq!(block.0[..4096], [40; 4096]);
            assert_eq!(Cached::of(&file, 0, LENGTH as u64).unwrap().pages, 0);
        }
        assert!(!cold.read(OTHER, &file, &mut block.0[..4096], 40 * 4096));
        assert!(!cold.read(MINE, &file, &mut block.0[..4096], 40 * 4096), "it is shared");
        assert!(!cold.read(OTHER, &file, &mut block.0, 39 * 4096), "a part of it is");
        assert!(cold.read(OTHER, &file, &mut block.0[..4096], 50 * 4096));
    }

    #[test]
    fn what_is_cached_already_is_not_read_directly() {
        let Some((file, cold)) = cold_file() else { return };
        let mut block = Block([0; 8192]);
        file.read_exact_at(&mut block.0[..4096], 4096).unwrap();
        assert!(!cold.read(MINE, &file, &mut block.0[..4096], 4096));
        rustix::fs::fadvise(&file, 8192, None, rustix::fs::Advice::DontNeed).unwrap();
        assert!(cold.read(MINE, &file, &mut block.0, 4096 * 20), "what is not, is");
        file.write_all_at(&[1; 4096], 4096 * 30).unwrap();
        assert!(
            !cold.read(MINE, &file, &mut block.0, 4096 * 30),
            "nor what is only there"
        );
    }

    #[test]
    fn small_reads_in_sequence_are_left_to_readahead() {
        let Some((file, cold)) = cold_file() else { return };
        let mut block = Block([0; 8192]);
        assert!(cold.read(MINE, &file, &mut block.0[..4096], 0));
        assert!(!cold.read(MINE, &file, &mut block.0[..4096], 4096));
    }

    #[test]
    fn what_is_not_aligned_or_beyond_the_file_is_read_as_usual() {
        let Some((file, cold)) = cold_file() else { return };
        let mut block = Block([0; 8192]);
        assert!(!cold.read(MINE, &file, &mut block.0[..100], 0));
        assert!(!cold.read(MINE, &file, &mut block.0[1..513], 4096 * 9));
        assert!(!cold.read(MINE, &file, &mut block.0, LENGTH as u64 - 4096), "short");
        assert!(!cold.read(MINE, &file, &mut block.0, 1 << 40));
    }

    #[test]
    fn readers_never_have_the_number_of_a_mark() {
        assert!((0..1000).all(|_| ![UNREAD, SHARED].contains(&Reader::next().0)));
    }
}
