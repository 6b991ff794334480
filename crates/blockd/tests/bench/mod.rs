//! What the tests against real mounts share: a pair of daemons that is gone when the value is, and a client.

#![allow(dead_code)] // each test file is its own crate and uses its part

pub mod guest;
pub mod remote;
pub mod store;

use std::fs::{File, OpenOptions};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use aenv_wire::block::{
    Empty, ErrorBody, ErrorKind, ExportDisk, ExportMemory, ExportOk, HelloOk, Name, Operation, Outcome, Request,
    SealDisk, SealDiskOk, decode_answer, read_frame, write_frame,
};
use serde::de::DeserializeOwned;

pub const MIB: u64 = 1 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

/// Whether FUSE can be mounted here; says why not.
pub fn host_can() -> bool {
    let can = rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists();
    if !can {
        eprintln!("skipped: needs root and /dev/fuse");
    }
    can
}

/// Keeper and blockd of a temporary folder. Dropping it kills and unmounts, whatever state they are in.
pub struct Daemons {
    pub folder: tempfile::TempDir,
    keeper: Option<Child>,
    options: Vec<String>,
}

impl Daemons {
    pub fn start() -> Daemons {
        Daemons::start_with(&[], &[])
    }

    /// `environment` reaches blockd too: the keeper hands its own on.
    pub fn start_with(options: &[&str], environment: &[(&str, &str)]) -> Daemons {
        let folder = tempfile::Builder::new().prefix("blockd").tempdir().unwrap();
        Daemons::start_in(folder, options, environment)
    }

    pub fn start_in(folder: tempfile::TempDir, options: &[&str], environment: &[(&str, &str)]) -> Daemons {
        let options = options.iter().map(|option| (*option).to_owned()).collect();
        let mut daemons = Daemons {
            folder,
            keeper: None,
            options,
        };
        daemons.start_keeper(environment);
        daemons.hello();
        daemons
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-blockd"));
        command.arg("keeper");
        for (option, name) in [
            ("--run-dir", "run"),
            ("--state-dir", "state"),
            ("--memory-mount", "mnt/memory"),
            ("--disk-mount", "mnt/disks"),
        ] {
            command.arg(option).arg(self.path(name));
        }
        command.args(&self.options);
        command
    }

    pub fn start_keeper(&mut self, environment: &[(&str, &str)]) {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.path("log"))
            .unwrap();
        let mut command = self.command();
        command
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(log);
        self.keeper = Some(command.spawn().unwrap());
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).to_string_lossy().into_owned()
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn client(&self) -> Client {
        let end = Instant::now() + DEADLINE;
        loop {
            match UnixStream::connect(self.path("run/blockd.sock")) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(DEADLINE)).unwrap();
                    return Client { stream, next_id: 1 };
                }
                Err(error) if Instant::now() > end => panic!("no blockd: {error}\n{}", self.log()),
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Asks until a blockd answers, which may take some where one is being killed.
    pub fn hello(&self) -> HelloOk {
        let end = Instant::now() + DEADLINE;
        loop {
            match self.client().try_ask::<HelloOk>(Operation::Hello) {
                Some(Outcome::Ok(hello)) => return hello,
                other if Instant::now() > end => panic!("no hello but {other:?}\n{}", self.log()),
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// SIGTERM to the keeper, and both are gone when this returns.
    pub fn stop(&mut self) {
        let hello = self.hello();
        kill(hello.keeper_pid, libc::SIGTERM);
        self.reap();
        wait_until("both have ended", || {
            !is_alive(hello.keeper_pid) && !is_alive(hello.pid)
        });
    }

    /// blockd answers nobody until `go_on`; its keeper does not mind, since it is alive.
    pub fn stop_answering(&self) {
        kill(self.hello().pid, libc::SIGSTOP);
    }

    pub fn go_on(&self) {
        self.recorded().into_iter().for_each(|pid| kill(pid, libc::SIGCONT));
    }

    fn reap(&mut self) {
        if let Some(mut keeper) = self.keeper.take() {
            let end = Instant::now() + Duration::from_secs(2);
            while Instant::now() < end && keeper.try_wait().is_ok_and(|status| status.is_none()) {
                std::thread::sleep(Duration::from_millis(2));
            }
            let _ = keeper.kill();
            let _ = keeper.wait();
        }
    }

    /// Kills both, which ends the connection: whoever waits on the mounts gets an error.
    pub fn destroy(&self) {
        for _ in 0..50 {
            // Stopped first, so that neither starts the other while both are killed.
            let pids = self.recorded();
            pids.iter().for_each(|pid| kill(*pid, libc::SIGSTOP));
            pids.iter().for_each(|pid| kill(*pid, libc::SIGKILL));
            if pids.iter().all(|pid| !is_alive(*pid)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Whether any process of this pair runs, also one that has written no record yet.
    pub fn any_runs(&self) -> bool {
        let folder = self.text("");
        std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
            std::fs::read(entry.path().join("cmdline"))
                .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&folder))
        })
    }

    /// Pids from the process records, which name the present ones.
    fn recorded(&self) -> Vec<u32> {
        let read = |name: &str| -> Option<u32> {
            let text = std::fs::read(self.path(name)).ok()?;
            let record: serde_json::Value = serde_json::from_slice(&text).ok()?;
            let pid = u32::try_from(record["pid"].as_u64()?).ok()?;
            // A number that has been given to another program must not be killed.
            let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
            (line.contains("aenv-blockd") && line.contains(&*self.folder.path().to_string_lossy())).then_some(pid)
        };
        ["run/keeper.json", "run/blockd.json"]
            .iter()
            .filter_map(|name| read(name))
            .collect()
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the daemons:\n{}", self.log());
        }
        self.destroy();
        if let Some(keeper) = &mut self.keeper {
            let _ = keeper.kill();
        }
        self.reap();
        for mount in ["mnt/memory", "mnt/disks"] {
            while rustix::mount::unmount(self.path(mount), rustix::mount::UnmountFlags::DETACH).is_ok() {}
        }
    }
}

pub struct Client {
    stream: UnixStream,
    next_id: u64,
}

impl Client {
    /// None when the connection breaks.
    pub fn try_ask<T: DeserializeOwned>(&mut self, operation: Operation) -> Option<Outcome<T>> {
        let id = self.send(operation)?;
        let (answered, outcome) = self.receive::<T>()?;
        assert_eq!(answered, id);
        Some(outcome)
    }

    pub fn send(&mut self, operation: Operation) -> Option<u64> {
        let id = self.next_id;
        self.next_id += 1;
        let body = serde_json::to_vec(&Request { id, operation }).unwrap();
        write_frame(&mut self.stream, &body).ok()?;
        Some(id)
    }

    pub fn receive<T: DeserializeOwned>(&mut self) -> Option<(u64, Outcome<T>)> {
        let body = read_frame(&mut self.stream).ok()??;
        Some(decode_answer(&body).unwrap())
    }

    pub fn ask<T: DeserializeOwned>(&mut self, operation: Operation) -> T {
        match self.try_ask(operation) {
            Some(Outcome::Ok(ok)) => ok,
            Some(Outcome::Error(ErrorBody { kind, message })) => panic!("{kind:?}: {message}"),
            None => panic!("the connection broke"),
        }
    }

    pub fn refused(&mut self, operation: Operation) -> ErrorKind {
        match self.try_ask::<serde_json::Value>(operation) {
            Some(Outcome::Error(error)) => error.kind,
            other => panic!("not refused: {other:?}"),
        }
    }

    pub fn memory(&mut self, name: &str, size_bytes: u64, layers: &[String]) -> ExportOk {
        let layers = layers.to_vec();
        self.ask(Operation::ExportMemory(ExportMemory {
            name: name.to_owned(),
            size_bytes,
            layers,
        }))
    }

    pub fn disk(&mut self, name: &str, size_bytes: u64, layers: &[String], upper: &str) -> ExportOk {
        let (layers, upper) = (layers.to_vec(), upper.to_owned());
        self.ask(Operation::ExportDisk(ExportDisk {
            name: name.to_owned(),
            size_bytes,
            layers,
            upper,
        }))
    }

    pub fn seal(&mut self, name: &str, new_upper: Option<&str>) -> SealDiskOk {
        self.ask(seal(name, new_upper))
    }

    pub fn unexport(&mut self, name: &str) {
        self.ask::<Empty>(Operation::Unexport(Name { name: name.to_owned() }));
    }
}

pub fn seal(name: &str, new_upper: Option<&str>) -> Operation {
    Operation::SealDisk(SealDisk {
        name: name.to_owned(),
        new_upper: new_upper.map(str::to_owned),
    })
}

pub fn open(path: &str) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

pub fn kill(pid: u32, signal: i32) {
    // SAFETY: sends a signal to a process that the test started.
    unsafe { libc::kill(i32::try_from(pid).unwrap(), signal) };
}

/// A process that ended and waits for its parent does not count.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

pub fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + DEADLINE;
    while !condition() {
        assert!(Instant::now() < end, "not within {DEADLINE:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub fn discard(file: &File, offset: u64, length: u64) -> rustix::io::Result<()> {
    use rustix::fs::FallocateFlags;
    rustix::fs::fallocate(
        file,
        FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        offset,
        length,
    )
}

/// A small generator with a printed seed: tests must be repeatable.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        bytes
            .chunks_mut(8)
            .for_each(|chunk| chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]));
    }
}
