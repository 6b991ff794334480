//! Sealing a disk's upper, and finishing a seal that a crash cut off.
//!
//! ```text
//!   A  record {upper: U}                                      before
//!   B  record {upper: U, sealing: {new_upper: N}}             the intent is on disk; U is still an upper
//!   C  U is a sealed layer, N may be missing                  made by aenv-layers
//!   D  record {layers: [.., U], upper: N, last_seal: ...}     done
//! ```
//!
//! A crash before B changes nothing. After B the next blockd goes *forward* to D before it serves the export: sealing
//! can always be finished from the upper's map, whereas a sealed file cannot become an upper again. The client whose
//! answer was lost asks again and is told what `last_seal` says. An error in B is not a crash: U is still an upper, and
//! the record goes back to A.

use std::path::Path;
use std::time::Instant;

use aenv_layers::FileState;
use aenv_wire::block::{ExportKind, SealDiskOk};

use super::record::{LastSeal, Record, Sealing};
use super::{Export, ExportError, Exports};
use crate::threads::spawn;

impl Exports {
    /// Seals the upper of a disk. Repeating the last seal with the same new upper answers what that answered.
    pub fn seal_disk(&self, name: &str, new_upper: Option<String>) -> Result<SealDiskOk, ExportError> {
        let started = Instant::now();
        let export = self.by_name(name)?;
        if export.kind != ExportKind::Disk {
            return Err(ExportError::NotADisk(name.to_owned()));
        }
        // Opened before the record is locked: opening locks in the other order. So does looking at all records.
        let content = export.content(&self.layers)?;
        if let Some(new_upper) = &new_upper {
            self.check_new_upper(new_upper, name)?;
        }
        let mut record = export.record_to_change()?;
        if let Some(last) = repeated(&record, new_upper.as_ref()) {
            return Ok(last);
        }
        let upper = record
            .upper
            .clone()
            .ok_or_else(|| ExportError::NothingToSeal(name.to_owned()))?;
        if let Some(new_upper) = &new_upper {
            check_is_free(new_upper)?;
        }
        record.sealing = Some(Sealing {
            new_upper: new_upper.clone(),
        });
        self.write_record(&record)?;
        crash_point("intent");
        let (report, retired) = match content.seal(new_upper.as_deref()) {
            Ok(sealed) => sealed,
            Err(source) => {
                record.sealing = None;
                self.write_record(&record)?;
                return Err(ExportError::Layers {
                    what: format!("{name}, sealing {upper}"),
                    source,
                });
            }
        };
        crash_point("sealed");
        let answer = SealDiskOk {
            layer: upper,
            data_bytes: report.data_bytes,
            index_entries: report.index_entries,
            duration_us: u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX),
        };
        self.record_the_swap(&mut record, new_upper, answer.clone())?;
        crash_point("recorded");
        // The guest waits for our answer and not for this. Without a thread it is dropped here.
        let _ = spawn("retired upper", move || drop(retired));
        Ok(answer)
    }

    /// Brings an export from B or C to D.
    pub(super) fn repair_seal(&self, export: &Export) -> Result<(), ExportError> {
        let mut record = export.record();
        let (Some(Sealing { new_upper }), Some(upper)) = (record.sealing.clone(), record.upper.clone()) else {
            return Ok(());
        };
        let failed = |source| ExportError::Layers {
            what: format!("{}, sealing {upper}", record.name),
            source,
        };
        let (data_bytes, index_entries) = finish_sealing(Path::new(&upper)).map_err(failed)?;
        say!(
            "aenv-blockd: finished the seal of export {} that was cut off",
            record.name
        );
        let answer = SealDiskOk {
            layer: upper,
            data_bytes,
            index_entries,
            duration_us: 0,
        };
        self.record_the_swap(&mut record, new_upper, answer)
    }

    fn record_the_swap(&self, record: &mut Record, new: Option<String>, answer: SealDiskOk) -> Result<(), ExportError> {
        record.layers.push(answer.layer.clone());
        record.upper.clone_from(&new);
        record.sealing = None;
        record.last_seal = Some(LastSeal { new_upper: new, answer });
        self.write_record(record)
    }
}

/// Looked at before the intent is recorded: from then on a file of that name counts as ours.
fn check_is_free(path: &str) -> Result<(), ExportError> {
    let failed = |source| ExportError::Layers {
        what: path.to_owned(),
        source,
    };
    match aenv_layers::probe(Path::new(path)).map_err(failed)? {
        FileState::Missing => Ok(()),
        _ => Err(failed(aenv_layers::Error::Exists { path: path.into() })),
    }
}

fn repeated(record: &Record, new_upper: Option<&String>) -> Option<SealDiskOk> {
    let last = record.last_seal.as_ref()?;
    let same = last.new_upper.as_ref() == new_upper && record.upper.as_ref() == new_upper;
    same.then(|| last.answer.clone())
}

fn finish_sealing(upper: &Path) -> Result<(u64, u64), aenv_layers::Error> {
    if let FileState::Upper = aenv_layers::probe(upper)? {
        let (_, report) = aenv_layers::Upper::open(upper)?.seal()?;
        return Ok((report.data_bytes, report.index_entries));
    }
    let layer = aenv_layers::Layer::open(upper)?;
    Ok((layer.data_bytes(), layer.segments().len() as u64))
}

/// Where the tests of the table above end the process, as `kill -9` would: `AENV_BLOCKD_TEST_CRASH` names the point.
fn crash_point(name: &str) {
    if cfg!(debug_assertions) && std::env::var_os("AENV_BLOCKD_TEST_CRASH").is_some_and(|wanted| wanted == name) {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
