//! `aenv-blockd serve`: takes over the two connections, in an order that keeps guests waiting as short as possible.
//!
//! ```text
//!   lock ── read records ── finish cut-off seals ── ask the kernel to resend ── answer guests
//!        ── remove cut-off captures ── open the control socket ── watch the keeper
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use aenv_wire::block::ExportKind;
use rustix::event::EventfdFlags;
use rustix::process::Signal;

use crate::arguments::{Folders, Settings};
use crate::capture::Captures;
use crate::control::{Daemon, listen};
use crate::export::{ExportError, Exports};
use crate::fuse::{Channel, Session};
use crate::limits::{CONTROL_RETRY, LOCK_WAIT};
use crate::process::{Backoff, Lock, LockError, Peer, be_called, start_self, write_record};
use crate::remote::Remote;
use crate::stats::Counters;
use crate::threads::spawn;

/// Command line of blockd, which only the keeper writes.
#[derive(Debug)]
pub struct ServeArguments {
    pub folders: Folders,
    pub settings: Settings,
    pub memory: OwnedFd,
    pub disks: OwnedFd,
    pub keeper: Peer,
}

/// Why blockd could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("this state folder is in use")]
    InUse(#[source] LockError),
    #[error("blocks of remote blobs cannot be cached")]
    Cache(#[source] aenv_cache::CacheError),
    #[error(transparent)]
    Exports(#[from] ExportError),
    #[error("cannot {step}")]
    System {
        step: &'static str,
        #[source]
        source: io::Error,
    },
}

pub fn run(arguments: ServeArguments) -> Result<(), ServeError> {
    let begun = Instant::now();
    let system = |step| move |source| ServeError::System { step, source };
    let stop = crate::signals::termination().map_err(system("watch for signals"))?;
    let ServeArguments {
        folders,
        settings,
        memory,
        disks,
        keeper,
    } = arguments;
    let _lock = Lock::take(&folders.serve_lock(), LOCK_WAIT).map_err(ServeError::InUse)?;
    be_called(c"aenv-blockd");
    crate::standing::orders();
    let remote = start_remote(&settings)?;
    let exports = Arc::new(Exports::load(&folders.state, remote)?);
    let counters = Arc::new(Counters::default());
    let session = |kind, descriptor| {
        let channel = Channel::new(descriptor).map_err(system("use a connection"))?;
        let session = Session::new(kind, channel, exports.clone(), counters.clone(), &settings);
        Ok::<_, ServeError>(session)
    };
    let (memory, disks) = (session(ExportKind::Memory, memory)?, session(ExportKind::Disk, disks)?);
    let gone = rustix::event::eventfd(0, EventfdFlags::CLOEXEC);
    let gone = gone.map_err(|error| system("count mounts")(error.into()))?;
    for session in [&disks, &memory] {
        take_over(session, &gone).map_err(system("start the threads that answer guests"))?;
    }
    say!(
        "aenv-blockd: {} answers for {} exports after {:?}",
        std::process::id(),
        exports.count(),
        begun.elapsed()
    );
    // From here on guests are served: what goes wrong below is told and tried again, and never ends that.
    let daemon = Arc::new(Daemon {
        captures: Captures::new(&folders.state, exports.clone(), settings.capture_buffer_bytes_max),
        exports,
        counters,
        memory,
        disks,
        memory_mount: folders.memory_mount.clone(),
        disk_mount: folders.disk_mount.clone(),
        keeper: Mutex::new(Arc::new(keeper)),
        operations: AtomicUsize::new(0),
        stopping: AtomicBool::new(false),
    });
    spawn("keeper-watch", {
        let (daemon, folders, settings) = (daemon.clone(), folders.clone(), settings.clone());
        move || watch_keeper(&daemon, &folders, &settings)
    })
    .map_err(system("watch the keeper"))?;
    spawn("accept", {
        let (daemon, folders) = (daemon.clone(), folders.clone());
        move || serve_control(&daemon, &folders)
    })
    .map_err(system("serve the control socket"))?;
    wait_for_the_end(&daemon, &stop, &gone, &folders);
    Ok(())
}

/// A blockd that was killed a moment ago may still hold the cache's folder.
fn start_remote(settings: &Settings) -> Result<Arc<Remote>, ServeError> {
    let end = Instant::now() + LOCK_WAIT;
    loop {
        match Remote::start(settings) {
            Err(_) if Instant::now() < end => std::thread::sleep(std::time::Duration::from_millis(1)),
            started => return started.map_err(ServeError::Cache),
        }
    }
}

/// Opens the control socket, as often as it takes: the folder may be full for a while.
fn serve_control(daemon: &Arc<Daemon>, folders: &Folders) {
    loop {
        let cleaned = daemon
            .captures
            .clean_up()
            .and_then(|()| write_record(&folders.serve_record()));
        match cleaned.and_then(|()| listen(&folders.socket())) {
            Ok(listener) => daemon.serve(&listener),
            Err(error) => say!("aenv-blockd: the control socket cannot be opened: {error}"),
        }
        std::thread::sleep(CONTROL_RETRY);
    }
}

/// Serves one mount from here on; `gone` counts it when it is no more.
fn take_over(session: &Arc<Session>, gone: &OwnedFd) -> io::Result<()> {
    // Before anything was ever read this puts nothing back; so the first blockd need not know that it is the first.
    if let Err(error) = session.channel.resend() {
        say!("aenv-blockd: the kernel cannot resend requests ({error}): those in flight when blockd died never end");
    }
    session.start(gone.try_clone()?)
}

/// Waits for the order to stop, or for both mounts to be gone, which the receivers say: a look at their descriptors here
/// would wake this thread with each request.
fn wait_for_the_end(daemon: &Daemon, stop: &OwnedFd, gone: &OwnedFd, folders: &Folders) {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut mounts = 2;
    loop {
        let mut watched = [PollFd::new(stop, PollFlags::IN), PollFd::new(gone, PollFlags::IN)];
        if poll(&mut watched, None).is_err() {
            continue;
        }
        let stopped = !watched[0].revents().is_empty();
        let mut count = [0; 8];
        if !watched[1].revents().is_empty() && rustix::io::read(gone, &mut count).is_ok() {
            mounts -= u64::from_ne_bytes(count).min(mounts);
        }
        if stopped || mounts == 0 {
            daemon.captures.cancel_all();
            let _ = crate::files::remove_if_there(&folders.socket());
            let _ = crate::files::remove_if_there(&folders.serve_record());
            say!(
                "aenv-blockd: {} ends {}",
                std::process::id(),
                if stopped { "as told" } else { "with its mounts" }
            );
            return;
        }
    }
}

/// Starts a new keeper whenever the present one dies, and hands it the connections. One that died of the order to stop,
/// or before it was told, is not replaced: what it left undone is done here.
fn watch_keeper(daemon: &Daemon, folders: &Folders, settings: &Settings) {
    let mut backoff = Backoff::default();
    loop {
        let keeper = daemon.keeper();
        let started = Instant::now();
        keeper.wait(None);
        keeper.reap();
        if daemon.stopping.load(Ordering::SeqCst) {
            return end_without_keeper(folders);
        }
        let delay = backoff.delay(started.elapsed());
        say!(
            "aenv-blockd: keeper {} ended; the next one starts after {delay:?}",
            keeper.pid
        );
        std::thread::sleep(delay);
        match start_keeper(daemon, folders, settings) {
            Ok(next) => {
                *daemon.keeper.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(next);
                if daemon.stopping.load(Ordering::SeqCst) {
                    daemon.keeper().signal(Signal::TERM);
                }
            }
            Err(error) => say!("aenv-blockd: no keeper can be started: {error}"),
        }
    }
}

/// The order to stop found no keeper that could hear it: the mounts are detached, and this process tells itself to end.
fn end_without_keeper(folders: &Folders) {
    crate::keeper::unmount(&folders.memory_mount);
    crate::keeper::unmount(&folders.disk_mount);
    if let Err(error) = rustix::process::kill_process(rustix::process::getpid(), Signal::TERM) {
        say!("aenv-blockd: cannot end as told: {error}");
    }
}

fn start_keeper(daemon: &Daemon, folders: &Folders, settings: &Settings) -> io::Result<Peer> {
    let own = Peer::of(std::process::id())?;
    let mut arguments = vec!["keeper".to_owned()];
    arguments.extend(folders.options());
    arguments.extend(settings.options());
    arguments.extend(["--blockd-pid".to_owned(), own.pid.to_string()]);
    let descriptors = [
        ("--memory-fd", daemon.memory.channel.descriptor().as_fd()),
        ("--disk-fd", daemon.disks.channel.descriptor().as_fd()),
        ("--blockd-pidfd", own.pidfd()),
    ];
    start_self(&arguments, &descriptors)
}
