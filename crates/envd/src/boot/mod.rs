//! PID 1: from the kernel's hand to a mounted image root with a network.
//!
//! Order: kernel file systems, modules, network, the image's root, our mounts in it, then the switch. Only a
//! root that cannot be mounted stops the boot; everything else is reported on the console and left out, since
//! a guest that answers is better than one that does not.

pub mod cmdline;
mod etc;
mod limits;
mod modules;
mod mounts;
mod network;
pub mod power;
mod switch;

use std::io;

use cmdline::Options;

#[derive(Debug, thiserror::Error)]
pub enum BootError {
    #[error("mounting {what} on {target}")]
    Mount {
        what: String,
        target: String,
        source: io::Error,
    },
    #[error("device {device} did not appear within {waited_ms} ms")]
    DeviceMissing { device: String, waited_ms: u64 },
    #[error("module {name}")]
    Module { name: String, source: io::Error },
    #[error("network: {step}")]
    Network { step: &'static str, source: io::Error },
    #[error("kernel command line: {key}={value} is not understood")]
    Option { key: &'static str, value: String },
    #[error("{step}")]
    Switch { step: &'static str, source: io::Error },
    #[error("writing {path}")]
    Write { path: String, source: io::Error },
}

/// Prints a line on the console; there is nowhere else to tell it.
pub fn say(text: &str) {
    use std::io::Write;
    let _ = writeln!(io::stdout(), "envd: {text}");
}

fn tolerate(result: Result<(), BootError>) {
    if let Err(error) = result {
        let source = std::error::Error::source(&error)
            .map(|source| format!(": {source}"))
            .unwrap_or_default();
        say(&format!("{error}{source}"));
    }
}

/// Brings the machine up. After an error there is no root to serve.
pub fn run() -> Result<(), BootError> {
    mounts::early()?;
    let text = std::fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let options = Options::parse(&text)?;
    tolerate(modules::load());
    tolerate(network::up(&options));
    if let Some(device) = &options.root {
        switch::to_image(device)?;
    }
    for result in mounts::late() {
        tolerate(result);
    }
    for result in etc::provide(&options) {
        tolerate(result);
    }
    limits::set();
    Ok(())
}
