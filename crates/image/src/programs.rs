//! The two programs of e2fsprogs that we run: mke2fs makes the empty file system, e2fsck checks a finished one.
//!
//! Owns: their arguments, which decide the features of our disks. They must stay those of
//! `src/agentenv/templates/ext4.py`, so that a guest finds the same disk whichever way its template was made. Both work
//! on a file of ours that has no name, by the descriptor that they inherit.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output, Stdio};

/// Sizes of disks, those of templates.
pub const DISK_BYTES_MIN: u64 = 16 << 20;
pub const DISK_BYTES_MAX: u64 = 1 << 40;
/// The guest writes its journal in a circle; a small disk has none.
const JOURNAL_MIB: u64 = 16;
const JOURNAL_DISK_BYTES_MIN: u64 = 128 << 20;
/// Spelled out, since hosts' `/etc/mke2fs.conf` differ and equal images must give equal bytes on all nodes.
const FEATURES: &str = "none,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,\
                        huge_file,dir_nlink,extra_isize,metadata_csum";
/// With less than this left, a failed mke2fs had too little: an empty file system takes more.
const FULL_BYTES: u64 = 1 << 20;
/// Bits of e2fsck's exit status: errors were corrected, and the two that leave them uncorrected or unknown.
const CORRECTED: i32 = 1;
const SYSTEM_FOLDERS: &str = "/usr/sbin:/sbin:/usr/bin:/bin";

#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("cannot run {program}")]
    Start {
        program: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("mke2fs failed: {output}")]
    MakeFileSystem { output: String },
    #[error("mke2fs failed, and the host's disk is full: {free} bytes are left")]
    HostFull { free: u64 },
    #[error("the file system is not clean: {output}")]
    NotClean { output: String },
    #[error("the journal cannot be replayed: {output}")]
    Journal { output: String },
}

/// Makes an empty ext4 file system on `file`, as large as the file. Errors: `Start`, `MakeFileSystem`, `HostFull`.
pub fn make_file_system(file: &File, size: u64, uuid: &str, time_s: u32) -> Result<(), ProgramError> {
    let extended = format!("discard,lazy_itable_init=0,lazy_journal_init=0,root_owner=0:0,hash_seed={uuid}");
    let journal = size >= JOURNAL_DISK_BYTES_MIN;
    let features = if journal {
        format!("{FEATURES},has_journal")
    } else {
        FEATURES.to_owned()
    };
    let mut command = Command::new("mke2fs");
    command
        .args([
            "-q",
            "-F",
            "-t",
            "ext4",
            "-b",
            "4096",
            "-I",
            "256",
            "-i",
            "16384",
            "-m",
            "0",
            "-L",
            "aenv-root",
        ])
        .args(["-O", &features, "-U", uuid, "-E", &extended]);
    if journal {
        command.args(["-J", &format!("size={JOURNAL_MIB}")]);
    }
    // The library takes zero for "not set".
    let time = time_s.max(1).to_string();
    command
        .env("E2FSPROGS_FAKE_TIME", &time)
        .env("SOURCE_DATE_EPOCH", &time);
    let output = run("mke2fs", command, file)?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failure(file, &output)),
    }
}

/// The program says why only in words; what is left of the disk says it better.
fn failure(file: &File, output: &Output) -> ProgramError {
    match rustix::fs::fstatvfs(file) {
        Ok(disk) if disk.f_bavail * disk.f_frsize < FULL_BYTES => ProgramError::HostFull {
            free: disk.f_bavail * disk.f_frsize,
        },
        _ => ProgramError::MakeFileSystem { output: text(output) },
    }
}

/// Checks the file system on `file` and changes nothing. Errors: `Start`, `NotClean`.
pub fn check_file_system(file: &File) -> Result<String, ProgramError> {
    let mut command = Command::new("e2fsck");
    command.arg("-fn");
    let output = run("e2fsck", command, file)?;
    match output.status.success() {
        true => Ok(text(&output)),
        false => Err(ProgramError::NotClean { output: text(&output) }),
    }
}

/// Puts what the journal holds in its places. Errors: `Start`, `Journal`.
pub fn replay_journal(file: &File) -> Result<(), ProgramError> {
    let mut command = Command::new("e2fsck");
    command.args(["-y", "-E", "journal_only"]);
    let output = run("e2fsck", command, file)?;
    match output.status.code() {
        Some(code) if code & !CORRECTED == 0 => Ok(()),
        _ => Err(ProgramError::Journal { output: text(&output) }),
    }
}

/// Runs a program on the file, given as its last argument by the number of the descriptor in the child.
fn run(program: &'static str, mut command: Command, file: &File) -> Result<Output, ProgramError> {
    let descriptor = file.as_raw_fd();
    // Root by way of `su` often lacks the sbin folders.
    let path = std::env::var("PATH").map_or(SYSTEM_FOLDERS.to_owned(), |path| format!("{path}:{SYSTEM_FOLDERS}"));
    command
        .arg(format!("/proc/self/fd/{descriptor}"))
        .env("PATH", path)
        .env("LC_ALL", "C")
        .stdin(Stdio::null());
    // SAFETY: fcntl and prctl are safe to call between fork and exec; the descriptor stays open in the parent until the
    // child has ended.
    unsafe {
        command.pre_exec(move || {
            // A killed conversion takes its helper along.
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 || libc::fcntl(descriptor, libc::F_SETFD, 0) < 0
            {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    command
        .output()
        .map_err(|source| ProgramError::Start { program, source })
}

/// The end of what the program said, in one line.
fn text(output: &Output) -> String {
    const LINES: usize = 20;
    let all = [&output.stdout[..], &output.stderr[..]].concat();
    let all = String::from_utf8_lossy(&all).into_owned();
    let lines: Vec<&str> = all.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].join("; ")
}
