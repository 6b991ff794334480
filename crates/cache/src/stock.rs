//! Taking stock of the folder: once, after the cache was opened and while readers are served already.
//!
//! Only files of our names are looked at; whatever else lies in the folder is none of our business.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{SeekFrom, seek};

use crate::claim::Look;
use crate::entry::{Entry, Files, data_path, list_path};
use crate::limits::CANCEL_LOOK;
use crate::shared::Shared;

impl Shared {
    /// Learns of every blob that earlier processes cached, removes what belongs to none, and punches data without a bit.
    pub fn take_stock(&self) -> io::Result<()> {
        for digest in self.digests_by_age()? {
            if self.is_stopping() {
                return Ok(());
            }
            self.know(&digest)?;
        }
        self.stock_taken.store(true, Ordering::Release);
        for entry in self.entries() {
            if self.is_stopping() {
                return Ok(());
            }
            // A blob whose waste cannot be looked for is still a good blob.
            let _ = self.punch_waste(&entry);
            self.remove_if_empty(&entry);
        }
        Ok(())
    }

    /// Those with the oldest data first: that is where the clock's hand begins.
    fn digests_by_age(&self) -> io::Result<Vec<String>> {
        let mut digests = BTreeSet::new();
        for entry in fs::read_dir(&self.dir)? {
            let name = entry?.file_name();
            let Some((digest, suffix)) = name.to_str().and_then(|name| name.split_once('.')) else {
                continue;
            };
            if is_digest(digest) && ["map", "data", "blocks", "map.new", "blocks.new"].contains(&suffix) {
                let modified = fs::metadata(data_path(&self.dir, digest))
                    .and_then(|file| file.modified())
                    .ok();
                digests.insert((modified, digest.to_owned()));
            }
        }
        Ok(digests.into_iter().map(|(_, digest)| digest).collect())
    }

    /// Data that was written before a kill and whose bit was not, or that could not be punched.
    fn punch_waste(&self, entry: &Arc<Entry>) -> io::Result<()> {
        let files = entry.files(&self.dir)?;
        let (size, block) = (entry.geometry.size_bytes, entry.geometry.block_bytes);
        let mut at = 0;
        while let Some((start, end)) = next_data(&files, at)? {
            let blocks = start / block..end.min(size).div_ceil(block);
            at = end;
            let mut first = blocks.start;
            while first < blocks.end {
                first += entry.present_run(&(first..blocks.end));
                if first >= blocks.end {
                    break;
                }
                match entry.look(&(first..blocks.end)) {
                    Look::Missing(claim) => {
                        entry.punch(self.ops.as_ref(), &files, &claim.blocks)?;
                        first = claim.blocks.end;
                    }
                    Look::Suspect(claim) => first = claim.blocks.end,
                    Look::Present => first += 1,
                    // Fetched at this moment: it will be present, or waste again.
                    Look::Busy if !self.is_stopping() => entry.wait_for(first, CANCEL_LOOK),
                    Look::Busy => return Ok(()),
                }
            }
        }
        Ok(())
    }

    /// Removes the files of a blob that cannot be used.
    pub fn remove_files(&self, digest: &str) -> io::Result<()> {
        // The map first: without it the data counts for nothing.
        self.ops.remove(&crate::entry::map_path(&self.dir, digest))?;
        self.ops.remove(&data_path(&self.dir, digest))?;
        self.ops.remove(&list_path(&self.dir, digest))?;
        self.ops.remove(&self.dir.join(format!("{digest}.map.new")))?;
        self.ops.remove(&self.dir.join(format!("{digest}.blocks.new")))
    }
}

/// Start and end of the next bytes that the file holds.
fn next_data(files: &Files, from: u64) -> io::Result<Option<(u64, u64)>> {
    match seek(&files.data, SeekFrom::Data(from)) {
        Ok(start) => Ok(Some((start, seek(&files.data, SeekFrom::Hole(start))?))),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}
