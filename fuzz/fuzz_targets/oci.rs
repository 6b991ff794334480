//! A hostile OCI layer: applied over a small file system, which e2fsck must then find clean.
//!
//! Slower than the others by orders of magnitude, for each input changes a real file system: some dozen in a second.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use aenv_fuzz::{MemoryFile, repair_tar};
use aenv_image::{Compression, Request, apply, check};
use libfuzzer_sys::fuzz_target;

const DISK_BYTES: u64 = 16 << 20;
/// Of an archive: more would test patience.
const ARCHIVE_BYTES_MAX: u64 = 1 << 20;

/// A folder and the layer with the empty file system.
struct Place {
    folder: tempfile::TempDir,
    base: PathBuf,
}

fn place() -> &'static Place {
    static PLACE: OnceLock<Place> = OnceLock::new();
    PLACE.get_or_init(|| {
        // `fuzz/run` removes it: libFuzzer ends the process without unwinding.
        let folder = tempfile::tempdir().expect("a folder");
        let base = folder.path().join("base");
        let nothing = MemoryFile::new(&[0; 1024]);
        apply(&request(nothing.path(), Vec::new(), &base), &mut |_| ()).expect("an empty file system");
        Place { folder, base }
    })
}

fn request(tar: &Path, parents: Vec<PathBuf>, out: &Path) -> Request {
    Request {
        size_bytes: DISK_BYTES,
        parents,
        tar: Some(tar.to_owned()),
        compression: Compression::None,
        expect_diff_id: None,
        expect_blob: None,
        out: out.to_owned(),
        uuid: None,
        epoch_s: 0,
        max_bytes: ARCHIVE_BYTES_MAX,
    }
}

// Bit 0 of the first byte: put the checksums of headers right. The rest is the archive.
fuzz_target!(|input: &[u8]| {
    let Some((&flags, archive)) = input.split_first() else {
        return;
    };
    let mut archive = archive.to_vec();
    if flags & 1 != 0 {
        repair_tar(&mut archive);
    }
    let place = place();
    let archive = MemoryFile::new(&archive);
    let out = place.folder.path().join("layer");
    let parents = vec![place.base.clone()];
    if let Ok(report) = apply(&request(archive.path(), parents.clone(), &out), &mut |_| ()) {
        let layers = [parents, vec![out.clone()]].concat();
        // Checking starts a program; what changed nothing needs none.
        if report.data_bytes > 0 {
            check(layers, Some(DISK_BYTES), place.folder.path().to_owned()).expect("a clean file system");
        }
        std::fs::remove_file(&out).expect("the layer is there");
    }
    assert!(!out.exists(), "a failed conversion left its layer");
});
