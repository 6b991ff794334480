//! Kernel modules that the initramfs brings along.

use std::fs::File;
use std::io;

use super::BootError;

/// File names in /modules, one a line, in the order of loading. No file: nothing to load.
const ORDER: &str = "/modules/order";

pub fn load() -> Result<(), BootError> {
    let Ok(order) = std::fs::read_to_string(ORDER) else {
        return Ok(());
    };
    for name in order.lines().map(str::trim).filter(|name| !name.is_empty()) {
        match load_one(name) {
            // Built in or loaded already.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(source) => {
                return Err(BootError::Module {
                    name: name.into(),
                    source,
                });
            }
            Ok(()) => {}
        }
    }
    Ok(())
}

fn load_one(name: &str) -> io::Result<()> {
    let file = File::open(format!("/modules/{name}"))?;
    rustix::system::finit_module(&file, c"", 0).map_err(io::Error::from)
}
