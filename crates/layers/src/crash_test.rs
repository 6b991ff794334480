//! Crashes at every operation.
