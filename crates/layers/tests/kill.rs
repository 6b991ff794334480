//! A process that writes, discards and seals is killed with SIGKILL; what it had acknowledged must be there.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use aenv_layers::{FileState, Stack, probe};

const SECTOR: u64 = 512;
const SECTORS: u64 = 64;
const SIZE: u64 = SECTORS * SECTOR;
/// The variable that turns the ignored test below into the process to be killed; its value is the folder.
const FOLDER: &str = "AENV_LAYERS_KILL_FOLDER";

/// Step `number` as both sides know it: which sectors, and their value afterwards (0 by a discard).
fn step(number: u64) -> (u64, u64, u8) {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let start = (mixed >> 40) % SECTORS;
    let count = (1 + (mixed >> 50) % 20).min(SECTORS - start);
    (
        start,
        count,
        if number.is_multiple_of(5) {
            0
        } else {
            (number % 250) as u8 + 1
        },
    )
}

/// The stack that the files in `folder` make: uppers are numbered, each sealed one is a layer.
fn open(folder: &Path) -> Stack {
    let name = |number: usize| folder.join(number.to_string());
    let layers: Vec<PathBuf> = (0..)
        .map(name)
        .take_while(|path| probe(path).unwrap() == FileState::Sealed)
        .collect();
    Stack::open(&layers, Some(&name(layers.len())), SIZE).unwrap()
}

#[test]
#[ignore = "the process that the next test kills"]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let stack = open(&folder);
    let mut out = std::io::stdout();
    for number in 0.. {
        let (start, count, value) = step(number);
        match value {
            0 => stack.discard(start * SECTOR, count * SECTOR).unwrap(),
            _ => stack
                .write_at(&vec![value; (count * SECTOR) as usize], start * SECTOR)
                .unwrap(),
        }
        if number % 7 == 6 {
            stack
                .seal_upper(Some(&folder.join((stack.layers().len() + 1).to_string())))
                .unwrap();
        }
        // The layers are 255 at most; the parent kills long before.
        writeln!(out, "done {number}").unwrap();
    }
}

#[test]
fn a_killed_process_loses_nothing_that_it_acknowledged() {
    for round in 0..12u64 {
        let folder = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "child", "--nocapture"])
            .env(FOLDER, folder.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok);
        // The harness may print before the first one on the same line.
        let mut acknowledged = lines
            .by_ref()
            .filter_map(|line| line.split("done ").nth(1)?.parse::<u64>().ok());
        let wait_for = 3 + round * 11;
        let mut last = acknowledged.by_ref().find(|&number| number >= wait_for).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        last = acknowledged.last().unwrap_or(last);
        check(folder.path(), last);
    }
}

/// Steps up to `last` were acknowledged; the one after it may have happened in part.
fn check(folder: &Path, last: u64) {
    let mut model = [0u8; SECTORS as usize];
    for number in 0..=last {
        let (start, count, value) = step(number);
        model[start as usize..(start + count) as usize].fill(value);
    }
    let (start, count, next) = step(last + 1);
    let mut found = vec![0xcc; SIZE as usize];
    open(folder).read_at(&mut found, 0).unwrap();
    for (sector, bytes) in found.chunks(SECTOR as usize).enumerate() {
        let may_be_next = (start..start + count).contains(&(sector as u64));
        assert!(
            bytes.iter().all(|&byte| byte == bytes[0]),
            "sector {sector} is mixed after step {last}"
        );
        assert!(
            bytes[0] == model[sector] || may_be_next && bytes[0] == next,
            "sector {sector} is {} instead of {} after step {last}",
            bytes[0],
            model[sector]
        );
    }
}
