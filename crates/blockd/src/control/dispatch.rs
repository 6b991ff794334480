//! From an operation to what carries it out, and its answer.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use aenv_wire::block::{
    AbandonOk, Empty, ExportKind, ExportOk, ExportsOk, HelloOk, Name, Operation, PROTOCOL_VERSION, Request, StatsOk,
    encode_error, encode_ok,
};
use rustix::process::Signal;
use serde::Serialize;

use super::layers;
use super::refusal::Refusal;
use crate::capture::Captures;
use crate::export::{Export, Exports, check_path};
use crate::files::sync_with_directory;
use crate::fuse::Session;
use crate::process::Peer;
use crate::remote::Remote;
use crate::stats::{Counter, Counters};

/// Everything that operations touch.
#[derive(Debug)]
pub struct Daemon {
    pub exports: Arc<Exports>,
    pub captures: Captures,
    pub counters: Arc<Counters>,
    pub memory: Arc<Session>,
    pub disks: Arc<Session>,
    pub memory_mount: PathBuf,
    pub disk_mount: PathBuf,
    /// Replaced by the watcher when the keeper is.
    pub keeper: Mutex<Arc<Peer>>,
    pub operations: AtomicUsize,
    /// Set by the order to stop. The keeper carries it out; the watcher does if that one dies before it could.
    pub stopping: AtomicBool,
}

impl Daemon {
    /// Operations that are done in no time and must not wait for a free thread.
    pub fn is_immediate(operation: &Operation) -> bool {
        use Operation as O;
        matches!(operation, O::Hello | O::Exports | O::Stats | O::Shutdown)
    }

    /// Operations that end something: they run however many others do, since those may be waiting for them.
    pub fn is_always_admitted(operation: &Operation) -> bool {
        matches!(
            operation,
            Operation::Abandon(_) | Operation::Unexport(_) | Operation::CaptureCancel(_)
        )
    }

    pub fn carry_out(&self, request: Request) -> Vec<u8> {
        let id = request.id;
        let outcome = match request.operation {
            Operation::Hello => ok(id, self.hello()),
            Operation::ExportMemory(asked) => self
                .exported(self.exports.export_memory(asked))
                .map(|a| encode_ok(id, &a)),
            Operation::ExportDisk(asked) => self
                .exported(self.exports.export_disk(asked))
                .map(|a| encode_ok(id, &a)),
            Operation::Unexport(Name { name }) => self.unexport(&name).map(|a| encode_ok(id, &a)),
            Operation::Abandon(Name { name }) => self.abandon(&name).map(|a| encode_ok(id, &a)),
            Operation::Exports => ok(
                id,
                ExportsOk {
                    exports: self.exports.list(),
                },
            ),
            Operation::SealDisk(asked) => self
                .exports
                .seal_disk(&asked.name, asked.new_upper)
                .map(|a| encode_ok(id, &a))
                .map_err(Refusal::from),
            Operation::Sync(asked) => sync(&asked.paths).map(|a| encode_ok(id, &a)),
            Operation::CaptureStart(asked) => self
                .captures
                .start(asked)
                .map(|a| encode_ok(id, &a))
                .map_err(Refusal::from),
            Operation::CaptureFinish(asked) => {
                let finished = self.captures.finish(&asked.job);
                self.counters.add(if finished.is_ok() {
                    Counter::Captured
                } else {
                    Counter::CaptureFailed
                });
                finished.map(|a| encode_ok(id, &a)).map_err(Refusal::from)
            }
            Operation::CaptureCancel(asked) => self
                .captures
                .cancel(&asked.job)
                .map(|()| encode_ok(id, &Empty {}))
                .map_err(Refusal::from),
            Operation::Merge(asked) => layers::merge(&self.exports, &asked).map(|a| encode_ok(id, &a)),
            Operation::ImportRaw(asked) => layers::import_raw(&asked).map(|a| encode_ok(id, &a)),
            Operation::Digest(asked) => layers::digest(&self.exports, &asked.path).map(|a| encode_ok(id, &a)),
            Operation::Compact(asked) => layers::compact(&self.exports, &asked).map(|a| encode_ok(id, &a)),
            Operation::TraceStart(asked) => self.remote().trace_start(asked).map(|a| encode_ok(id, &a)),
            Operation::TraceFinish(asked) => self.remote().trace_finish(&asked).map(|a| encode_ok(id, &a)),
            Operation::Prefetch(asked) => self.remote().prefetch(&asked).map(|a| encode_ok(id, &a)),
            Operation::Fill(asked) => self.remote().fill(&asked).map(|a| encode_ok(id, &a)),
            Operation::Cache => ok(id, self.remote().state()),
            Operation::CacheEvict(asked) => self.remote().evict(&asked).map(|a| encode_ok(id, &a)),
            Operation::Stats => ok(id, self.stats()),
            Operation::Shutdown => {
                // Before the signal: a keeper that is just being replaced is told by the watcher, which looks after.
                self.stopping.store(true, Ordering::SeqCst);
                self.keeper().signal(Signal::TERM);
                ok(id, Empty {})
            }
        };
        outcome.unwrap_or_else(|refusal| encode_error(id, refusal.kind, &refusal.message))
    }

    fn remote(&self) -> &Remote {
        &self.exports.layers.remote
    }

    pub fn keeper(&self) -> Arc<Peer> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn hello(&self) -> HelloOk {
        HelloOk {
            version: PROTOCOL_VERSION,
            pid: std::process::id(),
            keeper_pid: self.keeper().pid,
            memory_mount: self.memory_mount.to_string_lossy().into_owned(),
            disk_mount: self.disk_mount.to_string_lossy().into_owned(),
        }
    }

    fn stats(&self) -> StatsOk {
        StatsOk {
            counters: self.counters.by_name(),
            buffer_bytes: self.captures.buffer_bytes(),
            exports: self.exports.count() as u64,
            captures: self.captures.count() as u64,
            threads: (self.memory.threads() + self.disks.threads() + self.operations.load(Ordering::Relaxed)) as u64,
        }
    }

    fn session(&self, kind: ExportKind) -> &Session {
        match kind {
            ExportKind::Memory => &self.memory,
            ExportKind::Disk => &self.disks,
        }
    }

    fn exported(&self, export: Result<Arc<Export>, crate::export::ExportError>) -> Result<ExportOk, Refusal> {
        let export = export?;
        let mount = if export.kind == ExportKind::Memory {
            &self.memory_mount
        } else {
            &self.disk_mount
        };
        Ok(ExportOk {
            path: mount.join(&export.name).to_string_lossy().into_owned(),
            inode: export.inode,
        })
    }

    fn unexport(&self, name: &str) -> Result<Empty, Refusal> {
        let (export, waiting) = self.exports.unexport(name)?;
        let session = self.session(export.kind);
        session.refuse_all(&waiting);
        session.channel.forget(crate::fuse::ROOT_INODE, export.inode, name);
        Ok(Empty {})
    }

    fn abandon(&self, name: &str) -> Result<AbandonOk, Refusal> {
        let (export, waiting) = self.exports.abandon(name)?;
        self.session(export.kind).refuse_all(&waiting);
        self.exports.record_abandoned(&export)?;
        Ok(AbandonOk {
            waiting: waiting.len() as u64,
        })
    }
}

fn ok<T: Serialize>(id: u64, answer: T) -> Result<Vec<u8>, Refusal> {
    Ok(encode_ok(id, &answer))
}

fn sync(paths: &[String]) -> Result<Empty, Refusal> {
    for path in paths {
        check_path(path)?;
        sync_with_directory(Path::new(path)).map_err(|error| Refusal::io(&format!("cannot sync {path}"), &error))?;
    }
    Ok(Empty {})
}
