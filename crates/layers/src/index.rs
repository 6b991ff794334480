//! The look-up structure: sorted segments that do not overlap, and a table of where each stretch of the image begins.
//!
//! A look-up must cost the same at depth 1 and at depth 100, so a stack's layers are merged into one index when it is
//! opened; the tag of a segment names the layer. The table divides the image into as many equal stretches as there are
//! segments (rounded up to a power of two), so that a look-up is one read of the table and a search among the few
//! segments of one stretch, mostly two cache misses. A tree of cache lines was the alternative: its cost does not
//! depend on how segments are spread, but at 100,000 of them it is five dependent reads; here the worst spread (all
//! segments in one stretch) is a plain binary search.

use crate::error::{Error, Result};
use crate::segment::Segment;

/// Most segments of one index: 1 GiB of memory, a run for every second sector of 64 GiB. A `u32` counts them.
pub(crate) const MAX_SEGMENTS: u64 = 1 << 26;

/// An immutable, sorted list of segments with fast look-up.
#[derive(Debug, Default)]
pub struct Index {
    segments: Vec<Segment>,
    /// `stretches[i]`: how many segments start before sector `i << shift`. One more entry than there are stretches.
    stretches: Vec<u32>,
    shift: u32,
}

/// What a range of an image is, in order, without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Piece {
    /// No segment: an older layer shows through, or zero at the bottom. First sector and length.
    Hole(u64, u64),
    Mapped(Segment),
}

impl Index {
    /// Builds the table. Caller: `segments` are sorted and do not overlap.
    pub(crate) fn new(segments: Vec<Segment>) -> Result<Self> {
        let count = segments.len() as u64;
        if count > MAX_SEGMENTS {
            return Err(Error::TooManySegments {
                count,
                limit: MAX_SEGMENTS,
            });
        }
        let end = segments.last().map_or(0, Segment::end);
        let mut shift = 0;
        while end >> shift >= count.next_power_of_two() * 2 {
            shift += 1;
        }
        let stretches = table(&segments, shift, end);
        Ok(Index {
            segments,
            stretches,
            shift,
        })
    }

    /// All segments in ascending order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Position of the first segment that ends after `sector`; the number of segments if there is none.
    #[inline]
    pub fn locate(&self, sector: u64) -> usize {
        let stretch = (sector >> self.shift) as usize;
        let Some(&[low, high]) = self.stretches.get(stretch..).and_then(|rest| rest.first_chunk()) else {
            return self.segments.len();
        };
        let (low, high) = (low as usize, high as usize);
        let after = low + self.segments[low..high].partition_point(|s| !s.starts_after(sector));
        // The last one that starts at or before the sector may still reach over it.
        match after.checked_sub(1) {
            Some(before) if self.segments[before].end() > sector => before,
            _ => after,
        }
    }

    /// Calls `visit` for the pieces of the sectors `start..end`, in order and without gaps, until it fails.
    #[inline]
    pub(crate) fn for_each<E>(
        &self,
        start: u64,
        end: u64,
        mut visit: impl FnMut(Piece) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = start;
        for segment in &self.segments[self.locate(start)..] {
            if segment.start() >= end {
                break;
            }
            if segment.start() > at {
                visit(Piece::Hole(at, segment.start() - at))?;
                at = segment.start();
            }
            let mut piece = segment.tail(at);
            if piece.end() > end {
                piece = piece.head(end);
            }
            at = piece.end();
            visit(Piece::Mapped(piece))?;
        }
        if at < end {
            visit(Piece::Hole(at, end - at))?;
        }
        Ok(())
    }
}

fn table(segments: &[Segment], shift: u32, end: u64) -> Vec<u32> {
    let count = (end >> shift) as usize + 1;
    let mut stretches = Vec::with_capacity(count + 1);
    for (position, segment) in segments.iter().enumerate() {
        let stretch = (segment.start() >> shift) as usize;
        while stretches.len() <= stretch {
            stretches.push(position as u32);
        }
    }
    stretches.resize(count + 1, segments.len() as u32);
    stretches
}

/// `top` over `base`: one list in which a sector belongs to `top` where `top` has it. One pass over both.
pub(crate) fn overlay(base: &[Segment], top: &[Segment]) -> Vec<Segment> {
    let mut merged = Vec::with_capacity(base.len() + top.len());
    let mut older = base.iter().copied();
    let mut rest = older.next();
    for newer in top {
        while let Some(segment) = rest {
            if segment.start() >= newer.start() {
                break;
            }
            if segment.end() > newer.start() {
                merged.push(segment.head(newer.start()));
                rest = Some(segment.tail(newer.start()));
                break;
            }
            merged.push(segment);
            rest = older.next();
        }
        merged.push(*newer);
        while let Some(segment) = rest {
            if segment.end() > newer.end() {
                if segment.start() < newer.end() {
                    rest = Some(segment.tail(newer.end()));
                }
                break;
            }
            rest = older.next();
        }
    }
    merged.extend(rest);
    merged.extend(older);
    merged
}

/// The lists of `layers`, bottom first, as one list whose tags are the positions in `layers`. Halves are merged before
/// wholes, so that a segment is copied once per doubling of the depth and not once per layer.
pub(crate) fn flatten(layers: &[&[Segment]], first_tag: u8) -> Vec<Segment> {
    match layers {
        [] => Vec::new(),
        [one] => one.iter().map(|s| s.with_tag(first_tag)).collect(),
        _ => {
            let (lower, upper) = layers.split_at(layers.len() / 2);
            // At most 255 layers, so the half fits.
            overlay(
                &flatten(lower, first_tag),
                &flatten(upper, first_tag + lower.len() as u8),
            )
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use proptest::prelude::*;

    const SPACE: u64 = 400;

    /// Random sorted segments below SPACE; data sectors are numbered by `origin` to tell layers apart.
    fn segments(origin: u64) -> impl Strategy<Value = Vec<Segment>> {
        prop::collection::vec((0u64..12, 1u64..20, any::<bool>()), 0..30).prop_map(move |runs| {
            let mut at = 0;
            let mut list = Vec::new();
            for (gap, length, zero) in runs {
                at += gap;
                if at + length > SPACE {
                    break;
                }
                list.push(match zero {
                    true => Segment::zero(at, length, 8),
                    false => Segment::data(at, length, origin + at),
                });
                at += length;
            }
            list
        })
    }

    /// What each sector is: nothing, zero (tag), or data (tag, file sector).
    fn paint(list: &[Segment]) -> Vec<Option<(u8, Option<u64>)>> {
        let mut sectors = vec![None; SPACE as usize];
        for segment in list {
            for sector in segment.start()..segment.end() {
                let place = segment.file_sector() + (sector - segment.start());
                sectors[sector as usize] = Some((segment.tag(), (!segment.is_zero()).then_some(place)));
            }
        }
        sectors
    }

    proptest! {
        #[test]
        fn a_merged_index_shows_the_topmost_layer(a in segments(1000), b in segments(2000), c in segments(3000)) {
            let mut expected = vec![None; SPACE as usize];
            for (tag, layer) in [&a, &b, &c].into_iter().enumerate() {
                for (sector, owner) in paint(layer).into_iter().enumerate() {
                    if let Some((_, place)) = owner {
                        expected[sector] = Some((tag as u8, place));
                    }
                }
            }
            let merged = flatten(&[&a, &b, &c], 0);
            prop_assert!(merged.windows(2).all(|w| w[0].end() <= w[1].start()));
            prop_assert_eq!(paint(&merged), expected);
        }

        #[test]
        fn a_look_up_finds_what_a_scan_finds(list in segments(1000), sector in 0..SPACE + 50) {
            let expected = list.iter().position(|s| s.end() > sector).unwrap_or(list.len());
            prop_assert_eq!(Index::new(list).unwrap().locate(sector), expected);
        }

        #[test]
        fn pieces_cover_the_range_without_gaps(list in segments(1000), start in 0..SPACE, length in 1..SPACE) {
            let owners = paint(&list);
            let index = Index::new(list).unwrap();
            let mut at = start;
            index.for_each(start, start + length, |piece| {
                let (first, sectors) = match piece {
                    Piece::Hole(first, sectors) => (first, sectors),
                    Piece::Mapped(s) => (s.start(), s.sectors()),
                };
                prop_assert_eq!(first, at);
                for sector in first..first + sectors {
                    let owner = owners.get(sector as usize).copied().flatten();
                    let found = match piece {
                        Piece::Hole(..) => None,
                        Piece::Mapped(s) if s.is_zero() => Some((0, None)),
                        Piece::Mapped(s) => Some((0, Some(s.file_sector() + sector - first))),
                    };
                    prop_assert_eq!(found, owner);
                }
                at += sectors;
                Ok(())
            })?;
            prop_assert_eq!(at, start + length);
        }
    }
}
