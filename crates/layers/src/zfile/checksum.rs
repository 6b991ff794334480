//! The format's CRC32C: the polynomial without the inversions before and after that others apply.

/// Blocks start from this number, so that a block of zeros and its zeroed checksum do not agree.
const BLOCK_SEED: u32 = 100_007;

/// Of one stored block.
pub(super) fn block(bytes: &[u8]) -> u32 {
    raw(BLOCK_SEED, bytes)
}

/// Of the jump table, of which parts are appended to each other, and of a header.
pub(super) fn append(crc: u32, bytes: &[u8]) -> u32 {
    raw(crc, bytes)
}

fn raw(seed: u32, bytes: &[u8]) -> u32 {
    // The crate inverts on both sides; inverting again takes that back.
    !crc32c::crc32c_append(!seed, bytes)
}

#[cfg(test)]
mod test {
    use super::*;

    /// Bit by bit, from the polynomial.
    fn slow(mut crc: u32, bytes: &[u8]) -> u32 {
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 & 0u32.wrapping_sub(crc & 1));
            }
        }
        crc
    }

    #[test]
    fn it_is_the_polynomial_without_inversions() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(block(&bytes), slow(100_007, &bytes));
        assert_eq!(append(append(0, &bytes[..100]), &bytes[100..]), slow(0, &bytes));
        assert_eq!(append(0, &[0; 64]), 0);
    }
}
