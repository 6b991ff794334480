//! Guests read layers that are in a store: through FUSE and a bounded cache.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use aenv_wire::block::{
    CacheEvict, CacheEvictOk, CacheOk, Compact, CompactOk, Digest, DigestOk, Empty, ErrorKind, Fill, Merge, MergeOk,
    Operation, Prefetch, PrefetchOk, TraceFinish, TraceFinishOk, TraceStart,
};
use bench::remote::{CACHE, cache, check};
use bench::store::{Form, Mode, TestStore, random_image};
use bench::{Daemons, MIB, Random, host_can, open, wait_until};

#[test]
fn disks_and_memory_images_are_read_from_the_store_once_and_then_from_the_cache() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let image = random_image(1, 8 * MIB);
    let (blob, layer) = store.publish(&daemons, "base", &image);
    let mut client = daemons.client();
    let disk = open(
        &client
            .disk("d", 8 * MIB, std::slice::from_ref(&blob), &daemons.text("u"))
            .path,
    );
    check(&disk, &image, 0, image.len());
    let requests = store.requests();
    let memory = open(&client.memory("m", 8 * MIB, std::slice::from_ref(&blob)).path);
    check(&memory, &image, 0, image.len());
    disk.write_all_at(&[7; 4096], MIB).unwrap();
    let other = open(
        &client
            .disk("e", 8 * MIB, std::slice::from_ref(&blob), &daemons.text("v"))
            .path,
    );
    check(&other, &image, MIB, 65536);
    assert_eq!(
        store.requests(),
        requests,
        "the second and third read are served from the cache"
    );
    let state = cache(&mut client);
    assert!(
        state.blobs.len() == 1 && state.blobs[0].in_use && state.blobs[0].cached_bytes == state.size_bytes,
        "{state:?}"
    );
    assert!(
        state.bytes_from_store <= state.blobs[0].size_bytes + MIB / 2,
        "{state:?}"
    );
    let digests = [&blob, &layer].map(|path| client.ask::<DigestOk>(Operation::Digest(Digest { path: path.clone() })));
    assert_eq!(digests[0], digests[1]);
    let seal = client.seal("d", None).layer;
    let merged: MergeOk = client.ask(Operation::Merge(Merge {
        layers: vec![blob, seal.clone()],
        into: daemons.text("merged"),
    }));
    let merged = open(&client.memory("merged", 8 * MIB, &[merged.layer]).path);
    let mut expected = image.clone();
    expected[MIB as usize..MIB as usize + 4096].fill(7);
    check(&merged, &expected, 0, expected.len());
    let before: DigestOk = client.ask(Operation::Digest(Digest { path: seal.clone() }));
    let into = daemons.text("dense");
    let compact: CompactOk = client.ask(Operation::Compact(Compact {
        layer: seal,
        into: into.clone(),
    }));
    let after: DigestOk = client.ask(Operation::Digest(Digest { path: into }));
    assert!(before.sparse && !after.sparse && compact.data_bytes == 4096);
    assert_eq!((before.digest, before.size_bytes), (after.digest, after.size_bytes));
}

#[test]
fn a_working_set_larger_than_the_cache_is_read_right_and_the_cache_stays_within_its_limit() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(16 * MIB, &[]);
    let image = random_image(2, 96 * MIB);
    let (blob, _) = store.publish(&daemons, "base", &image);
    let disk = open(&daemons.client().disk("d", 96 * MIB, &[blob], &daemons.text("u")).path);
    let largest = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (disk, image, largest, daemons) = (&disk, &image, &largest, &daemons);
            scope.spawn(move || {
                let mut random = Random::new(thread);
                for round in 0..150 {
                    let length = 512 * (1 + random.below(if round % 5 == 0 { 2000 } else { 100 }));
                    let offset = 512 * random.below((image.len() as u64 - length) / 512);
                    check(disk, image, offset, length as usize);
                    if round % 10 == 0 {
                        let state = cache(&mut daemons.client());
                        largest.fetch_max(state.size_bytes, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let state = cache(&mut daemons.client());
    assert!(largest.load(Ordering::Relaxed) <= 16 * MIB, "{largest:?}");
    assert!(
        state.evicted_bytes > 20 * MIB && state.verify_failures == 0 && state.stalls == 0,
        "{state:?}"
    );
    let on_disk: u64 = std::fs::read_dir(daemons.path("cache"))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512)
        .sum();
    assert!(on_disk <= 17 * MIB, "{on_disk}");
}

#[test]
fn compressed_and_encrypted_layers_read_as_what_they_were_made_of() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let mut image = random_image(11, 4 * MIB);
    image[MIB as usize..2 * MIB as usize].fill(3);
    for form in [Form::UnlistedZFile, Form::EncryptedZFile] {
        let (blob, layer) = store.publish_as(&daemons, &format!("{form:?}"), &image, form);
        let mut client = daemons.client();
        let memory = open(
            &client
                .memory(&format!("{form:?}"), 4 * MIB, std::slice::from_ref(&blob))
                .path,
        );
        check(&memory, &image, 0, image.len());
        let digests = [blob, layer].map(|path| client.ask::<DigestOk>(Operation::Digest(Digest { path })).digest);
        assert_eq!(digests[0], digests[1], "{form:?}");
    }
    let plain = store.configuration().replace("0707", "0808");
    std::fs::write(daemons.path("stores.json"), plain).unwrap();
    let (blob, _) = store.publish_as(&daemons, "other", &image, Form::EncryptedZFile);
    let export = Operation::Digest(Digest { path: blob });
    assert_eq!(
        daemons.client().refused(export),
        ErrorKind::Corrupt,
        "the key is another"
    );
}

#[test]
fn a_blob_that_is_not_what_its_descriptor_says_is_refused_by_kind() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let (blob, _) = store.publish(&daemons, "base", &random_image(6, MIB));
    let mut client = daemons.client();
    let export = |layer: &str| {
        Operation::ExportMemory(aenv_wire::block::ExportMemory {
            name: "m".to_owned(),
            size_bytes: MIB,
            layers: vec![layer.to_owned()],
        })
    };
    let text = std::fs::read_to_string(&blob).unwrap();
    let other = daemons.text("other.blob");
    std::fs::write(&other, text.replace("base.blocks", "gone.blocks")).unwrap();
    assert_eq!(client.refused(export(&other)), ErrorKind::NotFound);
    store.put("layers/gone.blocks", b"nonsense".to_vec());
    assert_eq!(client.refused(export(&other)), ErrorKind::Corrupt);
    std::fs::write(&other, text.replacen("\"size_bytes\"", "\"bytes\"", 1)).unwrap();
    assert_eq!(client.refused(export(&other)), ErrorKind::Invalid);
    store.turn(Mode::Wrong);
    std::fs::write(&other, text.replace("base.blocks", "copy.blocks")).unwrap();
    assert_eq!(client.refused(export(&other)), ErrorKind::NotFound);
    store.turn(Mode::Good);
    let without = Daemons::start();
    assert_eq!(without.client().refused(export(&blob)), ErrorKind::Unsupported);
    assert_eq!(without.client().ask::<CacheOk>(Operation::Cache), CacheOk::default());
}

#[test]
fn a_trace_of_one_start_makes_the_next_one_wait_for_nothing() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::from_millis(20));
    let daemons = store.daemons(CACHE, &[]);
    let image = random_image(9, 32 * MIB);
    let (blob, _) = store.publish(&daemons, "base", &image);
    let places: Vec<u64> = (0..60).map(|index| index * 7919 % 500 * 65536).collect();
    let start = |name: &str| {
        let begun = Instant::now();
        let upper = daemons.text(&format!("{name}.upper"));
        let disk = open(
            &daemons
                .client()
                .disk(name, 32 * MIB, std::slice::from_ref(&blob), &upper)
                .path,
        );
        places.iter().for_each(|place| check(&disk, &image, *place, 4096));
        begun.elapsed()
    };
    let mut client = daemons.client();
    let trace = daemons.text("trace.json");
    client.ask::<Empty>(Operation::TraceStart(TraceStart {
        trace: "t".to_owned(),
        paths: vec![blob.clone()],
    }));
    let cold = start("cold");
    let finished: TraceFinishOk = client.ask(Operation::TraceFinish(TraceFinish {
        trace: "t".to_owned(),
        into: trace.clone(),
    }));
    assert!(finished.blocks >= 60 && finished.blocks < 80, "{finished:?}");
    client.unexport("cold");
    let digest = cache(&mut client).blobs[0].digest.clone();
    let evict = Operation::CacheEvict(CacheEvict {
        bytes: None,
        digest: Some(digest),
    });
    assert!(client.ask::<CacheEvictOk>(evict).freed_bytes > 0);
    client.ask::<PrefetchOk>(Operation::Prefetch(Prefetch {
        path: trace,
        blobs: vec![blob.clone()],
    }));
    let prefetched = start("prefetched");
    let warm = start("warm");
    eprintln!("cold {cold:?}, prefetched {prefetched:?}, warm {warm:?}");
    assert!(prefetched < cold / 2, "{cold:?} {prefetched:?}");
    let fill = Operation::Fill(Fill {
        paths: vec![blob],
        bytes_per_s_max: 1 << 30,
    });
    client.ask::<Empty>(fill);
    wait_until("the blob is filled", || {
        let state = cache(&mut daemons.client());
        state.blobs[0].cached_bytes == state.blobs[0].size_bytes
    });
}

#[test]
fn two_hundred_exports_of_remote_layers_take_little_memory_and_no_threads() {
    if !host_can() {
        return;
    }
    let store = TestStore::start(Duration::ZERO);
    let daemons = store.daemons(CACHE, &[]);
    let image = random_image(10, 16 * MIB);
    let blobs: Vec<String> = (0..4)
        .map(|index| store.publish(&daemons, &format!("b{index}"), &image[index * 4096..]).0)
        .collect();
    let mut client = daemons.client();
    let files: Vec<File> = (0..200)
        .map(|index| {
            let (name, layers) = (format!("e{index}"), [blobs[index % 4].clone()]);
            match index % 2 {
                0 => open(&client.memory(&name, 16 * MIB, &layers).path),
                _ => open(&client.disk(&name, 16 * MIB, &layers, &daemons.text(&name)).path),
            }
        })
        .collect();
    for (index, file) in files.iter().enumerate() {
        check(
            file,
            &image[index % 4 * 4096..],
            (index as u64 * 60_000) / 4096 * 4096,
            8192,
        );
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemons.hello().pid)).unwrap();
    let number = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    eprintln!(
        "200 exports: {} KiB resident, {} threads",
        number("VmRSS:"),
        number("Threads:")
    );
    assert!(number("VmRSS:") < 150 << 10 && number("Threads:") < 60, "{status}");
}
