//! The one place that chooses where atomics come from: `core`, or loom's model of it.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Part of everything that is freed after a grace period: in loom's models it reports a use that a free does not
/// wait for. Nothing otherwise.
#[cfg(not(loom))]
#[derive(Debug)]
pub(crate) struct Alive;

#[cfg(not(loom))]
impl Alive {
    pub(crate) const fn new() -> Self {
        Self
    }
    #[inline(always)]
    pub(crate) const fn used(&self) {}
    #[inline(always)]
    pub(crate) const fn freed(&self) {}
}

#[cfg(loom)]
#[derive(Debug)]
pub(crate) struct Alive(loom::cell::UnsafeCell<()>);

#[cfg(loom)]
impl Alive {
    pub(crate) fn new() -> Self {
        Self(loom::cell::UnsafeCell::new(()))
    }
    pub(crate) fn used(&self) {
        self.0.with(|_| ());
    }
    pub(crate) fn freed(&self) {
        self.0.with_mut(|_| ());
    }
}
