//! What an exit means.

use super::run_page::{Mmio, RunPage};
use crate::Exit;
use kvm_bindings::{
    KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_INTR, KVM_EXIT_IO,
    KVM_EXIT_IOAPIC_EOI, KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN, KVM_INTERNAL_ERROR_DELIVERY_EV,
    KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_SIMUL_EX,
};
use pageferry_addr::Gpa;

/// An exit, as far as the shared page alone tells.
#[derive(Debug)]
pub(super) enum Left {
    /// An access to an address that no slot covers, or that KVM could not reach.
    Mmio(Mmio),
    /// A port access: there are no ports. Reads give ones, writes go nowhere.
    Port,
    /// HLT.
    Halted,
    /// Nothing for the caller.
    Nothing,
    /// The guest cannot go on; why.
    Failed(String),
}

/// Reads what the last `KVM_RUN` that returned 0 was left for.
pub(super) fn read(page: &RunPage) -> Left {
    match page.exit_reason() {
        KVM_EXIT_MMIO => Left::Mmio(page.mmio()),
        KVM_EXIT_IO => {
            page.float_port_bus();
            Left::Port
        }
        KVM_EXIT_HLT => Left::Halted,
        KVM_EXIT_INTR | KVM_EXIT_IOAPIC_EOI => Left::Nothing,
        KVM_EXIT_SHUTDOWN => Left::Failed("triple fault (an exception that nobody handles)".into()),
        KVM_EXIT_FAIL_ENTRY => {
            let (reason, cpu) = page.fail_entry();
            Left::Failed(format!(
                "the CPU refused to enter the guest (hardware reason {reason:#x}, CPU {cpu})"
            ))
        }
        KVM_EXIT_INTERNAL_ERROR => {
            let (suberror, data) = page.internal_error();
            let what = match suberror {
                KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction",
                KVM_INTERNAL_ERROR_SIMUL_EX => "exceptions while handling exceptions",
                KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while delivering an event",
                _ => "an internal error",
            };
            Left::Failed(format!(
                "KVM gave up: {what} (sub-error {suberror}, data {data:#x?})"
            ))
        }
        other => Left::Failed(format!(
            "KVM left the guest for a reason nobody asked for ({other})"
        )),
    }
}

/// The exit of an access outside RAM; a read is answered with ones.
pub(super) fn mmio(page: &RunPage, access: Mmio) -> Exit {
    let (gpa, size) = (Gpa(access.gpa), access.size);
    if access.write {
        let mut bytes = [0; 8];
        bytes[..usize::from(size)].copy_from_slice(&access.bytes[..usize::from(size)]);
        Exit::MmioWrite {
            gpa,
            value: u64::from_le_bytes(bytes),
            size,
        }
    } else {
        page.set_mmio_data([0xff; 8]);
        Exit::MmioRead { gpa, size }
    }
}
