#![expect(
    unsafe_code,
    reason = "a cell that loom watches is shared between threads"
)]
//! What threads use that must be ordered.

use loom::cell::UnsafeCell;

/// Loom reports a use that is not ordered before or after a write.
pub(crate) struct Watched(UnsafeCell<()>);

// SAFETY: it holds no data, and what is not shared correctly is what the models look for.
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

    /// Ends what it was: whoever reads it beside this would use something else.
    pub(crate) fn write(&self) {
        self.0.with_mut(|_| ());
    }
}
