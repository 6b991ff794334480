//! Our device as an `io_manager`, the interface by which libext2fs reaches what a file system is on.
//!
//! Owns: the callbacks and the life of the channel. Does not own: the device, which belongs to [`super::Ext2`] and outlives
//! the library's handle. The library calls back only from inside of its functions, on the thread that called them.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_ulonglong, c_void};
use std::ptr;

use super::sys::{Channel, EXT2_ET_MAGIC_IO_CHANNEL, EXT2_ET_MAGIC_IO_MANAGER, Manager, errcode_t};
use crate::device::{Device, DeviceError};

/// What a channel's `private_data` points to.
pub(super) struct Target {
    pub device: Device,
    /// Why the last callback failed: the library's own code for it says no more than "I/O error".
    pub failure: Option<DeviceError>,
}

thread_local! {
    /// The target of the `ext2fs_open` that runs on this thread: the callback is given no argument of ours.
    pub(super) static OPENING: Cell<*mut Target> = const { Cell::new(ptr::null_mut()) };
}

const NAME: &CStr = c"aenv layer stack";
const EIO: errcode_t = libc::EIO as errcode_t;

pub(super) static MANAGER: Manager = Manager {
    magic: EXT2_ET_MAGIC_IO_MANAGER,
    name: NAME.as_ptr(),
    open,
    close,
    set_blksize,
    read_blk,
    write_blk,
    flush,
    write_byte: Some(write_byte),
    set_option: None,
    get_stats: None,
    read_blk64,
    write_blk64,
    discard: None,
    cache_readahead: None,
    zeroout: None,
    reserved: [0; 14],
};

unsafe extern "C" fn open(_name: *const c_char, _flags: c_int, channel: *mut *mut Channel) -> errcode_t {
    let target = OPENING.take();
    if target.is_null() {
        return EIO;
    }
    let made = Box::new(Channel {
        magic: EXT2_ET_MAGIC_IO_CHANNEL,
        manager: &raw const MANAGER,
        name: NAME.as_ptr().cast_mut(),
        block_size: 1024,
        read_error: ptr::null(),
        write_error: ptr::null(),
        refcount: 1,
        flags: 0,
        reserved: [0; 14],
        private_data: target.cast(),
        app_data: ptr::null_mut(),
        align: 0,
    });
    // SAFETY: the library passes a place for the result; the channel comes back in `close` only.
    unsafe { *channel = Box::into_raw(made) };
    0
}

unsafe extern "C" fn close(channel: *mut Channel) -> errcode_t {
    // SAFETY: `open` made the channel by Box, and the library counts its uses here.
    unsafe {
        (*channel).refcount -= 1;
        if (*channel).refcount == 0 {
            drop(Box::from_raw(channel));
        }
    }
    0
}

unsafe extern "C" fn set_blksize(channel: *mut Channel, bytes: c_int) -> errcode_t {
    // SAFETY: a channel of ours that is not closed.
    unsafe { (*channel).block_size = bytes };
    0
}

unsafe extern "C" fn flush(_channel: *mut Channel) -> errcode_t {
    0
}

unsafe extern "C" fn read_blk(channel: *mut Channel, block: c_ulong, count: c_int, data: *mut c_void) -> errcode_t {
    // SAFETY: same duties of the caller.
    unsafe { read_blk64(channel, block, count, data) }
}

unsafe extern "C" fn write_blk(channel: *mut Channel, block: c_ulong, count: c_int, data: *const c_void) -> errcode_t {
    // SAFETY: same duties of the caller.
    unsafe { write_blk64(channel, block, count, data) }
}

unsafe extern "C" fn read_blk64(
    channel: *mut Channel,
    block: c_ulonglong,
    count: c_int,
    data: *mut c_void,
) -> errcode_t {
    // SAFETY: a channel of ours; the library passes a buffer of as many bytes as it asks for.
    unsafe {
        let Some((offset, length)) = range(channel, block, count) else {
            return EIO;
        };
        let buffer = std::slice::from_raw_parts_mut(data.cast::<u8>(), length);
        answer(channel, |device| device.read(buffer, offset))
    }
}

unsafe extern "C" fn write_blk64(
    channel: *mut Channel,
    block: c_ulonglong,
    count: c_int,
    data: *const c_void,
) -> errcode_t {
    // SAFETY: a channel of ours; the library passes a buffer of as many bytes as it writes.
    unsafe {
        let Some((offset, length)) = range(channel, block, count) else {
            return EIO;
        };
        let buffer = std::slice::from_raw_parts(data.cast::<u8>(), length);
        answer(channel, |device| device.write(buffer, offset))
    }
}

unsafe extern "C" fn write_byte(
    channel: *mut Channel,
    offset: c_ulong,
    count: c_int,
    data: *const c_void,
) -> errcode_t {
    let Ok(length) = usize::try_from(count) else {
        return EIO;
    };
    // SAFETY: a channel of ours; the library passes a buffer of as many bytes as it writes.
    unsafe {
        let buffer = std::slice::from_raw_parts(data.cast::<u8>(), length);
        answer(channel, |device| device.write(buffer, offset))
    }
}

/// Offset and length in bytes of a request; a negative count is bytes.
///
/// # Safety
/// `channel` is one of ours.
unsafe fn range(channel: *mut Channel, block: u64, count: c_int) -> Option<(u64, usize)> {
    // SAFETY: by the caller.
    let block_size = u64::try_from(unsafe { (*channel).block_size }).ok()?;
    let length = match u64::try_from(count) {
        Ok(blocks) => blocks * block_size,
        Err(_) => u64::from(count.unsigned_abs()),
    };
    Some((block.checked_mul(block_size)?, usize::try_from(length).ok()?))
}

/// # Safety
/// `channel` is one of ours and its target lives.
unsafe fn answer(channel: *mut Channel, act: impl FnOnce(&mut Device) -> Result<(), DeviceError>) -> errcode_t {
    // SAFETY: by the caller; nobody else uses the target while the library runs.
    let target = unsafe { &mut *(*channel).private_data.cast::<Target>() };
    match act(&mut target.device) {
        Ok(()) => 0,
        Err(error) => {
            target.failure.get_or_insert(error);
            EIO
        }
    }
}
