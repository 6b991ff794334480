//! Golden bytes: every message of `spec/wire/block.golden` encodes to exactly its line and decodes from it.

use super::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

const GOLDEN: &str = include_str!("../../../../spec/wire/block.golden");

/// Lines are `name<TAB>body`; `#` starts a comment.
fn lines() -> Vec<(&'static str, &'static str)> {
    let lines = GOLDEN.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .map(|line| line.split_once('\t').expect("name, tab, body"))
        .collect()
}

fn answer_is_stable<T: Serialize + DeserializeOwned>(name: &str, body: &str) {
    match decode_answer::<T>(body.as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}")) {
        (id, Outcome::Ok(ok)) => assert_eq!(encode_ok(id, &ok), body.as_bytes(), "{name}"),
        (id, Outcome::Error(error)) => {
            assert_eq!(encode_error(id, error.kind, &error.message), body.as_bytes(), "{name}")
        }
    }
}

#[test]
fn every_message_has_its_golden_bytes() {
    for (name, body) in lines() {
        match name.strip_prefix("ok.") {
            None if name.starts_with("error.") => answer_is_stable::<Empty>(name, body),
            None => {
                let request = Request::decode(body.as_bytes()).unwrap_or_else(|error| panic!("{name}: {error}"));
                assert_eq!(serde_json::to_string(&request).unwrap(), body, "{name}");
            }
            Some("hello") => answer_is_stable::<HelloOk>(name, body),
            Some("export_memory" | "export_disk") => answer_is_stable::<ExportOk>(name, body),
            Some("abandon") => answer_is_stable::<AbandonOk>(name, body),
            Some("exports") => answer_is_stable::<ExportsOk>(name, body),
            Some("seal_disk") => answer_is_stable::<SealDiskOk>(name, body),
            Some("capture_start") => answer_is_stable::<CaptureStartOk>(name, body),
            Some("capture_finish") => answer_is_stable::<CaptureFinishOk>(name, body),
            Some("merge") => answer_is_stable::<MergeOk>(name, body),
            Some("import_raw") => answer_is_stable::<ImportRawOk>(name, body),
            Some("stats") => answer_is_stable::<StatsOk>(name, body),
            Some("digest") => answer_is_stable::<DigestOk>(name, body),
            Some("compact") => answer_is_stable::<CompactOk>(name, body),
            Some("trace_finish") => answer_is_stable::<TraceFinishOk>(name, body),
            Some("prefetch") => answer_is_stable::<PrefetchOk>(name, body),
            Some("cache") => answer_is_stable::<CacheOk>(name, body),
            Some("cache_evict") => answer_is_stable::<CacheEvictOk>(name, body),
            Some("unexport" | "sync" | "capture_cancel" | "trace_start" | "fill" | "shutdown") => {
                answer_is_stable::<Empty>(name, body)
            }
            Some(other) => panic!("the golden file names an unknown operation {other}"),
        }
    }
}

#[test]
fn no_operation_and_no_error_kind_lacks_a_golden_line() {
    let names: Vec<&str> = lines().into_iter().map(|(name, _)| name).collect();
    for operation in [
        "hello",
        "export_memory",
        "export_disk",
        "unexport",
        "abandon",
        "exports",
        "seal_disk",
        "sync",
        "capture_start",
        "capture_finish",
        "capture_cancel",
        "merge",
        "import_raw",
        "digest",
        "compact",
        "trace_start",
        "trace_finish",
        "prefetch",
        "fill",
        "cache",
        "cache_evict",
        "stats",
        "shutdown",
    ] {
        assert!(names.contains(&operation), "{operation} has no golden request");
        assert!(
            names.contains(&format!("ok.{operation}").as_str()),
            "{operation} has no golden answer"
        );
    }
    for kind in [
        "not_found",
        "exists",
        "invalid",
        "busy",
        "no_space",
        "io",
        "canceled",
        "corrupt",
        "unsupported",
    ] {
        assert!(
            names.contains(&format!("error.{kind}").as_str()),
            "{kind} has no golden answer"
        );
    }
}
