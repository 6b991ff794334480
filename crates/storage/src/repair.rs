//! What blockd also does, for a person who repairs something or measures.

use std::path::Path;

use aenv_layers::{Canonical, Layer};
use serde::Serialize;

use crate::directory::{NewFile, split};
use crate::error::{At, Failed};
use crate::progress::Progress;
use crate::recipe::{Broken, Recipe};

/// The identity of a layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Digested {
    pub digest: String,
    /// Bytes of the canonical form.
    pub size_bytes: u64,
    pub data_bytes: u64,
    pub sparse: bool,
}

/// The dense form of a layer as a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Compacted {
    pub layer: String,
    pub data_bytes: u64,
}

/// The digest of the canonical bytes. Errors: those of the layer.
pub fn digest(path: &Path) -> Result<Digested, Failed> {
    let found = aenv_layers::digest(path)?;
    Ok(Digested {
        digest: found.digest,
        size_bytes: found.size_bytes,
        data_bytes: found.data_bytes,
        sparse: found.sparse,
    })
}

/// Writes the canonical form to `into`, durably, whole or not at all.
///
/// Errors: kind `exists` if a file of that name is there, `invalid` for a name without a last part; those of the layer.
pub fn compact(path: &Path, into: &Path, progress: &Progress) -> Result<Compacted, Failed> {
    let layer = Layer::open(path)?;
    let (folder, name) = split(into)?;
    let mut file = NewFile::create(folder)?;
    let recipe = Recipe {
        path: path.to_owned(),
        plain: std::sync::Arc::new(Canonical::new(&layer)),
        compress: None,
        encrypt: None,
    };
    let length = recipe.plain.len_bytes();
    file.reserve(length)?;
    progress.expect(length);
    match recipe.produce(&mut file, &mut |_| (), progress) {
        Ok(()) => {}
        Err(Broken::Source(failed)) => return Err(failed),
        Err(Broken::Sink(e)) => return Err(e).at(into, "write"),
    }
    if file.publish(name)? {
        return Err(std::io::Error::from(std::io::ErrorKind::AlreadyExists)).at(into, "give the file its name");
    }
    Ok(Compacted {
        layer: into.display().to_string(),
        data_bytes: layer.data_bytes(),
    })
}
