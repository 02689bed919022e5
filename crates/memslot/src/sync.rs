#![expect(unsafe_code, reason = "copies atomics that no other thread stores to")]
//! The one place that chooses the source of atomics: `core`, or loom's model of it.

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// A part of everything that is freed after a grace period. In loom's models it reports a use that
/// a free did not wait for. Otherwise it is empty.
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

/// Tells the processor that memory will be used soon. It has no visible effect, and does nothing
/// outside x86-64.
#[inline(always)]
pub(crate) fn prefetch<T>(at: *const T) {
    #[cfg(all(target_arch = "x86_64", not(any(loom, miri))))]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: SSE is in all x86-64, and a prefetch faults nowhere.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, miri)))))]
    let _ = at;
}

/// Copies `count` pointers. Nobody stores to them meanwhile. The ranges may overlap.
///
/// # Safety
/// As for [`core::ptr::copy`]. The old values at `to` need no drop.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) unsafe fn copy_own<T>(from: *const AtomicPtr<T>, to: *mut AtomicPtr<T>, count: usize) {
    // SAFETY: as the caller says; loads do not race with loads.
    unsafe { core::ptr::copy(from, to, count) }
}

/// The same for loom, where each pointer is a separate object.
///
/// # Safety
/// As above.
#[cfg(loom)]
pub(crate) unsafe fn copy_own<T>(from: *const AtomicPtr<T>, to: *mut AtomicPtr<T>, count: usize) {
    // SAFETY: as the caller says. Nobody stores to the pointer meanwhile.
    let copy = |i: usize| unsafe {
        to.add(i)
            .write(AtomicPtr::new((*from.add(i)).unsync_load()))
    };
    if to.cast_const() < from {
        (0..count).for_each(copy);
    } else {
        (0..count).rev().for_each(copy);
    }
}
