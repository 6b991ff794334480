//! An ext4 file system that is changed in this process by libext2fs, on our own device.
//!
//! Owns: the library's handle and the safe way to call it. Does not own: names and trees ([`crate::tree`]), the choice of
//! blocks ([`crate::space`]). Only file systems that this program made itself may be opened here: the library is C, and
//! what guests wrote is read by [`crate::ext4`] instead.

mod io;
mod sys;

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;

use self::io::{MANAGER, OPENING, Target};
use self::sys::errcode_t;
use crate::device::{BLOCK_BYTES, Device, DeviceError};
use crate::ext4::{Extent, INODE_BYTES, Inode};

/// Where the superblock is, and its size.
const SUPERBLOCK_OFFSET: u64 = 1024;
const SUPERBLOCK_BYTES: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub enum Ext2Error {
    #[error("libext2fs cannot {step} (code {code})")]
    Library { step: &'static str, code: i64 },
    #[error("cannot {step}")]
    Device {
        step: &'static str,
        #[source]
        source: DeviceError,
    },
    #[error("no inode is free")]
    NoInode,
    #[error("no block is free")]
    NoBlocks,
    #[error("the extended attributes do not fit: {bytes} bytes where a file has room for 4000")]
    AttributesTooLarge { bytes: usize },
    #[error("the file system has blocks of {found} bytes and inodes of {inode} bytes; ours have 4096 and 256")]
    Geometry { found: u32, inode: u16 },
}

pub type Result<T, E = Ext2Error> = std::result::Result<T, E>;

/// An open file system. Changes are on the device after [`Ext2::flush`] only.
pub struct Ext2 {
    fs: *mut sys::Filsys,
    /// From `Box::into_raw`: the library holds this pointer too.
    target: *mut Target,
}

impl std::fmt::Debug for Ext2 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ext2")
            .field("device", self.device())
            .finish_non_exhaustive()
    }
}

impl Drop for Ext2 {
    fn drop(&mut self) {
        // SAFETY: both are ours, and the library uses the target no more once the handle is freed.
        unsafe {
            if !self.fs.is_null() {
                sys::ext2fs_free(self.fs);
            }
            drop(Box::from_raw(self.target));
        }
    }
}

impl Ext2 {
    /// Opens the file system on `device`. Errors: `Library`, `Device`, `Geometry`.
    pub fn open(device: Device) -> Result<Ext2> {
        let target = Box::into_raw(Box::new(Target { device, failure: None }));
        let mut this = Ext2 {
            fs: ptr::null_mut(),
            target,
        };
        OPENING.set(target);
        let flags = sys::EXT2_FLAG_RW | sys::EXT2_FLAG_64BITS;
        let block = BLOCK_BYTES as u32;
        // SAFETY: the manager is static, the target lives as long as the handle.
        let code = unsafe { sys::ext2fs_open(c"aenv".as_ptr(), flags, 0, 0, &raw const MANAGER, &raw mut this.fs) };
        OPENING.set(ptr::null_mut());
        if code != 0 {
            // The library has freed the handle itself.
            this.fs = ptr::null_mut();
        }
        this.check("open the file system", code)?;
        let inode = this.superblock_u16(0x58);
        // SAFETY: an open handle.
        let found = unsafe { (*this.fs).blocksize };
        if found != block || usize::from(inode) != INODE_BYTES {
            return Err(Ext2Error::Geometry { found, inode });
        }
        // SAFETY: an open handle.
        let code = unsafe { sys::ext2fs_read_bitmaps(this.fs) };
        this.check("read the bitmaps", code)?;
        // SAFETY: an open handle. Backups of superblock and descriptors stay as they were made, as the kernel leaves them.
        unsafe { (*this.fs).flags |= sys::EXT2_FLAG_MASTER_SB_ONLY };
        Ok(this)
    }

    pub fn device(&self) -> &Device {
        // SAFETY: the library uses the target only while one of its functions runs, which borrow `self` mutably.
        unsafe { &(*self.target).device }
    }

    pub fn device_mut(&mut self) -> &mut Device {
        // SAFETY: as above.
        unsafe { &mut (*self.target).device }
    }

    /// Writes bitmaps, descriptors and superblock. `time_s` becomes the time of the last write: the library would take the
    /// clock's, and equal inputs must give equal bytes. Errors: `Library`, `Device`.
    pub fn flush(&mut self, time_s: u32) -> Result<()> {
        // SAFETY: an open handle.
        let code = unsafe { sys::ext2fs_write_bitmaps(self.fs) };
        self.check("write the bitmaps", code)?;
        // SAFETY: an open handle.
        let code = unsafe {
            (*self.fs).flags |= sys::EXT2_FLAG_CHANGED | sys::EXT2_FLAG_DIRTY;
            sys::ext2fs_flush2(self.fs, sys::EXT2_FLAG_FLUSH_NO_SYNC)
        };
        self.check("write the superblock", code)?;
        self.set_write_time(time_s)
    }

    fn set_write_time(&mut self, time_s: u32) -> Result<()> {
        let device = self.device_mut();
        let mut block = [0u8; SUPERBLOCK_BYTES];
        let source = |source| Ext2Error::Device {
            step: "set the time of the superblock",
            source,
        };
        device.read(&mut block, SUPERBLOCK_OFFSET).map_err(source)?;
        crate::ext4::set_superblock_time(&mut block, time_s);
        device.write(&block, SUPERBLOCK_OFFSET).map_err(source)
    }

    pub fn free_blocks(&self) -> u64 {
        u64::from(self.superblock_u32(0x0c)) | u64::from(self.superblock_u32(0x158)) << 32
    }

    pub fn blocks(&self) -> u64 {
        u64::from(self.superblock_u32(0x04)) | u64::from(self.superblock_u32(0x150)) << 32
    }

    /// The first run of free blocks at or after `from`, at most `limit` long: its start and length.
    pub fn free_run(&mut self, from: u64, limit: u64) -> Result<Option<(u64, u64)>> {
        let last = self.blocks() - 1;
        if from > last {
            return Ok(None);
        }
        let Some(start) = self.find(sys::ext2fs_find_first_zero_generic_bmap, from, last)? else {
            return Ok(None);
        };
        let end = last.min(start.saturating_add(limit - 1));
        let used = self.find(sys::ext2fs_find_first_set_generic_bmap, start, end)?;
        Ok(Some((start, used.unwrap_or(end + 1) - start)))
    }

    fn find(
        &mut self,
        find: unsafe extern "C" fn(*mut c_void, u64, u64, *mut u64) -> errcode_t,
        start: u64,
        end: u64,
    ) -> Result<Option<u64>> {
        let mut found = 0;
        // SAFETY: an open handle whose bitmaps were read; the range lies in the file system.
        let code = unsafe { find((*self.fs).block_map, start, end, &raw mut found) };
        if code == errcode_t::from(libc::ENOENT) {
            return Ok(None);
        }
        self.check("search the block bitmap", code)?;
        Ok(Some(found))
    }

    /// Marks blocks as used or free, with all counts. Caller: they are the other way now.
    pub fn mark_blocks(&mut self, start: u64, count: u32, used: bool) {
        // SAFETY: an open handle; the range was found in the file system's own bitmap.
        unsafe { sys::ext2fs_block_alloc_stats_range(self.fs, start, count, if used { 1 } else { -1 }) };
    }

    /// Takes a free inode near the directory `near`. Errors: `NoInode`, `Library`.
    pub fn new_inode(&mut self, near: u32, mode: u16, is_dir: bool) -> Result<u32> {
        let mut ino = 0;
        // SAFETY: an open handle; the library's own bitmap is used.
        let code = unsafe { sys::ext2fs_new_inode(self.fs, near, c_int::from(mode), ptr::null_mut(), &raw mut ino) };
        if code == sys::EXT2_ET_INODE_ALLOC_FAIL {
            return Err(Ext2Error::NoInode);
        }
        self.check("find a free inode", code)?;
        // SAFETY: an open handle and an inode of it.
        unsafe { sys::ext2fs_inode_alloc_stats2(self.fs, ino, 1, c_int::from(is_dir)) };
        Ok(ino)
    }

    /// Errors: `Library`, `Device`.
    pub fn read_inode(&mut self, ino: u32) -> Result<Inode> {
        let mut inode = Inode::zero();
        // SAFETY: the buffer has the size that is named.
        let code =
            unsafe { sys::ext2fs_read_inode_full(self.fs, ino, inode.as_mut_ptr().cast(), INODE_BYTES as c_int) };
        self.check("read an inode", code)?;
        Ok(inode)
    }

    /// Writes it with its checksum. Errors: `Library`, `Device`.
    pub fn write_inode(&mut self, ino: u32, inode: &Inode) -> Result<()> {
        let mut copy = inode.clone();
        // SAFETY: the buffer has the size that is named.
        let code =
            unsafe { sys::ext2fs_write_inode_full(self.fs, ino, copy.as_mut_ptr().cast(), INODE_BYTES as c_int) };
        self.check("write an inode", code)
    }

    /// Frees all blocks of content; `inode` is what the inode holds afterwards. Errors: `Library`, `Device`.
    pub fn free_content(&mut self, ino: u32, inode: &mut Inode) -> Result<()> {
        // SAFETY: the buffer is a whole inode, of which the library uses the first half.
        let code = unsafe { sys::ext2fs_punch(self.fs, ino, inode.as_mut_ptr().cast(), ptr::null_mut(), 0, u64::MAX) };
        self.check("free the blocks of a file", code)
    }

    /// Frees the block of extended attributes, if there is one. Errors: `Library`, `Device`.
    pub fn free_attributes(&mut self, ino: u32, inode: &mut Inode) -> Result<()> {
        if !inode.has_attribute_block() {
            return Ok(());
        }
        // SAFETY: the buffer is a whole inode.
        let code = unsafe { sys::ext2fs_free_ext_attr(self.fs, ino, inode.as_mut_ptr().cast()) };
        self.check("free the block of extended attributes", code)
    }

    /// Gives an inode back, whose blocks were freed. Errors: `Library`, `Device`.
    pub fn free_inode(&mut self, ino: u32, is_dir: bool, time_s: u32) -> Result<()> {
        // SAFETY: an open handle and an inode of it that is in use.
        unsafe { sys::ext2fs_inode_alloc_stats2(self.fs, ino, -1, c_int::from(is_dir)) };
        let mut inode = Inode::zero();
        // Zero would say that it was never deleted.
        inode.set_deleted(time_s.max(1));
        self.write_inode(ino, &inode)
    }

    /// Gives a written inode without content these extents, by a tree if they do not fit in the inode. Errors: `Library`
    /// (also where no block is free for the tree), `Device`.
    pub fn insert_extents(&mut self, ino: u32, extents: &[Extent]) -> Result<()> {
        let mut handle = ptr::null_mut();
        // SAFETY: without a buffer of ours the library reads the inode itself.
        let code = unsafe { sys::ext2fs_extent_open2(self.fs, ino, ptr::null_mut(), &raw mut handle) };
        self.check("open the extents of a file", code)?;
        let mut code = 0;
        for extent in extents {
            let mut extent = sys::Extent {
                pblk: extent.physical,
                lblk: u64::from(extent.logical),
                len: extent.count,
                flags: 0,
            };
            // SAFETY: an open handle of extents; each insertion leaves it at what it inserted.
            code = unsafe { sys::ext2fs_extent_insert(handle, sys::EXT2_EXTENT_INSERT_AFTER, &raw mut extent) };
            if code != 0 {
                break;
            }
        }
        // SAFETY: opened above.
        unsafe { sys::ext2fs_extent_free(handle) };
        self.check("write the extents of a file", code)
    }

    /// Writes a block of a directory, whose last 12 bytes (or 8 of an index) hold room for the checksum.
    pub fn write_dir_block(&mut self, ino: u32, block: u64, content: &mut [u8; BLOCK_BYTES as usize]) -> Result<()> {
        // SAFETY: the buffer is a whole block.
        let code = unsafe { sys::ext2fs_write_dir_block4(self.fs, block, content.as_mut_ptr().cast(), 0, ino) };
        self.check("write a block of a directory", code)
    }

    /// The hash by which an index of this file system sorts `name`: major, then minor.
    pub fn name_hash(&mut self, name: &[u8]) -> Result<(u32, u32)> {
        let seed: [u32; 4] = std::array::from_fn(|at| self.superblock_u32(0xec + 4 * at));
        let version = self.hash_version();
        let (mut hash, mut minor) = (0, 0);
        // SAFETY: name and seed live during the call; the length is the name's.
        let code = unsafe {
            let length = name.len() as c_int;
            sys::ext2fs_dirhash(
                version,
                name.as_ptr().cast(),
                length,
                seed.as_ptr(),
                &raw mut hash,
                &raw mut minor,
            )
        };
        self.check("hash a name", code)?;
        Ok((hash, minor))
    }

    /// The version that an index carries; the unsigned variant of it is chosen by a flag of the superblock.
    pub fn stored_hash_version(&self) -> u8 {
        self.superblock_u8(0xfc)
    }

    fn hash_version(&self) -> c_int {
        let unsigned = self.superblock_u32(0x160) & 2 != 0;
        c_int::from(self.stored_hash_version()) + if unsigned { 3 } else { 0 }
    }

    /// Replaces all extended attributes of a written inode by these, in this order. Errors: `AttributesTooLarge`,
    /// `Library`, `Device`.
    pub fn set_attributes<'a>(
        &mut self,
        ino: u32,
        attributes: impl Iterator<Item = (&'a CStr, &'a [u8])> + Clone,
    ) -> Result<()> {
        let mut handle = ptr::null_mut();
        // SAFETY: an open handle.
        let code = unsafe { sys::ext2fs_xattrs_open(self.fs, ino, &raw mut handle) };
        self.check("open the extended attributes", code)?;
        let mut code = 0;
        for (name, value) in attributes.clone() {
            // SAFETY: name and value live during the call; the library copies both.
            code = unsafe { sys::ext2fs_xattr_set(handle, name.as_ptr(), value.as_ptr().cast(), value.len()) };
            if code != 0 {
                break;
            }
        }
        if code == 0 {
            // SAFETY: an open handle of attributes.
            code = unsafe { sys::ext2fs_xattrs_write(handle) };
        }
        // SAFETY: opened above.
        unsafe { sys::ext2fs_xattrs_close(&raw mut handle) };
        if code == sys::EXT2_ET_EA_NO_SPACE {
            let bytes = attributes.map(|(name, value)| name.count_bytes() + value.len()).sum();
            return Err(Ext2Error::AttributesTooLarge { bytes });
        }
        self.check("write the extended attributes", code)
    }

    fn check(&mut self, step: &'static str, code: errcode_t) -> Result<()> {
        // SAFETY: the library is not running.
        let failure = unsafe { (*self.target).failure.take() };
        match (code, failure) {
            (_, Some(source)) => Err(Ext2Error::Device { step, source }),
            (0, None) => Ok(()),
            (sys::EXT2_ET_BLOCK_ALLOC_FAIL, None) => Err(Ext2Error::NoBlocks),
            (code, None) => Err(Ext2Error::Library { step, code }),
        }
    }

    fn superblock_u8(&self, offset: usize) -> u8 {
        assert!(offset < SUPERBLOCK_BYTES, "a field of the superblock");
        // SAFETY: an open handle has its superblock of 1024 bytes in memory.
        unsafe { *(*self.fs).superblock.add(offset) }
    }

    fn superblock_u16(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.superblock_u8(offset), self.superblock_u8(offset + 1)])
    }

    fn superblock_u32(&self, offset: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|at| self.superblock_u8(offset + at)))
    }
}

/// A name of an extended attribute for the library. None if it holds a NUL.
pub fn attribute_name(name: &[u8]) -> Option<CString> {
    CString::new(name).ok()
}
