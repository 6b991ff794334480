//! POST /init: the node tells the guest who it is now.
//!
//! Called after the first boot and after each restore, before the sandbox counts as running; also later, when
//! settings change. Every field is optional and an absent one changes nothing, so repeating a call is safe.

use std::collections::BTreeMap;
use std::path::Path;

use http::StatusCode;
use http::request::Parts;
use hyper::body::Incoming;
use jiff::Timestamp;
use serde::Deserialize;

use crate::auth;
use crate::daemon::{Daemon, Machine};
use crate::http::answer::Answer;
use crate::http::body::{BodyError, Reader};
use crate::identity::{self, IdentityError};
use crate::image::{self, ImageError};
use crate::json::Base64;
use crate::users::Users;

/// Environment variables are the only long part.
const BODY_BYTES_MAX: usize = 4 << 20;

/// Bytes of entropy that make two restored copies differ for sure.
const ENTROPY_BYTES_MIN: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum InitError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("cannot read the message: {0}")]
    Message(#[from] serde_json::Error),
    #[error("access token is set and the given one does not match")]
    Token,
    #[error("{field} is not supported")]
    Unsupported { field: &'static str },
    #[error("timestamp '{text}' is not RFC 3339")]
    Timestamp { text: String },
    #[error("machineID '{text}' is not 32 hexadecimal digits")]
    MachineId { text: String },
    #[error("hostname '{text}' is not a host name")]
    Hostname { text: String },
    #[error("entropy has {length} bytes, at least {ENTROPY_BYTES_MIN} are needed")]
    Entropy { length: usize },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Image(#[from] ImageError),
}

impl InitError {
    fn status(&self) -> StatusCode {
        match self {
            InitError::Token => StatusCode::UNAUTHORIZED,
            InitError::Identity(_) | InitError::Image(ImageError::File { .. } | ImageError::NumbersUsedUp) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// The message, as E2B's daemon takes it, with our additions (from `hostname` on).
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Message {
    /// Replaces all variables of an earlier call.
    env_vars: Option<BTreeMap<String, String>>,
    /// An empty token removes the protection.
    access_token: Option<String>,
    timestamp: Option<String>,
    default_user: Option<String>,
    default_workdir: Option<String>,
    #[serde(rename = "hyperloopIP")]
    hyperloop_ip: Option<String>,
    #[serde(rename = "lifecycleID")]
    lifecycle_id: Option<String>,
    ca_bundle: Option<String>,
    volume_mounts: Option<Vec<serde_json::Value>>,
    hostname: Option<String>,
    #[serde(rename = "machineID")]
    machine_id: Option<String>,
    entropy: Option<Base64>,
    #[serde(rename = "sandboxID")]
    sandbox_id: Option<String>,
    #[serde(rename = "templateID")]
    template_id: Option<String>,
    /// Sent once, when a template is built of an image: make this user, and this directory of the default user, if they
    /// are missing.
    create_user: Option<String>,
    create_workdir: Option<String>,
    /// Sent last, to a guest whose disk alone is wanted: write out the root file system and stand still on it.
    freeze_disk: Option<bool>,
}

pub async fn handle(daemon: &Daemon, connection: u64, parts: &Parts, body: Incoming) -> Answer {
    match run(daemon, connection, parts, body).await {
        Ok(()) => Answer::no_content(),
        Err(error) => {
            let source = std::error::Error::source(&error)
                .map(|source| format!(": {source}"))
                .unwrap_or_default();
            Answer::error(error.status(), &format!("{error}{source}"))
        }
    }
}

async fn run(daemon: &Daemon, connection: u64, parts: &Parts, body: Incoming) -> Result<(), InitError> {
    let bytes = Reader::new(body).collect(BODY_BYTES_MAX).await?;
    let message: Message = if bytes.is_empty() {
        Message::default()
    } else {
        serde_json::from_slice(&bytes)?
    };
    authorize(daemon, parts, &message)?;
    let checked = Checked::new(&message)?;
    if daemon.machine == Machine::Guest {
        apply_to_guest(&message, &checked)?;
    }
    apply_to_settings(daemon, connection, message);
    Ok(())
}

/// A set token must be shown to change anything: in the header, or by repeating it in the body.
fn authorize(daemon: &Daemon, parts: &Parts, message: &Message) -> Result<(), InitError> {
    let settings = daemon.settings.borrow();
    let Some(token) = settings.token.as_deref() else {
        return Ok(());
    };
    let repeated = message
        .access_token
        .as_deref()
        .is_some_and(|given| auth::equal(given, token));
    if repeated || auth::has_token(&parts.headers, Some(token)) {
        Ok(())
    } else {
        Err(InitError::Token)
    }
}

/// Fields that need more than being a string, checked before anything is changed.
struct Checked {
    now: Option<Timestamp>,
}

impl Checked {
    fn new(message: &Message) -> Result<Self, InitError> {
        if message.volume_mounts.as_ref().is_some_and(|mounts| !mounts.is_empty()) {
            return Err(InitError::Unsupported { field: "volumeMounts" });
        }
        if message.ca_bundle.as_ref().is_some_and(|bundle| !bundle.is_empty()) {
            return Err(InitError::Unsupported { field: "caBundle" });
        }
        if let Some(length) = message.entropy.as_ref().map(|entropy| entropy.0.len())
            && length < ENTROPY_BYTES_MIN
        {
            return Err(InitError::Entropy { length });
        }
        if let Some(text) = message.machine_id.as_ref().filter(|text| !is_machine_id(text)) {
            return Err(InitError::MachineId { text: text.clone() });
        }
        if let Some(text) = message.hostname.as_ref().filter(|text| !identity::is_hostname(text)) {
            return Err(InitError::Hostname { text: text.clone() });
        }
        let parse = |text: &String| text.parse().map_err(|_| InitError::Timestamp { text: text.clone() });
        Ok(Checked {
            now: message.timestamp.as_ref().map(parse).transpose()?,
        })
    }
}

fn is_machine_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn apply_to_guest(message: &Message, checked: &Checked) -> Result<(), InitError> {
    if let Some(now) = checked.now {
        identity::set_clock(now)?;
    }
    if let Some(entropy) = &message.entropy {
        identity::reseed(&entropy.0)?;
    }
    if let Some(hostname) = &message.hostname {
        identity::set_hostname(hostname)?;
    }
    if let Some(address) = message.hyperloop_ip.as_ref().filter(|address| !address.is_empty()) {
        identity::set_host_entry("events.e2b.local", address)?;
    }
    if let Some(machine_id) = &message.machine_id {
        identity::set_machine_id(machine_id)?;
    }
    identity::write_sandbox_files(message.sandbox_id.as_deref(), message.template_id.as_deref())?;
    prepare_image(message)
}

fn prepare_image(message: &Message) -> Result<(), InitError> {
    let root = Path::new("/");
    if let Some(user) = &message.create_user {
        image::ensure_user(root, &Users::load(), user)?;
        let name = message.default_user.as_ref().filter(|name| !name.is_empty());
        let owner = image::known_user(&Users::load(), name.unwrap_or(user))?;
        if let Some(workdir) = message.create_workdir.as_ref().filter(|path| !path.is_empty()) {
            image::ensure_workdir(root, workdir, &owner)?;
        }
    }
    if message.freeze_disk == Some(true) {
        image::freeze(root)?;
    }
    Ok(())
}

fn apply_to_settings(daemon: &Daemon, connection: u64, message: Message) {
    let mut settings = daemon.settings.borrow_mut();
    if let Some(env_vars) = message.env_vars {
        settings.env_vars = env_vars;
    }
    if let Some(token) = message.access_token {
        settings.token = Some(token).filter(|token| !token.is_empty());
    }
    if let Some(user) = message.default_user {
        settings.defaults.user = Some(user).filter(|user| !user.is_empty());
    }
    if let Some(workdir) = message.default_workdir {
        settings.defaults.workdir = Some(workdir).filter(|path| !path.is_empty()).map(Into::into);
    }
    settings.sandbox_id = message.sandbox_id.or(settings.sandbox_id.take());
    settings.template_id = message.template_id.or(settings.template_id.take());
    settings.refresh_env();
    if let Some(id) = message.lifecycle_id {
        let before = settings.lifecycle_id.replace(id);
        // A new life after a restore: the peers of all older connections are gone, and a reader that never
        // comes back would hold its process up.
        if before.is_some() && before != settings.lifecycle_id {
            daemon.oldest_connection.send_replace(connection);
        }
    }
}
