//! The compact form in which inputs are kept and mutated.
//!
//! A layer is two pages of mostly zeros around its data, and any changed bit is caught by a checksum before the code
//! behind it is reached. So an input is the part of a file that means something, and says whether the checksum is put
//! right afterwards:
//!
//! ```text
//! byte 0      bit 0: repair the checksum, bit 1: the rest is the file as it is, bit 2: cut the file at its end
//! byte 1      sectors of data
//! 2 .. 136    the header's first 134 bytes
//! 136 .. 270  the trailer's
//! 270 ..      index entries
//! ```

const HEADER_BYTES: usize = 4096;
const FIELD_BYTES: usize = 134;
const SECTOR_BYTES: usize = 512;
const ENTRY_BYTES: usize = 16;
/// Where the index's offset and number of entries stand in header and trailer.
const INDEX_AT: std::ops::Range<usize> = 32..48;
const TAG: &[u8] = b"agentenv/1 crc32c=";

const REPAIR: u8 = 1;
const VERBATIM: u8 = 2;
const CUT: u8 = 4;

/// The file that an input stands for; none if it is too short to stand for one.
pub fn lsmt_file(input: &[u8]) -> Option<Vec<u8>> {
    let (&flags, rest) = input.split_first()?;
    if flags & VERBATIM != 0 {
        return Some(rest.to_vec());
    }
    let (&sectors, rest) = rest.split_first()?;
    let (header, rest) = rest.split_at_checked(FIELD_BYTES)?;
    let (trailer, index) = rest.split_at_checked(FIELD_BYTES)?;
    let mut file = page(header);
    for sector in 0..usize::from(sectors) {
        // No sector is zero and no two are equal, so that a read from the wrong place is seen.
        file.extend((0..SECTOR_BYTES).map(|byte| (sector * 3 + byte % 251) as u8 | 1));
    }
    let index_at = file.len();
    file.extend_from_slice(index);
    file.resize(file.len().next_multiple_of(SECTOR_BYTES), 0);
    file.extend_from_slice(&page(trailer));
    if flags & REPAIR != 0 {
        repair(&mut file, index_at, index.len() / ENTRY_BYTES);
    }
    if flags & CUT != 0 {
        file.truncate(file.len().saturating_sub(usize::from(sectors) * SECTOR_BYTES / 2));
    }
    Some(file)
}

/// The input that stands for `file`, a whole layer with at most 255 sectors of data. Its data becomes the form's own.
pub fn compact_lsmt(file: &[u8], repair: bool) -> Vec<u8> {
    let trailer = &file[file.len() - HEADER_BYTES..];
    let number = |at: usize| u64::from_le_bytes(trailer[at..at + 8].try_into().expect("8 bytes")) as usize;
    let (index_at, entries) = (number(INDEX_AT.start), number(INDEX_AT.start + 8));
    let mut input = vec![u8::from(repair), ((index_at - HEADER_BYTES) / SECTOR_BYTES) as u8];
    input.extend_from_slice(&file[..FIELD_BYTES]);
    input.extend_from_slice(&trailer[..FIELD_BYTES]);
    input.extend_from_slice(&file[index_at..index_at + entries * ENTRY_BYTES]);
    input
}

fn page(fields: &[u8]) -> Vec<u8> {
    let mut page = fields.to_vec();
    page.resize(HEADER_BYTES, 0);
    page
}

/// Makes both ends name the index that is there, and gives them the checksum of what they now say.
fn repair(file: &mut [u8], index_at: usize, entries: usize) {
    let trailer_at = file.len() - HEADER_BYTES;
    let index = [(index_at as u64).to_le_bytes(), (entries as u64).to_le_bytes()].concat();
    file[trailer_at..][INDEX_AT].copy_from_slice(&index);
    let crc = crc32c::crc32c(&file[index_at..index_at + entries * ENTRY_BYTES]);
    let crc = crc32c::crc32c_append(crc, &file[trailer_at..trailer_at + FIELD_BYTES]);
    let tag = [TAG, format!("{crc:08x}").as_bytes()].concat();
    file[trailer_at + FIELD_BYTES..][..tag.len()].copy_from_slice(&tag);
    // The header of a layer of ours equals the trailer but for the bit that tells them apart.
    let (header, trailer) = file.split_at_mut(trailer_at);
    header[..HEADER_BYTES].copy_from_slice(&trailer[..HEADER_BYTES]);
    header[28] |= 1;
}
