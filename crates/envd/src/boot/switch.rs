//! From the initramfs into the image's root.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::mount::{MountFlags, mount, mount_move};

use super::BootError;
use super::mounts::make_folder;

const NEW_ROOT: &str = "/newroot";
/// The kernel file systems that go along.
const MOVED: [&str; 3] = ["/dev", "/proc", "/sys"];
/// A disk is there when its driver has been loaded; slow hosts get some time.
const DEVICE_WAIT_MS: u64 = 10_000;
const DEVICE_POLL: Duration = Duration::from_millis(2);

/// Mounts the image and makes it the root of this process and all to come. The daemon itself is a static
/// binary in memory and needs nothing of the initramfs, whose files are given back.
pub fn to_image(device: &str) -> Result<(), BootError> {
    wait_for(device)?;
    make_folder(NEW_ROOT, 0o755);
    let failed = |target: &str, error: rustix::io::Errno| BootError::Mount {
        what: device.into(),
        target: target.into(),
        source: error.into(),
    };
    mount(device, NEW_ROOT, "ext4", MountFlags::NOATIME, None).map_err(|error| failed(NEW_ROOT, error))?;
    for folder in MOVED {
        let target = format!("{NEW_ROOT}{folder}");
        make_folder(&target, 0o755);
        super::tolerate(mount_move(folder, target.as_str()).map_err(|error| failed(&target, error)));
    }
    empty_initramfs();
    let step = |step, result: rustix::io::Result<()>| {
        result.map_err(|error| BootError::Switch {
            step,
            source: io::Error::from(error),
        })
    };
    step("entering the new root", rustix::process::chdir(NEW_ROOT))?;
    step("moving the new root", mount_move(".", "/"))?;
    step("changing the root", rustix::process::chroot("."))?;
    step("entering /", rustix::process::chdir("/"))
}

fn wait_for(device: &str) -> Result<(), BootError> {
    let until = Instant::now() + Duration::from_millis(DEVICE_WAIT_MS);
    while !Path::new(device).exists() {
        if Instant::now() >= until {
            return Err(BootError::DeviceMissing {
                device: device.into(),
                waited_ms: DEVICE_WAIT_MS,
            });
        }
        std::thread::sleep(DEVICE_POLL);
    }
    Ok(())
}

/// Frees the memory of the unpacked archive; never leaves its file system.
fn empty_initramfs() {
    let Ok(root) = std::fs::metadata("/") else {
        return;
    };
    let Ok(entries) = std::fs::read_dir("/") else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        let Ok(meta) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        if meta.dev() != root.dev() {
            continue;
        }
        // What cannot be removed costs some memory and nothing else.
        let _ = if meta.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
    }
}
