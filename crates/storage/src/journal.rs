//! What survives the death of an upload: which one it was and which parts the store has.
//!
//! One file per blob, `<digest>.json`: lines of JSON, the first one names the upload, each further one a part that the
//! store has acknowledged. A line counts when it is whole; the last one may be torn. The file is locked by the process
//! that uploads, so that two of one node do not send the same blob twice, and removed when the object is there.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use aenv_store::{Digest, UploadId};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::error::{At, Failed};

/// Ten thousand parts at a line of about 200 bytes, and room.
const JOURNAL_BYTES_MAX: u64 = 16 << 20;
const LOCK_POLL: Duration = Duration::from_millis(100);

/// What an upload must be to be gone on with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub store: String,
    pub key: String,
    pub digest: Digest,
    pub size_bytes: u64,
    pub part_bytes: u64,
}

/// A part that the store has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SentPart {
    pub part: usize,
    pub tag: String,
    pub sha256: Digest,
}

#[derive(Serialize, Deserialize)]
struct Head {
    aenv_upload: u32,
    upload_id: String,
    #[serde(flatten)]
    identity: Identity,
}

/// The journal of one upload; without a folder it is in memory only.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: Option<File>,
    upload: Option<(Identity, UploadId)>,
    parts: BTreeMap<usize, SentPart>,
}

impl Journal {
    /// Opens and locks the journal of a blob. Errors: `Busy` if another process holds it for longer than `wait`, `File`.
    pub fn open(folder: Option<&Path>, digest: Digest, wait: Duration) -> Result<Journal, Failed> {
        let mut journal = Journal {
            path: folder.unwrap_or(Path::new("")).join(format!("{digest}.json")),
            file: None,
            upload: None,
            parts: BTreeMap::new(),
        };
        if let Some(folder) = folder {
            std::fs::create_dir_all(folder).at(folder, "make the folder of journals")?;
            let mut file = lock(&journal.path, wait)?;
            journal.read(&mut file)?;
            journal.file = Some(file);
        }
        Ok(journal)
    }

    /// The upload to go on with, if it is the same one.
    pub fn upload(&self, identity: &Identity) -> Option<UploadId> {
        let (found, upload) = self.upload.as_ref()?;
        (found == identity).then(|| upload.clone())
    }

    /// An upload that was begun for something else, to be given up.
    pub fn stale(&self, identity: &Identity) -> Option<(Identity, UploadId)> {
        self.upload.clone().filter(|(found, _)| found != identity)
    }

    pub fn part(&self, part: usize) -> Option<&SentPart> {
        self.parts.get(&part)
    }

    /// Begins anew. Durable on return: an upload that nobody remembers costs its owner money.
    pub fn begin(&mut self, identity: &Identity, upload: &UploadId) -> Result<(), Failed> {
        self.parts.clear();
        self.upload = Some((identity.clone(), upload.clone()));
        let head = Head {
            aenv_upload: 1,
            upload_id: upload.0.clone(),
            identity: identity.clone(),
        };
        if let Some(file) = &mut self.file {
            file.set_len(0).at(&self.path, "truncate")?;
            file.seek(SeekFrom::Start(0)).at(&self.path, "seek")?;
        }
        self.append(&head)?;
        match (&self.file, self.path.parent()) {
            (Some(_), Some(folder)) => sync_folder(folder),
            _ => Ok(()),
        }
    }

    /// Notes a part. Durable on return.
    pub fn record(&mut self, sent: SentPart) -> Result<(), Failed> {
        self.append(&sent)?;
        self.parts.insert(sent.part, sent);
        Ok(())
    }

    /// The upload is over, well or not: there is nothing to go on with.
    pub fn forget(&mut self) -> Result<(), Failed> {
        self.upload = None;
        self.parts.clear();
        match &self.file {
            Some(file) => file.set_len(0).at(&self.path, "truncate"),
            None => Ok(()),
        }
    }

    /// The object is there.
    pub fn finish(mut self) {
        self.upload = None;
    }

    fn append(&mut self, line: &impl Serialize) -> Result<(), Failed> {
        let Some(file) = &mut self.file else {
            return Ok(());
        };
        let mut bytes = serde_json::to_vec(line)
            .map_err(std::io::Error::from)
            .at(&self.path, "write")?;
        bytes.push(b'\n');
        file.write_all(&bytes).at(&self.path, "write")?;
        file.sync_data().at(&self.path, "sync")
    }

    /// Takes what is whole; everything from the first line that is not is cut off.
    fn read(&mut self, file: &mut File) -> Result<(), Failed> {
        let mut text = Vec::new();
        let limited = Read::by_ref(file).take(JOURNAL_BYTES_MAX).read_to_end(&mut text);
        limited.at(&self.path, "read")?;
        let mut whole = 0;
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            if !self.take(line) {
                break;
            }
            whole += line.len() as u64;
        }
        file.set_len(whole).at(&self.path, "truncate")?;
        file.seek(SeekFrom::Start(whole)).at(&self.path, "seek")?;
        Ok(())
    }

    fn take(&mut self, line: &[u8]) -> bool {
        if !line.ends_with(b"\n") {
            return false;
        }
        if self.upload.is_none() {
            return match serde_json::from_slice::<Head>(line) {
                Ok(head) if head.aenv_upload == 1 => {
                    self.upload = Some((head.identity, UploadId(head.upload_id)));
                    true
                }
                _ => false,
            };
        }
        match serde_json::from_slice::<SentPart>(line) {
            Ok(sent) => {
                self.parts.insert(sent.part, sent);
                true
            }
            Err(_) => false,
        }
    }
}

impl Drop for Journal {
    /// A journal without an upload is of no use. Done under its lock, so it is nobody else's file.
    fn drop(&mut self) {
        if self.file.is_some() && self.upload.is_none() {
            // One that stays is harmless: it is empty, or its upload is found to be gone.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Opens a file and locks it. The one that had it before may have removed it meanwhile: then the next one is made.
fn lock(path: &Path, wait: Duration) -> Result<File, Failed> {
    let start = Instant::now();
    loop {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(path);
        let file = file.at(path, "open")?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let own = file.metadata().at(path, "stat")?.ino();
                match std::fs::metadata(path) {
                    Ok(found) if found.ino() == own => return Ok(file),
                    _ => continue,
                }
            }
            Err(rustix::io::Errno::WOULDBLOCK) if start.elapsed() < wait => std::thread::sleep(LOCK_POLL),
            Err(rustix::io::Errno::WOULDBLOCK) => {
                return Err(Failed::Busy {
                    path: path.to_owned(),
                    waited_s: wait.as_secs(),
                });
            }
            Err(e) => return Err(e).at(path, "lock"),
        }
    }
}

pub(crate) fn sync_folder(folder: &Path) -> Result<(), Failed> {
    let sync = || File::open(folder)?.sync_all();
    sync().at(folder, "sync the folder")
}

#[cfg(test)]
mod test {
    use super::*;

    const WAIT: Duration = Duration::from_millis(1);

    fn identity() -> Identity {
        Identity {
            store: "s".into(),
            key: "k".into(),
            digest: Digest::of(b""),
            size_bytes: 9,
            part_bytes: 3,
        }
    }

    fn sent(part: usize) -> SentPart {
        SentPart {
            part,
            tag: format!("\"t{part}\""),
            sha256: Digest::of(b"x"),
        }
    }

    fn open(folder: &Path) -> Journal {
        Journal::open(Some(folder), Digest::of(b""), WAIT).unwrap()
    }

    #[test]
    fn what_was_recorded_is_there_again() {
        let dir = tempfile::tempdir().unwrap();
        let upload = UploadId("u".into());
        let mut journal = open(dir.path());
        assert_eq!(journal.upload(&identity()), None);
        journal.begin(&identity(), &upload).unwrap();
        journal.record(sent(4)).unwrap();
        drop(journal);
        let journal = open(dir.path());
        assert_eq!(journal.upload(&identity()), Some(upload));
        assert_eq!((journal.part(4), journal.part(0)), (Some(&sent(4)), None));
        let other = Identity {
            part_bytes: 4,
            ..identity()
        };
        assert!(journal.upload(&other).is_none() && journal.stale(&other).is_some());
    }

    #[test]
    fn a_torn_line_is_cut_off_wherever_it_is_torn() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = open(dir.path());
        journal.begin(&identity(), &UploadId("u".into())).unwrap();
        journal.record(sent(0)).unwrap();
        let path = journal.path.clone();
        let kept = std::fs::read(&path).unwrap();
        journal.record(sent(1)).unwrap();
        drop(journal);
        let all = std::fs::read(&path).unwrap();
        for cut in kept.len()..all.len() {
            std::fs::write(&path, &all[..cut]).unwrap();
            let mut journal = open(dir.path());
            assert!(journal.part(0).is_some() && journal.part(1).is_none(), "{cut}");
            assert_eq!(std::fs::read(&path).unwrap(), kept, "{cut}");
            journal.record(sent(1)).unwrap();
            drop(journal);
            assert_eq!(std::fs::read(&path).unwrap(), all, "{cut}");
        }
    }

    #[test]
    fn one_process_has_it_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let journal = open(dir.path());
        let second = Journal::open(Some(dir.path()), Digest::of(b""), WAIT);
        assert_eq!(second.unwrap_err().kind(), "busy");
        journal.finish();
        assert!(open(dir.path()).upload(&identity()).is_none());
    }
}
