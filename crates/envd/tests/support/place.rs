//! A daemon and a folder for it to keep files in.

use serde_json::Value;

use super::Envd;

pub const RAW: (&str, &str) = ("content-type", "application/octet-stream");

pub fn url(path: &str) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    query.append_pair("path", path);
    format!("/files?{}", query.finish())
}

pub struct Place {
    pub envd: Envd,
    pub dir: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Self {
        Place {
            envd: Envd::start(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    pub fn upload(&self, name: &str, content: &[u8]) -> Value {
        let answer = self.envd.post(&url(&self.path(name)), &[RAW], content);
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        answer.json()
    }

    pub fn call(&self, method: &str, message: &Value) -> Value {
        self.envd.call(&format!("filesystem.Filesystem/{method}"), message)
    }

    pub fn error(&self, method: &str, message: &Value) -> String {
        self.envd
            .call_error(&format!("filesystem.Filesystem/{method}"), message)
    }
}
