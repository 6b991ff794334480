//! Publishing to a store that misbehaves at each request in turn, stays away, or forgets.

#![allow(clippy::unwrap_used, reason = "a panic is a failed test, in helpers too")]

mod support;

use std::time::Duration;

use aenv_storage::Failed;
use aenv_store::Digest;
use support::fake::s3::Fault;
use support::{assert_nothing_half_made, names, run, setup};

#[test]
fn any_fault_at_any_request_ends_in_success_or_a_named_error_and_the_next_run_succeeds() {
    let requests = {
        let setup = setup();
        run(&setup.to_bucket()).unwrap();
        setup.s3.state().log.len()
    };
    let faults = [
        Fault::Internal,
        Fault::SlowDown,
        Fault::Cut,
        Fault::CutAfter,
        Fault::Truncated,
        Fault::WrongTag,
        Fault::ErrorInBody,
        Fault::Denied,
    ];
    for fault in faults {
        for at in 0..requests {
            let (setup, context) = (setup(), format!("{fault:?} at request {at}"));
            setup.s3.state().faults.insert(at, fault);
            let outcome = run(&setup.to_bucket());
            assert_nothing_half_made(&setup, &context);
            match outcome {
                Ok(published) => {
                    let key = format!("layers/{}.lsmt", published.digest);
                    assert!(setup.s3.object(&key).is_some(), "{context}");
                }
                Err(failed) => {
                    let kind = match fault {
                        Fault::Denied => "denied",
                        Fault::WrongTag => "corrupt",
                        _ => "none",
                    };
                    assert_eq!(failed.kind(), kind, "{context}: {}", aenv_storage::chain(&failed));
                }
            }
            run(&setup.to_bucket()).expect(&context);
            assert_nothing_half_made(&setup, &context);
            assert!(names(&setup.path("uploads")).is_empty(), "{context}");
        }
    }
}

#[test]
fn a_request_that_is_never_answered_is_given_up_and_sent_again() {
    for at in 0..8 {
        let setup = setup();
        setup.s3.state().faults.insert(at, Fault::Silence);
        let mut publication = setup.to_bucket();
        publication.patience.attempt = Duration::from_millis(300);
        run(&publication).unwrap_or_else(|failed| panic!("{at}: {}", aenv_storage::chain(&failed)));
    }
}

#[test]
fn a_store_that_stays_away_is_an_error_that_names_it_and_the_upload_goes_on_later() {
    let setup = setup();
    setup.s3.state().always = Some(("partNumber=3".into(), Fault::SlowDown));
    let failed = run(&setup.to_bucket()).unwrap_err();
    let text = aenv_storage::chain(&failed);
    assert_eq!(failed.kind(), "transient");
    assert!(
        text.starts_with("repository: layers/") && text.contains("503 SlowDown"),
        "{text}"
    );
    assert!(!setup.s3.state().objects.keys().any(|key| key.ends_with(".lsmt")));
    let sent = |number: usize| setup.s3.count("PUT", &format!("partNumber={number}&"));
    let before = [sent(1), sent(2)];
    setup.s3.state().always = None;
    run(&setup.to_bucket()).unwrap();
    assert_eq!([sent(1), sent(2)], before, "what the store had was sent again");
    assert_nothing_half_made(&setup, "after the outage");
}

#[test]
fn an_object_that_is_not_what_was_stored_is_an_error() {
    let setup = setup();
    setup.s3.state().always = Some(("HEAD".into(), Fault::WrongTag));
    let failed = run(&setup.to_bucket()).unwrap_err();
    assert!(matches!(failed, Failed::NotStored { .. }), "{failed}");
    assert_eq!(failed.kind(), "corrupt");
}

#[test]
fn an_upload_that_the_store_forgot_is_begun_anew() {
    let setup = setup();
    setup.s3.state().always = Some(("partNumber=4".into(), Fault::Denied));
    assert_eq!(run(&setup.to_bucket()).unwrap_err().kind(), "denied");
    let mut state = setup.s3.state();
    state.always = None;
    state.uploads.clear();
    drop(state);
    run(&setup.to_bucket()).unwrap();
    assert_eq!(setup.s3.count("POST", "?uploads"), 2);
    assert_nothing_half_made(&setup, "after the loss");
}

#[test]
fn a_part_that_is_not_what_the_journal_says_is_sent_again() {
    let setup = setup();
    setup.s3.state().always = Some(("partNumber=4".into(), Fault::Denied));
    run(&setup.to_bucket()).unwrap_err();
    let journal = setup.path("uploads").join(&names(&setup.path("uploads"))[0]);
    let text = std::fs::read_to_string(&journal).unwrap();
    let other = Digest::of(b"other").to_string();
    // The first part's digest is another one.
    let lines: Vec<String> = text
        .lines()
        .map(|line| match line.split_once("\"part\":0,") {
            Some((start, rest)) => {
                let (middle, _) = rest.rsplit_once("\"sha256\":").unwrap();
                format!("{start}\"part\":0,{middle}\"sha256\":\"{other}\"}}")
            }
            None => line.to_owned(),
        })
        .collect();
    assert!(lines.iter().any(|line| line.contains(&other)));
    std::fs::write(&journal, lines.join("\n") + "\n").unwrap();
    setup.s3.state().always = None;
    run(&setup.to_bucket()).unwrap();
    assert_eq!(
        (
            setup.s3.count("PUT", "partNumber=1&"),
            setup.s3.count("PUT", "partNumber=2&")
        ),
        (2, 1)
    );
}
