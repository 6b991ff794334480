//! Starting a thread of this daemon: named, with the stack that its shallow handlers need. Owns no thread.

use crate::limits::STACK_BYTES;

/// Errors: the machine has no more threads or memory.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.stack_size(STACK_BYTES).spawn(work).map(|_| ())
}
