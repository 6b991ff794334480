//! A hostile tar around a layer or a ZFile.
#![no_main]

use aenv_fuzz::{MemoryFile, read_enveloped, repair_tar};
use libfuzzer_sys::fuzz_target;

// Bit 0 of the first byte: put the checksums of headers right. The rest is the file.
fuzz_target!(|input: &[u8]| {
    let Some((&flags, file)) = input.split_first() else {
        return;
    };
    let mut file = file.to_vec();
    if flags & 1 != 0 {
        repair_tar(&mut file);
    }
    let file = MemoryFile::new(&file);
    read_enveloped(file.path());
});
