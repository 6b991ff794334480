//! Operations that read layers and make new ones.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::Layer;
use aenv_wire::block::{Compact, CompactOk, DigestOk, ErrorKind, ImportRaw, ImportRawOk, Merge, MergeOk};

use super::refusal::Refusal;
use crate::export::{Exports, check_path};
use crate::files::{remove_if_there, rename_new, sibling, sync_with_directory};

/// The digest of a layer's canonical bytes. Reads all of its data.
pub fn digest(exports: &Exports, path: &str) -> Result<DigestOk, Refusal> {
    let report = aenv_layers::digest_layer(&*open(exports, path)?)?;
    Ok(DigestOk {
        digest: report.digest,
        size_bytes: report.size_bytes,
        data_bytes: report.data_bytes,
        sparse: report.sparse,
    })
}

/// The canonical form of a layer as a file that survives a power loss.
pub fn compact(exports: &Exports, asked: &Compact) -> Result<CompactOk, Refusal> {
    let layer = open(exports, &asked.layer)?;
    let into = Path::new(&asked.into);
    let unsynced = |error: std::io::Error| Refusal::io(&format!("cannot sync {}", into.display()), &error);
    let report = made_whole(&asked.into, |partial| {
        let report = aenv_layers::compact(&layer, partial)?;
        // Before the name: a file of that name is whole also after a power loss.
        File::open(partial)
            .and_then(|file| file.sync_all())
            .map_err(|source| aenv_layers::Error::Io {
                path: partial.to_owned(),
                step: "sync",
                source,
            })?;
        Ok(report)
    })?;
    sync_with_directory(into).map_err(unsynced)?;
    Ok(CompactOk {
        layer: asked.into.clone(),
        data_bytes: report.data_bytes,
    })
}

fn open(exports: &Exports, path: &str) -> Result<Arc<Layer>, Refusal> {
    check_path(path)?;
    Ok(exports.layers.registry.open(Path::new(path))?)
}

/// One layer that reads as several do.
pub fn merge(exports: &Exports, asked: &Merge) -> Result<MergeOk, Refusal> {
    let layers: Vec<PathBuf> = asked.layers.iter().map(PathBuf::from).collect();
    let report = made_whole(&asked.into, |partial| {
        aenv_layers::merge_with(&exports.layers.registry, &layers, partial)
    })?;
    Ok(MergeOk {
        layer: asked.into.clone(),
        data_bytes: report.data_bytes,
    })
}

/// A layer of a plain file.
pub fn import_raw(asked: &ImportRaw) -> Result<ImportRawOk, Refusal> {
    check_path(&asked.source)?;
    let report = made_whole(&asked.into, |partial| {
        aenv_layers::import_raw(Path::new(&asked.source), partial)
    })?;
    Ok(ImportRawOk {
        layer: asked.into.clone(),
        data_bytes: report.data_bytes,
        size_bytes: report.size_bytes,
    })
}

/// Makes a layer under a temporary name, so that a file of its final name is always whole. An existing one is never
/// replaced: it may be in use.
fn made_whole<T>(into: &str, make: impl FnOnce(&Path) -> Result<T, aenv_layers::Error>) -> Result<T, Refusal> {
    check_path(into)?;
    let partial = sibling(Path::new(into), ".partial");
    let taken = || Refusal::new(ErrorKind::Exists, format!("{into} is there already"));
    if Path::new(into).exists() {
        return Err(taken());
    }
    remove_if_there(&partial).map_err(|error| Refusal::io("cannot remove a leftover", &error))?;
    let report = make(&partial)?;
    rename_new(&partial, Path::new(into)).map_err(|error| {
        let _ = remove_if_there(&partial);
        Refusal::io(&format!("cannot name {into}"), &error)
    })?;
    Ok(report)
}
