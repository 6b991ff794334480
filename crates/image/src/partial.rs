//! The one file with a name that a conversion has before it is done, and its end when the process is told to stop.
//!
//! SIGTERM, SIGINT and SIGHUP are waited for by a thread, which removes the file and ends the process. SIGKILL leaves it:
//! its name says that it is none (`.<name>.partial`), and whoever owns the folder collects it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use rustix::fs::RenameFlags;

static CURRENT: Mutex<Option<PathBuf>> = Mutex::new(None);

/// A name beside the final one; removed unless it was renamed to that.
#[derive(Debug)]
pub struct Partial {
    path: PathBuf,
}

impl Partial {
    /// Reserves the name for `target`. One at a time in a process.
    pub fn beside(target: &Path) -> Partial {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let path = target.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = Some(path.clone());
        Partial { path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the file its name. Errors: also `AlreadyExists`.
    pub fn publish(self, target: &Path) -> io::Result<()> {
        let here = rustix::fs::CWD;
        Ok(rustix::fs::renameat_with(
            here,
            &self.path,
            here,
            target,
            RenameFlags::NOREPLACE,
        )?)
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // Gone already where it was renamed or never made.
        let _ = std::fs::remove_file(&self.path);
        *CURRENT.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// From now on the signals that ask to stop remove the partial file first. Call before any thread is started.
pub fn clean_up_on_signals() -> io::Result<()> {
    // SAFETY: the set is initialised before it is used, and belongs to this function.
    let set = unsafe {
        let mut set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            libc::sigaddset(&raw mut set, signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => set,
            code => return Err(io::Error::from_raw_os_error(code)),
        }
    };
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || wait(&set))?;
    Ok(())
}

fn wait(set: &libc::sigset_t) {
    let mut signal = 0;
    // SAFETY: both live during the call; the signals are blocked in all threads.
    if unsafe { libc::sigwait(set, &raw mut signal) } != 0 {
        return;
    }
    // The lock is kept: no other file may appear before the end.
    let current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(path) = current.as_ref() {
        let _ = std::fs::remove_file(path);
    }
    std::process::exit(128 + signal);
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn what_is_not_published_is_removed_and_nothing_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("layer");
        for content in ["one", "two"] {
            let partial = Partial::beside(&target);
            std::fs::write(partial.path(), content).unwrap();
            let taken = target.exists();
            assert_eq!(partial.publish(&target).is_err(), taken);
        }
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "one");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
