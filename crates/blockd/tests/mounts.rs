//! The two mounts: what is on them, what operations do to it, and how they come and go.

#![allow(clippy::unwrap_used)] // helpers of tests fail by panicking

mod bench;

use std::os::unix::fs::FileExt;
use std::time::Duration;

use aenv_wire::block::{AbandonOk, Empty, ErrorKind, ExportsOk, ImportRaw, ImportRawOk, Name, Operation, StatsOk};
use bench::{Daemons, MIB, host_can, kill, open, wait_until};

#[test]
fn the_tree_is_listed_and_cannot_be_changed() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    for index in 0..300 {
        client.memory(&format!("image-with-a-long-name-{index:03}"), MIB, &[]);
    }
    client.disk("d", MIB, &[], &daemons.text("u"));
    let listed = std::fs::read_dir(daemons.path("mnt/memory")).unwrap().count();
    assert_eq!(listed, 300);
    assert_eq!(std::fs::read_dir(daemons.path("mnt/disks")).unwrap().count(), 1);
    for path in ["mnt/memory/new", "mnt/disks/new"] {
        assert_eq!(
            std::fs::File::create(daemons.path(path)).unwrap_err().raw_os_error(),
            Some(libc::EROFS)
        );
    }
    assert!(std::fs::remove_file(daemons.path("mnt/disks/d")).is_err());
    assert!(std::fs::rename(daemons.path("mnt/disks/d"), daemons.path("mnt/disks/e")).is_err());
}

#[test]
fn a_name_that_is_exported_again_leads_to_the_new_content() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut client = daemons.client();
    std::fs::write(daemons.path("raw"), vec![5u8; MIB as usize]).unwrap();
    let (source, into) = (daemons.text("raw"), daemons.text("layer"));
    client.ask::<ImportRawOk>(Operation::ImportRaw(ImportRaw {
        source,
        into: into.clone(),
    }));
    let first = client.memory("m", MIB, &[into]);
    assert_eq!(std::fs::read(&first.path).unwrap()[0], 5);
    client.unexport("m");
    assert!(!std::path::Path::new(&first.path).exists());
    let second = client.memory("m", MIB, &[]);
    assert_ne!(first.inode, second.inode);
    assert_eq!(std::fs::read(&second.path).unwrap()[0], 0);
}

/// The slow store is a file of another blockd, which is stopped.
#[test]
fn a_reader_that_waits_for_a_slow_layer_is_abandoned_and_others_never_wait() {
    if !host_can() {
        return;
    }
    let store = Daemons::start();
    let daemons = Daemons::start();
    let slow_layer = layer_on_another_blockd(&store);
    let mut client = daemons.client();
    let slow = client.disk("slow", MIB, &[slow_layer], &daemons.text("u0")).path;
    let quick = open(&client.disk("quick", MIB, &[], &daemons.text("u1")).path);
    store.stop_answering();
    let readers: Vec<_> = (0..40)
        .map(|index| {
            let file = open(&slow);
            std::thread::spawn(move || {
                file.read_at(&mut [0; 512], index * 512)
                    .map_err(|error| error.raw_os_error())
            })
        })
        .collect();
    let waiting = || daemons.client().ask::<StatsOk>(Operation::Stats).counters["disk.read"] >= 16;
    wait_until("sixteen readers are inside a handler", waiting);
    let parked = || daemons.client().ask::<StatsOk>(Operation::Stats).counters["request.parked"] == 24;
    wait_until("the others are parked", parked);
    quick.write_all_at(&[1; 512], 0).unwrap();
    quick.read_exact_at(&mut [0; 512], 0).unwrap();
    let abandoned: AbandonOk = client.ask(Operation::Abandon(Name {
        name: "slow".to_owned(),
    }));
    assert_eq!(abandoned.waiting, 40);
    for reader in readers {
        assert_eq!(reader.join().unwrap(), Err(Some(libc::EIO)));
    }
    assert_eq!(
        open(&slow).read_at(&mut [0; 512], 0).unwrap_err().raw_os_error(),
        Some(libc::EIO)
    );
    let exports: ExportsOk = client.ask(Operation::Exports);
    assert!(
        exports
            .exports
            .iter()
            .find(|export| export.name == "slow")
            .unwrap()
            .abandoned
    );
    client.unexport("slow");
    assert_eq!(
        client.refused(Operation::Abandon(Name {
            name: "slow".to_owned()
        })),
        ErrorKind::NotFound
    );
    store.go_on();
}

/// A sealed layer of 1 MiB of data as the content of a disk of that blockd: every read of it is a request there.
fn layer_on_another_blockd(store: &Daemons) -> String {
    let mut client = store.client();
    std::fs::write(store.path("raw"), vec![5u8; MIB as usize]).unwrap();
    let (source, into) = (store.text("raw"), store.text("layer"));
    client.ask::<ImportRawOk>(Operation::ImportRaw(ImportRaw {
        source,
        into: into.clone(),
    }));
    let bytes = std::fs::read(&into).unwrap();
    let path = client.disk("layer", bytes.len() as u64, &[], &store.text("u")).path;
    open(&path).write_all_at(&bytes, 0).unwrap();
    path
}

#[test]
fn unexport_answers_whoever_still_waits() {
    if !host_can() {
        return;
    }
    let store = Daemons::start();
    let daemons = Daemons::start();
    let slow_layer = layer_on_another_blockd(&store);
    let mut client = daemons.client();
    let slow = open(&client.memory("slow", MIB, &[slow_layer]).path);
    store.stop_answering();
    let reader = std::thread::spawn(move || slow.read_at(&mut [0; 512], 0).map_err(|error| error.raw_os_error()));
    wait_until("the reader waits", || {
        daemons.client().ask::<StatsOk>(Operation::Stats).counters["memory.read"] >= 1
    });
    client.ask::<Empty>(Operation::Unexport(Name {
        name: "slow".to_owned(),
    }));
    assert_eq!(reader.join().unwrap(), Err(Some(libc::EIO)));
    store.go_on();
}

#[test]
fn a_state_folder_has_one_pair_and_a_second_keeper_is_refused() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let second = daemons.command().output().unwrap();
    assert_eq!(
        second.status.code(),
        Some(3),
        "{}",
        String::from_utf8_lossy(&second.stderr)
    );
    // Also when the keeper is dead for the moment and blockd alone holds the mounts.
    let hello = daemons.hello();
    kill(hello.keeper_pid, libc::SIGKILL);
    let second = daemons.command().output().unwrap();
    assert_eq!(
        second.status.code(),
        Some(3),
        "{}",
        String::from_utf8_lossy(&second.stderr)
    );
    assert_eq!(daemons.hello().pid, hello.pid);
}

#[test]
fn an_orderly_stop_leaves_no_mount_and_the_next_start_serves_the_same_inodes() {
    if !host_can() {
        return;
    }
    let mut daemons = Daemons::start();
    let before = daemons.client().disk("d", MIB, &[], &daemons.text("u"));
    open(&before.path).write_all_at(&[3; 512], 512).unwrap();
    daemons.stop();
    assert!(!mounted(&daemons) && !daemons.path("run/blockd.sock").exists());
    daemons.start_keeper(&[]);
    daemons.hello();
    let after = daemons.client().disk("d", MIB, &[], &daemons.text("u"));
    assert_eq!(before, after);
    let mut sector = [0; 512];
    open(&after.path).read_exact_at(&mut sector, 512).unwrap();
    assert_eq!(sector, [3; 512]);
}

#[test]
fn a_stale_mount_of_a_killed_pair_is_replaced() {
    if !host_can() {
        return;
    }
    let mut daemons = Daemons::start();
    daemons.client().disk("d", MIB, &[], &daemons.text("u"));
    let hello = daemons.hello();
    kill(hello.keeper_pid, libc::SIGSTOP);
    kill(hello.pid, libc::SIGKILL);
    kill(hello.keeper_pid, libc::SIGKILL);
    wait_until("both are dead", || {
        !bench::is_alive(hello.pid) && !bench::is_alive(hello.keeper_pid)
    });
    assert!(mounted(&daemons), "a dead connection stays mounted");
    daemons.start_keeper(&[]);
    daemons.hello();
    open(&daemons.text("mnt/disks/d")).write_all_at(&[1; 512], 0).unwrap();
}

#[test]
fn the_shutdown_operation_ends_both() {
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let hello = daemons.hello();
    daemons.client().ask::<Empty>(Operation::Shutdown);
    wait_until("both have ended", || {
        !bench::is_alive(hello.pid) && !bench::is_alive(hello.keeper_pid)
    });
    assert!(!mounted(&daemons));
}

/// Whether the dead keeper was replaced, is being replaced or was not yet missed when the order comes.
#[test]
fn the_shutdown_operation_ends_both_while_the_keeper_is_replaced() {
    if !host_can() {
        return;
    }
    for delay_us in [0, 100, 200, 300, 500, 1000, 1500, 2000, 3000, 5000] {
        let daemons = Daemons::start();
        let hello = daemons.hello();
        let mut client = daemons.client();
        kill(hello.keeper_pid, libc::SIGKILL);
        std::thread::sleep(Duration::from_micros(delay_us));
        // The answer may be cut off by the end that it announces.
        let _ = client.try_ask::<Empty>(Operation::Shutdown);
        wait_until("blockd has ended", || !bench::is_alive(hello.pid));
        wait_until("nothing is mounted", || !mounted(&daemons));
        wait_until("no keeper runs", || !daemons.any_runs());
    }
}

fn mounted(daemons: &Daemons) -> bool {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap();
    mounts.contains(&*daemons.folder.path().to_string_lossy())
}

#[test]
fn nonsense_on_the_control_socket_is_answered_and_a_long_frame_ends_only_its_connection() {
    use std::io::{Read, Write};
    if !host_can() {
        return;
    }
    let daemons = Daemons::start();
    let mut stream = std::os::unix::net::UnixStream::connect(daemons.path("run/blockd.sock")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    aenv_wire::block::write_frame(&mut stream, br#"{"id":9,"op":"explode"}"#).unwrap();
    let answer = aenv_wire::block::read_frame(&mut stream).unwrap().unwrap();
    assert!(
        answer.starts_with(br#"{"id":9,"error":{"kind":"invalid""#),
        "{}",
        String::from_utf8_lossy(&answer)
    );
    stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    daemons.hello();
}
