//! Stop an upper at every operation it makes, and ask what a new process sees: with the operation not done, done in part,
//! or done but not answered. Everything acknowledged must be there, and nothing else: each sector of the interrupted
//! request is old or new, each other sector is what the last acknowledged request made it, and a sector that was never
//! touched shows the layer below.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use proptest::prelude::*;

use crate::file_ops::{FileOps, SystemOps};
use crate::header::Part;
use crate::upper::{FileState, Upper, probe};
use crate::{LayerWriter, Result, SECTOR_BYTES, Stack, Uuid, seal};

const SECTORS: u64 = 200;
const SIZE: u64 = SECTORS * SECTOR_BYTES;
/// The layer below ends before the upper does.
const BASE_SECTORS: u64 = 150;
const BASE_VALUE: u8 = 0xee;
/// Every write of the test's system is short, so that every caller must go on at the right place.
const SHORT_WRITE_BYTES: usize = 3 * SECTOR_BYTES as usize;

/// How much of the operation at which we stop reaches the file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tear {
    Nothing,
    FirstSector,
    Whole,
}

/// What comes after the operation at which we stop.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// The process is dead: no operation takes effect any more.
    Dead,
    /// Only that one failed, as on a full disk.
    GoesOn,
}

/// The operating system, until operation number `stop_at`.
#[derive(Debug)]
struct FaultyOps {
    done: AtomicUsize,
    stop_at: usize,
    tear: Tear,
    then: Then,
}

impl FaultyOps {
    fn new(stop_at: usize, tear: Tear, then: Then) -> Arc<Self> {
        Arc::new(FaultyOps {
            done: AtomicUsize::new(0),
            stop_at,
            tear,
            then,
        })
    }

    /// Runs `whole` before the stop, nothing after it, and what the tear says at it. `first` does only the first sector,
    /// for operations that have one.
    fn run<T>(
        &self,
        whole: impl FnOnce() -> io::Result<T>,
        first: Option<&dyn Fn() -> io::Result<()>>,
    ) -> io::Result<T> {
        let number = self.done.fetch_add(1, Ordering::Relaxed);
        let stopped = io::Error::from(io::ErrorKind::StorageFull);
        match (number.cmp(&self.stop_at), self.then, self.tear) {
            (std::cmp::Ordering::Less, ..) => whole(),
            (std::cmp::Ordering::Greater, Then::GoesOn, _) => whole(),
            (std::cmp::Ordering::Greater, Then::Dead, _) => Err(stopped),
            (_, _, Tear::Nothing) => Err(stopped),
            (_, _, Tear::Whole) => whole().and(Err(stopped)),
            (_, _, Tear::FirstSector) => {
                first.map_or(Ok(()), |first| first())?;
                Err(stopped)
            }
        }
    }

    fn was_reached(&self) -> bool {
        self.done.load(Ordering::Relaxed) > self.stop_at
    }
}

impl FileOps for FaultyOps {
    fn write(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<usize> {
        let bytes = &bytes[..bytes.len().min(SHORT_WRITE_BYTES)];
        let first = &bytes[..bytes.len().min(SECTOR_BYTES as usize)];
        let first = || SystemOps.write(file, first, offset).map(drop);
        self.run(|| SystemOps.write(file, bytes, offset), Some(&first))
    }

    fn punch(&self, file: &File, offset: u64, length: u64) -> io::Result<()> {
        let first = || SystemOps.punch(file, offset, length.min(SECTOR_BYTES));
        self.run(|| SystemOps.punch(file, offset, length), Some(&first))
    }

    fn set_len(&self, file: &File, length: u64) -> io::Result<()> {
        self.run(|| SystemOps.set_len(file, length), None)
    }

    fn reserve(&self, file: &File, length: u64) -> io::Result<()> {
        let first = || SystemOps.reserve(file, length.min(4096));
        self.run(|| SystemOps.reserve(file, length), Some(&first))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(|| SystemOps.remove(path), None)
    }

    fn publish(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(|| SystemOps.publish(from, to), None)
    }

    fn set_bits(&self, word: &AtomicU64, bits: u64) -> io::Result<()> {
        self.run(|| SystemOps.set_bits(word, bits), None)
    }

    fn clear_bits(&self, word: &AtomicU64, bits: u64) -> io::Result<()> {
        self.run(|| SystemOps.clear_bits(word, bits), None)
    }
}

#[derive(Debug, Clone)]
enum Request {
    Write { start: u64, sectors: u64, value: u8 },
    Discard { start: u64, sectors: u64 },
}

fn request() -> impl Strategy<Value = Request> {
    let range = (0..SECTORS, 1u64..90).prop_map(|(start, n)| (start, n.min(SECTORS - start)));
    prop_oneof![
        2 => (range.clone(), 1u8..200).prop_map(|((start, sectors), value)| Request::Write { start, sectors, value }),
        1 => range.prop_map(|(start, sectors)| Request::Discard { start, sectors }),
    ]
}

/// The values that each sector may read as.
#[derive(Debug, Clone, PartialEq)]
struct Model(Vec<Vec<u8>>);

impl Model {
    fn new() -> Self {
        Model((0..SECTORS).map(|sector| vec![base_value(sector)]).collect())
    }

    fn apply(&mut self, request: &Request, acknowledged: bool) {
        let (start, sectors, value) = match *request {
            Request::Write { start, sectors, value } => (start, sectors, value),
            Request::Discard { start, sectors } => (start, sectors, 0),
        };
        for allowed in &mut self.0[start as usize..(start + sectors) as usize] {
            if acknowledged {
                allowed.clear();
            }
            allowed.push(value);
        }
    }

    fn check(&self, stack: &Stack, story: &str) {
        let mut content = vec![0xcc; SIZE as usize];
        stack.read_at(&mut content, 0).unwrap();
        for (sector, bytes) in content.chunks(SECTOR_BYTES as usize).enumerate() {
            let value = bytes[0];
            assert!(
                bytes.iter().all(|&byte| byte == value),
                "{story}: sector {sector} is mixed"
            );
            let allowed = &self.0[sector];
            assert!(
                allowed.contains(&value),
                "{story}: sector {sector} reads {value:#x}, not one of {allowed:x?}"
            );
        }
    }
}

fn base_value(sector: u64) -> u8 {
    if sector < BASE_SECTORS && (sector / 16).is_multiple_of(2) {
        BASE_VALUE
    } else {
        0
    }
}

fn make_base(folder: &Path) -> PathBuf {
    let path = folder.join("base");
    let mut writer = LayerWriter::create(&path, BASE_SECTORS * SECTOR_BYTES, Uuid::NIL).unwrap();
    for sector in (0..BASE_SECTORS).filter(|&sector| base_value(sector) != 0) {
        writer
            .append(sector * SECTOR_BYTES, &[BASE_VALUE; SECTOR_BYTES as usize])
            .unwrap();
    }
    writer.finish().unwrap();
    path
}

/// Opens what is at `upper` as the next process would.
fn open(base: &Path, upper: &Path) -> Stack {
    match probe(upper).unwrap() {
        FileState::Sealed => Stack::open(&[base.to_owned(), upper.to_owned()], None, SIZE).unwrap(),
        _ => Stack::open(&[base.to_owned()], Some(upper), SIZE).unwrap(),
    }
}

/// Runs requests until one fails; then the model allows both outcomes of that one.
fn run_requests(upper: &Upper, requests: &[Request], model: &mut Model) -> Result<()> {
    for request in requests {
        let outcome = run_request(upper, request);
        model.apply(request, outcome.is_ok());
        outcome?;
    }
    Ok(())
}

fn run_request(upper: &Upper, request: &Request) -> Result<()> {
    match *request {
        Request::Write { start, sectors, value } => {
            let data = vec![value; (sectors * SECTOR_BYTES) as usize];
            upper.write_at(&data, start * SECTOR_BYTES)
        }
        Request::Discard { start, sectors } => upper.discard(start * SECTOR_BYTES, sectors * SECTOR_BYTES),
    }
}

/// Create, requests, a new upper, seal: all on one operating system that stops somewhere.
fn life(ops: Arc<FaultyOps>, folder: &Path, requests: &[Request], model: &mut Model) -> Result<()> {
    let upper = Upper::create_with(ops.clone(), &folder.join("upper"), SIZE, Uuid::NIL)?;
    run_requests(&upper, requests, model)?;
    Upper::create_with(ops, &folder.join("next"), SIZE, upper.uuid())?;
    seal::seal(&upper, |_| Ok(|| ()))?;
    Ok(())
}

/// After a crash: the content is right; a second crash while the seal is undone changes nothing; a new seal works.
fn check_after_crash(folder: &Path, model: &Model, story: &str) {
    let (base, upper) = (folder.join("base"), folder.join("upper"));
    let next_exists = probe(&folder.join("next")).unwrap() != FileState::Missing;
    assert!(
        next_exists || probe(&upper).unwrap() != FileState::Sealed,
        "{story}: sealed without a successor"
    );
    if probe(&upper).unwrap() == FileState::Upper {
        for stop_at in 0.. {
            let ops = FaultyOps::new(stop_at, Tear::FirstSector, Then::Dead);
            if Upper::open_with(ops, &upper).is_ok() {
                break;
            }
        }
    }
    model.check(&open(&base, &upper), story);
    if probe(&upper).unwrap() == FileState::Upper {
        let opened = Upper::open(&upper).unwrap();
        let bytes = std::fs::read(&upper).unwrap();
        let header = opened.fields.encode(Part::Header);
        assert!(
            bytes[..header.len()] == header,
            "{story}: the header of a cut seal is left"
        );
        assert_eq!(
            bytes.len() as u64,
            opened.data_end(),
            "{story}: the tail of a cut seal is left"
        );
        drop(opened);
        let stack = open(&base, &upper);
        stack.seal_upper(None).unwrap();
        model.check(&stack, story);
        drop(stack);
        assert_eq!(probe(&upper).unwrap(), FileState::Sealed);
        model.check(&open(&base, &upper), story);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn a_crash_at_any_operation_loses_and_invents_nothing(requests in prop::collection::vec(request(), 1..8)) {
        for tear in [Tear::Nothing, Tear::FirstSector, Tear::Whole] {
            for stop_at in 0.. {
                let folder = tempfile::tempdir().unwrap();
                make_base(folder.path());
                let mut model = Model::new();
                let ops = FaultyOps::new(stop_at, tear, Then::Dead);
                // An error at the last step is possible though everything is done: the answer was lost.
                let outcome = life(ops.clone(), folder.path(), &requests, &mut model);
                check_after_crash(folder.path(), &model, &format!("{tear:?} at operation {stop_at}"));
                if !ops.was_reached() {
                    prop_assert!(outcome.is_ok());
                    break;
                }
            }
        }
    }

    #[test]
    fn a_failed_operation_leaves_a_working_upper(requests in prop::collection::vec(request(), 1..8)) {
        for tear in [Tear::Nothing, Tear::FirstSector, Tear::Whole] {
            for stop_at in 0.. {
                let folder = tempfile::tempdir().unwrap();
                let base = make_base(folder.path());
                let path = folder.path().join("upper");
                let story = format!("{tear:?} at operation {stop_at}");
                let ops = FaultyOps::new(stop_at, tear, Then::GoesOn);
                let mut model = Model::new();
                let upper = Upper::create_with(ops.clone(), &path, SIZE, Uuid::NIL).unwrap_or_else(|_| {
                    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "{story}: remains");
                    Upper::create_with(ops.clone(), &path, SIZE, Uuid::NIL).unwrap()
                });
                for request in &requests {
                    let outcome = run_request(&upper, request);
                    model.apply(request, outcome.is_ok());
                }
                if seal::seal(&upper, |_| Ok(|| ())).is_err() {
                    assert_eq!(probe(&path).unwrap(), FileState::Upper, "{story}: an error after the commit");
                    let written = run_request(&upper, &Request::Write { start: 3, sectors: 2, value: 9 });
                    written.unwrap();
                    model.apply(&Request::Write { start: 3, sectors: 2, value: 9 }, true);
                    seal::seal(&upper, |_| Ok(|| ())).unwrap();
                }
                model.check(&open(&base, &path), &story);
                if !ops.was_reached() {
                    break;
                }
            }
        }
    }
}
