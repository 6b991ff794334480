//! The keeper: owns the two /dev/fuse descriptors and the mounts, and has a blockd running.
//!
//! It serves nothing and opens no file on the mounts: a file it closed there would send a request to the blockd that it
//! is about to replace. blockd has copies of the descriptors and starts a new keeper when this one dies, so either may
//! be killed at any time.
//!
//! ```text
//!   fresh:  lock, remove stale mounts, mount ──┐
//!   adopted (by a blockd that lost its keeper): lock ──> watching ──blockd ended──> start the next one ──> watching
//!                                                           └──SIGTERM──> unmount, stop blockd, exit 0
//! ```

mod mounts;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;

use crate::arguments::Folders;
use crate::files::remove_if_there;
use crate::limits::{LOCK_WAIT, SHORT_LIFE, STOP_WAIT};
use crate::process::{
    Backoff, Lock, LockError, Peer, be_called, start_self, stay_out_of_the_oom_killers_reach, write_record,
};

pub use mounts::{MountError, unmount};

/// Command line of a keeper.
#[derive(Debug)]
pub struct KeeperArguments {
    pub folders: Folders,
    /// Options that are passed on to blockd as they are.
    pub serve_options: Vec<String>,
    /// Looked at before anything is mounted: a cache that another node uses is a mistake to be told at once.
    pub cache_dir: Option<PathBuf>,
    /// What a blockd that lost its keeper hands over.
    pub adopted: Option<Adopted>,
}

#[derive(Debug)]
pub struct Adopted {
    pub memory: OwnedFd,
    pub disks: OwnedFd,
    pub blockd: Peer,
}

/// Why the keeper could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum KeeperError {
    #[error("this state folder is in use")]
    InUse(#[source] LockError),
    #[error("another node caches blocks there")]
    CacheInUse(#[source] LockError),
    #[error("cannot make {}", path.display())]
    Folder {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot mount")]
    Mount(#[from] MountError),
    #[error("cannot {step}")]
    System {
        step: &'static str,
        #[source]
        source: io::Error,
    },
}

struct Keeper {
    arguments: KeeperArguments,
    memory: OwnedFd,
    disks: OwnedFd,
    stop: OwnedFd,
    _lock: Lock,
}

pub fn run(mut arguments: KeeperArguments) -> Result<(), KeeperError> {
    let system = |step| move |source| KeeperError::System { step, source };
    let stop = crate::signals::termination().map_err(system("watch for signals"))?;
    be_called(c"aenv-keeper");
    stay_out_of_the_oom_killers_reach();
    let adopted = arguments.adopted.take();
    let folders = &arguments.folders;
    let wait = match &adopted {
        // The folders are there, unless everything was removed a moment ago: then they must not come back.
        Some(_) => LOCK_WAIT,
        None => {
            make_folder(&folders.run)?;
            make_folder(&folders.state)?;
            if let Some(cache) = &arguments.cache_dir {
                make_folder(cache)?;
                drop(Lock::take(&cache.join("lock"), SHORT_LIFE).map_err(KeeperError::CacheInUse)?);
            }
            Duration::ZERO
        }
    };
    let lock = Lock::take(&folders.keeper_lock(), wait).map_err(KeeperError::InUse)?;
    let (memory, disks, blockd) = match adopted {
        Some(Adopted { memory, disks, blockd }) => (memory, disks, Some(blockd)),
        None => {
            let (memory, disks) = mount_afresh(folders)?;
            (memory, disks, None)
        }
    };
    if let Err(error) = write_record(&folders.keeper_record()) {
        // Guests are worth more than the record: it only helps to find us.
        say!(
            "aenv-blockd keeper: cannot write {}: {error}",
            folders.keeper_record().display()
        );
    }
    let keeper = Keeper {
        arguments,
        memory,
        disks,
        stop,
        _lock: lock,
    };
    keeper.watch(blockd);
    keeper.unmount();
    let _ = remove_if_there(&keeper.arguments.folders.keeper_record());
    Ok(())
}

fn make_folder(path: &Path) -> Result<(), KeeperError> {
    std::fs::create_dir_all(path).map_err(|source| KeeperError::Folder {
        path: path.to_owned(),
        source,
    })
}

/// Mounts both, and neither if the second fails.
fn mount_afresh(folders: &Folders) -> Result<(OwnedFd, OwnedFd), KeeperError> {
    // A blockd that is alive has the descriptors and will have a keeper in a moment: its mounts are not stale. One that
    // was killed just now may still hold its lock.
    drop(Lock::take(&folders.serve_lock(), SHORT_LIFE).map_err(KeeperError::InUse)?);
    for path in [&folders.memory_mount, &folders.disk_mount] {
        mounts::remove_stale(path)?;
        make_folder(path)?;
    }
    let memory = mounts::mount("aenv-memory", &folders.memory_mount)?;
    match mounts::mount("aenv-disks", &folders.disk_mount) {
        Ok(disks) => {
            // A cold memory image is read in long runs: short ones multiply the latency of a remote store.
            mounts::set_read_ahead(&folders.memory_mount);
            Ok((memory, disks))
        }
        Err(error) => {
            mounts::unmount(&folders.memory_mount);
            Err(error.into())
        }
    }
}

impl Keeper {
    /// Has a blockd running until it is told to stop.
    fn watch(&self, mut blockd: Option<Peer>) {
        let mut backoff = Backoff::default();
        loop {
            let started = Instant::now();
            match blockd.take().map_or_else(|| self.start_blockd(), Ok) {
                Ok(peer) => {
                    if self.stopped_before_end(&peer) {
                        self.unmount();
                        return stop(&peer);
                    }
                    peer.reap();
                    say!(
                        "aenv-blockd keeper: blockd {} ended after {:?}",
                        peer.pid,
                        started.elapsed()
                    );
                }
                // Out of memory or processes: giving up would end every guest, so it is tried again.
                Err(error) => say!("aenv-blockd keeper: blockd cannot be started: {error}"),
            }
            if !mounts::is_mounted(&self.arguments.folders.disk_mount) {
                return say!("aenv-blockd keeper: the mounts are gone");
            }
            if self.told_to_stop(backoff.delay(started.elapsed())) {
                return;
            }
        }
    }

    fn start_blockd(&self) -> io::Result<Peer> {
        let own = Peer::of(std::process::id())?;
        let folders = &self.arguments.folders;
        let mut arguments = vec!["serve".to_owned()];
        arguments.extend(folders.options());
        arguments.extend(self.arguments.serve_options.iter().cloned());
        arguments.extend(["--keeper-pid".to_owned(), own.pid.to_string()]);
        let descriptors = [
            ("--memory-fd", self.memory.as_fd()),
            ("--disk-fd", self.disks.as_fd()),
            ("--keeper-pidfd", own.pidfd()),
        ];
        start_self(&arguments, &descriptors)
    }

    /// Waits for whichever comes first: the order to stop (true) or the end of blockd (false).
    fn stopped_before_end(&self, blockd: &Peer) -> bool {
        loop {
            let pidfd = blockd.pidfd();
            let mut watched = [
                PollFd::new(&self.stop, PollFlags::IN),
                PollFd::new(&pidfd, PollFlags::IN),
            ];
            if poll(&mut watched, None).is_err() {
                continue;
            }
            if !watched[0].revents().is_empty() {
                return true;
            }
            if !watched[1].revents().is_empty() {
                return false;
            }
        }
    }

    fn told_to_stop(&self, within: Duration) -> bool {
        let time = crate::process::timespec(within);
        matches!(
            poll(&mut [PollFd::new(&self.stop, PollFlags::IN)], Some(&time)),
            Ok(1..)
        )
    }

    fn unmount(&self) {
        mounts::unmount(&self.arguments.folders.memory_mount);
        mounts::unmount(&self.arguments.folders.disk_mount);
    }
}

fn stop(blockd: &Peer) {
    blockd.signal(Signal::TERM);
    if !blockd.wait(Some(STOP_WAIT)) {
        say!(
            "aenv-blockd keeper: blockd {} does not end within {STOP_WAIT:?}: it is killed",
            blockd.pid
        );
        blockd.signal(Signal::KILL);
        blockd.wait(Some(STOP_WAIT));
    }
    blockd.reap();
}
