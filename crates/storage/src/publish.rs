//! Publishing: a layer or a file becomes a blob of a repository, named by the SHA-256 of its stored bytes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aenv_layers::{Algorithm, Blob, Canonical, FileBlob, Layer, ZFileOptions};
use aenv_store::{Cipher, Digest, Hasher, Stores};
use serde::Serialize;

use crate::directory::NewFile;
use crate::error::{At, Failed};
use crate::patience::Patience;
use crate::progress::Progress;
use crate::recipe::{Broken, Recipe};
use crate::sums::{Summed, Sums};
use crate::upload::{Options, Upload};

/// Level of zstd: about 200 MB/s on one core, and most of what higher levels save.
const ZSTD_LEVEL: i32 = 3;

/// What is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A sealed layer: its canonical bytes, in a bucket with a block list.
    Layer(PathBuf),
    /// Any file, as it is.
    File(PathBuf),
}

/// Where to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    Directory(PathBuf),
    /// A store of the configuration.
    Store(String),
}

/// One command `publish` or `put-file`.
#[derive(Debug, Clone)]
pub struct Publication {
    pub content: Content,
    pub target: Target,
    /// The configuration of stores; needed for a store and for encryption.
    pub stores: Option<PathBuf>,
    /// What stands before the digest in the key, `layers/`.
    pub prefix: String,
    /// What stands after it, `.lsmt`.
    pub suffix: String,
    pub compress: Option<Algorithm>,
    pub encrypt: bool,
    pub journal_dir: Option<PathBuf>,
    pub part_bytes: u64,
    pub parallel: usize,
    pub patience: Patience,
}

/// What became of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Published {
    /// Of the stored bytes.
    pub digest: Digest,
    pub size_bytes: u64,
    /// Of the canonical bytes, before compression and encryption.
    pub plain_digest: Digest,
    pub plain_size_bytes: u64,
    pub blocks_digest: Option<Digest>,
    pub encryption: Option<&'static str>,
    /// It was there already.
    pub reused: bool,
}

/// Publishes. Durable on return; idempotent; may be killed at any time and run again.
pub fn publish(publication: &Publication, progress: &Progress) -> Result<Published, Failed> {
    // A directory without encryption needs none, and a node with such a repository may have none.
    let needed = publication.encrypt || matches!(publication.target, Target::Store(_));
    let stores = publication.stores.as_deref().filter(|_| needed);
    let stores = stores.map(Stores::open).transpose()?;
    let (recipe, plain) = prepare(publication, stores.as_ref(), progress)?;
    match &publication.target {
        Target::Directory(folder) => into_directory(publication, &recipe, plain, folder, progress),
        Target::Store(name) => {
            let stores = stores.ok_or_else(|| Failed::NoStores { path: name.into() })?;
            into_store(publication, &recipe, plain, &stores, name, progress)
        }
    }
}

/// The digest of the plain bytes, as far as it is known before they are stored.
type Plain = Option<Digest>;

fn prepare(publication: &Publication, stores: Option<&Stores>, progress: &Progress) -> Result<(Recipe, Plain), Failed> {
    let (path, plain) = open(&publication.content)?;
    let compress = publication.compress.map(|algorithm| ZFileOptions {
        algorithm,
        level: ZSTD_LEVEL,
        ..ZFileOptions::default()
    });
    let mut recipe = Recipe {
        path,
        plain,
        compress,
        encrypt: None,
    };
    if !publication.encrypt {
        return Ok((recipe, None));
    }
    let cipher = stores.and_then(Stores::cipher).ok_or(Failed::NoKey)?;
    let digest = choose_key(&mut recipe, cipher, progress)?;
    Ok((recipe, Some(digest)))
}

fn open(content: &Content) -> Result<(PathBuf, Arc<dyn Blob>), Failed> {
    Ok(match content {
        Content::Layer(path) => (path.clone(), Arc::new(Canonical::new(&Layer::open(path)?))),
        Content::File(path) => (path.clone(), Arc::new(FileBlob::open(path)?)),
    })
}

/// The key of a file is derived from the digest of what is encrypted, so that takes a pass of its own.
fn choose_key(recipe: &mut Recipe, cipher: Cipher, progress: &Progress) -> Result<Digest, Failed> {
    let (sums, plain) = sum(recipe, false, progress)?;
    recipe.encrypt = Some((cipher, sums.digest));
    Ok(plain)
}

/// Makes the stored bytes for their sums alone; also the digest of the plain ones.
fn sum(recipe: &Recipe, with_blocks: bool, progress: &Progress) -> Result<(Summed, Digest), Failed> {
    progress.expect(recipe.plain.len_bytes());
    let mut sums = Sums::new(with_blocks);
    let mut plain = Hasher::new();
    let same = recipe.compress.is_none() && recipe.encrypt.is_none();
    let mut seen = |chunk: &[u8]| {
        if !same {
            plain.update(chunk)
        }
    };
    match recipe.produce(&mut sums, &mut seen, progress) {
        Ok(()) => {}
        Err(Broken::Source(failed)) => return Err(failed),
        Err(Broken::Sink(e)) => return Err(e).at(&recipe.path, "hash"),
    }
    let sums = sums.finish();
    let plain = if same { sums.digest } else { plain.finish() };
    Ok((sums, plain))
}

fn into_directory(
    publication: &Publication,
    recipe: &Recipe,
    plain: Plain,
    folder: &Path,
    progress: &Progress,
) -> Result<Published, Failed> {
    let folder = folder.join(publication.prefix.trim_end_matches('/'));
    let file = NewFile::create(&folder)?;
    let length = recipe.plain.len_bytes();
    // Compressed bytes are fewer, nobody knows how many.
    if recipe.compress.is_none() {
        file.reserve(length)?;
    }
    progress.expect(length);
    let mut sink = HashedFile {
        file,
        sums: Sums::new(false),
    };
    let (known, mut hasher) = (plain, Hasher::new());
    let same = recipe.compress.is_none() && recipe.encrypt.is_none();
    let mut seen = |chunk: &[u8]| {
        if known.is_none() && !same {
            hasher.update(chunk)
        }
    };
    match recipe.produce(&mut sink, &mut seen, progress) {
        Ok(()) => {}
        Err(Broken::Source(failed)) => return Err(failed),
        Err(Broken::Sink(e)) => return Err(e).at(&folder, "write"),
    }
    let sums = sink.sums.finish();
    let plain = known.unwrap_or_else(|| if same { sums.digest } else { hasher.finish() });
    let name = format!("{}{}", sums.digest, publication.suffix);
    let reused = sink.file.publish(&name)?;
    Ok(published(publication, recipe, &sums, plain, reused))
}

fn into_store(
    publication: &Publication,
    recipe: &Recipe,
    plain: Plain,
    stores: &Stores,
    name: &str,
    progress: &Progress,
) -> Result<Published, Failed> {
    let bucket = stores.bucket(name)?;
    let with_blocks = matches!(publication.content, Content::Layer(_));
    let (sums, seen) = sum(recipe, with_blocks, progress)?;
    progress.expect(sums.size_bytes);
    let key = |suffix: &str| format!("{}{}{suffix}", publication.prefix, sums.digest);
    let upload = Upload {
        bucket: &bucket,
        recipe,
        key: &key(&publication.suffix),
        blocks: sums.blocks.as_ref().map(|list| (key(".blocks"), list.encode().into())),
        sums: &sums,
        options: Options {
            journal_dir: publication.journal_dir.as_deref(),
            part_bytes: publication.part_bytes,
            parallel: publication.parallel,
            patience: publication.patience,
        },
        progress,
    };
    let reused = upload.run()?;
    Ok(published(publication, recipe, &sums, plain.unwrap_or(seen), reused))
}

fn published(publication: &Publication, recipe: &Recipe, sums: &Summed, plain: Digest, reused: bool) -> Published {
    Published {
        digest: sums.digest,
        size_bytes: sums.size_bytes,
        plain_digest: plain,
        plain_size_bytes: recipe.plain.len_bytes(),
        blocks_digest: sums.blocks.as_ref().map(|list| list.digest()),
        encryption: publication.encrypt.then_some("aes-256-gcm"),
        reused,
    }
}

/// A file and the sums of what is written to it.
struct HashedFile {
    file: NewFile,
    sums: Sums,
}

impl std::io::Write for HashedFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.file.write(bytes)?;
        self.sums.write_all(&bytes[..count])?;
        Ok(count)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}
