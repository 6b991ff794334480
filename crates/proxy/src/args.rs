//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

pub const USAGE: &str = "usage: aenv-proxy [--listen ADDR:PORT] --api SOCKET --resolver SOCKET --control SOCKET \
                         [--domain DOMAIN] [--connections-max N]";

/// Where the proxy listens unless told otherwise.
const LISTEN_DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 8000);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Args {
    pub listen: SocketAddr,
    pub api: PathBuf,
    pub resolver: PathBuf,
    pub control: PathBuf,
    pub domain: Option<String>,
    pub connections_max: Option<usize>,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    #[error("unknown option {0:?}")]
    Unknown(String),
    #[error("option {0} needs a value")]
    NoValue(String),
    #[error("option {option} has an invalid value {value:?}")]
    Invalid { option: String, value: String },
    #[error("option {0} is missing")]
    Missing(&'static str),
}

impl Args {
    /// Parses what follows the program's name.
    pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, ArgsError> {
        let (mut listen, mut api, mut resolver, mut control) = (LISTEN_DEFAULT, None, None, None);
        let (mut domain, mut connections_max) = (None, None);
        while let Some(option) = words.next() {
            let known = [
                "--listen",
                "--api",
                "--resolver",
                "--control",
                "--domain",
                "--connections-max",
            ];
            if !known.contains(&option.as_str()) {
                return Err(ArgsError::Unknown(option));
            }
            let value = words.next().ok_or_else(|| ArgsError::NoValue(option.clone()))?;
            match option.as_str() {
                "--listen" => listen = parsed(&option, &value)?,
                "--api" => api = Some(PathBuf::from(value)),
                "--resolver" => resolver = Some(PathBuf::from(value)),
                "--control" => control = Some(PathBuf::from(value)),
                "--domain" => domain = Some(value).filter(|domain| !domain.is_empty()),
                _ => connections_max = Some(parsed(&option, &value)?),
            }
        }
        Ok(Self {
            listen,
            api: api.ok_or(ArgsError::Missing("--api"))?,
            resolver: resolver.ok_or(ArgsError::Missing("--resolver"))?,
            control: control.ok_or(ArgsError::Missing("--control"))?,
            domain,
            connections_max,
        })
    }
}

fn parsed<T: std::str::FromStr>(option: &str, value: &str) -> Result<T, ArgsError> {
    value.parse().map_err(|_| ArgsError::Invalid {
        option: option.to_owned(),
        value: value.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, ArgsError> {
        Args::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn sockets_are_enough() {
        let args = parse("--api /a --resolver /r --control /c").unwrap();
        assert_eq!(
            (args.listen, args.domain, args.connections_max),
            (LISTEN_DEFAULT, None, None)
        );
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(parse("--apis /a"), Err(ArgsError::Unknown("--apis".into())));
        assert_eq!(parse("--api"), Err(ArgsError::NoValue("--api".into())));
        assert_eq!(parse("--api /a --control /c"), Err(ArgsError::Missing("--resolver")));
        let invalid = ArgsError::Invalid {
            option: "--listen".into(),
            value: "8000".into(),
        };
        assert_eq!(parse("--listen 8000"), Err(invalid));
    }
}
