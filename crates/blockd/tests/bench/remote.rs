//! What tests of remote layers ask and check.

use std::fs::File;
use std::os::unix::fs::FileExt;

use aenv_wire::block::{CacheOk, Operation};

use super::{Client, MIB};

pub const CACHE: u64 = 64 * MIB;

pub fn cache(client: &mut Client) -> CacheOk {
    client.ask(Operation::Cache)
}

pub fn check(file: &File, image: &[u8], offset: u64, length: usize) {
    let mut bytes = vec![0xcc; length];
    file.read_exact_at(&mut bytes, offset).unwrap();
    let start = usize::try_from(offset).unwrap();
    assert!(bytes == image[start..start + length], "wrong bytes at {offset}");
}

pub fn forget_pages(file: &File) {
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

pub fn errno(outcome: std::io::Result<usize>) -> Option<i32> {
    outcome.err().and_then(|error| error.raw_os_error())
}
