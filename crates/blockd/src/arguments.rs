//! The command line of both daemons.
//!
//! Written out by hand: options are few, all take a value, and half of them are only for the two daemons themselves.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use crate::keeper::{Adopted, KeeperArguments};
use crate::limits::{
    CACHE_SIZE_BYTES_MIN, CAPTURE_BUFFER_BYTES_MAX_DEFAULT, MEMORY_OUTAGE_DEFAULT, MEMORY_OUTAGE_S_MAX,
    RING_READS_DEFAULT, RING_READS_MAX, SERVE_THREADS_DEFAULT, SERVE_THREADS_MAX,
};
use crate::process::{Peer, adopt};
use crate::serve::ServeArguments;

pub const USAGE: &str = "\
usage: aenv-blockd keeper --run-dir DIR --state-dir DIR --memory-mount DIR --disk-mount DIR
                          [--serve-threads N] [--ring-reads N] [--capture-buffer-bytes-max N]
                          [--stores FILE --cache-dir DIR --cache-size-bytes-max N] [--memory-outage-s N]

Serves layered disks and memory images as files on two FUSE mounts (Linux 6.9 or newer recommended).
The keeper mounts and keeps `aenv-blockd serve` running; both may be killed at any time.
SIGTERM to the keeper ends both and unmounts. Control socket: RUN/blockd.sock (spec/wire/block.md).

  --run-dir DIR                  sockets and process records
  --state-dir DIR                records of exports, locks
  --memory-mount DIR             where memory images appear
  --disk-mount DIR               where disks appear
  --ring-reads N                 small local reads per mount without a thread each, 0 to 1024 (default 64)
  --serve-threads N              threads per mount at rest, 1 to 64 (default 4)
  --capture-buffer-bytes-max N   memory for captured pages (default 2 GiB)
  --stores FILE                  how to reach stores; without it descriptors of remote blobs are refused
  --cache-dir DIR                where blocks of remote blobs are kept
  --cache-size-bytes-max N       room for them, 16 MiB or more
  --memory-outage-s N            how long a memory image waits for its store (default 600)
";

/// The folders that both daemons are told.
#[derive(Debug, Clone)]
pub struct Folders {
    pub run: PathBuf,
    pub state: PathBuf,
    pub memory_mount: PathBuf,
    pub disk_mount: PathBuf,
}

impl Folders {
    pub fn keeper_lock(&self) -> PathBuf {
        self.state.join("keeper.lock")
    }

    pub fn serve_lock(&self) -> PathBuf {
        self.state.join("serve.lock")
    }

    pub fn socket(&self) -> PathBuf {
        self.run.join("blockd.sock")
    }

    pub fn keeper_record(&self) -> PathBuf {
        self.run.join("keeper.json")
    }

    pub fn serve_record(&self) -> PathBuf {
        self.run.join("blockd.json")
    }

    /// As options, for a peer.
    pub fn options(&self) -> Vec<String> {
        let pairs = [
            ("--run-dir", &self.run),
            ("--state-dir", &self.state),
            ("--memory-mount", &self.memory_mount),
            ("--disk-mount", &self.disk_mount),
        ];
        pairs
            .iter()
            .flat_map(|(name, path)| [(*name).to_owned(), path.to_string_lossy().into_owned()])
            .collect()
    }
}

/// What is wrong with a command line.
#[derive(Debug, thiserror::Error)]
pub enum ArgumentError {
    #[error("unknown option {0:?}")]
    Unknown(String),
    #[error("{0} needs a value")]
    NoValue(String),
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{name} is {value:?} and must be {wanted}")]
    Bad {
        name: &'static str,
        value: String,
        wanted: &'static str,
    },
    #[error("{0} is not an open descriptor")]
    Descriptor(&'static str, #[source] std::io::Error),
}

const OPTIONS: [&str; 17] = [
    "--run-dir",
    "--state-dir",
    "--memory-mount",
    "--disk-mount",
    "--serve-threads",
    "--ring-reads",
    "--capture-buffer-bytes-max",
    "--stores",
    "--cache-dir",
    "--cache-size-bytes-max",
    "--memory-outage-s",
    "--memory-fd",
    "--disk-fd",
    "--keeper-pid",
    "--keeper-pidfd",
    "--blockd-pid",
    "--blockd-pidfd",
];

/// Options by name.
#[derive(Debug)]
struct Options(HashMap<&'static str, String>);

impl Options {
    fn parse(arguments: impl Iterator<Item = String>) -> Result<Options, ArgumentError> {
        let mut options = HashMap::new();
        let mut arguments = arguments;
        while let Some(argument) = arguments.next() {
            let known = OPTIONS.iter().find(|name| **name == argument);
            let name = known.ok_or_else(|| ArgumentError::Unknown(argument.clone()))?;
            options.insert(*name, arguments.next().ok_or(ArgumentError::NoValue(argument))?);
        }
        Ok(Options(options))
    }

    fn folder(&self, name: &'static str) -> Result<PathBuf, ArgumentError> {
        let value = self.0.get(name).ok_or(ArgumentError::Missing(name))?;
        if value.starts_with('/') {
            return Ok(PathBuf::from(value));
        }
        Err(ArgumentError::Bad {
            name,
            value: value.clone(),
            wanted: "an absolute path",
        })
    }

    fn number(&self, name: &'static str) -> Result<Option<u64>, ArgumentError> {
        let Some(value) = self.0.get(name) else {
            return Ok(None);
        };
        let bad = |_| ArgumentError::Bad {
            name,
            value: value.clone(),
            wanted: "a number",
        };
        value.parse().map(Some).map_err(bad)
    }

    fn descriptor(&self, name: &'static str) -> Result<OwnedFd, ArgumentError> {
        let number = self.number(name)?.ok_or(ArgumentError::Missing(name))?;
        adopt(i32::try_from(number).unwrap_or(-1)).map_err(|error| ArgumentError::Descriptor(name, error))
    }

    fn peer(&self, pid: &'static str, pidfd: &'static str) -> Result<Peer, ArgumentError> {
        let number = self.number(pid)?.and_then(|pid| u32::try_from(pid).ok());
        Ok(Peer::inherited(
            number.ok_or(ArgumentError::Missing(pid))?,
            self.descriptor(pidfd)?,
        ))
    }

    fn folders(&self) -> Result<Folders, ArgumentError> {
        Ok(Folders {
            run: self.folder("--run-dir")?,
            state: self.folder("--state-dir")?,
            memory_mount: self.folder("--memory-mount")?,
            disk_mount: self.folder("--disk-mount")?,
        })
    }

    /// The settings of blockd, checked here so that a wrong one stops the keeper rather than every blockd.
    fn settings(&self) -> Result<Settings, ArgumentError> {
        let threads = self.within("--serve-threads", 1..=SERVE_THREADS_MAX as u64, "1 to 64")?;
        let ring_reads = self.within("--ring-reads", 0..=RING_READS_MAX as u64, "0 to 1024")?;
        let buffer = self.number("--capture-buffer-bytes-max")?;
        let outage = self.within("--memory-outage-s", 1..=MEMORY_OUTAGE_S_MAX, "1 to 86400")?;
        Ok(Settings {
            threads: threads.map_or(SERVE_THREADS_DEFAULT, |count| count as usize),
            ring_reads: ring_reads.map_or(RING_READS_DEFAULT, |count| count as usize),
            capture_buffer_bytes_max: buffer.unwrap_or(CAPTURE_BUFFER_BYTES_MAX_DEFAULT),
            remote: self.remote()?,
            memory_outage: outage.map_or(MEMORY_OUTAGE_DEFAULT, Duration::from_secs),
        })
    }

    /// All three or none: half a cache is a mistake.
    fn remote(&self) -> Result<Option<RemoteSettings>, ArgumentError> {
        let names = ["--stores", "--cache-dir", "--cache-size-bytes-max"];
        if !names.iter().any(|name| self.0.contains_key(name)) {
            return Ok(None);
        }
        let size = self.within(names[2], CACHE_SIZE_BYTES_MIN..=u64::MAX, "at least 16 MiB (16777216)")?;
        Ok(Some(RemoteSettings {
            stores: self.folder(names[0])?,
            cache_dir: self.folder(names[1])?,
            cache_size_bytes_max: size.ok_or(ArgumentError::Missing(names[2]))?,
        }))
    }

    fn within(
        &self,
        name: &'static str,
        range: RangeInclusive<u64>,
        wanted: &'static str,
    ) -> Result<Option<u64>, ArgumentError> {
        match self.number(name)? {
            Some(number) if !range.contains(&number) => Err(ArgumentError::Bad {
                name,
                value: number.to_string(),
                wanted,
            }),
            number => Ok(number),
        }
    }
}

/// What is said of blockd on the command line of either daemon, apart from its place.
#[derive(Debug, Clone)]
pub struct Settings {
    pub threads: usize,
    pub ring_reads: usize,
    pub capture_buffer_bytes_max: u64,
    pub remote: Option<RemoteSettings>,
    pub memory_outage: Duration,
}

/// Where remote blobs come from and where their blocks are kept.
#[derive(Debug, Clone)]
pub struct RemoteSettings {
    pub stores: PathBuf,
    pub cache_dir: PathBuf,
    pub cache_size_bytes_max: u64,
}

impl Settings {
    /// As options, for a peer.
    pub fn options(&self) -> Vec<String> {
        let mut options = vec![
            ("--serve-threads", self.threads.to_string()),
            ("--ring-reads", self.ring_reads.to_string()),
            ("--capture-buffer-bytes-max", self.capture_buffer_bytes_max.to_string()),
            ("--memory-outage-s", self.memory_outage.as_secs().to_string()),
        ];
        if let Some(remote) = &self.remote {
            options.extend([
                ("--stores", remote.stores.to_string_lossy().into_owned()),
                ("--cache-dir", remote.cache_dir.to_string_lossy().into_owned()),
                ("--cache-size-bytes-max", remote.cache_size_bytes_max.to_string()),
            ]);
        }
        options
            .into_iter()
            .flat_map(|(name, value)| [name.to_owned(), value])
            .collect()
    }
}

pub fn keeper(arguments: impl Iterator<Item = String>) -> Result<KeeperArguments, ArgumentError> {
    let options = Options::parse(arguments)?;
    let adopted = match options.0.contains_key("--blockd-pid") {
        true => Some(Adopted {
            memory: options.descriptor("--memory-fd")?,
            disks: options.descriptor("--disk-fd")?,
            blockd: options.peer("--blockd-pid", "--blockd-pidfd")?,
        }),
        false => None,
    };
    let settings = options.settings()?;
    Ok(KeeperArguments {
        folders: options.folders()?,
        serve_options: settings.options(),
        cache_dir: settings.remote.map(|remote| remote.cache_dir),
        adopted,
    })
}

pub fn serve(arguments: impl Iterator<Item = String>) -> Result<ServeArguments, ArgumentError> {
    let options = Options::parse(arguments)?;
    Ok(ServeArguments {
        folders: options.folders()?,
        settings: options.settings()?,
        memory: options.descriptor("--memory-fd")?,
        disks: options.descriptor("--disk-fd")?,
        keeper: options.peer("--keeper-pid", "--keeper-pidfd")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<KeeperArguments, ArgumentError> {
        keeper(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn wrong_options_are_named() {
        let folders = "--run-dir /r --state-dir /s --memory-mount /m --disk-mount /d";
        assert!(parse(folders).is_ok());
        for (line, named) in [
            ("--run-dir /r --state-dir /s --memory-mount /m", "--disk-mount"),
            ("--run-dir r", "--run-dir"),
            (&format!("{folders} --serve-threads 0"), "--serve-threads"),
            (&format!("{folders} --serve-threads 65"), "--serve-threads"),
            (&format!("{folders} --serve-threads"), "--serve-threads"),
            (&format!("{folders} --ring-reads 1025"), "--ring-reads"),
            (&format!("{folders} --verbose 1"), "--verbose"),
            (&format!("{folders} --stores /s"), "--cache"),
            (
                &format!("{folders} --stores /s --cache-dir /c"),
                "--cache-size-bytes-max",
            ),
            (
                &format!("{folders} --stores /s --cache-dir /c --cache-size-bytes-max 5"),
                "--cache-size-bytes-max",
            ),
            (&format!("{folders} --memory-outage-s 0"), "--memory-outage-s"),
        ] {
            let error = parse(line).unwrap_err().to_string();
            assert!(error.contains(named), "{line}: {error}");
        }
    }
}
