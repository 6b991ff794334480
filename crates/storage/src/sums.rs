//! What is learned of stored bytes in one pass: their digest, their number and the digests of their blocks.

use std::io::{self, Write};

use aenv_store::{BlockList, BlockListBuilder, Digest, Hasher};

/// A sink that keeps nothing but sums.
#[derive(Debug, Default)]
pub(crate) struct Sums {
    hasher: Hasher,
    blocks: Option<BlockListBuilder>,
    size_bytes: u64,
}

/// The sums of some bytes.
#[derive(Debug)]
pub(crate) struct Summed {
    pub digest: Digest,
    pub size_bytes: u64,
    pub blocks: Option<BlockList>,
}

impl Sums {
    pub fn new(with_blocks: bool) -> Sums {
        Sums {
            blocks: with_blocks.then(BlockListBuilder::new),
            ..Sums::default()
        }
    }

    pub fn finish(self) -> Summed {
        Summed {
            digest: self.hasher.finish(),
            size_bytes: self.size_bytes,
            blocks: self.blocks.map(BlockListBuilder::finish),
        }
    }
}

impl Write for Sums {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.hasher.update(bytes);
        if let Some(blocks) = &mut self.blocks {
            blocks.update(bytes);
        }
        self.size_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
