//! /etc/hosts, /etc/hostname and /etc/resolv.conf: ours, as with Docker, bound over the image's files.
//!
//! A missing file is created empty in the image, so that there is something to bind over; a link is followed.
//! /etc/machine-id is bound too, with the image's content until /init brings another.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};

use rustix::mount::mount_bind;

use super::BootError;
use super::cmdline::Options;
use crate::identity::{self, ETC_DIR};

pub fn provide(options: &Options) -> Vec<Result<(), BootError>> {
    let hostname = options
        .hostname
        .as_deref()
        .filter(|name| identity::is_hostname(name))
        .unwrap_or("sandbox");
    let resolv: String = options
        .dns
        .iter()
        .map(|server| format!("nameserver {server}\n"))
        .collect();
    let hosts = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n".to_owned();
    let machine_id = std::fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let files = [
        ("hosts", hosts),
        ("hostname", String::new()),
        ("resolv.conf", resolv),
        ("machine-id", machine_id),
    ];
    let mut results: Vec<_> = files.iter().map(|(name, text)| bind_over(name, text)).collect();
    let named = identity::set_hostname(hostname).map_err(|error| BootError::Write {
        path: "the host name".into(),
        source: io::Error::other(error),
    });
    results.push(named);
    let marked = identity::write_sandbox_files(None, None).map_err(|error| BootError::Write {
        path: identity::RUN_DIR.into(),
        source: io::Error::other(error),
    });
    results.push(marked);
    results
}

fn bind_over(name: &str, text: &str) -> Result<(), BootError> {
    let ours = format!("{ETC_DIR}/{name}");
    let failed = |path: &str| {
        let path = path.to_owned();
        move |source| BootError::Write { path, source }
    };
    std::fs::create_dir_all(ETC_DIR).map_err(failed(ETC_DIR))?;
    std::fs::write(&ours, text).map_err(failed(&ours))?;
    let target = format!("/etc/{name}");
    make_target(Path::new(&target)).map_err(failed(&target))?;
    mount_bind(ours.as_str(), target.as_str()).map_err(|error| BootError::Mount {
        what: ours,
        target,
        source: error.into(),
    })
}

/// Makes sure that a file is there to bind over, also at the end of a dangling link.
fn make_target(path: &Path) -> io::Result<()> {
    let place = match std::fs::read_link(path) {
        Ok(link) => path
            .parent()
            .map_or_else(|| PathBuf::from("/"), Path::to_path_buf)
            .join(link),
        Err(_) => path.to_path_buf(),
    };
    if let Some(parent) = place.parent() {
        std::fs::create_dir_all(parent)?;
    }
    OpenOptions::new().append(true).create(true).open(path).map(|_| ())
}
