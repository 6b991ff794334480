//! Starting one program: clone, become the user, exec.
//!
//! Owns the descriptors of the child until it runs. `std::process::Command` falls back to a full fork as soon
//! as uid, groups or a session are set; copying the page tables of this daemon and faulting them in again is
//! what a start would then cost most under emulation. So the child is made with `CLONE_VM | CLONE_VFORK`: it
//! borrows this process's memory, and the calling thread waits until it has called exec or exited.
//!
//! The child therefore runs only raw system calls on data prepared before, allocates nothing, and reports a
//! failure by writing to the shared [`Failure`]. The kernel keeps credentials, mask, descriptors and working
//! directory of the two apart (no CLONE_FILES, CLONE_FS, CLONE_SIGHAND).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use super::SpawnError;

/// Stack of the child between clone and exec; its frames hold no buffers.
const CHILD_STACK_BYTES: usize = 64 << 10;

/// Processes of users are killed before this daemon when memory runs out.
const OOM_SCORE_ADJ: &CStr = c"100";

/// Where the three standard descriptors of a child come from.
#[derive(Debug)]
pub enum Stdio {
    /// `stdin` is a pipe or /dev/null.
    Pipes {
        stdin: OwnedFd,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    /// One terminal, which becomes the controlling one.
    Terminal(OwnedFd),
}

/// One program to try: an image may lack the first choice.
#[derive(Debug)]
pub struct Candidate {
    pub path: CString,
    /// Programs like busybox act by this name.
    pub argv0: CString,
}

/// Everything the child needs, prepared while allocation is still allowed.
#[derive(Debug)]
pub struct Plan {
    pub candidates: Vec<Candidate>,
    /// Arguments after the zeroth.
    pub args: Vec<CString>,
    pub env: Vec<CString>,
    pub cwd: CString,
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub stdio: Stdio,
}

/// The step that failed in the child.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Terminal,
    Descriptors,
    User,
    Directory,
    Exec,
}

/// A child that exists; `failure` says why it could not become the program (it has exited then).
#[derive(Debug)]
pub struct Started {
    pub pid: u32,
    pub failure: Option<(Step, io::Error)>,
    /// Still open so that the reason of a failure can be written where the program's errors would go.
    pub stdio: Stdio,
}

struct Failure {
    step: Step,
    errno: c_int,
}

/// What the child reads; lives in the parent's frame, which waits for the child.
struct Child<'a> {
    plan: &'a Plan,
    argv: Vec<*const c_char>,
    envp: Vec<*const c_char>,
    fds: [c_int; 3],
    terminal: bool,
    failure: Option<Failure>,
}

/// Starts the program and waits until it has replaced the child (or failed to).
///
/// Blocks for the time of exec, so callers run it off the event loop: a hanging file system must not stop the
/// daemon.
pub fn spawn(plan: Plan) -> Result<Started, SpawnError> {
    let mut argv: Vec<*const c_char> = vec![std::ptr::null()];
    argv.extend(plan.args.iter().map(|arg| arg.as_ptr()));
    argv.push(std::ptr::null());
    let mut envp: Vec<*const c_char> = plan.env.iter().map(|entry| entry.as_ptr()).collect();
    envp.push(std::ptr::null());
    let (fds, terminal) = match &plan.stdio {
        Stdio::Pipes { stdin, stdout, stderr } => ([stdin.as_raw_fd(), stdout.as_raw_fd(), stderr.as_raw_fd()], false),
        Stdio::Terminal(slave) => ([slave.as_raw_fd(); 3], true),
    };
    let mut child = Child {
        plan: &plan,
        argv,
        envp,
        fds,
        terminal,
        failure: None,
    };
    let pid = clone_vfork(&mut child)?;
    let failure = child
        .failure
        .take()
        .map(|f| (f.step, io::Error::from_raw_os_error(f.errno)));
    Ok(Started {
        pid,
        failure,
        stdio: plan.stdio,
    })
}

fn clone_vfork(child: &mut Child<'_>) -> Result<u32, SpawnError> {
    let mut stack = vec![0u128; CHILD_STACK_BYTES / size_of::<u128>()];
    let top = stack.as_mut_ptr_range().end.cast::<c_void>();
    let mut old_mask = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: signals stay blocked while the child borrows our memory, so no handler of ours can run there;
    // the child resets its own mask. `stack` and `child` outlive the child's use of them, because
    // CLONE_VFORK returns only after its exec or exit. u128 elements keep the stack top 16-byte aligned.
    let pid = unsafe {
        let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), old_mask.as_mut_ptr());
        let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
        let pid = libc::clone(child_main, top, flags, (child as *mut Child<'_>).cast());
        let error = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, old_mask.as_ptr(), std::ptr::null_mut());
        if pid < 0 { Err(error) } else { Ok(pid) }
    };
    drop(stack);
    let pid = pid.map_err(SpawnError::Clone)?;
    u32::try_from(pid).map_err(|_| SpawnError::Clone(io::Error::from_raw_os_error(libc::EINVAL)))
}

extern "C" fn child_main(argument: *mut c_void) -> c_int {
    // SAFETY: `clone_vfork` passes a live `Child`, and its thread does not run while we do.
    let child = unsafe { &mut *argument.cast::<Child<'_>>() };
    // SAFETY: only this thread of the child exists; the steps use raw calls and prepared data alone.
    let failure = match unsafe { prepare(child) } {
        Err(failure) => failure,
        // SAFETY: as above; argv and envp are null-terminated arrays of live C strings.
        Ok(()) => unsafe { exec_first(child) },
    };
    child.failure = Some(failure);
    // SAFETY: _exit runs no destructors and no atexit handlers of the shared memory.
    unsafe { libc::_exit(127) }
}

fn last(step: Step) -> Failure {
    // SAFETY: the address of this thread's errno is always valid.
    let errno = unsafe { *libc::__errno_location() };
    Failure { step, errno }
}

fn check(result: i64, step: Step) -> Result<(), Failure> {
    if result < 0 { Err(last(step)) } else { Ok(()) }
}

/// Makes the child what the program expects to find itself as. Only to be called in the child.
unsafe fn prepare(child: &Child<'_>) -> Result<(), Failure> {
    let plan = child.plan;
    // SAFETY: raw system calls on valid descriptors and prepared pointers, in a process of its own.
    unsafe {
        // A session of its own: one process group to signal, and no controlling terminal of ours.
        libc::setsid();
        if child.terminal {
            check(libc::ioctl(child.fds[0], libc::TIOCSCTTY, 0).into(), Step::Terminal)?;
        }
        // The descriptors of this daemon are above 2 and close-on-exec, so nothing is overwritten here.
        for (target, fd) in child.fds.iter().enumerate() {
            check(libc::dup2(*fd, target as c_int).into(), Step::Descriptors)?;
        }
        let flags = libc::CLOSE_RANGE_CLOEXEC;
        check(
            libc::syscall(libc::SYS_close_range, 3, c_int::MAX, flags),
            Step::Descriptors,
        )?;
        write_oom_score();
        become_user(plan)?;
        check(libc::chdir(plan.cwd.as_ptr()).into(), Step::Directory)?;
        libc::umask(0o022);
        // Ignored signals survive exec; the Rust runtime ignores SIGPIPE.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut());
    }
    Ok(())
}

/// Best effort: an image without /proc has no such file.
unsafe fn write_oom_score() {
    // SAFETY: constant C strings; the descriptor is closed again.
    unsafe {
        let fd = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, OOM_SCORE_ADJ.as_ptr().cast(), OOM_SCORE_ADJ.count_bytes());
            libc::close(fd);
        }
    }
}

/// The libc wrappers would change all threads of the shared memory, so the raw calls are needed here.
/// A daemon that is not root (tests) can only become itself, and keeps its groups.
unsafe fn become_user(plan: &Plan) -> Result<(), Failure> {
    // SAFETY: plain credential calls; the groups slice is live.
    unsafe {
        if libc::geteuid() != 0 && plan.uid == libc::geteuid() {
            return Ok(());
        }
        let groups = &plan.groups;
        check(
            libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()),
            Step::User,
        )?;
        check(
            libc::syscall(libc::SYS_setresgid, plan.gid, plan.gid, plan.gid),
            Step::User,
        )?;
        check(
            libc::syscall(libc::SYS_setresuid, plan.uid, plan.uid, plan.uid),
            Step::User,
        )
    }
}

/// Tries the candidates in order. A file that exists but may not be run beats "not found", as in execvp.
unsafe fn exec_first(child: &mut Child<'_>) -> Failure {
    let mut failure = Failure {
        step: Step::Exec,
        errno: libc::ENOENT,
    };
    for candidate in &child.plan.candidates {
        if let Some(first) = child.argv.first_mut() {
            *first = candidate.argv0.as_ptr();
        }
        // SAFETY: null-terminated arrays of live C strings.
        unsafe { libc::execve(candidate.path.as_ptr(), child.argv.as_ptr(), child.envp.as_ptr()) };
        let errno = last(Step::Exec).errno;
        match errno {
            libc::ENOENT | libc::ENOTDIR => {}
            libc::EACCES => failure.errno = errno,
            _ => {
                return Failure {
                    step: Step::Exec,
                    errno,
                };
            }
        }
    }
    failure
}
