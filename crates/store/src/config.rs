//! `stores.json`: what a worker needs to reach the stores of the node's configuration. Holds secrets, so nothing here is
//! printed whole.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;

use crate::cipher::Cipher;
use crate::digest::hex_bytes;

/// Longest file; a store takes about 300 bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// The whole file.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Config {
    #[serde(default)]
    pub stores: BTreeMap<String, StoreConfig>,
    #[serde(default)]
    pub registries: BTreeMap<String, RegistryConfig>,
    #[serde(default)]
    encryption_key: Option<String>,
}

/// One store.
#[derive(Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum StoreConfig {
    S3(S3Config),
}

/// An S3 bucket, or the part of one under a prefix. Without keys the standard chain is asked: environment, web identity,
/// container, instance metadata.
#[derive(Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct S3Config {
    pub bucket: String,
    pub region: String,
    #[serde(default)]
    pub endpoint: Option<String>,
    #[serde(default)]
    pub addressing: Addressing,
    #[serde(default)]
    pub prefix: String,
    #[serde(default)]
    pub access_key_id: Option<String>,
    #[serde(default)]
    pub secret_access_key: Option<String>,
    #[serde(default)]
    pub session_token: Option<String>,
    #[serde(default)]
    pub allow_http: bool,
}

/// Where the bucket's name goes in a URL.
#[derive(Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Addressing {
    #[default]
    Path,
    Virtual,
}

/// An OCI registry.
#[derive(Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegistryConfig {
    pub url: String,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    pub password: Option<String>,
}

impl Config {
    /// Reads the file. The error is one line that names no secret.
    pub fn read(path: &Path) -> Result<Config, String> {
        let mut bytes = Vec::new();
        let file = std::fs::File::open(path).map_err(|e| e.to_string())?;
        let read = file.take(CONFIG_BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|e| e.to_string())?;
        if bytes.len() as u64 > CONFIG_BYTES_MAX {
            return Err(format!("more than {CONFIG_BYTES_MAX} bytes"));
        }
        Config::parse(&bytes)
    }

    fn parse(bytes: &[u8]) -> Result<Config, String> {
        // The text of serde's error may quote a value, which may be a secret; its place is enough.
        let config: Config = serde_json::from_slice(bytes)
            .map_err(|e| format!("{:?} error in line {}, column {}", e.classify(), e.line(), e.column()))?;
        config.cipher()?;
        for (name, StoreConfig::S3(store)) in &config.stores {
            store.check().map_err(|what| format!("stores.{name}: {what}"))?;
        }
        for (name, registry) in &config.registries {
            if !is_http(&registry.url) {
                return Err(format!("registries.{name}: url must begin with https:// or http://"));
            }
        }
        Ok(config)
    }

    /// The key of encryption at rest.
    pub fn cipher(&self) -> Result<Option<Cipher>, String> {
        let Some(text) = &self.encryption_key else {
            return Ok(None);
        };
        let key = hex_bytes(text).ok_or("encryption_key is not 64 lower-case hexadecimal digits")?;
        Ok(Some(Cipher::new(key)))
    }
}

impl S3Config {
    fn check(&self) -> Result<(), String> {
        if self.bucket.is_empty() || self.region.is_empty() {
            return Err("bucket and region must be given".into());
        }
        if self.access_key_id.is_some() != self.secret_access_key.is_some() {
            return Err("access_key_id and secret_access_key come together or not at all".into());
        }
        match &self.endpoint {
            Some(endpoint) if !is_http(endpoint) => Err("endpoint must begin with https:// or http://".into()),
            Some(endpoint) if endpoint.starts_with("http://") && !self.allow_http => {
                Err("endpoint is http:// and allow_http is not true".into())
            }
            _ => Ok(()),
        }
    }
}

fn is_http(url: &str) -> bool {
    url.starts_with("https://") || url.starts_with("http://")
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("stores", &self.stores.keys())
            .field("registries", &self.registries.keys())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn fault(text: &str) -> String {
        Config::parse(text.as_bytes()).expect_err(text)
    }

    #[test]
    fn the_file_of_the_contract_is_read() {
        let text = format!(
            r#"{{"stores":{{"repository":{{"kind":"s3","bucket":"b","region":"eu-central-1","endpoint":"http://127.0.0.1:1",
            "addressing":"virtual","prefix":"p","access_key_id":null,"secret_access_key":null,"session_token":null,
            "allow_http":true}}}},"registries":{{"r:5000":{{"url":"http://r:5000","username":"u","password":"p"}}}},
            "encryption_key":"{KEY}"}}"#
        );
        let config = Config::parse(text.as_bytes()).unwrap();
        assert!(config.cipher().unwrap().is_some());
        assert!(matches!(&config.stores["repository"], StoreConfig::S3(s3) if s3.addressing == Addressing::Virtual));
        assert_eq!(config.registries["r:5000"].username.as_deref(), Some("u"));
        assert!(!format!("{config:?}").contains(KEY));
    }

    #[test]
    fn faults_are_named_and_secrets_are_not() {
        assert!(fault("{").contains("line 1"));
        assert!(fault(r#"{"more":1}"#).contains("column"));
        assert!(fault(r#"{"encryption_key":"secret"}"#).contains("encryption_key is not"));
        let s3 = |more: &str| fault(&format!(r#"{{"stores":{{"s":{{"kind":"s3","bucket":"b"{more}}}}}}}"#));
        assert!(s3(r#","region":"""#).contains("stores.s: bucket and region"));
        assert!(s3(r#","region":"r","endpoint":"ftp://x""#).contains("endpoint must begin"));
        assert!(s3(r#","region":"r","endpoint":"http://x""#).contains("allow_http"));
        let half = s3(r#","region":"r","secret_access_key":"hush""#);
        assert!(half.contains("come together") && !half.contains("hush"), "{half}");
        assert!(!s3(r#","region":"r","secret_access_key":["hush"]"#).contains("hush"));
    }
}
