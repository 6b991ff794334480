//! The 4096 bytes at both ends of a layer.
//!
//! ```text
//!   0   8  magic "LSMT\0\1\2\0"            56  37  uuid, text, NUL
//!   8  16  second magic                    93  37  uuid of the parent, text, NUL
//!  24   4  size of this structure, 390    130   2  unused
//!  28   4  flags                          132   1  version, 1
//!  32   8  byte offset of the index       133   1  sub-version, 1
//!  40   8  entries of the index           134 256  tag (free text)
//!  48   8  virtual size in bytes          390      zero up to 4096
//! ```
//!
//! Flags: bit 0 header (else trailer), 1 data file, 2 sealed, 3 made by garbage collection, 4 sparse, 5 fields valid.
//! The trailer is the truth about a sealed file: a stream writer knows index and sizes only at the end.
//!
//! The format has no checksum. Ours lives in the tag, which upstream treats as a comment: `agentenv/1 crc32c=xxxxxxxx`
//! over the trailer's bytes before the tag and the index. Files without such a tag are read without the check.

use crate::error::Damage;
use crate::uuid::{UUID_FIELD_BYTES, Uuid};

/// Bytes of a header, of a trailer, and thus of the first data sector's offset.
pub const HEADER_BYTES: u64 = 4096;

pub(crate) const HEADER_LEN: usize = 4096;

const MAGIC: [u8; 24] = [
    b'L', b'S', b'M', b'T', 0, 1, 2, 0, // magic0
    0x65, 0x7e, 0x63, 0xd2, 0x94, 0x44, 0x08, 0x4c, 0xa2, 0xd2, 0xc8, 0xec, 0x4f, 0xcf, 0xae, 0x8a,
];
const STRUCT_BYTES: u32 = 390;
const VERSION: u8 = 1;
const TAG_AT: usize = 134;
const TAG_PREFIX: &[u8] = b"agentenv/1 crc32c=";

const FLAG_HEADER: u32 = 1 << 0;
const FLAG_DATA: u32 = 1 << 1;
const FLAG_SEALED: u32 = 1 << 2;
const FLAG_SPARSE: u32 = 1 << 4;
/// Bits that a future version may give a meaning we do not know.
const FLAGS_UNKNOWN: u32 = !0x3f;

/// Which end of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Header,
    Trailer,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Header => "header",
            Part::Trailer => "trailer",
        }
    }
}

/// What header and trailer say about a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fields {
    pub sealed: bool,
    pub sparse: bool,
    /// Byte offset of the index; 0 in the header of a file being written.
    pub index_offset: u64,
    pub index_entries: u64,
    pub virtual_size: u64,
    pub uuid: Uuid,
    pub parent: Uuid,
}

/// Whether bytes begin as a layer does.
pub(crate) fn is_lsmt(start: &[u8]) -> bool {
    start.starts_with(&MAGIC)
}

impl Fields {
    /// The bytes of one end, without checksum.
    pub fn encode(&self, part: Part) -> [u8; HEADER_LEN] {
        let mut flags = FLAG_DATA;
        if part == Part::Header {
            flags |= FLAG_HEADER;
        }
        if self.sealed {
            flags |= FLAG_SEALED;
        }
        if self.sparse {
            flags |= FLAG_SPARSE;
        }
        let mut bytes = [0u8; HEADER_LEN];
        bytes[..24].copy_from_slice(&MAGIC);
        bytes[24..28].copy_from_slice(&STRUCT_BYTES.to_le_bytes());
        bytes[28..32].copy_from_slice(&flags.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.index_offset.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.index_entries.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.virtual_size.to_le_bytes());
        bytes[56..56 + UUID_FIELD_BYTES].copy_from_slice(&self.uuid.to_field());
        bytes[93..93 + UUID_FIELD_BYTES].copy_from_slice(&self.parent.to_field());
        bytes[132] = VERSION;
        bytes[133] = VERSION;
        bytes
    }

    /// Header and trailer of a sealed file, both with the checksum of `index` (the entries' bytes, no padding).
    pub fn encode_sealed(&self, index_crc: u32) -> ([u8; HEADER_LEN], [u8; HEADER_LEN]) {
        let mut trailer = self.encode(Part::Trailer);
        let mut header = self.encode(Part::Header);
        let tag = format!("{:08x}", checksum(&trailer, index_crc));
        for bytes in [&mut header, &mut trailer] {
            bytes[TAG_AT..TAG_AT + TAG_PREFIX.len()].copy_from_slice(TAG_PREFIX);
            bytes[TAG_AT + TAG_PREFIX.len()..TAG_AT + TAG_PREFIX.len() + 8].copy_from_slice(tag.as_bytes());
        }
        (header, trailer)
    }

    /// Reads one end and checks all that can be checked without the rest of the file.
    pub fn decode(bytes: &[u8; HEADER_LEN], part: Part) -> Result<Self, Damage> {
        if bytes[..24] != MAGIC {
            return Err(Damage::NotLsmt { part: part.name() });
        }
        let flags = u32::from_le_bytes(array(bytes, 28));
        let right_end = (flags & FLAG_HEADER != 0) == (part == Part::Header);
        // A header may be unsealed though the file is sealed: upstream's writers do not go back to it.
        let sealed = flags & FLAG_SEALED != 0;
        let complete = sealed || part == Part::Header;
        if !right_end || !complete || flags & FLAG_DATA == 0 || flags & FLAGS_UNKNOWN != 0 {
            return Err(Damage::Flags {
                part: part.name(),
                flags,
            });
        }
        // Files from before the version field carry 0.
        if bytes[132] > VERSION {
            return Err(Damage::Version { version: bytes[132] });
        }
        Ok(Fields {
            sealed,
            sparse: flags & FLAG_SPARSE != 0,
            index_offset: u64::from_le_bytes(array(bytes, 32)),
            index_entries: u64::from_le_bytes(array(bytes, 40)),
            virtual_size: u64::from_le_bytes(array(bytes, 48)),
            uuid: Uuid::from_field(&bytes[56..93]),
            parent: Uuid::from_field(&bytes[93..130]),
        })
    }
}

/// Checks the pair of a file that carries our tag: equal but for the header bit, and with the right checksum. Says
/// nothing about files of others.
pub(crate) fn verify_own(header: &[u8; HEADER_LEN], trailer: &[u8; HEADER_LEN], index_crc: u32) -> Result<(), Damage> {
    let Some(tag) = trailer[TAG_AT..].strip_prefix(TAG_PREFIX) else {
        return Ok(());
    };
    if tag[..8] != *format!("{:08x}", checksum(trailer, index_crc)).as_bytes() {
        return Err(Damage::Checksum);
    }
    let mut expected = *trailer;
    expected[28] |= FLAG_HEADER as u8;
    if expected[..STRUCT_BYTES as usize] != header[..STRUCT_BYTES as usize] {
        return Err(Damage::HeaderMismatch);
    }
    Ok(())
}

/// One number over the trailer's fields and the index.
fn checksum(trailer: &[u8; HEADER_LEN], index_crc: u32) -> u32 {
    crc32c::crc32c_append(index_crc, &trailer[..TAG_AT])
}

fn array<const N: usize>(bytes: &[u8; HEADER_LEN], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
