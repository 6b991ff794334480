//! A hostile blob descriptor or block list, as a repository's object or a shared folder may hold it.
#![no_main]

use std::path::Path;

use aenv_fuzz::{BlockList, DESCRIPTOR_BYTES_MAX, Descriptor};
use libfuzzer_sys::fuzz_target;

// A descriptor is told from a block list as blockd does: by its beginning.
fuzz_target!(|input: &[u8]| {
    if Descriptor::is_start(input) {
        descriptor(input);
    } else {
        block_list(input);
    }
});

fn descriptor(input: &[u8]) {
    let path = Path::new("hostile.blob");
    match Descriptor::parse(path, input) {
        Ok(descriptor) => {
            let bytes = descriptor.encode();
            assert!(
                bytes.len() as u64 <= DESCRIPTOR_BYTES_MAX,
                "what was read cannot be written"
            );
            let again = Descriptor::parse(path, &bytes).expect("our own descriptor");
            assert_eq!(again.encode(), bytes);
        }
        Err(error) => assert!(error.to_string().contains("hostile.blob"), "{error}"),
    }
}

fn block_list(input: &[u8]) {
    let Ok(list) = BlockList::decode(input) else {
        return;
    };
    assert_eq!(list.encode(), input);
    let mut end = 0;
    for block in 0..list.blocks() {
        let range = list.range(block);
        assert!(range.start == end && range.end > end);
        end = range.end;
        assert!(list.verify(block, &input[..input.len().min(7)]).is_err());
    }
    assert_eq!(end, list.size_bytes());
    assert!(list.verify(list.blocks(), &[]).is_err());
}
