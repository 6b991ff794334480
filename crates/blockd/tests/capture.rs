//! Captures: image + layer = live memory, over generations.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::os::unix::fs::FileExt;
use std::path::Path;

use aenv_wire::block::{CaptureFinishOk, CaptureStartOk, Hold, Operation, StatsOk};
use bench::guest::{Guest, PAGE, dirty, finish};
use bench::{Client, Daemons, MIB, Random, host_can, open};

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
