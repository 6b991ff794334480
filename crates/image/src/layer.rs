//! Turns what was written to a device into a layer: only blocks that differ from the parent's.

use std::path::Path;

use aenv_layers::{LayerWriter, Uuid};

use crate::device::{BLOCK_BYTES, Device, DeviceError};

/// Blocks that are compared at a time.
const BATCH_BLOCKS: u64 = 256;
const BLOCK: usize = BLOCK_BYTES as usize;

#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("cannot write the layer")]
    Write(#[from] aenv_layers::Error),
    #[error("cannot read what the layer shall hold")]
    Read(#[from] DeviceError),
}

/// Identities of a layer and of the one below (nil for none).
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    pub own: Uuid,
    pub parent: Uuid,
}

/// Writes the layer at `path`, which must not exist; answers how many bytes of data it holds. Nothing is synced. Errors:
/// `Write`, `Read`; then no file is left.
pub fn write_layer(device: &Device, path: &Path, identity: Identity) -> Result<u64, LayerError> {
    let mut writer = LayerWriter::create(path, device.size(), identity.parent)?;
    writer.set_uuid(identity.own);
    let mut data_bytes = 0;
    let (mut new, mut old) = (
        vec![0; BLOCK * BATCH_BLOCKS as usize],
        vec![0; BLOCK * BATCH_BLOCKS as usize],
    );
    let mut at = 0;
    while let Some((start, end)) = device.next_dirty(at) {
        let end = end.min(start + BATCH_BLOCKS);
        let bytes = (end - start) as usize * BLOCK;
        device.read(&mut new[..bytes], start * BLOCK_BYTES)?;
        device.read_parent(&mut old[..bytes], start * BLOCK_BYTES)?;
        data_bytes += append(&mut writer, start, &new[..bytes], &old[..bytes])?;
        at = end;
    }
    writer.finish()?;
    Ok(data_bytes)
}

/// What becomes of a block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Same,
    Zero,
    Data,
}

fn append(writer: &mut LayerWriter, start: u64, new: &[u8], old: &[u8]) -> Result<u64, LayerError> {
    let fates: Vec<Fate> = new.chunks_exact(BLOCK).zip(old.chunks_exact(BLOCK)).map(fate).collect();
    let mut data_bytes = 0;
    let mut at = 0;
    for run in fates.chunk_by(PartialEq::eq) {
        let range = at * BLOCK..(at + run.len()) * BLOCK;
        let offset = start * BLOCK_BYTES + range.start as u64;
        match run[0] {
            Fate::Same => {}
            Fate::Zero => writer.append_zero(offset, range.len() as u64)?,
            Fate::Data => {
                data_bytes += range.len() as u64;
                writer.append(offset, &new[range])?;
            }
        }
        at += run.len();
    }
    Ok(data_bytes)
}

fn fate((new, old): (&[u8], &[u8])) -> Fate {
    if new == old {
        Fate::Same
    } else if new.iter().all(|&byte| byte == 0) {
        Fate::Zero
    } else {
        Fate::Data
    }
}
