//! The one place that chooses the source of atomics: `core`, or a model (loom, shuttle, `tso.rs`).
//!
//! On x86-64 any locked instruction is a full barrier (Intel SDM volume 3A, 10.2.2 and 10.2.3.9;
//! AMD64 APM volume 2, 7.4.2). Most are faster than `MFENCE`, to which a sequentially consistent
//! fence compiles. The processor promises that; the language's memory model does not. So models,
//! Miri and ThreadSanitizer get the fence.

#[cfg(not(any(loom, shuttle)))]
pub(crate) use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(all(shuttle, not(pageferry_tso)))]
pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering, fence};
#[cfg(pageferry_tso)]
pub(crate) use {
    crate::tso::{AtomicBool, AtomicU64, fence},
    shuttle::sync::atomic::{AtomicPtr, Ordering},
};

/// The count of a [`TryArc`](crate::TryArc). Models leave it out, as they leave out that of `Arc`:
/// it orders nothing but the end of the value.
pub(crate) use core::sync::atomic::AtomicUsize as Users;

/// The order of a load of an announcement that a fence follows. ThreadSanitizer (`--cfg
/// pageferry_tsan`) does not know fences, so there the load itself acquires.
pub(crate) const SCAN: Ordering = if cfg!(pageferry_tsan) {
    Ordering::Acquire
} else {
    Ordering::Relaxed
};

/// Whether readers may leave fences to scanning threads (`mode.rs`).
///
/// This holds on x86-64 only, because `tests/tso.rs` checks the proof on its memory model. By their
/// manuals AArch64 and RISC-V qualify too, but no model here checks them. ThreadSanitizer does not
/// see the barrier. Loom, shuttle and Miri have no such barrier. Under them light guards fence
/// after all, except in the model of `tso.rs`. So they check only the switching.
pub(crate) const MAY_BE_LIGHT: bool = cfg!(any(
    loom,
    shuttle,
    miri,
    all(target_arch = "x86_64", not(pageferry_tsan))
));

/// The place of the fence that light guards omit. It keeps the compiler from moving accesses
/// across.
#[inline(always)]
pub(crate) fn light_fence() {
    #[cfg(not(any(loom, shuttle, miri)))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(any(loom, shuttle, miri), not(pageferry_tso)))]
    fence(Ordering::SeqCst);
}

/// Chooses the first block where a locked instruction replaces a fence.
macro_rules! if_locked {
    ($yes:block else $no:block) => {{
        #[cfg(all(
            target_arch = "x86_64",
            not(any(loom, shuttle, miri, pageferry_tsan))
        ))]
        $yes
        #[cfg(not(all(
            target_arch = "x86_64",
            not(any(loom, shuttle, miri, pageferry_tsan))
        )))]
        $no
    }};
}

/// A sequentially consistent fence.
#[inline(always)]
pub(crate) fn full_fence() {
    if_locked!({ locked_nothing() } else { fence(Ordering::SeqCst) });
}

/// The same directly after an atomic read-modify-write by this thread.
#[inline(always)]
pub(crate) fn full_fence_after_exchange() {
    if_locked!({ core::sync::atomic::compiler_fence(Ordering::SeqCst) } else { fence(Ordering::SeqCst) });
}

/// A locked instruction that changes nothing.
#[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri, pageferry_tsan))))]
#[expect(unsafe_code, reason = "the language has no name for that instruction")]
#[inline(always)]
fn locked_nothing() {
    // SAFETY: it changes no bit of a word on the stack, which is this thread's. The compiler must
    // assume that it touches any memory, so it moves no access across.
    unsafe {
        core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
}
