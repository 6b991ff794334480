//! Standing orders of blockd to the kernel, against deadlock and against being the one that is killed.
//!
//! All are asked for and none is needed to serve, so a refusal (an unprivileged test, a container) is said and survived.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Linux 5.6; not in every libc.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

pub fn orders() {
    crate::process::stay_out_of_the_oom_killers_reach();
    be_an_io_flusher();
    keep_touched_memory();
    raise_the_descriptor_limit();
    // Many short threads otherwise get a heap each, which never shrinks.
    // SAFETY: mallopt only sets a parameter of the allocator.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 2) };
}

/// Memory that we need must not be had by writing out pages whose way to the disk leads through us.
fn be_an_io_flusher() {
    // SAFETY: this prctl takes one number and changes only flags of this task, inherited by its later threads.
    if unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } != 0 {
        say!("aenv-blockd: no PR_SET_IO_FLUSHER: {}", std::io::Error::last_os_error());
    }
}

/// Pages that were used once stay: a page fault of ours must not wait for a reclaim that waits for us. Only once used
/// (MCL_ONFAULT): indexes and thread buffers are mapped larger than they are needed.
fn keep_touched_memory() {
    if !may_lock_without_limit() {
        // With a limit, what is mapped later would count against it and mappings would begin to fail.
        return say!("aenv-blockd: memory is not locked: no CAP_IPC_LOCK and a limit");
    }
    // SAFETY: mlockall changes how the kernel treats our pages, not their content.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        say!("aenv-blockd: memory is not locked: {}", std::io::Error::last_os_error());
    }
}

fn may_lock_without_limit() -> bool {
    const CAP_IPC_LOCK: u64 = 1 << 14;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    effective.is_some_and(|set| set & CAP_IPC_LOCK != 0) || getrlimit(Resource::Memlock).current.is_none()
}

/// An export has a descriptor per layer and more.
fn raise_the_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    ) {
        say!(
            "aenv-blockd: the limit of open files stays at {:?}: {error}",
            limit.current
        );
    }
}
