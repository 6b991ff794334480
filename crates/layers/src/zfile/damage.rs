//! How the bytes of a ZFile contradict its format.

/// Blocks count from zero.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ZFileDamage {
    #[error("{length} bytes are too few for a ZFile's header and trailer")]
    TooShort { length: u64 },
    #[error("the ZFile {part} does not carry the magic")]
    Magic { part: &'static str },
    #[error("the ZFile {part} has flags {flags:#x}, which do not make it a {part} of a sealed data file")]
    Flags { part: &'static str, flags: u64 },
    #[error("the checksum of the ZFile {part} is wrong")]
    HeaderChecksum { part: &'static str },
    #[error("the checksum of the jump table is wrong")]
    TableChecksum,
    #[error("the jump table is compressed, which is not supported")]
    CompressedTable,
    #[error("compression algorithm {algorithm} is not known")]
    Algorithm { algorithm: u8 },
    #[error("blocks need a dictionary, which is not supported")]
    Dictionary,
    #[error("a block size of {block_bytes} bytes is no power of two between 512 and 1048576")]
    BlockSize { block_bytes: u32 },
    #[error("an original of {length} bytes is beyond the limit of 2^44")]
    TooLarge { length: u64 },
    #[error("{found} blocks where {expected} make up the original")]
    BlockCount { found: u64, expected: u64 },
    #[error("a jump table of {blocks} blocks at byte {offset} does not fit in the file")]
    TableOutside { offset: u64, blocks: u64 },
    #[error("block {block} has an impossible stored length of {length} bytes")]
    BlockLength { block: u64, length: u32 },
    #[error("block {block} ends beyond the data")]
    BlockOutside { block: u64 },
    #[error("block {block} does not have its checksum")]
    BlockChecksum { block: u64 },
    #[error("block {block} does not decompress to its {length} bytes")]
    BlockContent { block: u64, length: u64 },
}
