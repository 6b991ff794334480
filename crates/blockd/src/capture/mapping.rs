//! Checks that a process really maps the image where the caller says.
//!
//! A wrong address would yield a layer that is valid and wrong; this turns it into an error.

use super::CaptureError;

/// Whether `/proc/PID/maps` (given as text) shows `inode` mapped privately from its start, at `address` and over
/// `length` bytes. A VMM's madvise calls split one mapping into several neighbours, which count as one.
pub fn covers(maps: &str, inode: u64, address: u64, length: u64) -> bool {
    let end = address + length;
    let mut covered_to = address;
    for line in maps.lines() {
        let Some(area) = Area::parse(line) else {
            continue;
        };
        if area.inode != inode || !area.private || area.end <= covered_to || area.start > covered_to {
            continue;
        }
        // The image's offset must run with the address, or pages would be recorded at wrong places.
        if area.offset.checked_add(covered_to - area.start) != Some(covered_to - address) {
            continue;
        }
        covered_to = area.end;
        if covered_to >= end {
            return true;
        }
    }
    false
}

pub fn check(pid: u32, parent: &str, inode: u64, address: u64, length: u64) -> Result<(), CaptureError> {
    let failed = |source: std::io::Error| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => CaptureError::Gone { pid },
        _ => CaptureError::Process {
            pid,
            step: "reading the mappings",
            source,
        },
    };
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).map_err(failed)?;
    if maps.is_empty() {
        return Err(CaptureError::Gone { pid });
    }
    if covers(&maps, inode, address, length) {
        return Ok(());
    }
    Err(CaptureError::NotMapped {
        pid,
        parent: parent.to_owned(),
        address,
    })
}

struct Area {
    start: u64,
    end: u64,
    private: bool,
    offset: u64,
    inode: u64,
}

impl Area {
    /// `start-end perms offset device inode path`, numbers in hexadecimal but for the inode.
    fn parse(line: &str) -> Option<Area> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let private = fields.next()?.ends_with('p');
        let offset = u64::from_str_radix(fields.next()?, 16).ok()?;
        let inode = fields.nth(1)?.parse().ok()?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        Some(Area {
            start: hex(start)?,
            end: hex(end)?,
            private,
            offset,
            inode,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000100000 rw-p 00000000 00:32 77                         /mnt/memory/m1
7f0000100000-7f0000200000 rw-p 00100000 00:32 77                         /mnt/memory/m1
7f0000300000-7f0000400000 rw-s 00000000 00:32 78                         /mnt/memory/m2
7f0000400000-7f0000500000 rw-p 00000000 00:00 0
";

    #[test]
    fn neighbours_of_one_image_count_as_one_mapping() {
        assert!(covers(MAPS, 77, 0x7f00_0000_0000, 0x20_0000));
        assert!(covers(MAPS, 77, 0x7f00_0000_0000, 0x1000));
    }

    #[test]
    fn a_wrong_place_file_or_kind_of_mapping_is_refused() {
        assert!(!covers(MAPS, 77, 0x7f00_0000_0000, 0x20_1000), "too long");
        assert!(!covers(MAPS, 77, 0x7f00_0010_0000, 0x1000), "not the image's start");
        assert!(!covers(MAPS, 78, 0x7f00_0030_0000, 0x1000), "shared");
        assert!(!covers(MAPS, 99, 0x7f00_0000_0000, 0x1000), "another image");
    }
}
