//! How the stored bytes of a blob are made from its plain bytes: compressed, then encrypted, each if asked for.
//!
//! Stored bytes are never kept: they are made again for every pass over them (one to learn their name, one to send them),
//! which costs processor time and no disk. Equal plain bytes and equal options give equal stored bytes.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use aenv_layers::zfile::CompressError;
use aenv_layers::{Blob, ZFileOptions, ZFileWriter};
use aenv_store::{Cipher, Digest, EncryptWriter};

use crate::error::Failed;
use crate::progress::Progress;

/// Plain bytes read at a time: fits the second-level cache.
const CHUNK_BYTES: usize = 512 << 10;

/// One way to make stored bytes.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    /// For errors.
    pub path: PathBuf,
    pub plain: Arc<dyn Blob>,
    pub compress: Option<ZFileOptions>,
    /// The key, and the digest of the bytes that are encrypted.
    pub encrypt: Option<(Cipher, Digest)>,
}

/// Why stored bytes were not made to their end.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The source, or what is done with it.
    Source(Failed),
    /// What the bytes were written to.
    Sink(io::Error),
}

impl Recipe {
    /// Writes the stored bytes to `sink`; `seen` is shown the plain ones on the way.
    pub fn produce(
        &self,
        sink: &mut dyn Write,
        seen: &mut dyn FnMut(&[u8]),
        progress: &Progress,
    ) -> Result<(), Broken> {
        let Some((cipher, salt)) = &self.encrypt else {
            return self.pack(sink, seen, progress);
        };
        let mut writer = EncryptWriter::new(cipher, *salt, sink).map_err(Broken::Sink)?;
        self.pack(&mut writer, seen, progress)?;
        match writer.finish() {
            Ok(_) => Ok(()),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => Err(Broken::Source(self.changed())),
            Err(e) => Err(Broken::Sink(e)),
        }
    }

    /// The bytes before encryption.
    fn pack(&self, sink: &mut dyn Write, seen: &mut dyn FnMut(&[u8]), progress: &Progress) -> Result<(), Broken> {
        let Some(options) = self.compress else {
            return self.read(seen, progress, |chunk| sink.write_all(chunk).map_err(Broken::Sink));
        };
        let broken = |error| match error {
            CompressError::Sink(error) => Broken::Sink(error),
            error => Broken::Source(Failed::Compress {
                path: self.path.clone(),
                source: error.into(),
            }),
        };
        let mut writer = ZFileWriter::new(sink, options).map_err(broken)?;
        self.read(seen, progress, |chunk| writer.append(chunk).map_err(broken))?;
        writer.finish().map_err(broken)?;
        Ok(())
    }

    fn read(
        &self,
        seen: &mut dyn FnMut(&[u8]),
        progress: &Progress,
        mut take: impl FnMut(&[u8]) -> Result<(), Broken>,
    ) -> Result<(), Broken> {
        let length = self.plain.len_bytes();
        let mut chunk = vec![0; CHUNK_BYTES];
        let mut offset = 0;
        while offset < length {
            let part = &mut chunk[..(length - offset).min(CHUNK_BYTES as u64) as usize];
            let read = self.plain.read_exact_at(part, offset);
            read.map_err(|e| Broken::Source(e.into()))?;
            seen(part);
            take(part)?;
            offset += part.len() as u64;
            progress.advance(part.len() as u64);
        }
        Ok(())
    }

    pub fn changed(&self) -> Failed {
        Failed::Changed {
            path: self.path.clone(),
        }
    }
}
