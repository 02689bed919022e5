//! The one place that chooses where atomics come from: `core`, or the model of loom, shuttle or `tso.rs`.
//!
//! On x86-64 any locked instruction is a full barrier, and most take less time than the `MFENCE` that a sequentially
//! consistent fence is there. (Intel SDM volume 3A, 10.2.2 and 10.2.3.9; AMD64 APM volume 2, 7.4.2.) That is what the
//! processor does and not what the language's memory model says, so models, Miri and ThreadSanitizer get the fence.

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

/// How an announcement is read that a fence follows. ThreadSanitizer knows no fences (`--cfg pageferry_tsan`): for it the
/// load itself acquires.
pub(crate) const SCAN: Ordering = if cfg!(pageferry_tsan) {
    Ordering::Acquire
} else {
    Ordering::Relaxed
};

/// Whether readers can do without fences where somebody else makes them: see `mode.rs`. In models other than that of `tso.rs` they fence all the same.
pub(crate) const MAY_BE_LIGHT: bool = cfg!(any(
    loom,
    shuttle,
    all(
        any(
            target_arch = "x86_64",
            target_arch = "aarch64",
            target_arch = "riscv64"
        ),
        not(any(miri, pageferry_tsan))
    )
));

/// Where a fence would be if readers had to fence. It keeps the compiler from moving accesses across.
#[inline(always)]
pub(crate) fn light_fence() {
    #[cfg(not(any(loom, shuttle)))]
    core::sync::atomic::compiler_fence(Ordering::SeqCst);
    #[cfg(all(any(loom, shuttle), not(pageferry_tso)))]
    fence(Ordering::SeqCst);
}

/// Whether a locked instruction stands for a fence.
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

/// The same, right behind an operation by this thread that has read and written a word atomically.
#[inline(always)]
pub(crate) fn full_fence_after_exchange() {
    if_locked!({ core::sync::atomic::compiler_fence(Ordering::SeqCst) } else { fence(Ordering::SeqCst) });
}

/// A locked instruction that changes nothing.
#[cfg(all(target_arch = "x86_64", not(any(loom, shuttle, miri, pageferry_tsan))))]
#[expect(unsafe_code, reason = "the language has no name for that instruction")]
#[inline(always)]
fn locked_nothing() {
    // SAFETY: it changes no bit of a word on the stack, which is this thread's. As it may touch any memory for all the
    // compiler knows, no access is moved across.
    unsafe {
        core::arch::asm!("lock or dword ptr [rsp], 0", options(nostack));
    }
}
