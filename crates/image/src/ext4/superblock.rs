//! The superblock: what a reader needs of it, and the one field that we change ourselves.

use super::{Ext4Error, put_u32, u16_at, u32_at};

const MAGIC: u16 = 0xef53;
/// Features that a reader must know. Those that we know change nothing here but the place of descriptors.
const INCOMPAT_KNOWN: u32 = 0x2 | 0x40 | INCOMPAT_RECOVER | INCOMPAT_64BIT | 0x200 | 0x2000 | 0x4000;
const INCOMPAT_RECOVER: u32 = 0x4;
const INCOMPAT_64BIT: u32 = 0x80;
const WRITE_TIME: usize = 0x30;
const WRITE_TIME_HIGH: usize = 0x274;
const CHECKSUM: usize = 0x3fc;

/// The geometry of a file system.
#[derive(Debug, Clone, Copy)]
pub(super) struct Superblock {
    pub inodes: u32,
    pub inodes_per_group: u32,
    pub inode_bytes: u16,
    pub descriptor_bytes: u16,
    /// The journal holds changes that are not in their places yet.
    pub needs_recovery: bool,
}

impl Superblock {
    /// Errors: `NotExt4`, `Unsupported`.
    pub fn parse(bytes: &[u8; 1024]) -> Result<Superblock, Ext4Error> {
        if u16_at(bytes, 0x38) != MAGIC {
            return Err(Ext4Error::NotExt4);
        }
        let incompat = u32_at(bytes, 0x60);
        if u32_at(bytes, 0x18) != 2 {
            return Err(Ext4Error::Unsupported {
                what: "blocks of another size than 4096 bytes",
            });
        }
        if incompat & !INCOMPAT_KNOWN != 0 {
            return Err(Ext4Error::Unsupported {
                what: "a feature that ours never have",
            });
        }
        let found = Superblock {
            inodes: u32_at(bytes, 0x00),
            inodes_per_group: u32_at(bytes, 0x28),
            inode_bytes: u16_at(bytes, 0x58),
            descriptor_bytes: if incompat & INCOMPAT_64BIT != 0 {
                u16_at(bytes, 0xfe)
            } else {
                32
            },
            needs_recovery: incompat & INCOMPAT_RECOVER != 0,
        };
        let sane = found.inodes_per_group > 0
            && (128..=4096).contains(&found.inode_bytes)
            && found.inode_bytes.is_power_of_two()
            && (32..=1024).contains(&found.descriptor_bytes)
            && found.descriptor_bytes.is_power_of_two();
        match sane {
            true => Ok(found),
            false => Err(Ext4Error::NotExt4),
        }
    }
}

/// Sets the time of the last write and the checksum.
pub fn set_superblock_time(bytes: &mut [u8; 1024], time_s: u32) {
    put_u32(bytes, WRITE_TIME, time_s);
    bytes[WRITE_TIME_HIGH] = 0;
    let checksum = crc32c(!0, &bytes[..CHECKSUM]);
    put_u32(bytes, CHECKSUM, checksum);
}

/// CRC-32C without the final inversion, as ext4 stores it. Bit by bit: it runs once over a kilobyte.
fn crc32c(seed: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(seed, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
        })
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_checksum_is_crc32c() {
        // The check value of the polynomial's catalogue entry.
        assert_eq!(!crc32c(!0, b"123456789"), 0xe306_9283);
    }

    #[test]
    fn what_is_no_superblock_is_refused() {
        assert!(matches!(Superblock::parse(&[0; 1024]), Err(Ext4Error::NotExt4)));
        let mut bytes = [0; 1024];
        bytes[0x38..0x3a].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[0x18] = 2;
        bytes[0x61] = 0x80;
        assert!(matches!(Superblock::parse(&bytes), Err(Ext4Error::Unsupported { .. })));
    }
}
