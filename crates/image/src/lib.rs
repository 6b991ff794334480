//! OCI image layers to overlaybd layers and back, with libext2fs: no mount, no loop device, nothing of the host touched.
//!
//! ```text
//!  blob -> input (hash, inflate) -> tar -> entries -> tree -> ext2 (libext2fs) -> device -> layer
//!                                                                 parents' stack -^
//! ```

mod apply;
mod check;
mod device;
mod dump;
mod entries;
mod ext2;
mod ext4;
mod input;
mod kinds;
mod layer;
mod partial;
mod programs;
mod space;
mod tar;
mod tree;
mod uuid;

#[cfg(test)]
mod conversion_test;
#[cfg(test)]
mod model_test;
#[cfg(test)]
mod test_image;

pub use apply::{ApplyError, Report, Request, apply};
pub use check::{CheckError, check};
pub use dump::{DumpError, DumpReport, Source, dump};
pub use input::{Compression, Digest};
pub use kinds::Kind;
pub use partial::{Partial, clean_up_on_signals};
pub use uuid::parse_uuid;
