//! The meaning of KVM's exits.

use super::run_page::{Mmio, Port, RunPage};
use crate::Exit;
use kvm_bindings::{
    KVM_EXIT_DIRTY_RING_FULL, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_HLT, KVM_EXIT_INTERNAL_ERROR,
    KVM_EXIT_INTR, KVM_EXIT_IO, KVM_EXIT_IOAPIC_EOI, KVM_EXIT_MMIO, KVM_EXIT_SHUTDOWN,
    KVM_EXIT_X86_WRMSR, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_SIMUL_EX, kvm_msr_entry, kvm_regs, kvm_sregs,
};
use pageferry_addr::Gpa;

/// An exit, as far as the shared page alone describes it.
#[derive(Debug)]
pub(super) enum Left {
    /// An access to an address that no slot covers, or that KVM could not reach.
    Mmio(Mmio),
    /// A port access.
    Port(Port),
    /// A write of a model-specific register that the filter lets out.
    WriteMsr(kvm_msr_entry),
    /// HLT.
    Halted,
    /// The vCPU's dirty ring has no room.
    RingFull,
    /// An exit that does not concern the caller.
    Nothing,
    /// The guest cannot run any further, for this reason.
    Failed(String),
}

/// A vCPU that was reset: `kvm_vcpu_reset` in `arch/x86/kvm/x86.c`.
const RESET_RIP: u64 = 0xfff0;
const RESET_CS_BASE: u64 = 0xffff_0000;
const CR0_PE: u64 = 1;

/// Reads the reason of the last `KVM_RUN` that returned 0.
pub(super) fn read(page: &RunPage) -> Left {
    match page.exit_reason() {
        KVM_EXIT_MMIO => Left::Mmio(page.mmio()),
        KVM_EXIT_IO => Left::Port(page.port()),
        KVM_EXIT_X86_WRMSR => Left::WriteMsr(page.msr_written()),
        KVM_EXIT_HLT => Left::Halted,
        KVM_EXIT_DIRTY_RING_FULL => Left::RingFull,
        KVM_EXIT_INTR | KVM_EXIT_IOAPIC_EOI => Left::Nothing,
        KVM_EXIT_SHUTDOWN => Left::Failed("triple fault (an exception without a handler)".into()),
        KVM_EXIT_FAIL_ENTRY => {
            let (reason, cpu) = page.fail_entry();
            Left::Failed(format!(
                "the CPU refused to enter the guest (hardware reason {reason:#x}, CPU {cpu})"
            ))
        }
        KVM_EXIT_INTERNAL_ERROR => {
            let (suberror, data) = page.internal_error();
            let data = data
                .iter()
                .map(|word| format!(" {word:#x}"))
                .collect::<String>();
            let what = match suberror {
                KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction",
                KVM_INTERNAL_ERROR_SIMUL_EX => "exceptions while handling exceptions",
                KVM_INTERNAL_ERROR_DELIVERY_EV => "an exit while delivering an event",
                _ => "an internal error",
            };
            Left::Failed(format!(
                "KVM cannot run the guest: {what} (sub-error {suberror}, data{data})"
            ))
        }
        other => Left::Failed(format!(
            "KVM left the guest for an unexpected reason ({other})"
        )),
    }
}

/// Describes an exit for an error.
pub(super) fn described(exit: &Exit) -> String {
    match exit {
        Exit::MemoryFault { page, .. } => format!("it touched the missing page {page} of RAM"),
        Exit::MmioWrite { gpa, value, size } => {
            format!("it stored {value:#x} to {gpa} in {size} bytes, where no memory is")
        }
        Exit::MmioRead { gpa, size } => {
            format!("it loaded {size} bytes from {gpa}, where no memory is")
        }
        Exit::PortWrite { port, value, size } => {
            format!("it wrote {value:#x} to I/O port {port:#x} in {size} bytes")
        }
        Exit::PortRead { port, size } => {
            format!("it read {size} bytes from I/O port {port:#x}")
        }
        Exit::Halted => "it halted".into(),
        Exit::Reset(_) => "it ended itself".into(),
        Exit::Kicked => "it was kicked".into(),
    }
}

/// Describes a vCPU's position for an error. KVM on AMD hosts resets a vCPU that has shut down
/// (`shutdown_interception` in `arch/x86/kvm/svm/svm.c`). Its registers then say nothing about the
/// guest.
pub(super) fn place(regs: &kvm_regs, sregs: &kvm_sregs) -> String {
    let is_reset = regs.rip == RESET_RIP && sregs.cs.base == RESET_CS_BASE;
    if is_reset && sregs.cr0 & CR0_PE == 0 {
        return "its position is not known: this host's KVM has reset the vCPU, as it does on AMD"
            .into();
    }
    format!(
        "rip {:#x}, rsp {:#x}, cr2 {:#x}, ring {}",
        regs.rip, regs.rsp, sregs.cr2, sregs.ss.dpl
    )
}

/// The exit of an access outside RAM. A read is answered with ones.
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

/// The exit for the value `index` of a port access. A read is answered with ones.
pub(super) fn port(page: &RunPage, access: &Port, index: u32) -> Exit {
    let (port, size) = (access.port, access.size);
    if access.write {
        let value = page.port_written(access, index);
        Exit::PortWrite { port, value, size }
    } else {
        page.set_port_read(access, index, u32::MAX);
        Exit::PortRead { port, size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exits_are_described_in_words() {
        use crate::Access::Read;
        use pageferry_addr::RamPage;
        let write = Exit::MmioWrite {
            gpa: Gpa(0xd000_0000),
            value: 77,
            size: 8,
        };
        let fault = Exit::MemoryFault {
            page: RamPage(16),
            access: Read,
        };
        let read = Exit::MmioRead {
            gpa: Gpa(0xd000_0000),
            size: 4,
        };
        for (exit, says) in [
            (
                write,
                "it stored 0x4d to 0xd0000000 in 8 bytes, where no memory is",
            ),
            (fault, "it touched the missing page 0x10 of RAM"),
            (
                read,
                "it loaded 4 bytes from 0xd0000000, where no memory is",
            ),
            (
                Exit::PortWrite {
                    port: 0x3f8,
                    value: 0x41,
                    size: 1,
                },
                "it wrote 0x41 to I/O port 0x3f8 in 1 bytes",
            ),
            (
                Exit::PortRead {
                    port: 0x3fd,
                    size: 1,
                },
                "it read 1 bytes from I/O port 0x3fd",
            ),
            (Exit::Halted, "it halted"),
            (Exit::Kicked, "it was kicked"),
        ] {
            assert_eq!(described(&exit), says);
        }
    }

    #[test]
    fn a_vcpu_that_kvm_has_reset_is_nowhere() {
        let regs = kvm_regs {
            rip: RESET_RIP,
            ..Default::default()
        };
        let mut sregs = kvm_sregs::default();
        sregs.cs.base = RESET_CS_BASE;
        sregs.cr0 = 0x6000_0010;
        assert!(place(&regs, &sregs).contains("not known"));
        // In protected mode a guest may run at this address.
        sregs.cr0 |= CR0_PE;
        assert!(place(&regs, &sregs).contains("rip 0xfff0"));
    }
}
