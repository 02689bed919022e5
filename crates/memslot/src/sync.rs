#![expect(
    unsafe_code,
    reason = "copies cells of which there is nobody else's store"
)]
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

/// Tells the processor that memory will be used soon. It does nothing that a program could see; on other processors than
/// those of x86-64 nothing at all.
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

/// Copies `count` cells that nobody stores to meanwhile; the ranges may overlap.
///
/// # Safety
/// As for [`core::ptr::copy`]; what `to` held needs no drop.
#[cfg(not(loom))]
#[inline(always)]
pub(crate) unsafe fn copy_cells<T>(from: *const AtomicPtr<T>, to: *mut AtomicPtr<T>, count: usize) {
    // SAFETY: as the caller says; loads by others are no race with loads.
    unsafe { core::ptr::copy(from, to, count) }
}

/// The same, as a model sees it: each cell is an object of its own.
///
/// # Safety
/// As above.
#[cfg(loom)]
pub(crate) unsafe fn copy_cells<T>(from: *const AtomicPtr<T>, to: *mut AtomicPtr<T>, count: usize) {
    // SAFETY: as the caller says.
    let copy = |i: usize| unsafe {
        let pointer = (*from.add(i)).unsync_load();
        to.add(i).write(AtomicPtr::new(pointer));
    };
    if to.cast_const() < from {
        (0..count).for_each(copy);
    } else {
        (0..count).rev().for_each(copy);
    }
}
