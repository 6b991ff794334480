//! Makes a layer of a plain image file, zero runs left out.

use std::fs::File;
use std::path::Path;

use rustix::fs::SeekFrom;

use crate::SECTOR_BYTES;
use crate::error::{At, Error, Result};
use crate::file_ops::read_exact;
use crate::layer::Layer;
use crate::uuid::Uuid;
use crate::writer::LayerWriter;

/// Data read at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Zeros are looked for in units of this: smaller ones would cost more index than they save data.
const BLOCK_BYTES: usize = 4096;

/// What an import made.
#[derive(Debug)]
pub struct ImportReport {
    pub layer: Layer,
    pub data_bytes: u64,
    /// Size of the image: the source's, rounded up to whole sectors.
    pub size_bytes: u64,
}

/// Copies the regular file `source` into a new base layer at `into`. Holes and blocks of zeros are left out, which reads
/// zero as there is nothing below. Caller: nobody writes to the source meanwhile. Nothing is synced.
///
/// Errors: `NotAFile`, `BadSize` (empty source), `Exists` for `into`, `Corrupt` if the source shrinks, `Io`.
pub fn import_raw(source: &Path, into: &Path) -> Result<ImportReport> {
    let file = File::open(source).at(source, "open")?;
    let metadata = file.metadata().at(source, "stat")?;
    if !metadata.is_file() {
        return Err(Error::NotAFile {
            path: source.to_owned(),
        });
    }
    let length = metadata.len();
    let limit = crate::upper::MAX_UPPER_BYTES;
    if length == 0 || length > limit {
        return Err(Error::BadSize { size: length, limit });
    }
    let size_bytes = length.next_multiple_of(SECTOR_BYTES);
    let mut writer = LayerWriter::create(into, size_bytes, Uuid::NIL)?;
    let mut chunk = vec![0u8; CHUNK_BYTES as usize];
    let mut at = 0;
    while let Some((start, end)) = next_data(&file, source, at, length)? {
        at = start;
        while at < end {
            let count = (end - at).min(CHUNK_BYTES) as usize;
            read_exact(&file, source, &mut chunk[..count], at)?;
            // The last sector of an odd source is filled up with zeros.
            let padded = count.next_multiple_of(SECTOR_BYTES as usize);
            chunk[count..padded].fill(0);
            append_nonzero(&mut writer, &chunk[..padded], at)?;
            at += count as u64;
        }
    }
    let layer = writer.finish()?;
    Ok(ImportReport {
        data_bytes: layer.data_bytes(),
        layer,
        size_bytes,
    })
}

/// The next stretch that is not a hole, widened to whole blocks; none if only holes follow.
fn next_data(file: &File, path: &Path, from: u64, length: u64) -> Result<Option<(u64, u64)>> {
    if from >= length {
        return Ok(None);
    }
    let block = BLOCK_BYTES as u64;
    let start = match rustix::fs::seek(file, SeekFrom::Data(from)) {
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        // Without knowledge of holes all is data.
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => {
            return Ok(Some((from, length)));
        }
        other => other.at(path, "look for data")?,
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start)).at(path, "look for a hole")?;
    let start = (start - start % block).max(from);
    Ok(Some((start, end.next_multiple_of(block).clamp(start, length))))
}

/// Appends the runs of blocks that hold anything but zeros.
fn append_nonzero(writer: &mut LayerWriter, data: &[u8], offset: u64) -> Result<()> {
    let mut run_start = 0;
    let mut at = 0;
    for block in data.chunks(BLOCK_BYTES) {
        if is_zero(block) {
            writer.append(offset + run_start as u64, &data[run_start..at])?;
            run_start = at + block.len();
        }
        at += block.len();
    }
    writer.append(offset + run_start as u64, &data[run_start..])
}

/// Whether all bytes are zero; most of an image is looked at, so it must be fast.
fn is_zero(block: &[u8]) -> bool {
    // Eighths of a block, each without an early end inside, so that the compiler can use vectors.
    block
        .chunks(BLOCK_BYTES / 8)
        .all(|part| part.iter().fold(0, |all, byte| all | byte) == 0)
}
