//! The state in which a guest program starts: 64-bit mode, ring 3, flat segments, no interrupts.
//!
//! The guest runs in ring 3, because a shadow-paging KVM may interpret ring 0 code. There are no
//! descriptor tables. Any exception is a triple fault, which ends the run with an error that says
//! where.

use crate::{MachineError, StartState};
use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, kvm_cpuid_entry2, kvm_mp_state, kvm_regs, kvm_segment, kvm_xcr, kvm_xcrs,
};
use kvm_ioctls::VcpuFd;

// AMD64 APM vol. 2, 3.1 "System-control registers".
const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31; // PE MP ET NE WP PG
const CR4_PAE: u64 = 1 << 5;
const CR4_OSFXSR_OSXMMEXCPT: u64 = 3 << 9;
const CR4_OSXSAVE: u64 = 1 << 18;
const EFER: u64 = 1 << 8 | 1 << 10 | 1 << 11; // LME LMA NXE
/// Bit 1 always reads as one.
const RFLAGS: u64 = 2;
/// x87 and SSE; AVX; the three parts of AVX-512, which only come together.
const XCR0: [u64; 3] = [0b11, 0b100, 0b1110_0000];

fn segment(selector: u16, code: bool) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: if code { 11 } else { 3 }, // execute/read or read/write, accessed
        present: 1,
        dpl: 3,
        s: 1,
        l: u8::from(code),
        db: u8::from(!code),
        g: 1,
        ..Default::default()
    }
}

fn has_xsave(cpuid: &[kvm_cpuid_entry2]) -> bool {
    cpuid
        .iter()
        .any(|e| e.function == 1 && e.ecx & 1 << 26 != 0)
}

/// The bits of [`XCR0`] that the vCPU supports.
fn xcr0(cpuid: &[kvm_cpuid_entry2]) -> u64 {
    let offered = cpuid
        .iter()
        .find(|e| e.function == 0xd && e.index == 0)
        .map_or(0b11, |e| u64::from(e.eax));
    XCR0.iter().filter(|part| offered & **part == **part).sum()
}

/// Sets the start state.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn set(
    fd: &VcpuFd,
    cpuid: &[kvm_cpuid_entry2],
    start: &StartState,
) -> Result<(), MachineError> {
    const WHAT: &str = "cannot set a vCPU's start state";
    let os =
        |e: kvm_ioctls::Error| MachineError::os(WHAT, std::io::Error::from_raw_os_error(e.errno()));
    let mut sregs = fd.get_sregs().map_err(os)?;
    sregs.cr0 = CR0;
    sregs.cr3 = start.tables.0;
    sregs.cr4 = CR4_PAE | CR4_OSFXSR_OSXMMEXCPT | if has_xsave(cpuid) { CR4_OSXSAVE } else { 0 };
    sregs.efer = EFER;
    sregs.cs = segment(0x33, true);
    let data = segment(0x2b, false);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.idt.limit = 0;
    sregs.gdt.limit = 0;
    fd.set_sregs(&sregs).map_err(os)?;
    if has_xsave(cpuid) {
        let mut xcrs = kvm_xcrs {
            nr_xcrs: 1,
            ..Default::default()
        };
        xcrs.xcrs[0] = kvm_xcr {
            xcr: 0,
            value: xcr0(cpuid),
            ..Default::default()
        };
        fd.set_xcrs(&xcrs).map_err(os)?;
    }
    fd.set_regs(&kvm_regs {
        rip: start.entry,
        rsp: start.stack,
        rdi: start.args[0],
        rsi: start.args[1],
        rflags: RFLAGS,
        ..Default::default()
    })
    .map_err(os)?;
    fd.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })
    .map_err(os)
}
