//! One inode of 256 bytes: owner, mode, times, size, and where its content is.

use super::{put_u16, put_u32, u16_at, u32_at};

/// Size of an inode in our file systems.
pub const INODE_BYTES: usize = 256;
/// Bytes of the fields behind the first 128 that we use, the size the kernel asks for (`s_want_extra_isize`).
const EXTRA_BYTES: u16 = 32;

const EXTENTS_FLAG: u32 = 0x8_0000;
const INDEX_FLAG: u32 = 0x1000;
const INLINE_DATA_FLAG: u32 = 0x1000_0000;
const ENCRYPT_FLAG: u32 = 0x800;

/// Offsets of fields.
const MODE: usize = 0x00;
const UID: usize = 0x02;
const SIZE: usize = 0x04;
const ATIME: usize = 0x08;
const CTIME: usize = 0x0c;
const MTIME: usize = 0x10;
const DTIME: usize = 0x14;
const GID: usize = 0x18;
const LINKS: usize = 0x1a;
const SECTORS: usize = 0x1c;
const FLAGS: usize = 0x20;
pub(super) const CONTENT: usize = 0x28;
pub(super) const CONTENT_BYTES: usize = 60;
const ATTRIBUTE_BLOCK: usize = 0x68;
const SIZE_HIGH: usize = 0x6c;
const SECTORS_HIGH: usize = 0x74;
const ATTRIBUTE_BLOCK_HIGH: usize = 0x76;
const UID_HIGH: usize = 0x78;
const GID_HIGH: usize = 0x7a;
pub(super) const EXTRA_SIZE: usize = 0x80;
const CTIME_EXTRA: usize = 0x84;
const MTIME_EXTRA: usize = 0x88;
const ATIME_EXTRA: usize = 0x8c;
const CREATED: usize = 0x90;
const CREATED_EXTRA: usize = 0x94;

/// Seconds that 34 bits can hold, counted from the smallest that 32 can.
const SECONDS_MIN: i64 = -(1 << 31);
const SECONDS_MAX: i64 = SECONDS_MIN + (1 << 34) - 1;

/// Seconds since 1970 and nanoseconds after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, PartialOrd, Ord)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

impl Time {
    /// Low word, and the word of epoch bits and nanoseconds. Times out of range become the nearest that is in it.
    fn encode(self) -> (u32, u32) {
        let seconds = self.seconds.clamp(SECONDS_MIN, SECONDS_MAX);
        let low = seconds as u32;
        let epoch = ((seconds - i64::from(low as i32)) >> 32) as u32 & 3;
        (low, epoch | self.nanoseconds.min(999_999_999) << 2)
    }

    fn decode(low: u32, extra: u32) -> Time {
        Time {
            seconds: i64::from(low as i32) + (i64::from(extra & 3) << 32),
            nanoseconds: (extra >> 2).min(999_999_999),
        }
    }
}

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileType {
    Regular,
    Directory,
    CharDevice,
    BlockDevice,
    Fifo,
    Socket,
    Symlink,
}

impl FileType {
    /// By the upper bits of a mode.
    pub fn of_mode(mode: u16) -> Option<FileType> {
        Some(match mode >> 12 {
            0o10 => FileType::Regular,
            0o04 => FileType::Directory,
            0o02 => FileType::CharDevice,
            0o06 => FileType::BlockDevice,
            0o01 => FileType::Fifo,
            0o14 => FileType::Socket,
            0o12 => FileType::Symlink,
            _ => return None,
        })
    }

    pub fn mode_bits(self) -> u16 {
        let bits = match self {
            FileType::Regular => 0o10,
            FileType::Directory => 0o04,
            FileType::CharDevice => 0o02,
            FileType::BlockDevice => 0o06,
            FileType::Fifo => 0o01,
            FileType::Socket => 0o14,
            FileType::Symlink => 0o12,
        };
        bits << 12
    }

    /// The number in directory entries.
    pub fn dirent_code(self) -> u8 {
        match self {
            FileType::Regular => 1,
            FileType::Directory => 2,
            FileType::CharDevice => 3,
            FileType::BlockDevice => 4,
            FileType::Fifo => 5,
            FileType::Socket => 6,
            FileType::Symlink => 7,
        }
    }

    pub fn of_dirent_code(code: u8) -> Option<FileType> {
        Some(match code {
            1 => FileType::Regular,
            2 => FileType::Directory,
            3 => FileType::CharDevice,
            4 => FileType::BlockDevice,
            5 => FileType::Fifo,
            6 => FileType::Socket,
            7 => FileType::Symlink,
            _ => return None,
        })
    }
}

/// The bytes of an inode, with names for its fields.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inode([u8; INODE_BYTES]);

impl Inode {
    pub fn zero() -> Inode {
        Inode([0; INODE_BYTES])
    }

    /// An inode in use, empty, with an empty list of extents.
    pub fn new(file_type: FileType, links: u16) -> Inode {
        let mut inode = Inode::zero();
        put_u16(&mut inode.0, EXTRA_SIZE, EXTRA_BYTES);
        inode.set_mode(file_type.mode_bits());
        inode.set_links(links);
        inode.set_inline_extents(&super::encode_inline(&[]));
        inode
    }

    pub fn from_bytes(bytes: [u8; INODE_BYTES]) -> Inode {
        Inode(bytes)
    }

    pub fn as_bytes(&self) -> &[u8; INODE_BYTES] {
        &self.0
    }

    /// For the library, which reads and writes whole inodes.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    pub fn mode(&self) -> u16 {
        u16_at(&self.0, MODE)
    }

    pub fn file_type(&self) -> Option<FileType> {
        FileType::of_mode(self.mode())
    }

    pub fn set_mode(&mut self, mode: u16) {
        put_u16(&mut self.0, MODE, mode);
    }

    pub fn uid(&self) -> u32 {
        u32::from(u16_at(&self.0, UID)) | u32::from(u16_at(&self.0, UID_HIGH)) << 16
    }

    pub fn gid(&self) -> u32 {
        u32::from(u16_at(&self.0, GID)) | u32::from(u16_at(&self.0, GID_HIGH)) << 16
    }

    pub fn set_owner(&mut self, uid: u32, gid: u32) {
        put_u16(&mut self.0, UID, uid as u16);
        put_u16(&mut self.0, UID_HIGH, (uid >> 16) as u16);
        put_u16(&mut self.0, GID, gid as u16);
        put_u16(&mut self.0, GID_HIGH, (gid >> 16) as u16);
    }

    pub fn mtime(&self) -> Time {
        Time::decode(u32_at(&self.0, MTIME), self.extra(MTIME_EXTRA))
    }

    /// Sets all four times; change and creation become the time of modification, as nothing else is known of them.
    pub fn set_times(&mut self, atime: Time, mtime: Time) {
        let fields = [
            (ATIME, ATIME_EXTRA, atime),
            (CTIME, CTIME_EXTRA, mtime),
            (MTIME, MTIME_EXTRA, mtime),
            (CREATED, CREATED_EXTRA, mtime),
        ];
        for (low_at, extra_at, time) in fields {
            let (low, extra) = time.encode();
            put_u32(&mut self.0, low_at, low);
            put_u32(&mut self.0, extra_at, extra);
        }
    }

    /// A word behind the first 128 bytes; an inode may say that it does not have it.
    fn extra(&self, at: usize) -> u32 {
        let end = 128 + usize::from(u16_at(&self.0, EXTRA_SIZE));
        if at + 4 <= end { u32_at(&self.0, at) } else { 0 }
    }

    pub fn set_deleted(&mut self, time_s: u32) {
        put_u32(&mut self.0, DTIME, time_s);
    }

    pub fn links(&self) -> u16 {
        u16_at(&self.0, LINKS)
    }

    pub fn set_links(&mut self, links: u16) {
        put_u16(&mut self.0, LINKS, links);
    }

    pub fn size(&self) -> u64 {
        u64::from(u32_at(&self.0, SIZE)) | u64::from(u32_at(&self.0, SIZE_HIGH)) << 32
    }

    pub fn set_size(&mut self, size: u64) {
        put_u32(&mut self.0, SIZE, size as u32);
        put_u32(&mut self.0, SIZE_HIGH, (size >> 32) as u32);
    }

    /// Blocks of 512 bytes that it uses, all told.
    pub fn sectors(&self) -> u64 {
        u64::from(u32_at(&self.0, SECTORS)) | u64::from(u16_at(&self.0, SECTORS_HIGH)) << 32
    }

    pub fn set_sectors(&mut self, sectors: u64) {
        put_u32(&mut self.0, SECTORS, sectors as u32);
        put_u16(&mut self.0, SECTORS_HIGH, (sectors >> 32) as u16);
    }

    pub fn has_extents(&self) -> bool {
        self.flag(EXTENTS_FLAG)
    }

    pub fn has_inline_data(&self) -> bool {
        self.flag(INLINE_DATA_FLAG)
    }

    pub fn is_encrypted(&self) -> bool {
        self.flag(ENCRYPT_FLAG)
    }

    pub fn set_index(&mut self, index: bool) {
        self.set_flag(INDEX_FLAG, index);
    }

    fn flag(&self, flag: u32) -> bool {
        u32_at(&self.0, FLAGS) & flag != 0
    }

    fn set_flag(&mut self, flag: u32, on: bool) {
        let flags = u32_at(&self.0, FLAGS);
        put_u32(&mut self.0, FLAGS, if on { flags | flag } else { flags & !flag });
    }

    /// The 60 bytes that hold extents, a short link's target or a device's number.
    pub fn content(&self) -> &[u8] {
        &self.0[CONTENT..CONTENT + CONTENT_BYTES]
    }

    pub fn set_inline_extents(&mut self, node: &[u8; CONTENT_BYTES]) {
        self.0[CONTENT..CONTENT + CONTENT_BYTES].copy_from_slice(node);
        self.set_flag(EXTENTS_FLAG, true);
    }

    /// A target that fits in the inode with a NUL; longer ones go into a block.
    pub fn set_short_target(&mut self, target: &[u8]) {
        self.clear_content();
        self.0[CONTENT..CONTENT + target.len()].copy_from_slice(target);
        self.set_size(target.len() as u64);
    }

    /// The kernel's two encodings: 8 bits each where they fit, 12 and 20 else.
    pub fn set_device(&mut self, major: u32, minor: u32) {
        self.clear_content();
        match major < 256 && minor < 256 {
            true => put_u32(&mut self.0, CONTENT, major << 8 | minor),
            false => put_u32(
                &mut self.0,
                CONTENT + 4,
                (minor & 0xff) | major << 8 | (minor & !0xff) << 12,
            ),
        }
    }

    pub fn device(&self) -> (u32, u32) {
        match u32_at(&self.0, CONTENT) {
            0 => {
                let code = u32_at(&self.0, CONTENT + 4);
                (code >> 8 & 0xfff, (code & 0xff) | (code >> 12 & 0xfff00))
            }
            code => (code >> 8 & 0xff, code & 0xff),
        }
    }

    fn clear_content(&mut self) {
        self.0[CONTENT..CONTENT + CONTENT_BYTES].fill(0);
        self.set_flag(EXTENTS_FLAG, false);
    }

    pub fn attribute_block(&self) -> u64 {
        u64::from(u32_at(&self.0, ATTRIBUTE_BLOCK)) | u64::from(u16_at(&self.0, ATTRIBUTE_BLOCK_HIGH)) << 32
    }

    pub fn has_attribute_block(&self) -> bool {
        self.attribute_block() != 0
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn times_before_1970_and_after_2038_survive() {
        for seconds in [SECONDS_MIN, -2, -1, 0, 1 << 31, (1 << 32) + 7, SECONDS_MAX] {
            let time = Time {
                seconds,
                nanoseconds: 123_456_789,
            };
            let (low, extra) = time.encode();
            assert_eq!(Time::decode(low, extra), time);
        }
    }

    #[test]
    fn device_numbers_survive_in_both_encodings() {
        for (major, minor) in [(1, 3), (255, 255), (256, 0), (8, 256), (4095, 1_048_575), (0, 0)] {
            let mut inode = Inode::new(FileType::CharDevice, 1);
            inode.set_device(major, minor);
            assert_eq!(inode.device(), (major, minor));
        }
    }

    #[test]
    fn owners_above_16_bits_survive() {
        let mut inode = Inode::zero();
        inode.set_owner(4_000_000_000, 70_000);
        assert_eq!((inode.uid(), inode.gid()), (4_000_000_000, 70_000));
    }
}
