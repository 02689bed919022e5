//! The integers that a guest loads and stores, and the host atomics that access guest memory.
//!
//! Harts and the VMM's threads share guest memory, so every access is a host atomic of the access's
//! width. The atomics are always those of `core`, never a model checker's: guest memory is a
//! mapping of bytes, not a set of Rust objects.
//!
//! A guest may access the same bytes with different widths at the same time. The ISA and the memory
//! models of the hosts define the result. Rust's memory model leaves it open, and every VMM depends
//! on it.

use super::sync::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use core::fmt::Debug;

#[cfg(target_endian = "big")]
compile_error!("guest memory is little-endian and is accessed with host atomics");

/// An unsigned integer that guest code loads or stores: `u8`, `u16`, `u32` or `u64`.
///
/// The trait is sealed: implementations of [`Bus`](super::Bus) use it, but do not implement it.
pub trait GuestInt: Copy + Eq + Debug + Send + Sync + private::Sealed + 'static {
    /// The width in bytes: 1, 2, 4 or 8. Also the natural alignment.
    const BYTES: u64;
    /// The host atomic of the same size. Its alignment is [`GuestInt::BYTES`].
    type Atomic: Sync;

    /// A relaxed load.
    fn load(cell: &Self::Atomic) -> Self;
    /// A relaxed store.
    fn store(cell: &Self::Atomic, value: Self);
    /// The value, zero-extended.
    fn to_u64(self) -> u64;
    /// The low [`GuestInt::BYTES`] bytes of `value`.
    fn truncate(value: u64) -> Self;
}

/// An integer on which AMO, LR and SC operate: `u32` or `u64`.
pub trait AmoInt: GuestInt {
    /// A sequentially consistent load. It is strong enough for an LR with any `aq` and `rl` bits.
    fn load_ordered(cell: &Self::Atomic) -> Self;
    /// Does `op` with `operand` in one sequentially consistent step, which is strong enough for any
    /// `aq` and `rl` bits. Returns the old value.
    fn amo(cell: &Self::Atomic, op: AmoOp, operand: Self) -> Self;
    /// Replaces `expected` by `new` in one sequentially consistent step. Returns whether it did. It
    /// fails only if the value differs.
    fn compare_exchange(cell: &Self::Atomic, expected: Self, new: Self) -> bool;
}

/// The operation of an AMO instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AmoOp {
    /// AMOSWAP.
    Swap,
    /// AMOADD, wrapping.
    Add,
    /// AMOXOR.
    Xor,
    /// AMOAND.
    And,
    /// AMOOR.
    Or,
    /// AMOMIN, signed.
    Min,
    /// AMOMAX, signed.
    Max,
    /// AMOMINU, unsigned.
    MinU,
    /// AMOMAXU, unsigned.
    MaxU,
}

mod private {
    pub trait Sealed {}
}

macro_rules! guest_int {
    ($int:ty, $atomic:ty, $bytes:literal) => {
        impl private::Sealed for $int {}

        impl GuestInt for $int {
            const BYTES: u64 = $bytes;
            type Atomic = $atomic;

            #[inline(always)]
            fn load(cell: &$atomic) -> Self {
                cell.load(Ordering::Relaxed)
            }

            #[inline(always)]
            fn store(cell: &$atomic, value: Self) {
                cell.store(value, Ordering::Relaxed);
            }

            #[inline(always)]
            fn to_u64(self) -> u64 {
                u64::from(self)
            }

            #[inline(always)]
            fn truncate(value: u64) -> Self {
                value as $int
            }
        }

        const _: () = assert!(
            size_of::<$int>() == $bytes
                && size_of::<$atomic>() == $bytes
                && align_of::<$atomic>() == $bytes
        );
    };
}

guest_int!(u8, AtomicU8, 1);
guest_int!(u16, AtomicU16, 2);
guest_int!(u32, AtomicU32, 4);
guest_int!(u64, AtomicU64, 8);

macro_rules! amo_int {
    ($int:ty, $signed:ty, $atomic:ty) => {
        impl AmoInt for $int {
            #[inline]
            fn load_ordered(cell: &$atomic) -> Self {
                cell.load(Ordering::SeqCst)
            }

            #[inline]
            fn amo(cell: &$atomic, op: AmoOp, operand: Self) -> Self {
                let choose = |pick: fn($int, $int) -> $int| {
                    let mut old = cell.load(Ordering::Relaxed);
                    loop {
                        let new = pick(old, operand);
                        match cell.compare_exchange_weak(
                            old,
                            new,
                            Ordering::SeqCst,
                            Ordering::Relaxed,
                        ) {
                            Ok(_) => return old,
                            Err(seen) => old = seen,
                        }
                    }
                };
                match op {
                    AmoOp::Swap => cell.swap(operand, Ordering::SeqCst),
                    AmoOp::Add => cell.fetch_add(operand, Ordering::SeqCst),
                    AmoOp::Xor => cell.fetch_xor(operand, Ordering::SeqCst),
                    AmoOp::And => cell.fetch_and(operand, Ordering::SeqCst),
                    AmoOp::Or => cell.fetch_or(operand, Ordering::SeqCst),
                    AmoOp::MinU => cell.fetch_min(operand, Ordering::SeqCst),
                    AmoOp::MaxU => cell.fetch_max(operand, Ordering::SeqCst),
                    AmoOp::Min => choose(|a, b| (a as $signed).min(b as $signed) as $int),
                    AmoOp::Max => choose(|a, b| (a as $signed).max(b as $signed) as $int),
                }
            }

            #[inline]
            fn compare_exchange(cell: &$atomic, expected: Self, new: Self) -> bool {
                cell.compare_exchange(expected, new, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok()
            }
        }
    };
}

amo_int!(u32, i32, AtomicU32);
amo_int!(u64, i64, AtomicU64);
