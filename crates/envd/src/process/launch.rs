//! From a client's request to a registered, running process.
//!
//! Owns the environment, the choice of the program file and the descriptors on our side. Everything that
//! touches a file system runs on a blocking thread.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::pump::{self, Source};
use super::registry::RUNNING_MAX;
use super::ring::{Kind, Ring};
use super::spawn::{self, Candidate, Plan, Started, Stdio, Step};
use super::stdin::{Channel, Input};
use super::stdio::{open_pipes, open_terminal};
use super::stream::Readers;
use super::{Config, Process, Shared, SpawnError};
use crate::daemon::Daemon;
use crate::settings::Defaults;
use crate::users::{User, Users};

/// Where programs are looked for when nobody sets PATH (Debian's default for root and users alike).
const PATH_DEFAULT: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The shell that the SDKs always ask for, and what stands in where an image has none.
const BASH: &str = "/bin/bash";
const BASH_STAND_INS: [&str; 3] = ["/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh"];

/// Exit codes of shells for a program that cannot be run and one that is not there.
const EXIT_NOT_FOUND: i32 = 127;
const EXIT_NOT_EXECUTABLE: i32 = 126;

/// One request to start a process.
#[derive(Debug)]
pub struct Order {
    pub config: Config,
    /// Columns and rows, when the process gets a terminal.
    pub terminal: Option<(u16, u16)>,
    pub stdin: bool,
    pub tag: Option<String>,
    /// Name from the request; `None` is the default user.
    pub user: Option<String>,
    /// When to kill the process group.
    pub deadline: Option<Instant>,
}

/// What the blocking part hands back.
struct Launched {
    started: Started,
    input: Option<OwnedFd>,
    outputs: Vec<(Kind, OwnedFd)>,
    exec_error: Option<(i32, String)>,
}

/// Starts a process and registers it. Safe to cancel: call it in a task of its own, so that a client that goes
/// away meanwhile leaves a registered process behind, not a lost one.
pub async fn launch(daemon: Rc<Daemon>, order: Order) -> Result<Shared, SpawnError> {
    let running = daemon.processes.live_count();
    if running >= RUNNING_MAX {
        return Err(SpawnError::TooMany { running });
    }
    let starting = daemon.processes.starting();
    let defaults = daemon.settings.borrow().defaults.clone();
    let (config, user, terminal, stdin) = (order.config.clone(), order.user.clone(), order.terminal, order.stdin);
    let launched = tokio::task::spawn_blocking(move || start(&config, user.as_deref(), &defaults, terminal, stdin))
        .await
        .map_err(|error| SpawnError::Clone(io::Error::other(error)))??;
    let process = adopt(&daemon, order, launched)?;
    drop(starting);
    Ok(process)
}

fn adopt(daemon: &Rc<Daemon>, order: Order, launched: Launched) -> Result<Shared, SpawnError> {
    let channel = if order.terminal.is_some() {
        Channel::Pty
    } else {
        Channel::Stdin
    };
    let input = launched.input.map(watched).transpose().map_err(SpawnError::Pipe)?;
    let mut sources = Vec::with_capacity(2);
    for (kind, fd) in launched.outputs {
        sources.push(Source {
            kind,
            fd: watched(fd).map_err(SpawnError::Pipe)?,
        });
    }
    let process = Rc::new(Process {
        pid: launched.started.pid,
        serial: daemon.next_serial(),
        tag: order.tag,
        config: order.config,
        input: Input::new(channel, input),
        ring: RefCell::new(Ring::default()),
        readers: RefCell::new(Readers::default()),
        room: Notify::new(),
        exit: Cell::new(None),
        exited: Notify::new(),
        gone: Notify::new(),
        end: RefCell::new(None),
        killed_by_us: Cell::new(false),
        exec_error: launched.exec_error,
    });
    daemon.processes.add(&process);
    let (pumped, daemon) = (Rc::clone(&process), Rc::clone(daemon));
    tokio::task::spawn_local(async move {
        pump::run(Rc::clone(&pumped), sources, order.deadline).await;
        daemon.processes.retire(&pumped);
    });
    Ok(process)
}

fn watched(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the descriptor is owned and stays inside the AsyncFd, which nothing here takes apart.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

/// The blocking part: look up, open, clone.
fn start(
    config: &Config,
    user: Option<&str>,
    defaults: &Defaults,
    terminal: Option<(u16, u16)>,
    stdin: bool,
) -> Result<Launched, SpawnError> {
    if config.cmd.is_empty() {
        return Err(SpawnError::NoCommand);
    }
    let users = Users::load();
    let user = defaults
        .user(&users, user)
        .map_err(|name| SpawnError::UserUnknown { name })?;
    let cwd = working_directory(config.cwd.as_deref(), defaults, &user)?;
    let env = environment(config, defaults, &user, terminal.is_some());
    let path = env.get("PATH").map_or("", String::as_str);
    let candidates = candidates(&config.cmd, path)?;
    let (stdio, input, outputs) = match terminal {
        Some(size) => open_terminal(size, &user)?,
        None => open_pipes(stdin)?,
    };
    let plan = Plan {
        candidates,
        args: config
            .args
            .iter()
            .map(|arg| c_string("an argument", arg))
            .collect::<Result<_, _>>()?,
        env: env
            .iter()
            .map(|(key, value)| c_string("an environment variable", &format!("{key}={value}")))
            .collect::<Result<_, _>>()?,
        cwd: c_string("cwd", &cwd.to_string_lossy())?,
        uid: user.uid,
        gid: user.gid,
        groups: user.groups.clone(),
        stdio,
    };
    let mut started = spawn::spawn(plan)?;
    let exec_error = started
        .failure
        .take()
        .map(|(step, error)| explain(config, &user, &cwd, step, &error));
    if let Some((_, text)) = &exec_error {
        write_reason(&started.stdio, text);
    }
    Ok(Launched {
        started,
        input,
        outputs,
        exec_error,
    })
}

/// Exit code and text for a program that did not start, as a shell would put it.
fn explain(config: &Config, user: &User, cwd: &Path, step: Step, error: &io::Error) -> (i32, String) {
    let is_missing = error.kind() == io::ErrorKind::NotFound;
    let cmd = &config.cmd;
    let error_text = error.to_string();
    // The number that std appends means nothing to the reader of a shell-like message.
    let error = error_text.split(" (os error").next().unwrap_or_default();
    match step {
        Step::Exec if is_missing => (EXIT_NOT_FOUND, format!("{cmd}: command not found")),
        Step::Exec => (EXIT_NOT_EXECUTABLE, format!("{cmd}: cannot execute: {error}")),
        Step::Directory => (
            EXIT_NOT_EXECUTABLE,
            format!("{cmd}: cannot enter '{}' as {}: {error}", cwd.display(), user.name),
        ),
        Step::User => (
            EXIT_NOT_EXECUTABLE,
            format!("{cmd}: cannot become user {}: {error}", user.name),
        ),
        Step::Terminal | Step::Descriptors => (
            EXIT_NOT_EXECUTABLE,
            format!("{cmd}: cannot set up its {step:?}: {error}"),
        ),
    }
}

/// The reason goes where the program's own errors would have gone, before our copy of it is closed.
fn write_reason(stdio: &Stdio, text: &str) {
    let fd = match stdio {
        Stdio::Pipes { stderr, .. } => stderr,
        Stdio::Terminal(slave) => slave,
    };
    // An empty pipe takes a line at once; the text is in the end event as well.
    if let Ok(copy) = fd.try_clone() {
        let _ = writeln!(std::fs::File::from(copy), "{text}");
    }
}

fn c_string(what: &'static str, text: &str) -> Result<CString, SpawnError> {
    CString::new(text).map_err(|_| SpawnError::Nul { what })
}

/// The directory a process starts in. One that the client named must exist; a home that an image lacks is
/// replaced by the root, since a minimal image has no directories at all.
fn working_directory(cwd: Option<&str>, defaults: &Defaults, user: &User) -> Result<PathBuf, SpawnError> {
    let Some(cwd) = cwd.filter(|cwd| !cwd.is_empty()) else {
        let path = defaults.base(user);
        return Ok(if path.is_dir() { path } else { PathBuf::from("/") });
    };
    let path = crate::files::path::resolve(cwd, &defaults.base(user), &user.home);
    match std::fs::metadata(&path) {
        Ok(meta) if meta.is_dir() => Ok(path),
        Ok(_) => Err(SpawnError::DirectoryNot {
            path: path.display().to_string(),
        }),
        Err(_) => Err(SpawnError::DirectoryMissing {
            path: path.display().to_string(),
        }),
    }
}

/// Later entries win: what every process has, then the sandbox's variables, then the request's.
fn environment(config: &Config, defaults: &Defaults, user: &User, terminal: bool) -> BTreeMap<String, String> {
    let mut env = BTreeMap::from([
        ("PATH".to_owned(), PATH_DEFAULT.to_owned()),
        ("HOME".to_owned(), user.home.display().to_string()),
        ("USER".to_owned(), user.name.clone()),
        ("LOGNAME".to_owned(), user.name.clone()),
        ("SHELL".to_owned(), user.shell.clone()),
    ]);
    if terminal {
        // Without a UTF-8 locale, tmux and friends show underscores.
        env.insert("LANG".into(), "C.UTF-8".into());
        env.insert("TERM".into(), "xterm-256color".into());
    }
    env.extend(
        defaults
            .env
            .iter()
            .chain(&config.envs)
            .map(|(key, value)| (key.clone(), value.clone())),
    );
    env
}

/// The files to try for a command, in order.
fn candidates(cmd: &str, path: &str) -> Result<Vec<Candidate>, SpawnError> {
    let candidate = |file: &str, name: &str| {
        Ok(Candidate {
            path: c_string("cmd", file)?,
            argv0: c_string("cmd", name)?,
        })
    };
    if cmd == BASH {
        return std::iter::once(&BASH)
            .chain(&BASH_STAND_INS)
            .map(|shell| candidate(shell, shell))
            .collect();
    }
    if cmd.contains('/') {
        return Ok(vec![candidate(cmd, cmd)?]);
    }
    path.split(':')
        .map(|folder| if folder.is_empty() { "." } else { folder })
        .map(|folder| candidate(&format!("{}/{cmd}", folder.trim_end_matches('/')), cmd))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User {
            name: "user".into(),
            uid: 1,
            gid: 1,
            home: "/home/user".into(),
            shell: "/bin/sh".into(),
            groups: vec![],
        }
    }

    #[test]
    fn the_request_wins_over_the_sandbox_and_the_base() {
        let defaults = Defaults {
            env: BTreeMap::from([("A".into(), "sandbox".into()), ("HOME".into(), "/x".into())]),
            ..Defaults::default()
        };
        let envs = BTreeMap::from([("A".into(), "request".into())]);
        let env = environment(
            &Config {
                envs,
                ..Config::default()
            },
            &defaults,
            &user(),
            true,
        );
        assert_eq!(
            (env["A"].as_str(), env["HOME"].as_str(), env["USER"].as_str()),
            ("request", "/x", "user")
        );
        assert_eq!(env["LANG"], "C.UTF-8");
    }

    #[test]
    fn a_plain_name_is_looked_for_in_path_and_a_path_is_not() {
        let files = |cmd, path| -> Vec<String> {
            let found = candidates(cmd, path).unwrap();
            found.into_iter().map(|c| c.path.into_string().unwrap()).collect()
        };
        assert_eq!(files("ls", "/a:/b/:"), ["/a/ls", "/b/ls", "./ls"]);
        assert_eq!(files("./ls", "/a"), ["./ls"]);
        assert_eq!(files("/bin/bash", "/a").last().unwrap(), "/bin/sh");
    }

    #[test]
    fn a_missing_directory_of_the_client_is_an_error_and_a_missing_home_is_not() {
        let defaults = Defaults::default();
        let lost = User {
            home: "/no/such/home".into(),
            ..user()
        };
        assert_eq!(working_directory(None, &defaults, &lost).unwrap(), PathBuf::from("/"));
        let error = working_directory(Some("/no/such"), &defaults, &lost).unwrap_err();
        assert_eq!(error.to_string(), "cwd '/no/such' does not exist");
    }
}
