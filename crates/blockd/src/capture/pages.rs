//! What each dirty page becomes in the layer.
//!
//! | page | parent reads | becomes |
//! |---|---|---|
//! | anything but zeros | anything | data |
//! | zeros | something else | a zero run: leaving it out would bring the parent's bytes back |
//! | zeros | zeros | nothing |
//! | the same as the base | | nothing |
//!
//! Over a base (an earlier capture of the same mapping) each page is compared with it. Over the image that is not worth
//! it: a dirty page that equals the image's is rare.

use std::sync::Arc;

use aenv_layers::LayerWriter;

use super::Range;
use crate::export::Content;
use crate::limits::PAGE_BYTES;

const PAGE: usize = PAGE_BYTES as usize;
static ZEROS: [u8; PAGE] = [0; PAGE];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Data,
    Zero,
    LeftOut,
}

/// What the new layer will lie upon.
#[derive(Debug)]
pub enum Below {
    Image(Arc<Content>),
    Base(Arc<Content>),
}

/// Bytes by what became of them.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Totals {
    pub data_bytes: u64,
    pub zero_bytes: u64,
    pub skipped_bytes: u64,
}

/// Which half of the work failed.
#[derive(Debug)]
pub enum PagesError {
    Parent(aenv_layers::Error),
    Layer(aenv_layers::Error),
}

/// Appends one range, whose content is `bytes`, as the longest runs of equal fate.
pub fn append(
    writer: &mut LayerWriter,
    below: &Below,
    range: Range,
    bytes: &[u8],
    totals: &mut Totals,
) -> Result<(), PagesError> {
    let compared = match below {
        Below::Image(_) => None,
        Below::Base(base) => {
            let mut old = vec![0; bytes.len()];
            base.read_at(&mut old, range.start).map_err(PagesError::Parent)?;
            Some(old)
        }
    };
    let mut run = 0..0;
    let mut fate = Fate::LeftOut;
    for at in (0..bytes.len()).step_by(PAGE) {
        let page = &bytes[at..at + PAGE];
        let here = match (below, &compared) {
            (_, Some(old)) => fate_over(page, &old[at..at + PAGE]),
            (Below::Image(image) | Below::Base(image), None) => fate_of(page, image, range.start + at as u64)?,
        };
        if here != fate {
            emit(writer, fate, range.start + run.start as u64, &bytes[run], totals)?;
            run = at..at;
            fate = here;
        }
        run.end = at + PAGE;
    }
    emit(writer, fate, range.start + run.start as u64, &bytes[run], totals)
}

fn fate_over(page: &[u8], old: &[u8]) -> Fate {
    match page == old {
        true => Fate::LeftOut,
        false if page == ZEROS => Fate::Zero,
        false => Fate::Data,
    }
}

fn fate_of(page: &[u8], parent: &Content, offset: u64) -> Result<Fate, PagesError> {
    if page != ZEROS {
        return Ok(Fate::Data);
    }
    if parent.is_zero(offset, PAGE_BYTES) {
        return Ok(Fate::LeftOut);
    }
    let mut below = [0u8; PAGE];
    parent.read_at(&mut below, offset).map_err(PagesError::Parent)?;
    Ok(if below == ZEROS { Fate::LeftOut } else { Fate::Zero })
}

fn emit(
    writer: &mut LayerWriter,
    fate: Fate,
    offset: u64,
    bytes: &[u8],
    totals: &mut Totals,
) -> Result<(), PagesError> {
    let length = bytes.len() as u64;
    if length == 0 {
        return Ok(());
    }
    match fate {
        Fate::Data => {
            totals.data_bytes += length;
            writer.append(offset, bytes).map_err(PagesError::Layer)
        }
        Fate::Zero => {
            totals.zero_bytes += length;
            writer.append_zero(offset, length).map_err(PagesError::Layer)
        }
        Fate::LeftOut => {
            totals.skipped_bytes += length;
            Ok(())
        }
    }
}
