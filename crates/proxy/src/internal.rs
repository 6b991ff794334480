//! Recognises the guest daemon's internal routes, which the host alone may call, however the path is disguised.
//!
//! The daemon's own router may decode and normalise less than this does; being stricter than it costs nothing, because
//! no public route of the daemon looks like one of these.

/// Internal routes of the daemon on port 49983.
const INTERNAL: [&str; 7] = [
    "init", "freeze", "unfreeze", "collapse", "fsfreeze", "fsthaw", "upgrade",
];

/// Layers of percent-encoding that are undone; what is still encoded after them is refused as a disguise.
const DECODINGS_MAX: usize = 8;

/// True when some reading of `path` (without query) is an internal route or lies below one.
pub fn is_internal(path: &str) -> bool {
    let Some(decoded) = fully_decoded(path) else {
        return true;
    };
    let mut segments: Vec<String> = Vec::new();
    for segment in decoded.split(['/', '\\']) {
        // Matrix parameters, control characters and blanks around a name are ignored by some routers.
        let name = segment.split(';').next().unwrap_or_default();
        let name: String = name.chars().filter(|c| !c.is_control() && !c.is_whitespace()).collect();
        match name.as_str() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            _ => segments.push(name.to_ascii_lowercase()),
        }
    }
    segments.first().is_some_and(|first| INTERNAL.contains(&first.as_str()))
}

fn fully_decoded(path: &str) -> Option<String> {
    let mut bytes = path.as_bytes().to_vec();
    for _ in 0..DECODINGS_MAX {
        let decoded = decoded_once(&bytes);
        if decoded == bytes {
            return Some(String::from_utf8_lossy(&bytes).into_owned());
        }
        bytes = decoded;
    }
    None
}

fn decoded_once(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&first, tail)) = rest.split_first() {
        let digit = |at: usize| tail.get(at).and_then(|byte| char::from(*byte).to_digit(16));
        if let (b'%', Some(high), Some(low)) = (first, digit(0), digit(1)) {
            out.push((high * 16 + low) as u8);
            rest = &tail[2..];
        } else {
            out.push(first);
            rest = tail;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_routes_are_seen_through_disguises() {
        for path in [
            "/init",
            "/init/",
            "//init",
            "///init//",
            "/./init",
            "/x/../init",
            "/../init",
            "/INIT",
            "/%69nit",
            "/%2569nit",
            "/%252569nit",
            "/in%69t/",
            "/init%2f",
            "%2finit",
            "/init;x=1",
            "/init%00",
            "/init%20",
            "/init/x",
            "/%2e/init",
            "/files/%2e%2e/init",
            "/files/..%2finit",
            "\\init",
            "/%5cinit",
            "/freeze",
            "/unfreeze",
            "/collapse",
            "/fsfreeze",
            "/fsthaw",
            "/upgrade",
            "/upgrade/",
        ] {
            assert!(is_internal(path), "{path}");
        }
        assert!(is_internal(&format!("/%{}69nit", "25".repeat(9))));
    }

    #[test]
    fn public_routes_pass() {
        for path in [
            "/",
            "",
            "/health",
            "/files",
            "/files/init",
            "/initial",
            "/envs",
            "/metrics",
            "/process.Process/Start",
            "/filesystem.Filesystem/ListDir",
            "/%zz",
            "/100%",
            "/files/init/..",
            "*",
        ] {
            assert!(!is_internal(path), "{path}");
        }
    }
}
