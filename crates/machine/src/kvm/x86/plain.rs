#![expect(unsafe_code, reason = "kernel structures as bytes and back")]
//! Kernel structures as bytes, for the vCPU state.
//!
//! x86 is little-endian, so the kernel's layout *is* a fixed little-endian layout. The sizes
//! asserted here are those of Linux 6.18 and part of the state's format.

use kvm_bindings::{
    kvm_clock_data, kvm_cpuid_entry2, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state,
    kvm_msr_entry, kvm_pit_state2, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
};
use std::mem::{MaybeUninit, size_of};

/// A structure of integers only.
///
/// # Safety
/// The type has no padding bytes. Every bit pattern is a value of it. It holds no pointer,
/// reference or interior mutability.
pub(super) unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($name:ident = $bytes:literal,)*) => {$(
        const _: () = assert!(size_of::<$name>() == $bytes);
        // SAFETY: the kernel's ABI declares it as integers with explicit padding fields. The size
        // asserted above is the sum of its fields' sizes, so there are no other padding bytes.
        unsafe impl Plain for $name {}
    )*};
}

plain! {
    kvm_regs = 144,
    kvm_sregs = 312,
    kvm_sregs2 = 320,
    kvm_xcrs = 392,
    kvm_debugregs = 128,
    kvm_vcpu_events = 64,
    kvm_mp_state = 4,
    kvm_lapic_state = 1024,
    kvm_msr_entry = 16,
    kvm_cpuid_entry2 = 40,
    // The kernel writes all bytes of its union.
    kvm_irqchip = 520,
    kvm_pit_state2 = 112,
    kvm_clock_data = 48,
}

/// The bytes of `value`.
pub(super) fn bytes_of<T: Plain>(value: &T) -> &[u8] {
    // SAFETY: `T` is `Plain`: all its bytes are initialized and none changes while borrowed.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// The value with exactly these bytes, or `None` if there are more or fewer.
pub(super) fn from_bytes<T: Plain>(bytes: &[u8]) -> Option<T> {
    if bytes.len() != size_of::<T>() {
        return None;
    }
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: source and destination are `size_of::<T>()` bytes each and do not overlap; the copy
    // needs no alignment.
    unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), value.as_mut_ptr().cast(), bytes.len());
    };
    // SAFETY: all bytes are written, and every bit pattern is a value of a `Plain` type.
    Some(unsafe { value.assume_init() })
}

/// The values with exactly these bytes, at most `most` of them.
pub(super) fn array_from_bytes<T: Plain>(bytes: &[u8], most: usize) -> Option<Vec<T>> {
    let each = size_of::<T>();
    if !bytes.len().is_multiple_of(each) || bytes.len() / each > most {
        return None;
    }
    bytes.chunks_exact(each).map(from_bytes).collect()
}
