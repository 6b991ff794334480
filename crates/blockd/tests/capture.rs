//! Captures: image + layer = live memory, over generations; room, cancel, dying processes.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::ffi::c_void;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use aenv_wire::block::{
    CaptureFinishOk, CaptureStart, CaptureStartOk, Empty, ErrorKind, Hold, Job, Operation, Outcome, StatsOk,
};
use bench::{Client, Daemons, MIB, Random, host_can, is_alive, kill, open, wait_until};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

const PAGE: usize = 4096;

/// A private mapping of an exported image in this process, which stands for the guest memory of a stopped VMM.
struct Guest {
    base: *mut c_void,
    length: usize,
}

impl Guest {
    fn map(path: &str, length: u64) -> Guest {
        let file = open(path);
        let length = usize::try_from(length).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice; unmapped when the guest is dropped.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        };
        Guest {
            base: base.unwrap(),
            length,
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is readable and writable, `length` bytes long, and borrowed from the guest that owns it.
        unsafe { std::slice::from_raw_parts_mut(self.base.cast(), self.length) }
    }

    fn write_page(&mut self, page: usize, content: &[u8]) {
        self.bytes()[page * PAGE..(page + 1) * PAGE].copy_from_slice(content);
    }

    fn start(&self, job: &str, parent: &str, layer: &str, hold: Hold) -> Operation {
        Operation::CaptureStart(CaptureStart {
            job: job.to_owned(),
            pid: std::process::id(),
            address: self.base as u64,
            length_bytes: self.length as u64,
            parent: parent.to_owned(),
            layer: layer.to_owned(),
            hold,
            base: None,
        })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: made by `map`, and no slice of it is alive.
        unsafe { munmap(self.base, self.length).unwrap() };
    }
}

fn finish(job: &str) -> Operation {
    Operation::CaptureFinish(Job { job: job.to_owned() })
}

fn cancel(job: &str) -> Operation {
    Operation::CaptureCancel(Job { job: job.to_owned() })
}

fn dirty(guest: &mut Guest, random: &mut Random, pages: usize) {
    let mut content = [0u8; PAGE];
    for _ in 0..pages {
        random.fill(&mut content);
        let first = random.below((guest.length / PAGE) as u64) as usize;
        for page in first..(first + 1 + random.below(6) as usize).min(guest.length / PAGE) {
            guest.write_page(page, &content);
        }
    }
    // Pages that the guest zeroed, some over content of the parent and some over nothing.
    for _ in 0..pages / 4 {
        guest.write_page(random.below((guest.length / PAGE) as u64) as usize, &[0; PAGE]);
    }
}

#[test]
fn ten_generations_read_as_the_live_memory_was_byte_for_byte() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let mut random = Random::new(7);
    let size = 16 * MIB;
    let mut layers: Vec<String> = Vec::new();
    let mut zeroed = 0;
    for generation in 0..10 {
        let name = format!("g{generation}");
        let mut guest = Guest::map(&client.memory(&name, size, &layers).path, size);
        dirty(&mut guest, &mut random, 60);
        let layer = daemons.text(&format!("layer{generation}"));
        let hold = if generation % 2 == 0 {
            Hold::Buffer
        } else {
            Hold::Process
        };
        let started: CaptureStartOk = client.ask(guest.start("j", &name, &layer, hold));
        if hold == Hold::Buffer {
            // The guest goes on at once; what it does now is not in this generation.
            let before = guest.bytes().to_vec();
            guest.write_page(0, &[0xee; PAGE]);
            let finished: CaptureFinishOk = client.ask(finish("j"));
            check(&mut client, &finished, started.dirty_bytes, &mut layers, size, &before);
            zeroed += finished.zero_bytes;
        } else {
            let finished: CaptureFinishOk = client.ask(finish("j"));
            check(
                &mut client,
                &finished,
                started.dirty_bytes,
                &mut layers,
                size,
                guest.bytes(),
            );
            zeroed += finished.zero_bytes;
        }
    }
    assert!(zeroed > 0, "zero pages over content were part of it");
    assert_eq!(client.ask::<StatsOk>(Operation::Stats).buffer_bytes, 0);
}

fn check(
    client: &mut Client,
    finished: &CaptureFinishOk,
    dirty_bytes: u64,
    layers: &mut Vec<String>,
    size: u64,
    live: &[u8],
) {
    assert_eq!(
        finished.data_bytes + finished.zero_bytes + finished.skipped_bytes,
        dirty_bytes
    );
    layers.push(finished.layer.clone());
    let path = client.memory("check", size, layers).path;
    let mut image = vec![0; live.len()];
    open(&path).read_exact_at(&mut image, 0).unwrap();
    client.unexport("check");
    let wrong = (0..live.len() / PAGE).find(|page| image[page * PAGE..][..PAGE] != live[page * PAGE..][..PAGE]);
    assert_eq!(wrong, None, "first wrong page");
    let folder = Path::new(&finished.layer).parent().unwrap();
    assert!(
        !std::fs::read_dir(folder)
            .unwrap()
            .any(|entry| { entry.unwrap().path().extension().is_some_and(|e| e == "partial") })
    );
}

/// Every second page: thousands of ranges, more than any piece that they are handled in.
#[test]
fn a_capture_over_an_earlier_one_stores_what_differs_from_it() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let mut random = Random::new(11);
    let size = 16 * MIB;
    let mut guest = Guest::map(&client.memory("m", size, &[]).path, size);
    let mut layers: Vec<String> = Vec::new();
    for generation in 0..5 {
        // Much is dirtied once; little changes between two captures, some of it back to zeros.
        dirty(&mut guest, &mut random, if generation == 0 { 400 } else { 5 });
        let layer = daemons.text(&format!("over{generation}"));
        let mut start = guest.start("j", "m", &layer, Hold::Buffer);
        if let Operation::CaptureStart(spec) = &mut start {
            spec.base = Some(layers.clone());
        }
        let started: CaptureStartOk = client.ask(start);
        assert!(started.based);
        let finished: CaptureFinishOk = client.ask(finish("j"));
        let stored = finished.data_bytes + finished.zero_bytes;
        assert!(
            generation == 0 || stored <= 40 * PAGE as u64,
            "{stored} bytes for a small change"
        );
        assert_eq!(stored + finished.skipped_bytes, started.dirty_bytes);
        layers.push(layer);
        let image = client.memory(&format!("check{generation}"), size, &layers);
        let mut read = vec![0; guest.length];
        open(&image.path).read_exact_at(&mut read, 0).unwrap();
        assert!(read == guest.bytes(), "generation {generation} differs");
    }
}

#[test]
fn a_base_with_a_page_that_was_given_back_is_not_used() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let size = 4 * MIB;
    let mut guest = Guest::map(&client.memory("m", size, &[]).path, size);
    guest.write_page(3, &[7; PAGE]);
    guest.write_page(9, &[8; PAGE]);
    let first = daemons.text("first");
    let _: CaptureStartOk = client.ask(guest.start("j", "m", &first, Hold::Buffer));
    let _: CaptureFinishOk = client.ask(finish("j"));
    // SAFETY: the page is part of the guest's own mapping, and no slice of it is alive.
    unsafe {
        let page = guest.base.cast::<u8>().add(3 * PAGE).cast();
        rustix::mm::madvise(page, PAGE, rustix::mm::Advice::LinuxDontNeed).unwrap();
    }
    let second = daemons.text("second");
    let mut start = guest.start("j", "m", &second, Hold::Buffer);
    if let Operation::CaptureStart(spec) = &mut start {
        spec.base = Some(vec![first]);
    }
    let started: CaptureStartOk = client.ask(start);
    assert!(!started.based);
    let _: CaptureFinishOk = client.ask(finish("j"));
    let image = client.memory("check", size, &[second]);
    let mut read = vec![0; guest.length];
    open(&image.path).read_exact_at(&mut read, 0).unwrap();
    assert!(read == guest.bytes());
}

#[test]
fn scattered_pages_are_captured_each_once() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let size = 64 * MIB;
    let mut guest = Guest::map(&client.memory("m", size, &[]).path, size);
    let mut random = Random::new(11);
    let mut content = [0u8; PAGE];
    for page in (0..guest.length / PAGE).step_by(2) {
        random.fill(&mut content);
        guest.write_page(page, &content);
    }
    for hold in [Hold::Buffer, Hold::Process] {
        let layer = daemons.text(&format!("{hold:?}"));
        let started: CaptureStartOk = client.ask(guest.start("j", "m", &layer, hold));
        assert_eq!(started.dirty_bytes, size / 2);
        let finished: CaptureFinishOk = client.ask(finish("j"));
        let live = guest.bytes().to_vec();
        check(
            &mut client,
            &finished,
            started.dirty_bytes,
            &mut Vec::new(),
            size,
            &live,
        );
    }
}

#[test]
fn a_guest_that_wrote_nothing_yields_an_empty_layer() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    let mut guest = Guest::map(&client.memory("m", MIB, &[]).path, MIB);
    assert_eq!(guest.bytes()[5], 0);
    let layer = daemons.text("l");
    let started: CaptureStartOk = client.ask(guest.start("j", "m", &layer, Hold::Process));
    assert_eq!(started.dirty_bytes, 0);
    let finished: CaptureFinishOk = client.ask(finish("j"));
    assert_eq!(finished.data_bytes, 0);
    client.memory("next", MIB, &[layer]);
}

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
