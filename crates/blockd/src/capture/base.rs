//! The base of a capture: an earlier capture of the same mapping, which the new layer lies upon.
//!
//! Dirty pages only accumulate while a mapping lives, so what an earlier capture holds is dirty still, and a later one
//! need only store the pages that differ from it. The exception is a page that the process gave back since (balloon,
//! reported free pages): it reads as the image again, without being dirty. A base with such a page is not used.

use std::path::Path;
use std::sync::Arc;

use aenv_layers::{Layer, SECTOR_BYTES};

use super::{CaptureError, Range};
use crate::export::{Content, Layers};
use crate::limits::PAGE_BYTES;

/// The base's content, or None where the new layer must lie upon the image itself.
pub fn usable(
    layers: &Layers,
    image: &[String],
    base: &[String],
    dirty: &[Range],
    size_bytes: u64,
) -> Result<Option<Arc<Content>>, CaptureError> {
    let Some(captures) = base.strip_prefix(image) else {
        return Ok(None);
    };
    let dirty = Pages::of(dirty, size_bytes);
    for path in captures {
        let layer = layers
            .registry
            .open(Path::new(path))
            .map_err(|source| CaptureError::Parent { source })?;
        if !covers(&dirty, &layer) {
            return Ok(None);
        }
    }
    let content = Content::open(layers, base, None, size_bytes)?;
    Ok(Some(Arc::new(content)))
}

fn covers(dirty: &Pages, layer: &Layer) -> bool {
    layer.segments().iter().all(|segment| {
        let start = segment.start() * SECTOR_BYTES;
        dirty.holds(start, start + segment.sectors() * SECTOR_BYTES)
    })
}

/// One bit per page of the image.
struct Pages {
    bits: Vec<u64>,
}

impl Pages {
    fn of(ranges: &[Range], size_bytes: u64) -> Pages {
        let words = size_bytes.div_ceil(PAGE_BYTES).div_ceil(64) as usize;
        let mut pages = Pages { bits: vec![0; words] };
        for range in ranges {
            for page in range.start / PAGE_BYTES..(range.start + range.length) / PAGE_BYTES {
                pages.bits[(page / 64) as usize] |= 1 << (page % 64);
            }
        }
        pages
    }

    /// Whether every page of the bytes `start..end` is in it.
    fn holds(&self, start: u64, end: u64) -> bool {
        (start / PAGE_BYTES..end.div_ceil(PAGE_BYTES)).all(|page| {
            let word = self.bits.get((page / 64) as usize);
            word.is_some_and(|word| word & 1 << (page % 64) != 0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_held_only_if_each_of_its_pages_is() {
        let ranges = [
            Range {
                start: 0,
                length: 2 * PAGE_BYTES,
            },
            Range {
                start: 64 * PAGE_BYTES,
                length: PAGE_BYTES,
            },
        ];
        let pages = Pages::of(&ranges, 100 * PAGE_BYTES);
        assert!(pages.holds(0, 2 * PAGE_BYTES));
        assert!(pages.holds(64 * PAGE_BYTES, 65 * PAGE_BYTES));
        assert!(!pages.holds(PAGE_BYTES, 3 * PAGE_BYTES));
        assert!(!pages.holds(63 * PAGE_BYTES, 65 * PAGE_BYTES));
        assert!(!pages.holds(200 * PAGE_BYTES, 201 * PAGE_BYTES));
    }
}
