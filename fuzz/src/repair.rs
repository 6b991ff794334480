//! Puts checksums of ZFiles and tars right, so that a changed bit reaches what lies behind them.

const ENDS: usize = 512;
const TAR_BLOCK: usize = 512;
/// Headers put right: more than a small archive has.
const TAR_HEADERS_MAX: usize = 32;

/// The format's CRC32C: no inversion before or after.
fn crc(seed: u32, bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!seed, bytes)
}

fn number(file: &[u8], at: usize, bytes: usize) -> Option<usize> {
    let mut word = [0; 8];
    word[..bytes].copy_from_slice(file.get(at..at + bytes)?);
    usize::try_from(u64::from_le_bytes(word)).ok()
}

/// Gives blocks, table and both ends of a ZFile the checksums of what they hold, as far as the places make sense.
pub fn repair_zfile(file: &mut [u8]) {
    if file.len() < 2 * ENDS {
        return;
    }
    let trailer = file.len() - ENDS;
    if repair_table(file, trailer).is_some() {
        repair_table(file, 0);
    }
    for at in [0, trailer] {
        file[at + 28..at + 32].fill(0);
        let sum = crc(0, &file[at..at + ENDS]);
        file[at + 28..at + 32].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Of the table that the end at `end` names.
fn repair_table(file: &mut [u8], end: usize) -> Option<()> {
    let (offset, blocks) = (number(file, end + 40, 8)?, number(file, end + 48, 8)?);
    let stop = offset.checked_add(blocks.checked_mul(4)?)?;
    if offset < ENDS || stop > file.len() - ENDS {
        return None;
    }
    let dictionary = number(file, end + 84, 4)?;
    let mut at = ENDS.checked_add(dictionary)?;
    for entry in (offset..stop).step_by(4) {
        let next = at.checked_add(number(file, entry, 4)?)?;
        if next > offset || next < at + 4 {
            break;
        }
        let sum = crc(100_007, &file[at..next - 4]);
        file[next - 4..next].copy_from_slice(&sum.to_le_bytes());
        at = next;
    }
    let sum = crc(0, &file[offset..stop]);
    file[end + 64..end + 68].copy_from_slice(&sum.to_le_bytes());
    Some(())
}

/// Gives the first headers of a tar their checksums; what follows a header is found by its size, if it makes sense.
pub fn repair_tar(file: &mut [u8]) {
    let mut at = 0;
    for _ in 0..TAR_HEADERS_MAX {
        let Some(header) = file.get_mut(at..at + TAR_BLOCK) else {
            return;
        };
        if header.iter().all(|&byte| byte == 0) {
            // The end of the archive, which has no checksum.
            return;
        }
        header[148..156].fill(b' ');
        let sum: u32 = header.iter().map(|&byte| u32::from(byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let digits = std::str::from_utf8(&header[124..135]).unwrap_or_default();
        let size = usize::from_str_radix(digits, 8).unwrap_or(0);
        at = at
            .saturating_add(TAR_BLOCK)
            .saturating_add(size.next_multiple_of(TAR_BLOCK));
    }
}
