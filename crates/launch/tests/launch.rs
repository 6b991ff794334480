//! The binary as its callers use it: what the started process looks like, and what is left when it could not start.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// A test's folder; kills what it started when it ends, also by a panic.
struct Scene {
    dir: TempDir,
}

impl Scene {
    fn new() -> Self {
        Scene {
            dir: TempDir::new().unwrap(),
        }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, options: &[&str], program: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-launch"));
        command
            .args(["--record".as_ref(), self.path("record").as_os_str()])
            .args(["--log".as_ref(), self.path("log").as_os_str()])
            .args(options)
            .arg("--")
            .args(program);
        command
    }

    fn record(&self) -> Value {
        serde_json::from_slice(&fs::read(self.path("record")).unwrap()).unwrap()
    }

    /// The log once the program has written `lines` lines.
    fn log(&self, lines: usize) -> String {
        wait_for(|| {
            let text = fs::read_to_string(self.path("log")).unwrap_or_default();
            (text.lines().count() >= lines).then_some(text)
        })
    }

    fn launch_shell(&self, options: &[&str], script: &str) -> u64 {
        let output = self.command(options, &["/bin/sh", "-c", script]).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        self.record()["pid"].as_u64().unwrap()
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        if let Ok(text) = fs::read(self.path("record"))
            && let Ok(record) = serde_json::from_slice::<Value>(&text)
            && let Some(pid) = record["pid"].as_u64()
            && stat_field(pid, 22) == record["start_time_ticks"].as_u64()
        {
            // SAFETY: a signal to the recorded process; its start time was compared in the line above.
            unsafe { libc::kill(i32::try_from(pid).unwrap(), libc::SIGKILL) };
        }
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Field `number` of /proc/PID/stat, counted from 1 as in proc(5); None when the process is gone.
fn stat_field(pid: u64, number: usize) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(number - 3)?.parse().ok()
}

fn wait_for<T>(mut probe: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(value) = probe() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited for 10 s");
        std::thread::yield_now();
    }
}

#[test]
fn the_record_names_the_process_and_equals_the_printed_line() {
    let scene = Scene::new();
    let output = scene.command(&[], &["/bin/sleep", "60"]).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(output.stdout, fs::read(scene.path("record")).unwrap());
    let record = scene.record();
    let pid = record["pid"].as_u64().unwrap();
    assert_eq!(record["start_time_ticks"].as_u64(), stat_field(pid, 22));
    assert_eq!(record["argv"], serde_json::json!(["/bin/sleep", "60"]));
}

#[test]
fn the_record_is_there_when_the_program_starts() {
    let scene = Scene::new();
    let record = scene.path("record");
    scene.launch_shell(&[], &format!("cat {}; sleep 60", record.display()));
    assert_eq!(scene.log(1), fs::read_to_string(record).unwrap());
}

#[test]
fn the_program_leads_its_own_group_in_a_session_without_leader() {
    let scene = Scene::new();
    let pid = scene.launch_shell(&[], "sleep 60");
    let (group, session) = (stat_field(pid, 5), stat_field(pid, 6).unwrap());
    assert_eq!(group, Some(pid));
    assert_ne!(session, pid);
    // SAFETY: getsid only asks.
    let own = u64::try_from(unsafe { libc::getsid(0) }).unwrap();
    assert_ne!(session, own);
    assert_ne!(stat_field(pid, 4), Some(u64::from(std::process::id())));
}

#[test]
fn descriptors_of_the_caller_do_not_reach_the_program() {
    let scene = Scene::new();
    let leak = fs::File::open("/etc/passwd").unwrap();
    let number = leak.as_raw_fd();
    let mut command = scene.command(&[], &["/bin/sh", "-c", "ls -l /proc/$$/fd; sleep 60"]);
    // SAFETY: fcntl is async-signal-safe; it lets the descriptor through exec, as careless callers do.
    unsafe {
        command.pre_exec(move || {
            libc::fcntl(number, libc::F_SETFD, 0);
            Ok(())
        });
    }
    assert!(command.output().unwrap().status.success());
    let log = scene.log(4);
    assert!(log.contains("0 -> /dev/null"), "{log}");
    assert!(
        log.contains("1 -> ") && log.contains("2 -> ") && !log.contains("passwd"),
        "{log}"
    );
}

#[test]
fn signals_are_reset() {
    let scene = Scene::new();
    let mut command = scene.command(&[], &["/bin/cat", "/proc/self/status"]);
    // SAFETY: signal and sigprocmask are async-signal-safe, and the set is initialised by sigfillset.
    unsafe {
        command.pre_exec(|| {
            libc::signal(libc::SIGHUP, libc::SIG_IGN);
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
            Ok(())
        });
    }
    assert!(command.output().unwrap().status.success());
    let status = wait_for(|| {
        let text = fs::read_to_string(scene.path("log")).ok()?;
        text.contains("nonvoluntary").then_some(text)
    });
    for line in ["SigBlk:\t0000000000000000", "SigIgn:\t0000000000000000"] {
        assert!(status.contains(line), "{status}");
    }
}

#[test]
fn limits_and_directory_are_set() {
    let scene = Scene::new();
    let directory = scene.dir.path().to_str().unwrap().to_owned();
    scene.launch_shell(
        &["--nofile", "77", "--oom-score-adj", "123", "--cwd", &directory],
        "ulimit -n; ulimit -Hn; cat /proc/$$/oom_score_adj; pwd; sleep 60",
    );
    assert_eq!(scene.log(4), format!("77\n77\n123\n{directory}\n"));
}

#[test]
fn the_log_is_appended_to() {
    let scene = Scene::new();
    fs::write(scene.path("log"), "before\n").unwrap();
    scene.launch_shell(&[], "echo out; echo err >&2; sleep 60");
    assert_eq!(scene.log(3), "before\nout\nerr\n");
}

#[test]
fn a_program_that_cannot_be_executed_is_reported_and_leaves_no_record() {
    let scene = Scene::new();
    let output = scene.command(&[], &["/nonexistent/program!", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        stderr(&output),
        "aenv-launch: cannot execute /nonexistent/program!: No such file or directory (os error 2)\n"
    );
    assert!(output.stdout.is_empty());
    assert_eq!(files(scene.dir.path()), ["log"]);
}

#[test]
fn a_record_that_cannot_be_written_stops_the_program() {
    let scene = Scene::new();
    let marker = scene.path("marker");
    let mut command = Command::new(env!("CARGO_BIN_EXE_aenv-launch"));
    command.args(["--record", "/nonexistent/record", "--log", "/dev/null", "--"]);
    let output = command.arg("/bin/touch").arg(&marker).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write the record /nonexistent/record"));
    assert!(!marker.exists());
}

#[test]
fn an_unknown_namespace_and_a_bad_command_line_are_named() {
    let scene = Scene::new();
    let output = scene
        .command(&["--netns", "aenv-none"], &["/bin/true"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("/run/netns/aenv-none"), "{}", stderr(&output));
    let output = scene.command(&["--what"], &["/bin/true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("unknown option --what"));
}

fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}
