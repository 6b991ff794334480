//! Makes one layer of several consecutive ones.

use std::path::{Path, PathBuf};

use crate::SECTOR_BYTES;
use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::registry::Registry;
use crate::segment::Segment;
use crate::writer::LayerWriter;

/// Data copied at a time.
const CHUNK_SECTORS: u64 = 2048;

/// What a merge made.
#[derive(Debug)]
pub struct MergeReport {
    pub layer: Layer,
    pub data_bytes: u64,
}

/// Merges `layers`, bottom first, into a new layer at `into` that reads as their stack does, over any layer below: zero
/// runs are kept. Its size is that of the largest; its uuid is the top's and its parent the bottom's, so that it takes
/// their place in a chain. Nothing is synced.
///
/// Errors: `NoLayers`, `TooManyLayers`, those of [`Layer::open`], `Exists` for `into`, `Io`.
pub fn merge(layers: &[PathBuf], into: &Path) -> Result<MergeReport> {
    merge_with(&Registry::default(), layers, into)
}

/// As `merge`, with layers that `registry` opens.
pub fn merge_with(registry: &Registry, layers: &[PathBuf], into: &Path) -> Result<MergeReport> {
    let lowers = registry.lowers(layers)?;
    let (Some(bottom), Some(top)) = (lowers.layers().first(), lowers.layers().last()) else {
        return Err(Error::NoLayers);
    };
    let size = lowers
        .layers()
        .iter()
        .map(|layer| layer.writer_size())
        .max()
        .unwrap_or(SECTOR_BYTES);
    let mut writer = LayerWriter::create(into, size, bottom.parent())?;
    writer.set_uuid(top.uuid());
    let mut chunk = vec![0u8; (CHUNK_SECTORS * SECTOR_BYTES) as usize];
    for segment in lowers.index().segments() {
        if segment.is_zero() {
            writer.append_zero(segment.start() * SECTOR_BYTES, segment.sectors() * SECTOR_BYTES)?;
        } else {
            copy(
                &lowers.layers()[usize::from(segment.tag())],
                segment,
                &mut writer,
                &mut chunk,
            )?;
        }
    }
    let layer = writer.finish()?;
    Ok(MergeReport {
        data_bytes: layer.data_bytes(),
        layer,
    })
}

fn copy(layer: &Layer, segment: &Segment, writer: &mut LayerWriter, chunk: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < segment.sectors() {
        let sectors = (segment.sectors() - done).min(CHUNK_SECTORS);
        let part = &mut chunk[..(sectors * SECTOR_BYTES) as usize];
        layer.read_stored(part, segment.file_sector() + done)?;
        writer.append((segment.start() + done) * SECTOR_BYTES, part)?;
        done += sectors;
    }
    Ok(())
}
