//! One FUSE connection: reading requests from its descriptor, writing answers and notifications to it.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::abi::{Body, notify, out_header};

/// One thread reads from the descriptor, several write to it.
#[derive(Debug)]
pub struct Channel {
    descriptor: OwnedFd,
}

/// What a look for a request found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// One of so many bytes.
    Request(usize),
    Nothing,
    /// The mount is gone.
    Gone,
}

impl Channel {
    /// Errors: the descriptor is none.
    pub fn new(descriptor: OwnedFd) -> io::Result<Channel> {
        // The thread that reads must never wait there, it has other things under way. The flag belongs to what keeper and
        // blockd share, and nobody reads otherwise.
        let flags = rustix::fs::fcntl_getfl(&descriptor)?;
        rustix::fs::fcntl_setfl(&descriptor, flags | OFlags::NONBLOCK)?;
        Ok(Channel { descriptor })
    }

    pub fn descriptor(&self) -> &OwnedFd {
        &self.descriptor
    }

    /// The next request, if there is one.
    pub fn receive(&self, buffer: &mut [u8]) -> Received {
        loop {
            match rustix::io::read(&self.descriptor, &mut *buffer) {
                Ok(length) => return Received::Request(length),
                // ENOENT: the request was interrupted before it could be handed over.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::AGAIN) => return Received::Nothing,
                Err(Errno::NODEV) => return Received::Gone,
                Err(error) => {
                    say!("aenv-blockd: reading from /dev/fuse failed: {error}");
                    return Received::Gone;
                }
            }
        }
    }

    pub fn answer(&self, unique: u64, body: &[u8]) {
        self.write(unique, 0, body);
    }

    pub fn refuse(&self, unique: u64, errno: i32) {
        self.write(unique, -errno, &[]);
    }

    /// Asks the kernel to hand over again what the blockd before us had read and not answered.
    /// Unsupported before Linux 6.9: such requests then never end.
    pub fn resend(&self) -> io::Result<()> {
        self.notify(notify::RESEND, &[])
    }

    /// Drops the page cache and the directory entry of an inode that is served no more.
    pub fn forget(&self, parent: u64, inode: u64, name: &str) {
        let range: [u64; 2] = [0, 0]; // offset 0 and length 0: all of it
        let _ = self.notify(notify::INVAL_INODE, Body::default().u64s(&[inode]).u64s(&range).bytes());
        let length = u32::try_from(name.len()).unwrap_or(0);
        let entry = Body::default().u64s(&[parent]).u32s(&[length, 0]).name(name.as_bytes());
        // Both fail with ENOENT where the kernel does not know the inode or the name, which is as good.
        let _ = self.notify(notify::INVAL_ENTRY, entry.bytes());
    }

    fn notify(&self, code: i32, body: &[u8]) -> io::Result<()> {
        let header = out_header(0, code, body.len());
        rustix::io::writev(&self.descriptor, &[IoSlice::new(&header), IoSlice::new(body)])?;
        Ok(())
    }

    fn write(&self, unique: u64, error: i32, body: &[u8]) {
        let header = out_header(unique, error, body.len());
        match rustix::io::writev(&self.descriptor, &[IoSlice::new(&header), IoSlice::new(body)]) {
            // ENOENT: the requester was killed meanwhile. ENODEV: the mount is gone. Nobody waits in either case.
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(error) => say!(
                "aenv-blockd: answering {unique:#x} with {} bytes failed: {error}",
                body.len()
            ),
        }
    }
}
