//! What is done with whatever opens: every promise of a read is compared with the layers' own segments.

use std::path::{Path, PathBuf};

use aenv_layers::{Error, Layer, MAX_UPPER_BYTES, Stack};

const SECTOR: u64 = 512;
/// Sectors looked at from each side of a segment's ends; segments themselves may be 8 MiB long.
const MARGIN: u64 = 3;
/// Segments looked at: an input may hold more than a run should take.
const SEGMENTS_MAX: usize = 64;

/// Bytes read of a layer whose file is not its own form.
const ENVELOPED_BYTES: u64 = 1 << 20;
const LSMT: &[u8] = b"LSMT\0\x01\x02\0";

/// Whether bytes begin as a layer does that is in no envelope.
pub fn is_layer(bytes: &[u8]) -> bool {
    bytes.starts_with(LSMT)
}

/// A layer in whatever envelope: what its reads return is compared with its reads in other pieces.
pub fn read_enveloped(path: &Path) {
    let layer = match Layer::open(path) {
        Ok(layer) => layer,
        Err(error) => return check_error(&error),
    };
    let size = layer
        .virtual_size()
        .next_multiple_of(SECTOR)
        .clamp(SECTOR, MAX_UPPER_BYTES);
    let Ok(stack) = Stack::open(&[path.to_owned()], None, size) else {
        return;
    };
    let mut whole = vec![0xa5; size.min(ENVELOPED_BYTES) as usize];
    if let Err(error) = stack.read_at(&mut whole, 0) {
        return check_error(&error);
    }
    for (number, expected) in whole.chunks(3 * SECTOR as usize).enumerate() {
        let mut part = vec![0x5a; expected.len()];
        stack
            .read_at(&mut part, number as u64 * 3 * SECTOR)
            .expect("a part of what was read whole");
        assert_eq!(part, expected, "piece {number}");
    }
}

/// A layer alone, in its own form.
pub fn read_whole(path: &Path, bytes: &[u8]) {
    if !is_layer(bytes) {
        return read_enveloped(path);
    }
    let layer = match Layer::open(path) {
        Ok(layer) => layer,
        Err(error) => return check_error(&error),
    };
    let segments = layer.segments();
    for pair in segments.windows(2) {
        assert!(pair[0].end() <= pair[1].start(), "{pair:?}");
    }
    // An image may end inside a sector, which is whole in the layer all the same.
    let image_end = layer.virtual_size().div_ceil(SECTOR);
    for segment in segments {
        assert!(segment.sectors() > 0 && segment.end() <= image_end, "{segment:?}");
        // The file offset of a zero run is not read and may be anything.
        let inside = || (segment.file_sector() + segment.sectors()) * SECTOR <= bytes.len() as u64;
        assert!(segment.is_zero() || inside(), "{segment:?}");
    }
    read_stack(&[(path.to_owned(), bytes.to_vec())]);
}

/// A stack of layers, bottom first, each with the bytes of its file; every sector near an end of a segment is compared
/// with what the topmost segment that holds it says.
pub fn read_stack(files: &[(PathBuf, Vec<u8>)]) {
    let paths: Vec<_> = files.iter().map(|(path, _)| path.clone()).collect();
    let layers: Result<Vec<_>, _> = paths.iter().map(|path| Layer::open(path)).collect();
    let layers = match layers {
        Ok(layers) => layers,
        Err(error) => return check_error(&error),
    };
    let size = layers.iter().map(Layer::virtual_size).max().unwrap_or(0);
    let size = size.next_multiple_of(SECTOR).clamp(SECTOR, MAX_UPPER_BYTES);
    let stack = match Stack::open(&paths, None, size) {
        Ok(stack) => stack,
        Err(error) => return check_error(&error),
    };
    for sector in places(&layers, size / SECTOR) {
        let mut found = [0xa5; SECTOR as usize];
        match stack.read_at(&mut found, sector * SECTOR) {
            Ok(()) => assert_eq!(found[..], expected(&layers, files, sector)[..], "sector {sector}"),
            Err(error) => check_error(&error),
        }
        if stack.is_zero(sector * SECTOR, SECTOR) {
            assert!(
                expected(&layers, files, sector).iter().all(|&byte| byte == 0),
                "sector {sector}"
            );
        }
    }
    check_extents(&stack, size);
}

/// Extents of the first and the last stretch must cover it without gap.
fn check_extents(stack: &Stack, size: u64) {
    let length = size.min(1 << 20);
    for start in [0, size - length] {
        let mut at = start;
        for extent in stack.extents(start, length).expect("extents of a range inside") {
            assert!(extent.offset == at && extent.length > 0);
            at += extent.length;
        }
        assert_eq!(at, start + length);
    }
}

/// Sectors inside of the stack beside each segment's ends.
fn places(layers: &[Layer], sectors: u64) -> Vec<u64> {
    let mut places = vec![0, sectors - 1];
    for segment in layers
        .iter()
        .flat_map(|layer| layer.segments().iter().take(SEGMENTS_MAX))
    {
        for end in [segment.start(), segment.end()] {
            places.extend(end.saturating_sub(MARGIN)..end.saturating_add(MARGIN).min(sectors));
        }
    }
    places.retain(|&sector| sector < sectors);
    places.sort_unstable();
    places.dedup();
    places
}

/// By the slow and obvious way: the topmost segment that holds the sector.
fn expected(layers: &[Layer], files: &[(PathBuf, Vec<u8>)], sector: u64) -> Vec<u8> {
    for (layer, (_, bytes)) in layers.iter().zip(files).rev() {
        let holder = layer
            .segments()
            .iter()
            .find(|s| s.start() <= sector && sector < s.end());
        match holder {
            Some(segment) if segment.is_zero() => break,
            Some(segment) => {
                let at = ((segment.file_sector() + sector - segment.start()) * SECTOR) as usize;
                return bytes[at..at + SECTOR as usize].to_vec();
            }
            None => {}
        }
    }
    vec![0; SECTOR as usize]
}

/// An error about a file's bytes must name the file.
fn check_error(error: &Error) {
    let text = error.to_string();
    if let Error::Corrupt { path, .. } | Error::Io { path, .. } = error {
        assert!(text.contains(&path.display().to_string()), "{text}");
    }
}
