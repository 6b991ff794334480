//! The part of `libext2fs.so.2` that we call, as its headers of versions 1.47.0 and 1.47.2 declare it.
//!
//! Owns: declarations, nothing else. Only fields up to the last one that we read are declared of the library's
//! structures; they have kept their places since version 1.42. The library's `errcode_t` is 0, an errno or a code of its
//! own table.

#![allow(non_camel_case_types)]

use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_ulonglong, c_void};

pub type errcode_t = c_long;

/// `EXT2_ET_*`: numbers of the library's error table that we give or tell apart.
pub const EXT2_ET_MAGIC_IO_CHANNEL: errcode_t = 2_133_571_333;
pub const EXT2_ET_MAGIC_IO_MANAGER: errcode_t = 2_133_571_335;
pub const EXT2_ET_BLOCK_ALLOC_FAIL: errcode_t = 2_133_571_400;
pub const EXT2_ET_INODE_ALLOC_FAIL: errcode_t = 2_133_571_401;
pub const EXT2_ET_EA_NO_SPACE: errcode_t = 2_133_571_491;

pub const EXT2_FLAG_RW: c_int = 0x01;
pub const EXT2_FLAG_CHANGED: c_int = 0x02;
pub const EXT2_FLAG_DIRTY: c_int = 0x04;
pub const EXT2_FLAG_MASTER_SB_ONLY: c_int = 0x200;
pub const EXT2_FLAG_64BITS: c_int = 0x20000;
/// Argument of `ext2fs_flush2`: no fsync.
pub const EXT2_FLAG_FLUSH_NO_SYNC: c_int = 1;
pub const EXT2_EXTENT_INSERT_AFTER: c_int = 1;

/// `struct struct_ext2_filsys`, its beginning. Made and freed by the library only.
#[repr(C)]
pub struct Filsys {
    pub magic: errcode_t,
    pub io: *mut Channel,
    pub flags: c_int,
    pub device_name: *mut c_char,
    pub superblock: *mut u8,
    pub blocksize: c_uint,
    pub fragsize: c_int,
    pub group_desc_count: u32,
    pub desc_blocks: c_ulong,
    pub group_desc: *mut c_void,
    pub inode_blocks_per_group: c_uint,
    pub inode_map: *mut c_void,
    pub block_map: *mut c_void,
}

/// `struct struct_io_channel`, whole: we make it.
#[repr(C)]
pub struct Channel {
    pub magic: errcode_t,
    pub manager: *const Manager,
    pub name: *mut c_char,
    pub block_size: c_int,
    pub read_error: *const c_void,
    pub write_error: *const c_void,
    pub refcount: c_int,
    pub flags: c_int,
    pub reserved: [c_long; 14],
    pub private_data: *mut c_void,
    pub app_data: *mut c_void,
    pub align: c_int,
}

/// `struct struct_io_manager`, whole: we make it.
#[repr(C)]
pub struct Manager {
    pub magic: errcode_t,
    pub name: *const c_char,
    pub open: unsafe extern "C" fn(*const c_char, c_int, *mut *mut Channel) -> errcode_t,
    pub close: unsafe extern "C" fn(*mut Channel) -> errcode_t,
    pub set_blksize: unsafe extern "C" fn(*mut Channel, c_int) -> errcode_t,
    pub read_blk: unsafe extern "C" fn(*mut Channel, c_ulong, c_int, *mut c_void) -> errcode_t,
    pub write_blk: unsafe extern "C" fn(*mut Channel, c_ulong, c_int, *const c_void) -> errcode_t,
    pub flush: unsafe extern "C" fn(*mut Channel) -> errcode_t,
    pub write_byte: Option<unsafe extern "C" fn(*mut Channel, c_ulong, c_int, *const c_void) -> errcode_t>,
    pub set_option: Option<unsafe extern "C" fn(*mut Channel, *const c_char, *const c_char) -> errcode_t>,
    pub get_stats: Option<unsafe extern "C" fn(*mut Channel, *mut *mut c_void) -> errcode_t>,
    pub read_blk64: unsafe extern "C" fn(*mut Channel, c_ulonglong, c_int, *mut c_void) -> errcode_t,
    pub write_blk64: unsafe extern "C" fn(*mut Channel, c_ulonglong, c_int, *const c_void) -> errcode_t,
    pub discard: Option<unsafe extern "C" fn(*mut Channel, c_ulonglong, c_ulonglong) -> errcode_t>,
    pub cache_readahead: Option<unsafe extern "C" fn(*mut Channel, c_ulonglong, c_ulonglong) -> errcode_t>,
    pub zeroout: Option<unsafe extern "C" fn(*mut Channel, c_ulonglong, c_ulonglong) -> errcode_t>,
    pub reserved: [c_long; 14],
}

// SAFETY: a table of functions and constants that nobody changes.
unsafe impl Sync for Manager {}

/// `struct ext2fs_extent`.
#[repr(C)]
pub struct Extent {
    pub pblk: u64,
    pub lblk: u64,
    pub len: u32,
    pub flags: u32,
}

unsafe extern "C" {
    pub fn ext2fs_open(
        name: *const c_char,
        flags: c_int,
        superblock: c_int,
        block_size: c_uint,
        manager: *const Manager,
        fs: *mut *mut Filsys,
    ) -> errcode_t;
    pub fn ext2fs_free(fs: *mut Filsys);
    pub fn ext2fs_flush2(fs: *mut Filsys, flags: c_int) -> errcode_t;
    pub fn ext2fs_read_bitmaps(fs: *mut Filsys) -> errcode_t;
    pub fn ext2fs_write_bitmaps(fs: *mut Filsys) -> errcode_t;

    pub fn ext2fs_new_inode(fs: *mut Filsys, dir: u32, mode: c_int, map: *mut c_void, ino: *mut u32) -> errcode_t;
    pub fn ext2fs_inode_alloc_stats2(fs: *mut Filsys, ino: u32, inuse: c_int, isdir: c_int);
    pub fn ext2fs_read_inode_full(fs: *mut Filsys, ino: u32, inode: *mut c_void, bytes: c_int) -> errcode_t;
    pub fn ext2fs_write_inode_full(fs: *mut Filsys, ino: u32, inode: *mut c_void, bytes: c_int) -> errcode_t;

    pub fn ext2fs_find_first_zero_generic_bmap(map: *mut c_void, start: u64, end: u64, out: *mut u64) -> errcode_t;
    pub fn ext2fs_find_first_set_generic_bmap(map: *mut c_void, start: u64, end: u64, out: *mut u64) -> errcode_t;
    pub fn ext2fs_block_alloc_stats_range(fs: *mut Filsys, block: u64, count: u32, inuse: c_int);
    pub fn ext2fs_punch(
        fs: *mut Filsys,
        ino: u32,
        inode: *mut c_void,
        block_buf: *mut c_char,
        start: u64,
        end: u64,
    ) -> errcode_t;

    pub fn ext2fs_extent_open2(fs: *mut Filsys, ino: u32, inode: *mut c_void, handle: *mut *mut c_void) -> errcode_t;
    pub fn ext2fs_extent_insert(handle: *mut c_void, flags: c_int, extent: *mut Extent) -> errcode_t;
    pub fn ext2fs_extent_free(handle: *mut c_void);

    pub fn ext2fs_write_dir_block4(
        fs: *mut Filsys,
        block: u64,
        buffer: *mut c_void,
        flags: c_int,
        ino: u32,
    ) -> errcode_t;
    pub fn ext2fs_dirhash(
        version: c_int,
        name: *const c_char,
        length: c_int,
        seed: *const u32,
        hash: *mut u32,
        minor: *mut u32,
    ) -> errcode_t;

    pub fn ext2fs_xattrs_open(fs: *mut Filsys, ino: u32, handle: *mut *mut c_void) -> errcode_t;
    pub fn ext2fs_xattr_set(handle: *mut c_void, key: *const c_char, value: *const c_void, length: usize) -> errcode_t;
    pub fn ext2fs_xattrs_write(handle: *mut c_void) -> errcode_t;
    pub fn ext2fs_xattrs_close(handle: *mut *mut c_void) -> errcode_t;
    pub fn ext2fs_free_ext_attr(fs: *mut Filsys, ino: u32, inode: *mut c_void) -> errcode_t;
}
