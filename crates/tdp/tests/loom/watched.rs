#![expect(
    unsafe_code,
    reason = "a cell that loom watches is shared between threads"
)]
//! A cell that marks uses which must be ordered.

use loom::cell::UnsafeCell;

/// Loom reports a use that is not ordered before or after a write.
pub(crate) struct Watched(UnsafeCell<()>);

// SAFETY: it holds no data, and the models look for incorrect sharing.
unsafe impl Sync for Watched {}
// SAFETY: as above.
unsafe impl Send for Watched {}

impl Watched {
    pub(crate) fn new() -> Self {
        Self(UnsafeCell::new(()))
    }

    /// Several threads may do so at once.
    pub(crate) fn read(&self) {
        self.0.with(|_| ());
    }

    /// Ends the use of the old contents: loom reports a concurrent reader.
    pub(crate) fn write(&self) {
        self.0.with_mut(|_| ());
    }
}
