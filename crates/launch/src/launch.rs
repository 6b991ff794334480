//! The two forks and what happens on each side of them.
//!
//! This process has one thread, so the children may allocate and use the standard library before exec. All that can
//! fail for a reason in the request (log, namespace) is opened before the first fork.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::args::Request;
use crate::chain;
use crate::record::{self, Record, RecordError};

/// Everything between fork and exec is a few system calls; a longer wait means a path on a dead file system.
const START_DEADLINE: Duration = Duration::from_secs(10);
/// Marks the reason of a failure in the pipe; a record line starts with `{`.
const FAILURE_MARK: char = '!';
/// CLOSE_RANGE_CLOEXEC, in the type that the C library's function takes.
const CLOSE_ON_EXEC: libc::c_int = 4;
const NETNS_DIR: &str = "/run/netns";

#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    #[error("cannot open {path}")]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot make a pipe")]
    Pipe(#[source] io::Error),
    #[error("cannot fork")]
    Fork(#[source] io::Error),
    #[error("cannot read the answer of the new process")]
    Answer(#[source] io::Error),
    #[error("the program did not start within {} s", START_DEADLINE.as_secs())]
    Late,
    #[error("the new process died before it could run the program")]
    Died,
    /// The new process said why it failed; its words are already complete.
    #[error("{0}")]
    Child(String),
}

/// What stops the new process from becoming the program.
#[derive(Debug, thiserror::Error)]
enum ChildError {
    #[error("cannot enter the network namespace {name}")]
    Netns {
        name: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot change to the directory {path}")]
    Cwd {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot set oom_score_adj to {value}")]
    OomScore {
        value: i32,
        #[source]
        source: io::Error,
    },
    #[error("cannot set the limit of open descriptors to {value}")]
    DescriptorLimit {
        value: u64,
        #[source]
        source: io::Error,
    },
    #[error("cannot set up the standard descriptors")]
    Descriptors(#[source] io::Error),
    #[error("cannot fork")]
    Fork(#[source] io::Error),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("cannot execute {program}")]
    Exec {
        program: String,
        #[source]
        source: io::Error,
    },
}

/// Files opened before the forks, all close-on-exec.
struct Opened {
    null: File,
    log: File,
    netns: Option<File>,
}

/// Starts the program and returns its record line once exec has succeeded.
pub fn launch(request: &Request) -> Result<String, LaunchError> {
    let opened = open_all(request)?;
    let (reader, writer) = pipe()?;
    // SAFETY: this process has a single thread, so the child is a full copy with no lock held by anybody else.
    match unsafe { libc::fork() } {
        -1 => Err(LaunchError::Fork(io::Error::last_os_error())),
        0 => middle(request, &opened, writer),
        pid => {
            drop(writer);
            let answer = read_answer(reader);
            reap(pid);
            interpret(&answer?)
        }
    }
}

fn open_all(request: &Request) -> Result<Opened, LaunchError> {
    let open = |options: &mut OpenOptions, path: &Path| {
        options.open(path).map_err(|source| LaunchError::Open {
            path: path.to_owned(),
            source,
        })
    };
    Ok(Opened {
        null: open(OpenOptions::new().read(true), Path::new("/dev/null"))?,
        log: open(OpenOptions::new().append(true).create(true).mode(0o640), &request.log)?,
        netns: match &request.netns {
            Some(name) => Some(open(OpenOptions::new().read(true), &Path::new(NETNS_DIR).join(name))?),
            None => None,
        },
    })
}

fn pipe() -> Result<(File, File), LaunchError> {
    let mut ends: [RawFd; 2] = [-1; 2];
    // SAFETY: `ends` is room for the two descriptors that the call writes.
    if unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) } != 0 {
        return Err(LaunchError::Pipe(io::Error::last_os_error()));
    }
    // SAFETY: both descriptors are new and have no other owner.
    let [reader, writer] = ends.map(|end| File::from(unsafe { OwnedFd::from_raw_fd(end) }));
    Ok((reader, writer))
}

/// The first child: makes a session of its own, forks once more and goes, so that init adopts the program and the
/// program, which leads no session, can never get a controlling terminal.
fn middle(request: &Request, opened: &Opened, mut writer: File) -> ! {
    // SAFETY: setsid has no memory effects; it cannot fail right after fork, when we lead no process group.
    unsafe { libc::setsid() };
    // SAFETY: as at the first fork, there is one thread.
    match unsafe { libc::fork() } {
        -1 => report(&mut writer, &ChildError::Fork(io::Error::last_os_error())),
        0 => {
            let Err(error) = become_program(request, opened, &mut writer);
            report(&mut writer, &error);
        }
        _ => {}
    }
    // SAFETY: _exit is right after fork: the parent's exit handlers and buffers are not ours to run.
    unsafe { libc::_exit(0) }
}

/// Tells the waiting aenv-launch why. If it is gone, nobody is left to be told.
fn report(writer: &mut File, error: &ChildError) {
    let message = format!("{FAILURE_MARK}{}", chain(error));
    let _ = writer.write_all(message.as_bytes());
}

enum Never {}

/// The second child, up to exec. Returns only when something failed, with no record left behind.
fn become_program(request: &Request, opened: &Opened, writer: &mut File) -> Result<Never, ChildError> {
    // SAFETY: setpgid on ourselves has no memory effects; it makes us leader of our own group.
    unsafe { libc::setpgid(0, 0) };
    apply_limits(request)?;
    enter(request, opened)?;
    standard_descriptors(opened)?;
    let record = Record::of_this_process(&request.argv)?.line();
    record::write(&request.record, &record)?;
    // A caller that died meanwhile is no reason to stop: the record on disk is the truth. SIGPIPE is still ignored here.
    let _ = writer.write_all(record.as_bytes());
    reset_signals();
    let source = exec(&request.argv);
    let _ = std::fs::remove_file(&request.record);
    Err(ChildError::Exec {
        program: request.argv[0].clone(),
        source,
    })
}

fn apply_limits(request: &Request) -> Result<(), ChildError> {
    if let Some(value) = request.oom_score_adj {
        std::fs::write("/proc/self/oom_score_adj", value.to_string())
            .map_err(|source| ChildError::OomScore { value, source })?;
    }
    if let Some(value) = request.nofile {
        let limit = libc::rlimit {
            rlim_cur: value,
            rlim_max: value,
        };
        // SAFETY: `limit` is a valid rlimit for the length of the call.
        check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
            .map_err(|source| ChildError::DescriptorLimit { value, source })?;
    }
    Ok(())
}

fn enter(request: &Request, opened: &Opened) -> Result<(), ChildError> {
    if let (Some(name), Some(netns)) = (&request.netns, &opened.netns) {
        // SAFETY: the descriptor is open; CLONE_NEWNET makes the kernel refuse a file that is no network namespace.
        check(unsafe { libc::setns(netns.as_raw_fd(), libc::CLONE_NEWNET) }).map_err(|source| ChildError::Netns {
            name: name.clone(),
            source,
        })?;
    }
    if let Some(path) = &request.cwd {
        std::env::set_current_dir(path).map_err(|source| ChildError::Cwd {
            path: path.clone(),
            source,
        })?;
    }
    Ok(())
}

/// 0 from /dev/null, 1 and 2 to the log; everything above closes at exec, whatever the caller had left open.
fn standard_descriptors(opened: &Opened) -> Result<(), ChildError> {
    let plan = [(&opened.null, 0), (&opened.log, 1), (&opened.log, 2)];
    for (file, target) in plan {
        // SAFETY: the source is open; the targets are the standard descriptors, which no Rust object owns.
        let result = unsafe { libc::dup2(file.as_raw_fd(), target) };
        check(result).map_err(ChildError::Descriptors)?;
    }
    // SAFETY: only sets a flag on descriptors; it closes none that is in use here.
    let result = unsafe { libc::close_range(3, libc::c_uint::MAX, CLOSE_ON_EXEC) };
    check(result).map_err(ChildError::Descriptors)
}

/// Default dispositions and an empty mask: ignored signals and masks survive exec, and Rust itself ignores SIGPIPE.
fn reset_signals() {
    const SIGNAL_MAX: libc::c_int = 64;
    const MASK_BYTES: usize = 8;
    // The kernel's own struct (handler, flags, restorer, mask), all zero: SIG_DFL. By system call, because the C
    // library refuses its two private signals, which some parents leave ignored.
    let default = [0_usize; 4];
    for signal in 1..=SIGNAL_MAX {
        // SAFETY: SIG_DFL installs no handler and the struct outlives the call. SIGKILL and SIGSTOP fail, rightly.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null::<usize>(),
                MASK_BYTES,
            )
        };
    }
    // SAFETY: an all-zero sigset_t is initialised by sigemptyset before it is used.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Replaces this process; returns only the reason why it could not. A name without `/` is looked up in PATH.
fn exec(argv: &[String]) -> io::Error {
    let words: Result<Vec<CString>, _> = argv.iter().map(|word| CString::new(word.as_str())).collect();
    let Ok(words) = words else {
        return io::ErrorKind::InvalidInput.into();
    };
    let mut pointers: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: the pointers are NUL-terminated strings that outlive the call, and the list ends with a null pointer.
    unsafe { libc::execvp(pointers[0], pointers.as_ptr()) };
    let error = io::Error::last_os_error();
    // SAFETY: back to ignoring, so that the report cannot kill us when aenv-launch is gone.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    error
}

/// All that the new process wrote, up to exec or exit.
fn read_answer(mut reader: File) -> Result<Vec<u8>, LaunchError> {
    let deadline = Instant::now() + START_DEADLINE;
    let mut answer = Vec::new();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut poll = libc::pollfd {
            fd: reader.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let timeout_ms = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
        // SAFETY: one valid pollfd, which lives through the call.
        match unsafe { libc::poll(&raw mut poll, 1, timeout_ms) } {
            0 => return Err(LaunchError::Late),
            -1 => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(LaunchError::Answer(error));
                }
                continue;
            }
            _ => {}
        }
        let mut chunk = [0; 4096];
        match reader.read(&mut chunk).map_err(LaunchError::Answer)? {
            0 => return Ok(answer),
            count => answer.extend_from_slice(&chunk[..count]),
        }
    }
}

/// Takes the exit status of the middle process, which lives for microseconds, so that no zombie is left to our parent.
fn reap(pid: libc::pid_t) {
    // SAFETY: a null status pointer is allowed.
    while unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) } == -1
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// End of file right after the record line means that exec closed the pipe. JSON holds no raw line feed.
fn interpret(answer: &[u8]) -> Result<String, LaunchError> {
    let text = String::from_utf8_lossy(answer);
    let (record, rest) = match text.find('\n') {
        Some(end) if !text.starts_with(FAILURE_MARK) => text.split_at(end + 1),
        _ => ("", &*text),
    };
    match rest.strip_prefix(FAILURE_MARK) {
        Some(reason) => Err(LaunchError::Child(reason.to_owned())),
        None if rest.is_empty() && !record.is_empty() => Ok(record.to_owned()),
        None => Err(LaunchError::Died),
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_answer_is_a_record_a_reason_or_a_death() {
        assert_eq!(interpret(b"{\"a!\"}\n").unwrap(), "{\"a!\"}\n");
        for (answer, expected) in [("!no\nway", "no\nway"), ("{\"a!\"}\n!cannot", "cannot")] {
            let error = interpret(answer.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
        for torn in ["", "{\"pid\":"] {
            assert!(matches!(interpret(torn.as_bytes()), Err(LaunchError::Died)));
        }
    }
}
