//! The sealed part of a stack: layers, bottom first, and their merged index. Immutable, so stacks share it.

use std::sync::Arc;

use crate::SECTOR_BYTES;
use crate::cold::Reader;
use crate::error::{Error, Result};
use crate::extent::Sectors;
use crate::index::{Index, Piece, flatten, overlay};
use crate::layer::Layer;
use crate::segment::Segment;
use crate::stack::MAX_LAYERS;

#[derive(Debug, Default)]
pub(crate) struct Lowers {
    layers: Vec<Arc<Layer>>,
    index: Arc<Index>,
    /// Whether some layer may be far away: then reads of several pieces are announced.
    distant: bool,
}

/// Pieces of one layer that are closer to each other than this are announced as one: stores are read in blocks of about
/// this size.
const NEAR_BYTES: u64 = 64 << 10;

/// A piece of a read that is worth a request to the disk of its own.
const LARGE_PIECE_BYTES: usize = 64 << 10;

impl Lowers {
    /// Merges the layers' indexes. Errors: `TooManyLayers`, `TooManySegments`.
    pub fn new(layers: Vec<Arc<Layer>>) -> Result<Self> {
        check_depth(layers.len())?;
        let index = match layers.as_slice() {
            // The tag of a lone layer is 0, as in its own index.
            [one] => one.shared_index(),
            _ => {
                let lists: Vec<&[Segment]> = layers.iter().map(|layer| layer.segments()).collect();
                Arc::new(Index::new(flatten(&lists, 0))?)
            }
        };
        Ok(Self::of(layers, index))
    }

    fn of(layers: Vec<Arc<Layer>>, index: Arc<Index>) -> Self {
        let distant = layers.iter().any(|layer| layer.blob().file_identity().is_none());
        Lowers { layers, index, distant }
    }

    /// These layers with one more on top; only the new one is merged.
    pub fn extended(&self, layer: Arc<Layer>) -> Result<Self> {
        check_depth(self.layers.len() + 1)?;
        if self.layers.is_empty() {
            return Lowers::new(vec![layer]);
        }
        // The check above keeps the tag in 8 bits.
        let tag = self.layers.len() as u8;
        let newer: Vec<Segment> = layer.segments().iter().map(|s| s.with_tag(tag)).collect();
        let index = Arc::new(Index::new(overlay(self.index.segments(), &newer))?);
        let layers = self.layers.iter().cloned().chain([layer]).collect();
        Ok(Self::of(layers, index))
    }

    pub fn layers(&self) -> &[Arc<Layer>] {
        &self.layers
    }

    pub fn index(&self) -> &Index {
        &self.index
    }

    pub fn shared_index(&self) -> Arc<Index> {
        self.index.clone()
    }

    /// Fills `buf` with the sectors from `start` on, for `reader`; unmapped ones are zero.
    pub fn read(&self, reader: Reader, buf: &mut [u8], start: u64) -> Result<()> {
        let end = start + buf.len() as u64 / SECTOR_BYTES;
        if self.distant {
            self.announce(start, end);
        }
        let place = |sector: u64| ((sector - start) * SECTOR_BYTES) as usize;
        let whole = buf.len();
        self.index.for_each(start, end, |piece| match piece {
            Piece::Hole(first, sectors) => {
                buf[place(first)..place(first + sectors)].fill(0);
                Ok(())
            }
            Piece::Mapped(segment) => {
                let part = &mut buf[place(segment.start())..place(segment.end())];
                self.read_segment(reader, part, &segment, whole)
            }
        })
    }

    /// Tells the blobs what a read will want of them, so that pieces of several layers come at the same time and not one
    /// round trip after the other. Says nothing if it is one piece only: its read follows at once.
    fn announce(&self, start: u64, end: u64) {
        let mut pieces: Vec<(u8, u64, u64)> = Vec::new();
        let visited: Result<(), std::convert::Infallible> = self.index.for_each(start, end, |piece| {
            let Piece::Mapped(segment) = piece else { return Ok(()) };
            if segment.is_zero() {
                return Ok(());
            }
            let from = segment.file_sector() * SECTOR_BYTES;
            let to = from + segment.sectors() * SECTOR_BYTES;
            match pieces.last_mut() {
                Some((tag, _, last)) if *tag == segment.tag() && from.wrapping_sub(*last) < NEAR_BYTES => *last = to,
                _ => pieces.push((segment.tag(), from, to)),
            }
            Ok(())
        });
        let Ok(()) = visited;
        if pieces.len() > 1 {
            for (tag, from, to) in pieces {
                self.layers[usize::from(tag)].blob().will_read(from, to - from);
            }
        }
    }

    /// `whole`: bytes of the read that this is a part of.
    fn read_segment(&self, reader: Reader, part: &mut [u8], segment: &Segment, whole: usize) -> Result<()> {
        if segment.is_zero() {
            part.fill(0);
            return Ok(());
        }
        // Tags are given by this module and number the layers.
        let layer = &self.layers[usize::from(segment.tag())];
        // One after the other, small pieces would each wait for the disk; the kernel's readahead brings several at once.
        match part.len() == whole || part.len() >= LARGE_PIECE_BYTES {
            true => layer.read_for_cacher(reader, part, segment.file_sector()),
            false => layer.read_stored(part, segment.file_sector()),
        }
    }

    /// Calls `visit(sectors, is data)` for the parts of the range, in order.
    pub fn for_each_part(&self, range: Sectors, mut visit: impl FnMut(Sectors, bool)) {
        let visited: Result<(), std::convert::Infallible> = self.index.for_each(range.start, range.end, |piece| {
            match piece {
                Piece::Hole(first, sectors) => visit(
                    Sectors {
                        start: first,
                        end: first + sectors,
                    },
                    false,
                ),
                Piece::Mapped(s) => visit(
                    Sectors {
                        start: s.start(),
                        end: s.end(),
                    },
                    !s.is_zero(),
                ),
            }
            Ok(())
        });
        let Ok(()) = visited;
    }
}

pub(crate) fn check_depth(count: usize) -> Result<()> {
    match count > MAX_LAYERS {
        true => Err(Error::TooManyLayers {
            count,
            limit: MAX_LAYERS,
        }),
        false => Ok(()),
    }
}
