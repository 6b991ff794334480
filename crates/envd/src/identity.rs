//! What makes this guest this guest: clock, random pool, host name, machine id.
//!
//! Only used in a microVM. Our files live in a small tmpfs and are bound over /etc/hosts, /etc/hostname,
//! /etc/resolv.conf and /etc/machine-id, as Docker does, so that the image's disk stays as it was.
//! /proc/sys/kernel/random/boot_id cannot be changed by anyone: copies of one snapshot share it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use jiff::{SignedDuration, Timestamp};
use rustix::time::{ClockId, Timespec};

/// Where our files are; the tmpfs is mounted at boot.
pub const RUN_DIR: &str = "/run/e2b";
pub const ETC_DIR: &str = "/run/e2b/etc";

/// The clock is moved forward beyond this difference; below it, the time of the request itself is the error.
const CLOCK_BEHIND_MAX: SignedDuration = SignedDuration::from_millis(5);
/// And back only beyond this one, so that a late request does not turn time back.
const CLOCK_AHEAD_MAX: SignedDuration = SignedDuration::from_millis(200);

/// ioctl numbers of the random devices: `_IOW('R', 3, int[2])` and `_IO('R', 7)`.
const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
/// Entropy taken from one call.
const ENTROPY_BYTES_MAX: usize = 512;

/// The address that stands for the host's own name, Debian's convention.
const OWN_ADDRESS: &str = "127.0.1.1";

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot set the clock")]
    Clock(#[source] io::Error),
    #[error("cannot reseed the random pool")]
    Random(#[source] io::Error),
    #[error("cannot set the host name")]
    Hostname(#[source] io::Error),
    #[error("cannot write {path}")]
    Write { path: String, source: io::Error },
}

pub fn set_clock(now: Timestamp) -> Result<(), IdentityError> {
    let ahead = Timestamp::now().duration_since(now);
    if ahead >= -CLOCK_BEHIND_MAX && ahead <= CLOCK_AHEAD_MAX {
        return Ok(());
    }
    let time = Timespec {
        tv_sec: now.as_second(),
        tv_nsec: now.subsec_nanosecond().into(),
    };
    rustix::time::clock_settime(ClockId::Realtime, time).map_err(|error| IdentityError::Clock(error.into()))
}

/// Mixes entropy in, counts it, and makes the kernel's generator use it at once: without the second step a
/// restored copy would go on with its sibling's stream for up to a minute.
pub fn reseed(entropy: &[u8]) -> Result<(), IdentityError> {
    #[repr(C)]
    struct PoolInfo {
        entropy_bits: libc::c_int,
        bytes: libc::c_int,
        data: [u8; ENTROPY_BYTES_MAX],
    }
    let taken = entropy.len().min(ENTROPY_BYTES_MAX);
    let length = libc::c_int::try_from(taken).unwrap_or(0);
    let mut info = PoolInfo {
        entropy_bits: length * 8,
        bytes: length,
        data: [0; ENTROPY_BYTES_MAX],
    };
    for (slot, byte) in info.data.iter_mut().zip(entropy) {
        *slot = *byte;
    }
    let device = File::options()
        .write(true)
        .open("/dev/urandom")
        .map_err(IdentityError::Random)?;
    // SAFETY: the kernel reads the header and `bytes` bytes of a live struct of that layout; the second call
    // takes no argument.
    let results = unsafe {
        [
            libc::ioctl(device.as_raw_fd(), RNDADDENTROPY, &raw const info),
            libc::ioctl(device.as_raw_fd(), RNDRESEEDCRNG),
        ]
    };
    if results.contains(&-1) {
        Err(IdentityError::Random(io::Error::last_os_error()))
    } else {
        Ok(())
    }
}

/// Letters, digits, dots and dashes, 64 bytes at most (the kernel's limit).
pub fn is_hostname(text: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    !text.is_empty() && text.len() <= 64 && !text.starts_with('-') && text.bytes().all(allowed)
}

pub fn set_hostname(name: &str) -> Result<(), IdentityError> {
    rustix::system::sethostname(name.as_bytes()).map_err(|error| IdentityError::Hostname(error.into()))?;
    write(&format!("{ETC_DIR}/hostname"), &format!("{name}\n"))?;
    let path = format!("{ETC_DIR}/hosts");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    write(
        &path,
        &hosts_with(&text, |address, _| address == OWN_ADDRESS, OWN_ADDRESS, name),
    )
}

/// Gives a name another address in /etc/hosts.
pub fn set_host_entry(name: &str, address: &str) -> Result<(), IdentityError> {
    let path = format!("{ETC_DIR}/hosts");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    write(&path, &hosts_with(&text, |_, host| host == name, address, name))
}

pub fn set_machine_id(id: &str) -> Result<(), IdentityError> {
    write(&format!("{ETC_DIR}/machine-id"), &format!("{id}\n"))
}

/// The marks by which code finds out that it runs in a sandbox, and in which.
pub fn write_sandbox_files(sandbox: Option<&str>, template: Option<&str>) -> Result<(), IdentityError> {
    write(&format!("{RUN_DIR}/.E2B_SANDBOX"), "true")?;
    for (name, value) in [(".E2B_SANDBOX_ID", sandbox), (".E2B_TEMPLATE_ID", template)] {
        if let Some(value) = value {
            write(&format!("{RUN_DIR}/{name}"), value)?;
        }
    }
    Ok(())
}

/// A hosts file with one entry replaced; what a user added stays.
fn hosts_with(text: &str, replaced: impl Fn(&str, &str) -> bool, address: &str, name: &str) -> String {
    let keep = |line: &&str| {
        let mut words = line.split_whitespace();
        let (first, second) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        !replaced(first, second)
    };
    let mut lines: Vec<&str> = text.lines().filter(keep).collect();
    let entry = format!("{address}\t{name}");
    lines.push(&entry);
    lines.join("\n") + "\n"
}

/// In place, because the bind mounts show this inode; and only on a change.
fn write(path: &str, text: &str) -> Result<(), IdentityError> {
    if std::fs::read(path).is_ok_and(|old| old == text.as_bytes()) {
        return Ok(());
    }
    if let Some(parent) = Path::new(path).parent() {
        // Fails with the write below, which names the path.
        let _ = std::fs::create_dir_all(parent);
    }
    std::fs::write(path, text).map_err(|source| IdentityError::Write {
        path: path.into(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_host_name_replaces_the_old_and_keeps_what_the_user_wrote() {
        let text = "127.0.0.1\tlocalhost\n127.0.1.1\told\n10.0.0.9 db\n";
        let new = hosts_with(text, |address, _| address == OWN_ADDRESS, OWN_ADDRESS, "new");
        assert_eq!(new, "127.0.0.1\tlocalhost\n10.0.0.9 db\n127.0.1.1\tnew\n");
        let entry = hosts_with(&new, |_, host| host == "db", "10.0.0.8", "db");
        assert_eq!(entry, "127.0.0.1\tlocalhost\n127.0.1.1\tnew\n10.0.0.8\tdb\n");
    }

    #[test]
    fn host_names_are_checked() {
        assert!(is_hostname("i0abc-1.x"));
        for bad in ["", "-a", "a b", "a\nb", "ü", &"a".repeat(65)] {
            assert!(!is_hostname(bad), "{bad:?}");
        }
    }
}
