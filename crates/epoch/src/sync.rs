#![expect(unsafe_code, reason = "a locked instruction in place of a fence")]
//! The one place that chooses where atomics come from: `core`, or the model of loom or shuttle.
//!
//! On x86-64 any locked instruction is a full barrier, and most take less time than the `MFENCE` that a sequentially
//! consistent fence is there. (Intel SDM volume 3A, 10.2.2 and 10.2.3.9; AMD64 APM volume 2, 7.4.2.) That is what the
//! processor does and not what the language's memory model says, so models, Miri and ThreadSanitizer get the fence.

#[cfg(not(any(loom, shuttle)))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(shuttle)]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};

/// How an announcement is read that a fence follows. ThreadSanitizer knows no fences (`--cfg pageferry_tsan`): for it the
/// load itself acquires.
pub(crate) const SCAN: Ordering = if cfg!(pageferry_tsan) {
    Ordering::Acquire
} else {
    Ordering::Relaxed
};

/// A sequentially consistent fence.
#[inline(always)]
pub(crate) fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri, pageferry_tsan))))]
    // SAFETY: it changes no bit of a word on the stack, which is this thread's. Without `nomem` the compiler moves no access across.
    unsafe {
        core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle, miri, pageferry_tsan)))))]
    fence(Ordering::SeqCst);
}

/// The same, right behind an atomic operation by this thread that has read and written a word: on x86 that is one already.
#[inline(always)]
pub(crate) fn full_fence_after_exchange() {
    #[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri, pageferry_tsan))))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(not(all(target_arch = "x86_64", not(any(loom, shuttle, miri, pageferry_tsan)))))]
    fence(Ordering::SeqCst);
}
