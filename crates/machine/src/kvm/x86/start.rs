//! The state in which a guest starts: flat segments, no interrupts.
//!
//! A program without an operating system runs in ring 3, because a shadow-paging KVM may interpret
//! ring 0 code. There are no descriptor tables. Any exception is a triple fault, which ends the run
//! with an error that says where.
//!
//! A kernel starts in ring 0, as Linux's `Documentation/arch/x86/boot.rst` ("64-bit Boot
//! Protocol") or Xen's `docs/misc/pvh.pandoc` wants it.

use crate::{MachineError, StartMode, StartState};
use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, kvm_cpuid_entry2, kvm_fpu, kvm_mp_state, kvm_regs, kvm_segment, kvm_xcr,
    kvm_xcrs,
};
use kvm_ioctls::VcpuFd;

// AMD64 APM vol. 2, 3.1 "System-control registers".
const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31; // PE MP ET NE WP PG
const CR0_KERNEL32: u64 = 1 | 1 << 4; // PE ET
const CR0_KERNEL64: u64 = CR0_KERNEL32 | 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_OSFXSR_OSXMMEXCPT: u64 = 3 << 9;
const CR4_OSXSAVE: u64 = 1 << 18;
const EFER: u64 = 1 << 8 | 1 << 10 | 1 << 11; // LME LMA NXE
const EFER_KERNEL64: u64 = 1 << 8 | 1 << 10;
/// The four descriptors at [`StartState::GDT`].
const GDT_LIMIT: u16 = 31;
/// Bit 1 always reads as one.
const RFLAGS: u64 = 2;
/// x87 and SSE; AVX; the three parts of AVX-512, which only come together.
const XCR0: [u64; 3] = [0b11, 0b100, 0b1110_0000];

/// A flat segment. `long`: 64-bit code.
fn segment(selector: u16, code: bool, long: bool) -> kvm_segment {
    kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_: if code { 11 } else { 3 }, // execute/read or read/write, accessed
        present: 1,
        dpl: (selector & 3) as u8,
        s: 1,
        l: u8::from(code && long),
        db: u8::from(!(code && long)),
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

/// IA32_MISC_ENABLE with fast strings, and IA32_MTRR_DEF_TYPE with MTRRs on and write-back memory:
/// the values that firmware leaves (Intel SDM vol. 4).
const FIRMWARE_MSRS: [(u32, u64); 2] = [(0x1a0, 1), (0x2ff, 0x806)];
/// Registers of the LAPIC's two local interrupts, and the delivery modes of a PC's wiring: the PICs
/// (ExtINT), and non-maskable interrupts (Intel SDM vol. 3, "Local Vector Table").
const LOCAL_INTERRUPTS: [(usize, u32); 2] = [(0x350, 7), (0x360, 4)];

/// Leaves a vCPU as the firmware of a PC does.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn prepare_pc(fd: &VcpuFd) -> Result<(), MachineError> {
    let os = |e: kvm_ioctls::Error| {
        let error = std::io::Error::from_raw_os_error(e.errno());
        MachineError::os("cannot set up a vCPU of a PC", error)
    };
    for (index, value) in FIRMWARE_MSRS {
        super::msr::set_one(fd, index, value)?;
    }
    let mut lapic = fd.get_lapic().map_err(os)?;
    for (register, mode) in LOCAL_INTERRUPTS {
        // Bits 8 to 10 are the mode.
        let byte = &mut lapic.regs[register + 1];
        *byte = (*byte & !7) | mode as std::ffi::c_char;
    }
    fd.set_lapic(&lapic).map_err(os)?;
    // x87 and SSE as after FINIT, which kernels expect.
    let fpu = kvm_fpu {
        fcw: 0x37f,
        mxcsr: 0x1f80,
        ..Default::default()
    };
    fd.set_fpu(&fpu).map_err(os)
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
    let is_user = start.mode == StartMode::User;
    let long = start.mode != StartMode::Kernel32;
    (sregs.cr0, sregs.cr4, sregs.efer) = match start.mode {
        StartMode::User => {
            let xsave = if has_xsave(cpuid) { CR4_OSXSAVE } else { 0 };
            (CR0, CR4_PAE | CR4_OSFXSR_OSXMMEXCPT | xsave, EFER)
        }
        StartMode::Kernel64 => (CR0_KERNEL64, CR4_PAE, EFER_KERNEL64),
        StartMode::Kernel32 => (CR0_KERNEL32, 0, 0),
    };
    sregs.cr3 = start.tables.0;
    let (code, data) = if is_user { (0x33, 0x2b) } else { (0x10, 0x18) };
    sregs.cs = segment(code, true, long);
    let data = segment(data, false, long);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.idt.limit = 0;
    sregs.gdt.limit = 0;
    if !is_user {
        sregs.gdt.base = StartState::GDT.0;
        sregs.gdt.limit = GDT_LIMIT;
    }
    fd.set_sregs(&sregs).map_err(os)?;
    if is_user && has_xsave(cpuid) {
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
        rbx: if long { 0 } else { start.args[1] },
        rflags: RFLAGS,
        ..Default::default()
    })
    .map_err(os)?;
    fd.set_mp_state(kvm_mp_state {
        mp_state: KVM_MP_STATE_RUNNABLE,
    })
    .map_err(os)
}
