//! Stacks against a plain byte array: random writes, discards, seals, merges and reopens.

// Helpers of tests are no tests for the lint.
#![allow(clippy::unwrap_used)]

use std::path::PathBuf;
use std::sync::Arc;

use aenv_layers::{ExtentKind, FileState, Layer, LayerWriter, Registry, Stack, Uuid, import_raw, merge, probe};
use proptest::prelude::*;

const SECTOR: u64 = 512;
/// Sectors of the device: a few words of the map and a partial one.
const SECTORS: u64 = 300;
const SIZE: u64 = SECTORS * SECTOR;

#[derive(Debug, Clone)]
enum Step {
    Write {
        start: u64,
        sectors: u64,
        fill: u8,
    },
    Discard {
        start: u64,
        sectors: u64,
    },
    Seal,
    Reopen,
    /// Merges the layers from the first position to the second.
    Merge(usize, usize),
    /// Copies the whole content to a raw file and imports it as the only layer.
    Import,
}

fn step() -> impl Strategy<Value = Step> {
    let range = (0..SECTORS, 1u64..80).prop_map(|(start, n)| (start, n.min(SECTORS - start)));
    prop_oneof![
        8 => (range.clone(), any::<u8>()).prop_map(|((start, sectors), fill)| Step::Write { start, sectors, fill }),
        4 => range.prop_map(|(start, sectors)| Step::Discard { start, sectors }),
        2 => Just(Step::Seal),
        1 => Just(Step::Reopen),
        1 => (0usize..8, 0usize..8).prop_map(|(a, b)| Step::Merge(a, b)),
        1 => Just(Step::Import),
    ]
}

/// Bytes that differ from sector to sector, so that data at the wrong place is seen.
fn pattern(start: u64, sectors: u64, fill: u8) -> Vec<u8> {
    (0..sectors * SECTOR)
        .map(|i| {
            fill.wrapping_add(((start + i / SECTOR) * 7) as u8)
                .wrapping_add(i as u8)
        })
        .collect()
}

struct World {
    folder: tempfile::TempDir,
    registry: Arc<Registry>,
    stack: Stack,
    layers: Vec<PathBuf>,
    upper: PathBuf,
    names: u32,
    model: Vec<u8>,
}

impl World {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let registry = Registry::new();
        let upper = folder.path().join("0");
        let stack = Stack::open_with(&registry, &[], Some(&upper), SIZE).unwrap();
        World {
            folder,
            registry,
            stack,
            layers: vec![],
            upper,
            names: 1,
            model: vec![0; SIZE as usize],
        }
    }

    fn name(&mut self) -> PathBuf {
        self.names += 1;
        self.folder.path().join(self.names.to_string())
    }

    fn reopen(&mut self) {
        let registry = Registry::new();
        self.stack = Stack::open_with(&registry, &self.layers, Some(&self.upper), SIZE).unwrap();
        self.registry = registry;
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Write { start, sectors, fill } => {
                let data = pattern(start, sectors, fill);
                self.stack.write_at(&data, start * SECTOR).unwrap();
                self.model[(start * SECTOR) as usize..][..data.len()].copy_from_slice(&data);
            }
            Step::Discard { start, sectors } => {
                self.stack.discard(start * SECTOR, sectors * SECTOR).unwrap();
                self.model[(start * SECTOR) as usize..][..(sectors * SECTOR) as usize].fill(0);
            }
            Step::Seal => self.seal(),
            Step::Reopen => self.reopen(),
            Step::Merge(a, b) if !self.layers.is_empty() => {
                let (a, b) = (a % self.layers.len(), b % self.layers.len());
                let (first, last) = (a.min(b), a.max(b));
                let into = self.name();
                let report = merge(&self.layers[first..=last], &into).unwrap();
                assert_eq!(report.layer.uuid(), Layer::open(&self.layers[last]).unwrap().uuid());
                self.layers.splice(first..=last, [into]);
                self.reopen();
            }
            Step::Merge(..) => {}
            Step::Import => self.import(),
        }
    }

    fn seal(&mut self) {
        let next = self.name();
        let (report, _) = self.stack.seal_upper(Some(&next)).unwrap();
        assert_eq!(report.layer, self.upper);
        assert_eq!(probe(&self.upper).unwrap(), FileState::Sealed);
        // What was kept in memory is what the file says.
        let layer = Layer::open(&self.upper).unwrap();
        assert_eq!(layer.segments().len() as u64, report.index_entries);
        assert_eq!(layer.data_bytes(), report.data_bytes);
        self.layers.push(std::mem::replace(&mut self.upper, next));
    }

    fn import(&mut self) {
        let raw = self.name();
        std::fs::write(&raw, &self.model).unwrap();
        let into = self.name();
        import_raw(&raw, &into).unwrap();
        self.layers = vec![into];
        self.upper = self.name();
        self.reopen();
    }

    fn check(&self) {
        let mut whole = vec![0xa5; SIZE as usize];
        self.stack.read_at(&mut whole, 0).unwrap();
        assert!(
            whole == self.model,
            "first wrong sector: {:?}",
            first_difference(&whole, &self.model)
        );
        let mut at = 0;
        for extent in self.stack.extents(0, SIZE).unwrap() {
            assert_eq!(extent.offset, at);
            at += extent.length;
            let zero = extent.kind == ExtentKind::Zero;
            assert_eq!(self.stack.is_zero(extent.offset, extent.length), zero);
            assert!(!zero || self.model[extent.offset as usize..at as usize].iter().all(|&b| b == 0));
        }
        assert_eq!(at, SIZE);
    }
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter()
        .zip(b)
        .position(|(x, y)| x != y)
        .map(|byte| byte / SECTOR as usize)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn a_stack_reads_what_a_byte_array_holds(
        steps in prop::collection::vec(step(), 1..40),
        reads in prop::collection::vec((0..SECTORS, 1u64..40), 4),
    ) {
        let mut world = World::new();
        for step in &steps {
            world.run(step);
            world.check();
        }
        world.reopen();
        world.check();
        for (start, sectors) in reads {
            let sectors = sectors.min(SECTORS - start);
            let mut part = vec![0x5a; (sectors * SECTOR) as usize];
            world.stack.read_at(&mut part, start * SECTOR).unwrap();
            prop_assert_eq!(&part[..], &world.model[(start * SECTOR) as usize..][..part.len()]);
        }
    }

    #[test]
    fn a_written_layer_reads_back(runs in prop::collection::vec((0u64..20, 1u64..60, any::<bool>(), any::<u8>()), 0..20)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("layer");
        let mut writer = LayerWriter::create(&path, SIZE, Uuid::NIL).unwrap();
        let mut model = vec![0u8; SIZE as usize];
        let mut at = 0;
        for (gap, sectors, zero, fill) in runs {
            at += gap;
            if at + sectors > SECTORS {
                break;
            }
            if zero {
                writer.append_zero(at * SECTOR, sectors * SECTOR).unwrap();
            } else {
                let data = pattern(at, sectors, fill);
                writer.append(at * SECTOR, &data).unwrap();
                model[(at * SECTOR) as usize..][..data.len()].copy_from_slice(&data);
            }
            at += sectors;
        }
        let uuid = writer.uuid();
        let made = writer.finish().unwrap();
        let opened = Layer::open(&path).unwrap();
        prop_assert_eq!(made.segments(), opened.segments());
        prop_assert_eq!(opened.uuid(), uuid);
        let stack = Stack::open(&[path], None, SIZE).unwrap();
        let mut found = vec![1; SIZE as usize];
        stack.read_at(&mut found, 0).unwrap();
        prop_assert!(found == model);
    }
}
