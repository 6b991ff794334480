//! Two hostile layers over each other: the merged index against the two alone.
#![no_main]

use aenv_fuzz::{MemoryFile, is_layer, lsmt_file, read_stack};
use libfuzzer_sys::fuzz_target;

// The first two bytes, little endian, divide the rest into the lower and the upper layer.
fuzz_target!(|input: &[u8]| {
    let Some((&split, rest)) = input.split_first_chunk::<2>() else {
        return;
    };
    let Some((lower, upper)) = rest.split_at_checked(usize::from(u16::from_le_bytes(split))) else {
        return;
    };
    if let (Some(lower), Some(upper)) = (lsmt_file(lower), lsmt_file(upper)) {
        // Envelopes are other targets' business, and would make the comparison wrong.
        if !is_layer(&lower) || !is_layer(&upper) {
            return;
        }
        let files = [MemoryFile::new(&lower), MemoryFile::new(&upper)];
        read_stack(&[(files[0].path().to_owned(), lower), (files[1].path().to_owned(), upper)]);
    }
});
