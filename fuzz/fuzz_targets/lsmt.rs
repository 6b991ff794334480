//! One hostile LSMT file: opened, listed, read near every edge.
#![no_main]

use aenv_fuzz::{MemoryFile, lsmt_file, read_whole};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    if let Some(bytes) = lsmt_file(input) {
        let file = MemoryFile::new(&bytes);
        read_whole(file.path(), &bytes);
    }
});
