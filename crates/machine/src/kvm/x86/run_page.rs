#![expect(unsafe_code, reason = "the page a vCPU shares with the kernel")]
//! `struct kvm_run`: the page that a vCPU shares with the kernel.
//!
//! The page is mapped a second time here, beside kvm-ioctls' own mapping. A kicker writes one byte
//! of it from other threads, while the kernel and the vCPU's thread use the rest. So no Rust
//! reference to the structure ever exists: all accesses go through raw pointers, and that byte is
//! an atomic. The mapping lives as long as anything holds it, even after the vCPU is gone.

use super::sync::AtomicU8;
use crate::MachineError;
use kvm_bindings::{kvm_msr_entry, kvm_run};
use kvm_ioctls::VcpuFd;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

/// An MMIO access, from the kernel's record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mmio {
    pub(super) gpa: u64,
    pub(super) bytes: [u8; 8],
    pub(super) size: u8,
    pub(super) write: bool,
}

/// A port access, from the kernel's record.
#[derive(Clone, Copy, Debug)]
pub(super) struct Port {
    pub(super) port: u16,
    pub(super) size: u8,
    /// A string instruction reads several values at once.
    pub(super) count: u32,
    pub(super) write: bool,
    /// The place of the first value in the page.
    offset: usize,
}

/// The mapped page.
pub(super) struct RunPage {
    start: NonNull<kvm_run>,
    bytes: usize,
}

// SAFETY: the page is plain shared memory that belongs to no thread. Only the owner of the vCPU
// touches its non-atomic parts, between entries (`&self` methods of a type that the vCPU keeps
// private, except `immediate_exit`).
unsafe impl Send for RunPage {}
// SAFETY: as for Send.
unsafe impl Sync for RunPage {}

impl RunPage {
    pub(super) fn map(vcpu: &VcpuFd, bytes: usize) -> Result<Self, MachineError> {
        assert!(
            bytes >= size_of::<kvm_run>(),
            "KVM's shared page is too small: {bytes} bytes"
        );
        // SAFETY: the descriptor is open while `vcpu` is borrowed.
        let fd = unsafe { BorrowedFd::borrow_raw(vcpu.as_raw_fd()) };
        // SAFETY: the kernel chooses an unused address; nothing existing is replaced.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )
        }
        .map_err(|e| MachineError::os("cannot map a vCPU's shared page", e))?;
        let start = NonNull::new(start.cast()).expect("mmap returns no null on success");
        Ok(Self { start, bytes })
    }

    /// Makes the next `KVM_RUN` return `EINTR` at once (after completing a pending exit) while not
    /// 0.
    pub(super) fn immediate_exit(&self) -> &AtomicU8 {
        // SAFETY: the byte lies in the mapping, which lives as long as `self`. All of this process
        // reaches it through this atomic, and the kernel reads it once per entry.
        unsafe { AtomicU8::from_ptr(&raw mut (*self.start.as_ptr()).immediate_exit) }
    }

    pub(super) fn exit_reason(&self) -> u32 {
        // SAFETY: the field lies in the mapping; the kernel writes it only inside KVM_RUN.
        unsafe { (&raw const (*self.start.as_ptr()).exit_reason).read_volatile() }
    }

    /// The MMIO access of a `KVM_EXIT_MMIO`.
    pub(super) fn mmio(&self) -> Mmio {
        // SAFETY: as above; all fields are integers, so any contents of the union are values of
        // them.
        let raw =
            unsafe { (&raw const (*self.start.as_ptr()).__bindgen_anon_1.mmio).read_volatile() };
        Mmio {
            gpa: raw.phys_addr,
            bytes: raw.data,
            size: raw.len.min(8) as u8,
            write: raw.is_write != 0,
        }
    }

    /// The answer to an MMIO read.
    pub(super) fn set_mmio_data(&self, bytes: [u8; 8]) {
        // SAFETY: the field lies in the mapping, and the kernel reads it only inside KVM_RUN.
        unsafe {
            (&raw mut (*self.start.as_ptr()).__bindgen_anon_1.mmio.data).write_volatile(bytes);
        };
    }

    /// The port access of a `KVM_EXIT_IO`.
    pub(super) fn port(&self) -> Port {
        // SAFETY: as in `mmio`.
        let io = unsafe { (&raw const (*self.start.as_ptr()).__bindgen_anon_1.io).read_volatile() };
        Port {
            port: io.port,
            size: io.size.clamp(1, 4),
            count: io.count,
            write: u32::from(io.direction) != kvm_bindings::KVM_EXIT_IO_IN,
            offset: io.data_offset as usize,
        }
    }

    /// The bytes of the value `index` of a port access.
    ///
    /// # Panics
    /// If the kernel's record reaches out of the page.
    fn port_value(&self, access: &Port, index: u32) -> *mut u8 {
        let size = usize::from(access.size);
        let offset = access.offset + index as usize * size;
        assert!(
            index < access.count && offset + size <= self.bytes,
            "{access:?} reaches out of {} bytes",
            self.bytes
        );
        // SAFETY: just checked to lie in the mapping.
        unsafe { self.start.as_ptr().cast::<u8>().add(offset) }
    }

    /// The value `index` that the guest wrote to a port, zero-extended.
    pub(super) fn port_written(&self, access: &Port, index: u32) -> u32 {
        let mut bytes = [0; 4];
        let from = self.port_value(access, index);
        // SAFETY: `port_value` has checked the place, and the kernel writes it only inside KVM_RUN.
        unsafe {
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), usize::from(access.size));
        }
        u32::from_le_bytes(bytes)
    }

    /// The answer to the value `index` that the guest reads from a port.
    pub(super) fn set_port_read(&self, access: &Port, index: u32, value: u32) {
        let to = self.port_value(access, index);
        let bytes = value.to_le_bytes();
        // SAFETY: `port_value` has checked the place, and the kernel reads it only inside KVM_RUN.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, usize::from(access.size)) };
    }

    /// The register and the value of a `KVM_EXIT_X86_WRMSR`.
    pub(super) fn msr_written(&self) -> kvm_msr_entry {
        // SAFETY: as in `mmio`.
        let raw =
            unsafe { (&raw const (*self.start.as_ptr()).__bindgen_anon_1.msr).read_volatile() };
        kvm_msr_entry {
            index: raw.index,
            data: raw.data,
            ..Default::default()
        }
    }

    /// The answer to a `KVM_EXIT_X86_WRMSR`: the guest gets an exception (#GP), or goes on.
    pub(super) fn set_msr_refused(&self, refused: bool) {
        // SAFETY: the field lies in the mapping, and the kernel reads it only inside KVM_RUN.
        unsafe {
            (&raw mut (*self.start.as_ptr()).__bindgen_anon_1.msr.error)
                .write_volatile(refused.into());
        };
    }

    /// Reason and CPU of a `KVM_EXIT_FAIL_ENTRY`.
    pub(super) fn fail_entry(&self) -> (u64, u32) {
        // SAFETY: as in `mmio`.
        let raw = unsafe {
            (&raw const (*self.start.as_ptr()).__bindgen_anon_1.fail_entry).read_volatile()
        };
        (raw.hardware_entry_failure_reason, raw.cpu)
    }

    /// Sub-error and data words of a `KVM_EXIT_INTERNAL_ERROR`.
    pub(super) fn internal_error(&self) -> (u32, Vec<u64>) {
        // SAFETY: as in `mmio`.
        let raw = unsafe {
            (&raw const (*self.start.as_ptr()).__bindgen_anon_1.internal).read_volatile()
        };
        (
            raw.suberror,
            raw.data[..raw.data.len().min(raw.ndata as usize)].to_vec(),
        )
    }

    /// Flags and guest-physical address of a `KVM_EXIT_MEMORY_FAULT`.
    pub(super) fn memory_fault(&self) -> (u64, u64) {
        // SAFETY: as in `mmio`.
        let raw = unsafe {
            (&raw const (*self.start.as_ptr()).__bindgen_anon_1.memory_fault).read_volatile()
        };
        (raw.flags, raw.gpa)
    }
}

impl Drop for RunPage {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map`, and every user of it holds `self`.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
