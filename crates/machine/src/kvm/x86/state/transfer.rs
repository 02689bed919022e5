//! [`Parts`] read from the kernel, and written to it.

use super::{Parts, Special};
use crate::MachineError;
use crate::kvm::x86::clock::Tsc;
use crate::kvm::x86::shared::VmShared;
use crate::kvm::x86::{cpuid, msr, sys};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use rustix::io::Errno;

fn os(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> MachineError {
    move |e| MachineError::os(what, std::io::Error::from_raw_os_error(e.errno()))
}

/// Reads the whole state. No exit may be pending.
///
/// # Errors
/// When the kernel refuses a part.
pub(in crate::kvm::x86) fn load(
    fd: &VcpuFd,
    shared: &VmShared,
    cpuid: &[kvm_cpuid_entry2],
) -> Result<Parts, MachineError> {
    let special = if shared.caps.sregs2 {
        Special::V2(
            sys::get_sregs2(fd)
                .map_err(|e| MachineError::os("cannot read the special registers", e))?,
        )
    } else {
        Special::V1(
            fd.get_sregs()
                .map_err(os("cannot read the special registers"))?,
        )
    };
    let lapic = match shared.caps.lapic {
        true => Some(fd.get_lapic().map_err(os("cannot read the LAPIC"))?),
        false => None,
    };
    Ok(Parts {
        // MP state first: KVM may act on a pending INIT (kvm_apic_accept_events) and so change the
        // other parts.
        mp_state: fd
            .get_mp_state()
            .map_err(os("cannot read the multiprocessing state"))?,
        regs: fd.get_regs().map_err(os("cannot read the registers"))?,
        special,
        xcrs: fd
            .get_xcrs()
            .map_err(os("cannot read the extended control registers"))?,
        xsave: sys::get_xsave(fd, shared.caps.xsave_bytes)
            .map_err(|e| MachineError::os("cannot read the extended registers", e))?,
        debug: fd
            .get_debug_regs()
            .map_err(os("cannot read the debug registers"))?,
        events: fd
            .get_vcpu_events()
            .map_err(os("cannot read the pending events"))?,
        msrs: msr::read(fd, msr::travelling(shared.caps.lapic)?)?,
        cpuid: cpuid.to_vec(),
        lapic,
        tsc_khz: fd.get_tsc_khz().unwrap_or(0),
        tsc_offset: None,
        exits: Vec::new(),
        pages: Vec::new(),
    })
}

/// Converts the kernel's refusal of a part. The bytes were well-formed, their values impossible.
fn refused(part: &str) -> impl FnOnce(Errno) -> MachineError {
    move |errno| MachineError::BadState(format!("KVM refuses its {part}: {errno}"))
}

fn errno(error: kvm_ioctls::Error) -> Errno {
    Errno::from_raw_os_error(error.errno())
}

/// `KVM_SREGS2_FLAGS_PDPTRS_VALID` (`arch/x86/include/uapi/asm/kvm.h`).
const PDPTRS_VALID: u64 = 1;

/// Refuses what KVM would refuse on this host, as far as that is known without a vCPU. Changes
/// nothing.
///
/// # Errors
/// [`MachineError::BadState`] with the reason.
pub(in crate::kvm::x86) fn check(shared: &VmShared, parts: &Parts) -> Result<(), MachineError> {
    if parts.lapic.is_some() != shared.caps.lapic {
        let (has, not) = if shared.caps.lapic {
            ("this machine", "it")
        } else {
            ("it", "this machine")
        };
        return Err(MachineError::BadState(format!(
            "{has} has a LAPIC and {not} has none"
        )));
    }
    cpuid::refuse_unoffered(&parts.cpuid, &shared.cpuid).map_err(MachineError::BadState)?;
    let paging = parts.special.paging();
    let pae = paging.cr0 >> 31 & 1 != 0 && paging.cr4 >> 5 & 1 != 0 && paging.efer >> 10 & 1 == 0;
    let has_pdptrs =
        matches!(&parts.special, Special::V2(sregs) if sregs.flags & PDPTRS_VALID != 0);
    if pae && !has_pdptrs {
        // KVM would read them from guest memory, which may not be there yet.
        return Err(MachineError::BadState(
            "it is in PAE paging without its page-directory pointers".into(),
        ));
    }
    Ok(())
}

/// Sets the whole state.
///
/// The order is the kernel's:
///
/// 1. CPUID, which bounds the rest,
/// 2. special registers, before the MSRs that depend on them,
/// 3. XCR0, before the registers that it enables,
/// 4. the LAPIC, before its timer's MSR,
/// 5. pending events, and the condition that the vCPU waits for.
///
/// No step touches guest memory, which may be missing until the guest runs: a touch would sleep for
/// a page that comes only afterwards.
///
/// | part | memory that KVM could touch | why it does not |
/// |---|---|---|
/// | special registers | the page-directory pointers of PAE paging | they are part of the state, or [`check`] refuses it |
/// | MSRs | the guest's clocks | [`msr::write`] leaves them disabled, and returns them |
/// | MSRs | the wall clocks, Hyper-V's pages | not set, or refused |
/// | MSRs | steal time, asynchronous page faults, end of interrupt | KVM notes the address |
/// | the rest | none | KVM checks it when it enters the guest |
///
/// `first`: it is the first vCPU of its VM to be set. Returns what is to be set before the guest
/// runs.
///
/// # Errors
/// [`MachineError::BadState`] for values that this host's KVM refuses.
pub(in crate::kvm::x86) fn store(
    fd: &VcpuFd,
    shared: &VmShared,
    present_cpuid: &[kvm_cpuid_entry2],
    parts: &Parts,
    first: bool,
) -> Result<Late, MachineError> {
    check(shared, parts)?;
    let scaled = set_tsc_khz(fd, parts.tsc_khz)?;
    // KVM refuses another CPUID once the vCPU has run, so a CPUID that is already right is left
    // alone.
    if parts.cpuid.as_slice() != present_cpuid {
        let wanted = CpuId::from_entries(&parts.cpuid)
            .map_err(|_| MachineError::BadState(too_many_leaves(parts.cpuid.len())))?;
        fd.set_cpuid2(&wanted)
            .map_err(errno)
            .map_err(refused("CPUID"))?;
    }
    match &parts.special {
        Special::V1(sregs) => fd.set_sregs(sregs).map_err(errno),
        Special::V2(_) if !shared.caps.sregs2 => Err(Errno::NOSYS),
        Special::V2(sregs) => sys::set_sregs2(fd, sregs),
    }
    .map_err(refused("special registers"))?;
    fd.set_regs(&parts.regs)
        .map_err(errno)
        .map_err(refused("registers"))?;
    fd.set_xcrs(&parts.xcrs)
        .map_err(errno)
        .map_err(refused("extended control registers"))?;
    set_xsave(fd, shared.caps.xsave_bytes, &parts.xsave)?;
    fd.set_debug_regs(&parts.debug)
        .map_err(errno)
        .map_err(refused("debug registers"))?;
    if let Some(lapic) = &parts.lapic {
        fd.set_lapic(lapic)
            .map_err(errno)
            .map_err(refused("LAPIC"))?;
    }
    let value = |index| {
        let msr = parts.msrs.iter().find(|msr| msr.index == index);
        msr.map_or(0, |msr| msr.data)
    };
    if first {
        // KVM takes a value within a second of the VM's TSC for that TSC, and drops it. So the
        // first vCPU gets a value far away before its own. Those of the others are then the same
        // TSC.
        msr::set_one(fd, msr::TSC, value(msr::TSC).wrapping_add(1 << 50))?;
    }
    let msrs = msr::write(fd, &parts.msrs)?;
    fd.set_vcpu_events(&parts.events)
        .map_err(errno)
        .map_err(refused("pending events"))?;
    fd.set_mp_state(parts.mp_state)
        .map_err(errno)
        .map_err(refused("multiprocessing state"))?;
    Ok(Late {
        msrs,
        tsc: parts.lapic.map(|_| Tsc {
            offset: parts.tsc_offset.filter(|_| !scaled),
            deadline: value(msr::TSC_DEADLINE),
            khz: parts.tsc_khz,
        }),
        scaled,
    })
}

/// The parts of a state that are set when the guest is about to run.
#[derive(Default)]
pub(in crate::kvm::x86) struct Late {
    /// For [`msr::write_late`].
    pub(in crate::kvm::x86) msrs: Vec<kvm_msr_entry>,
    /// The TSC, which goes on over the blackout. `None` once it is set, and without a LAPIC.
    pub(in crate::kvm::x86) tsc: Option<Tsc>,
    /// Whether the host scales the TSC.
    pub(in crate::kvm::x86) scaled: bool,
}

fn too_many_leaves(leaves: usize) -> String {
    format!("its CPUID has {leaves} leaves, expected at most {KVM_MAX_CPUID_ENTRIES}")
}

/// Sets the XSAVE area. The area of a host with larger registers is refused. The area of a host
/// with smaller ones is padded: its header says which components are there.
fn set_xsave(fd: &VcpuFd, host_bytes: usize, area: &[u32]) -> Result<(), MachineError> {
    let host_words = host_bytes.max(sys::XSAVE_BASE_BYTES) / 4;
    let (fits, beyond) = area.split_at(area.len().min(host_words));
    if beyond.iter().any(|word| *word != 0) {
        return Err(MachineError::BadState(format!(
            "its extended registers take {} bytes, and this host has {host_bytes}",
            area.len() * 4
        )));
    }
    let mut padded = fits.to_vec();
    padded.resize(host_words, 0);
    sys::set_xsave(fd, &padded, host_bytes).map_err(refused("extended registers"))
}

/// Returns whether the host scales the TSC.
fn set_tsc_khz(fd: &VcpuFd, wanted: u32) -> Result<bool, MachineError> {
    let present = fd.get_tsc_khz().unwrap_or(0);
    // 250 parts per million: KVM's own tolerance for the same frequency (tsc_tolerance_ppm).
    if wanted == 0 || u64::from(wanted.abs_diff(present)) * 4000 <= u64::from(present) {
        return Ok(false);
    }
    fd.set_tsc_khz(wanted).map(|()| true).map_err(|e| {
        MachineError::BadState(format!(
            "its TSC runs at {wanted} kHz, and this host's at {present} kHz and cannot be scaled: {}",
            errno(e)
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpuid_that_is_too_long_is_refused_in_words() {
        let says = "its CPUID has 257 leaves, expected at most 256";
        assert_eq!(too_many_leaves(KVM_MAX_CPUID_ENTRIES + 1), says);
    }
}
