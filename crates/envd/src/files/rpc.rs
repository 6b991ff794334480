//! The service `filesystem.Filesystem`, watchers left out: their calls answer `unimplemented`.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::json;

use super::entry::EntryInfo;
use super::path::{make_dirs, resolve};
use crate::connect::{Code, RpcError};
use crate::daemon::Daemon;
use crate::json::null_default;
use crate::rpc::Call;
use crate::settings::Defaults;
use crate::users::{User, Users};

/// Entries of one listing; an answer has to be built in memory.
const LIST_ENTRIES_MAX: usize = 100_000;

/// The fields of all requests of the service.
#[derive(Default, Deserialize)]
#[serde(default)]
struct PathRequest {
    #[serde(deserialize_with = "null_default")]
    path: String,
    #[serde(deserialize_with = "null_default")]
    source: String,
    #[serde(deserialize_with = "null_default")]
    destination: String,
    #[serde(deserialize_with = "null_default")]
    depth: u32,
}

/// Whose request it is and how paths are read.
struct Caller {
    users: Users,
    user: User,
    base: PathBuf,
    strict: bool,
}

impl Caller {
    fn new(defaults: &Defaults, name: Option<&str>, strict: bool) -> Result<Self, RpcError> {
        let users = Users::load();
        let unknown = |name| RpcError::new(Code::Unauthenticated, format!("invalid username: '{name}'"));
        let user = defaults.user(&users, name).map_err(unknown)?;
        Ok(Caller {
            base: defaults.base(&user),
            users,
            user,
            strict,
        })
    }

    fn path(&self, text: &str) -> PathBuf {
        resolve(text, &self.base, &self.user.home)
    }

    fn entry(&self, path: &Path) -> Result<EntryInfo, RpcError> {
        let entry = EntryInfo::of(path, &self.users).map_err(|error| path_error(path, &error))?;
        Ok(if self.strict { entry.for_strict_client() } else { entry })
    }
}

/// Runs one unary call on a blocking thread.
pub async fn unary(daemon: &Daemon, call: &Call, method: &str, body: &[u8]) -> Result<serde_json::Value, RpcError> {
    let run = match method {
        "Stat" => stat,
        "MakeDir" => make_dir,
        "Move" => move_entry,
        "ListDir" => list_dir,
        "Remove" => remove,
        other => {
            let text = format!("filesystem.Filesystem/{other} is not implemented");
            return Err(RpcError::new(Code::Unimplemented, text));
        }
    };
    let request: PathRequest = call.parse(body)?;
    let defaults = daemon.settings.borrow().defaults.clone();
    let (user, strict) = (call.user.clone(), call.strict_client);
    let work = move || run(&Caller::new(&defaults, user.as_deref(), strict)?, &request);
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|error| Err(RpcError::new(Code::Internal, error.to_string())))
}

fn path_error(path: &Path, error: &io::Error) -> RpcError {
    if error.kind() == io::ErrorKind::NotFound {
        return RpcError::new(Code::NotFound, format!("path '{}' does not exist", path.display()));
    }
    RpcError::from_io(&format!("path '{}'", path.display()), error)
}

fn stat(caller: &Caller, request: &PathRequest) -> Result<serde_json::Value, RpcError> {
    Ok(json!({ "entry": caller.entry(&caller.path(&request.path))? }))
}

fn make_dir(caller: &Caller, request: &PathRequest) -> Result<serde_json::Value, RpcError> {
    let path = caller.path(&request.path);
    match std::fs::metadata(&path) {
        Ok(meta) if meta.is_dir() => {
            let text = format!("directory already exists: {}", path.display());
            return Err(RpcError::new(Code::AlreadyExists, text));
        }
        Ok(_) => {
            let text = format!("path already exists but it is not a directory: {}", path.display());
            return Err(RpcError::new(Code::InvalidArgument, text));
        }
        // make_dirs tells every other trouble better.
        Err(_) => make_dirs(&path, &caller.user).map_err(|error| path_error(&path, &error))?,
    }
    Ok(json!({ "entry": caller.entry(&path)? }))
}

fn move_entry(caller: &Caller, request: &PathRequest) -> Result<serde_json::Value, RpcError> {
    let (source, destination) = (caller.path(&request.source), caller.path(&request.destination));
    std::fs::symlink_metadata(&source).map_err(|error| path_error(&source, &error))?;
    if let Some(parent) = destination.parent() {
        make_dirs(parent, &caller.user).map_err(|error| path_error(parent, &error))?;
    }
    let what = || format!("moving '{}' to '{}'", source.display(), destination.display());
    std::fs::rename(&source, &destination).map_err(|error| RpcError::from_io(&what(), &error))?;
    Ok(json!({ "entry": caller.entry(&destination)? }))
}

fn list_dir(caller: &Caller, request: &PathRequest) -> Result<serde_json::Value, RpcError> {
    let path = caller.path(&request.path);
    let meta = std::fs::metadata(&path).map_err(|error| path_error(&path, &error))?;
    if !meta.is_dir() {
        let text = format!("path is not a directory: {}", path.display());
        return Err(RpcError::new(Code::InvalidArgument, text));
    }
    let mut entries = Vec::new();
    walk(caller, &path, request.depth.max(1), &mut entries)?;
    Ok(json!({ "entries": entries }))
}

/// Depth first, names in byte order, links not followed. What vanishes meanwhile is left out.
fn walk(caller: &Caller, folder: &Path, depth: u32, out: &mut Vec<EntryInfo>) -> Result<(), RpcError> {
    let names: BTreeSet<_> = match std::fs::read_dir(folder) {
        Ok(listing) => listing.flatten().map(|entry| entry.file_name()).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(path_error(folder, &error)),
    };
    for name in names {
        let path = folder.join(name);
        let Ok(entry) = caller.entry(&path) else {
            continue;
        };
        if out.len() >= LIST_ENTRIES_MAX {
            let text = format!("more than {LIST_ENTRIES_MAX} entries, list with a smaller depth");
            return Err(RpcError::new(Code::ResourceExhausted, text));
        }
        let descend = depth > 1 && entry.r#type == "FILE_TYPE_DIRECTORY" && entry.symlink_target.is_none();
        out.push(entry);
        if descend {
            walk(caller, &path, depth - 1, out)?;
        }
    }
    Ok(())
}

/// Recursive; a path that is not there is fine.
fn remove(caller: &Caller, request: &PathRequest) -> Result<serde_json::Value, RpcError> {
    let path = caller.path(&request.path);
    let result = match std::fs::symlink_metadata(&path) {
        Ok(meta) if meta.is_dir() => std::fs::remove_dir_all(&path),
        Ok(_) => std::fs::remove_file(&path),
        Err(error) => Err(error),
    };
    match result {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(path_error(&path, &error)),
        _ => Ok(json!({})),
    }
}
