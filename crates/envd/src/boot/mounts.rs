//! The kernel's file systems: first in the initramfs, later in the image.

use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use rustix::mount::{MountFlags, mount};

use super::BootError;
use crate::identity::RUN_DIR;

/// Size of the tmpfs with our own few files.
const RUN_OPTIONS: &str = "mode=755,size=1m";

/// Enough to find the modules, the command line and the root device.
pub fn early() -> Result<(), BootError> {
    let plain = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    attach("proc", "/proc", "proc", plain, "")?;
    attach("sysfs", "/sys", "sysfs", plain, "")?;
    attach("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, "mode=755")
}

/// What programs expect besides. /run and /tmp stay the image's own, as with Docker: images keep folders
/// there that a tmpfs would hide.
pub fn late() -> Vec<Result<(), BootError>> {
    let plain = MountFlags::NOSUID | MountFlags::NOEXEC | MountFlags::NODEV;
    let shared = MountFlags::NOSUID | MountFlags::NODEV;
    device_links();
    for (folder, mode) in [("/run", 0o755), ("/tmp", 0o1777)] {
        make_folder(folder, mode);
    }
    vec![
        attach(
            "devpts",
            "/dev/pts",
            "devpts",
            MountFlags::NOSUID | MountFlags::NOEXEC,
            "mode=620,gid=5,ptmxmode=666",
        ),
        attach("tmpfs", "/dev/shm", "tmpfs", shared, "mode=1777"),
        attach("cgroup2", "/sys/fs/cgroup", "cgroup2", plain, "nsdelegate"),
        attach("tmpfs", RUN_DIR, "tmpfs", shared, RUN_OPTIONS),
    ]
}

/// Makes a missing folder; one that is there keeps its mode. A failure shows at the mount that needs it.
pub fn make_folder(path: &str, mode: u32) {
    if !Path::new(path).exists() && std::fs::create_dir_all(path).is_ok() {
        let _ = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
    }
}

/// Mounts, making the folder first. Already mounted is fine.
pub fn attach(source: &str, target: &str, kind: &str, flags: MountFlags, options: &str) -> Result<(), BootError> {
    make_folder(target, 0o755);
    let options = std::ffi::CString::new(options).unwrap_or_default();
    match mount(source, target, kind, flags, Some(options.as_c_str())) {
        Ok(()) | Err(rustix::io::Errno::BUSY) => Ok(()),
        Err(error) => Err(BootError::Mount {
            what: kind.into(),
            target: target.into(),
            source: error.into(),
        }),
    }
}

/// The links that shells and scripts use; devtmpfs does not have them.
fn device_links() {
    let links = [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
        ("/proc/kcore", "/dev/core"),
    ];
    for (target, link) in links {
        // Existing ones are as good.
        let _: io::Result<()> = symlink(target, link);
    }
}
