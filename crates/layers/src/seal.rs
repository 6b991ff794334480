//! Turns an upper into a layer in place.
//!
//! The data is already where the format wants it, so a seal only adds what says so:
//!
//! 1. cut off what an earlier, cut seal left behind the data area;
//! 2. index, 3. trailer, both behind the data area;
//! 4. the header's page, now sealed;
//! 5. remove the map file.
//!
//! **Step 5 is the commit.** A path with a map is an upper, whatever the other steps have left: opening it cuts the tail
//! off and writes the unsealed header again. A path without one is a layer, and all of it was written before. The
//! trailer could have been the commit (a torn one ends at the wrong place), but its 4096 bytes would then be looked for
//! in what may be a guest's data.

use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use crate::SECTOR_BYTES;
use crate::error::{At, Result};
use crate::extent::Sectors;
use crate::file_ops::write_all;
use crate::header::{Fields, HEADER_BYTES, Part};
use crate::layer::Layer;
use crate::map::{Map, SectorState};
use crate::segment::Segment;
use crate::upper::{Upper, map_path};
use crate::writer::{push_run, write_tail};

/// What a seal made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SealReport {
    pub layer: PathBuf,
    /// Bytes mapped to data.
    pub data_bytes: u64,
    pub index_entries: u64,
    pub duration: Duration,
}

/// Seals `upper`. `prepare` runs between the last write and the commit: what can still fail belongs there. What it
/// returns runs after the commit and before any write that waits can see that the upper is sealed. After an error nothing
/// has happened, except that the tail may be left (the next seal or open removes it).
pub(crate) fn seal<Committed: FnOnce()>(
    upper: &Upper,
    prepare: impl FnOnce(&Arc<Layer>) -> Result<Committed>,
) -> Result<(Arc<Layer>, SealReport)> {
    let started = Instant::now();
    // Waits for the writes that are under way and keeps new ones out.
    let mut sealed = upper.sealed.write().unwrap_or_else(PoisonError::into_inner);
    if *sealed {
        return Err(crate::Error::Sealed {
            path: upper.path.clone(),
        });
    }
    let layer = match write_layer(upper) {
        Ok(layer) => Arc::new(layer),
        Err(error) => {
            // Only to give the space back; the error that matters is the first one.
            let _ = undo(upper);
            return Err(error);
        }
    };
    let committed = prepare(&layer)?;
    let map = map_path(&upper.path);
    match upper.ops.remove(&map) {
        // An error though the map is gone is a commit all the same: going on as an upper would lose what is written next.
        Err(_) if matches!(map.try_exists(), Ok(false)) => {}
        outcome => outcome.at(&map, "remove the map of a sealed upper")?,
    }
    *sealed = true;
    committed();
    let report = SealReport {
        layer: upper.path.clone(),
        data_bytes: layer.data_bytes(),
        index_entries: layer.segments().len() as u64,
        duration: started.elapsed(),
    };
    Ok((layer, report))
}

fn write_layer(upper: &Upper) -> Result<Layer> {
    let end = upper.data_end();
    upper
        .ops
        .set_len(&upper.file, end)
        .at(&upper.path, "cut an old index off")?;
    let segments = segments_of(&upper.map);
    let fields = Fields {
        index_offset: end,
        ..upper.fields
    };
    let fields = write_tail(upper.ops.as_ref(), &upper.file, &upper.path, fields, &segments)?;
    Layer::sealed(&upper.path, fields, segments)
}

/// Takes a cut seal back: the file is an unsealed upper again, byte for byte.
pub(crate) fn undo(upper: &Upper) -> Result<()> {
    let header = upper.fields.encode(Part::Header);
    write_all(
        upper.ops.as_ref(),
        &upper.file,
        &upper.path,
        "write the unsealed header",
        &header,
        0,
    )?;
    upper
        .ops
        .set_len(&upper.file, upper.data_end())
        .at(&upper.path, "cut the index off")
}

/// The index of a map: one pass over its words.
fn segments_of(map: &Map) -> Vec<Segment> {
    let end = map.header().sectors();
    let mut segments = Vec::new();
    let mut at = 0;
    while at < end {
        let (state, run_end) = map.run(at, end);
        let run = Sectors {
            start: at,
            end: run_end,
        };
        match state {
            SectorState::Written => push_run(&mut segments, run, Some(HEADER_BYTES / SECTOR_BYTES + at)),
            SectorState::Trimmed => push_run(&mut segments, run, None),
            SectorState::Below => {}
        }
        at = run_end;
    }
    segments
}
