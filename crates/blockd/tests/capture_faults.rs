//! Captures that are refused, have no room, are cancelled or lose a process.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use aenv_wire::block::{
    CaptureFinishOk, CaptureStart, CaptureStartOk, Empty, ErrorKind, Hold, Operation, Outcome, StatsOk,
};
use bench::guest::{Guest, cancel, finish};
use bench::{Daemons, MIB, host_can, is_alive, kill, wait_until};

#[test]
fn a_wrong_address_parent_or_length_is_refused() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let guest = Guest::map(&client.memory("m", MIB, &[]).path, MIB);
    client.memory("other", MIB, &[]);
    let with = |change: &dyn Fn(&mut CaptureStart)| {
        let Operation::CaptureStart(mut start) = guest.start("j", "m", &daemons.text("l"), Hold::Buffer) else {
            panic!()
        };
        change(&mut start);
        Operation::CaptureStart(start)
    };
    assert_eq!(
        client.refused(with(&|start| start.parent = "other".to_owned())),
        ErrorKind::Invalid
    );
    assert_eq!(client.refused(with(&|start| start.address += 4096)), ErrorKind::Invalid);
    assert_eq!(
        client.refused(with(&|start| start.length_bytes += 4096)),
        ErrorKind::Invalid
    );
    assert_eq!(
        client.refused(with(&|start| start.layer = "relative".to_owned())),
        ErrorKind::Invalid
    );
    assert_eq!(
        client.refused(with(&|start| start.layer = daemons.text("log"))),
        ErrorKind::Exists
    );
    client.ask::<CaptureStartOk>(with(&|_| ()));
    assert_eq!(
        client.refused(with(&|_| ())),
        ErrorKind::Exists,
        "a job of that name runs"
    );
    client.ask::<Empty>(cancel("j"));
}

#[test]
fn a_capture_that_has_no_room_says_so_before_the_guest_goes_on() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start_with(&["--capture-buffer-bytes-max", "4194304"], &[]);
    let small = daemons.path("small");
    std::fs::create_dir_all(&small).unwrap();
    rustix::mount::mount("small", &small, "tmpfs", rustix::mount::MountFlags::empty(), c"size=4m").unwrap();
    let mut client = daemons.client();
    let mut guest = Guest::map(&client.memory("m", 16 * MIB, &[]).path, 16 * MIB);
    guest.bytes()[..6 << 20].fill(1);
    let layer = small.join("l").to_string_lossy().into_owned();
    assert_eq!(
        client.refused(guest.start("j", "m", &layer, Hold::Process)),
        ErrorKind::NoSpace
    );
    assert_eq!(std::fs::read_dir(&small).unwrap().count(), 0, "nothing is left behind");
    assert_eq!(
        client.refused(guest.start("j", "m", &daemons.text("l"), Hold::Buffer)),
        ErrorKind::Busy
    );
    assert!(!daemons.path("l.partial").exists());
    client.ask::<CaptureStartOk>(guest.start("j", "m", &daemons.text("l"), Hold::Process));
    client.ask::<CaptureFinishOk>(finish("j"));
    rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH).unwrap();
}

#[test]
fn a_cancel_at_any_time_leaves_either_the_layer_or_nothing() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let size = 64 * MIB;
    let mut guest = Guest::map(&client.memory("m", size, &[]).path, size);
    guest.bytes().fill(3);
    let (mut cancelled, longest) = (0, AtomicUsize::new(0));
    for round in 0..12u32 {
        let (job, layer) = (format!("j{round}"), daemons.text(&format!("l{round}")));
        client.ask::<CaptureStartOk>(guest.start(&job, "m", &layer, Hold::Process));
        let outcome = std::thread::scope(|scope| {
            let finishing = scope.spawn(|| daemons.client().try_ask::<CaptureFinishOk>(finish(&job)).unwrap());
            std::thread::sleep(Duration::from_millis(u64::from(round) * 8));
            let begun = Instant::now();
            let answer = daemons.client().try_ask::<Empty>(cancel(&job)).unwrap();
            longest.fetch_max(begun.elapsed().as_millis() as usize, Ordering::Relaxed);
            // Not found: it had ended, in time.
            assert!(
                matches!(&answer, Outcome::Ok(_))
                    || matches!(&answer, Outcome::Error(e) if e.kind == ErrorKind::NotFound)
            );
            finishing.join().unwrap()
        });
        match outcome {
            Outcome::Ok(_) => assert!(Path::new(&layer).exists()),
            Outcome::Error(error) => {
                assert!(
                    matches!(error.kind, ErrorKind::Canceled | ErrorKind::NotFound),
                    "{error:?}"
                );
                assert!(!Path::new(&layer).exists());
                cancelled += 1;
            }
        }
        let partial = format!("{layer}.partial");
        wait_until("the partial layer is gone", || !Path::new(&partial).exists());
    }
    eprintln!("{cancelled} of 12 were cancelled, the longest cancel took {longest:?} ms");
    assert!(cancelled > 0);
    let idle = || daemons.client().ask::<StatsOk>(Operation::Stats).captures == 0;
    wait_until("no capture is left", idle);
}

/// Not a test of its own: the program of the process that dies in the next one.
#[test]
#[ignore = "started by a_process_that_dies_while_it_is_read_is_an_error"]
fn a_guest_process() {
    let path = std::env::var("AENV_TEST_GUEST_IMAGE").unwrap();
    let mut guest = Guest::map(&path, 256 * MIB);
    guest.bytes().fill(9);
    println!("\nmapped {}", guest.base as u64);
    std::io::stdout().flush().unwrap();
    std::io::stdin().lines().next();
}

struct GuestProcess {
    child: Child,
    address: u64,
}

impl GuestProcess {
    fn start(image: &str) -> GuestProcess {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["a_guest_process", "--exact", "--ignored", "--nocapture"])
            .env("AENV_TEST_GUEST_IMAGE", image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("mapped ")?.parse().ok());
        GuestProcess {
            child,
            address: address.unwrap(),
        }
    }

    fn start_capture(&self, job: &str, layer: &str, hold: Hold) -> Operation {
        Operation::CaptureStart(CaptureStart {
            job: job.to_owned(),
            pid: self.child.id(),
            address: self.address,
            length_bytes: 256 * MIB,
            parent: "m".to_owned(),
            layer: layer.to_owned(),
            hold,
            base: None,
        })
    }
}

impl Drop for GuestProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_process_that_dies_while_it_is_read_is_an_error() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let image = client.memory("m", 256 * MIB, &[]).path;
    // Dead before the first byte, and dead in the middle.
    for delay_ms in [0, 20] {
        let mut guest = GuestProcess::start(&image);
        let layer = daemons.text("l");
        client.ask::<CaptureStartOk>(guest.start_capture("j", &layer, Hold::Process));
        let pid = guest.child.id();
        if delay_ms == 0 {
            kill(pid, libc::SIGKILL);
            guest.child.wait().unwrap();
        }
        client.send(finish("j")).unwrap();
        std::thread::sleep(Duration::from_millis(delay_ms));
        kill(pid, libc::SIGKILL);
        match client.receive::<CaptureFinishOk>().unwrap().1 {
            Outcome::Error(error) => assert!(matches!(error.kind, ErrorKind::NotFound | ErrorKind::Io), "{error:?}"),
            Outcome::Ok(ok) => panic!("a layer of a dead process: {ok:?}"),
        }
        assert!(!Path::new(&layer).exists() && !daemons.path("l.partial").exists());
    }
    // With the pages in the buffer the death of the process means nothing.
    let mut guest = GuestProcess::start(&image);
    client.ask::<CaptureStartOk>(guest.start_capture("j", &daemons.text("l"), Hold::Buffer));
    guest.child.kill().unwrap();
    guest.child.wait().unwrap();
    assert_eq!(client.ask::<CaptureFinishOk>(finish("j")).data_bytes, 256 * MIB);
}

#[test]
fn a_capture_of_a_blockd_that_died_is_cleaned_up_by_the_next() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let mut guest = Guest::map(&client.memory("m", MIB, &[]).path, MIB);
    guest.bytes().fill(1);
    let layer = daemons.text("l");
    client.ask::<CaptureStartOk>(guest.start("j", "m", &layer, Hold::Buffer));
    assert!(daemons.path("l.partial").exists());
    let before = daemons.hello();
    kill(before.pid, libc::SIGKILL);
    wait_until("the next blockd serves", || {
        !is_alive(before.pid) && daemons.hello().pid != before.pid
    });
    assert!(!daemons.path("l.partial").exists());
    assert_eq!(daemons.client().refused(finish("j")), ErrorKind::NotFound);
    let mut client = daemons.client();
    client.ask::<CaptureStartOk>(guest.start("j", "m", &layer, Hold::Buffer));
    client.ask::<CaptureFinishOk>(finish("j"));
}
