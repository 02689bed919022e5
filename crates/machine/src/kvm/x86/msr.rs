//! Model-specific registers: the choice of those that make up a vCPU's state, and how they are
//! saved and restored.
//!
//! `KVM_GET_MSR_INDEX_LIST` names more registers than a given host can read or write back. Both
//! batch ioctls stop at the first register that they refuse. So a survey, once per host and on a
//! fresh vCPU, finds the registers that can be read and set to the value read. These are saved and
//! restored, in one batch. If a batch stops nevertheless (another host, another CPUID), the rest is
//! tried one by one. A refused register is an error only if it *matters*: if a guest can have
//! changed it and would miss it.

use crate::MachineError;
use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuFd, VmFd};
use pageferry_addr::{Gpa, PAGE_SIZE};
use std::sync::OnceLock;

/// Registers that every x86-64 vCPU has, and on whose value a guest relies: SYSENTER_CS, _ESP,
/// _EIP, PAT, TSC, STAR, LSTAR, CSTAR, FMASK and KERNEL_GS_BASE. EFER, FS_BASE and GS_BASE travel
/// with the special registers. They must be readable and settable.
const ESSENTIAL: [u32; 10] = [
    0x174,
    0x175,
    0x176,
    0x277,
    0x10,
    0xc000_0081,
    0xc000_0082,
    0xc000_0083,
    0xc000_0084,
    0xc000_0102,
];

/// IA32_TIME_STAMP_COUNTER.
pub(super) const TSC: u32 = 0x10;
/// IA32_TSC_DEADLINE.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;

/// Registers that not every vCPU has, but that matter if they are not zero: TSC_ADJUST, SPEC_CTRL,
/// MISC_ENABLE, TSC_DEADLINE, XSS, TSC_AUX, and KVM's own (clocks, asynchronous page faults, steal
/// time, end of interrupt).
const MATTERS_UNLESS_ZERO: [u32; 14] = [
    0x3b,
    0x48,
    0x1a0,
    0x6e0,
    0xda0,
    0xc000_0103,
    0x11,
    0x12,
    0x4b56_4d00,
    0x4b56_4d01,
    0x4b56_4d02,
    0x4b56_4d03,
    0x4b56_4d04,
    0x4b56_4d06,
];

/// The guest's clock of each vCPU (`MSR_KVM_SYSTEM_TIME`, old and new number). The kernel looks for
/// the clock's page when the register is set with bit 0 (`kvm_gpc_activate` in
/// `kvm_write_system_time`). It sleeps there while the page is missing, or not mapped yet. The page
/// comes only when the guest runs, so such a register is set then.
///
/// The other registers of [`structure`] only note an address, and `KVM_RUN` touches the page. The
/// wall clocks are never set (`WALL_CLOCKS`).
const CLOCKS: [u32; 2] = [0x12, 0x4b56_4d01];

fn touches_memory(msr: &kvm_msr_entry) -> bool {
    CLOCKS.contains(&msr.index) && msr.data & 1 != 0
}

fn entry(index: u32) -> kvm_msr_entry {
    kvm_msr_entry {
        index,
        ..Default::default()
    }
}

fn io(error: kvm_ioctls::Error) -> std::io::Error {
    std::io::Error::from_raw_os_error(error.errno())
}

/// Reads or writes as many leading registers as the kernel accepts. Returns the accepted ones.
fn batch(
    entries: &[kvm_msr_entry],
    call: impl FnOnce(&mut Msrs) -> Result<usize, kvm_ioctls::Error>,
) -> Result<Vec<kvm_msr_entry>, kvm_ioctls::Error> {
    let mut msrs = Msrs::from_entries(entries).expect("at most KVM_MAX_MSR_ENTRIES registers");
    let taken = call(&mut msrs)?;
    Ok(msrs.as_slice()[..taken.min(entries.len())].to_vec())
}

/// The registers that travel on this host, once surveyed: of vCPUs without and with a LAPIC.
static TRAVELLING: [OnceLock<Vec<u32>>; 2] = [OnceLock::new(), OnceLock::new()];

/// The registers that travel on this host, of a vCPU with a LAPIC or without.
///
/// # Errors
/// Before the first [`survey`].
pub(super) fn travelling(lapic: bool) -> Result<&'static [u32], MachineError> {
    let never = MachineError::WrongState("no vCPU was ever created here");
    TRAVELLING[usize::from(lapic)]
        .get()
        .map(Vec::as_slice)
        .ok_or(never)
}

/// Finds the registers that travel, on the first call. `fd` is a fresh vCPU with its CPUID set. The
/// survey sets each of its registers to the value read.
///
/// # Errors
/// When a register that every vCPU has cannot be read and set.
pub(super) fn survey(kvm: &Kvm, fd: &VcpuFd, lapic: bool) -> Result<(), MachineError> {
    let travelling = &TRAVELLING[usize::from(lapic)];
    if travelling.get().is_some() {
        return Ok(());
    }
    let list = kvm
        .get_msr_index_list()
        .map_err(|e| MachineError::os("cannot list the model-specific registers", io(e)))?;
    let travels = |index: &u32| {
        let read = batch(&[entry(*index)], |m| fd.get_msrs(m)).unwrap_or_default();
        !read.is_empty() && batch(&read, |m| fd.set_msrs(m)).is_ok_and(|set| !set.is_empty())
    };
    let all: Vec<u32> = list.as_slice().iter().copied().filter(travels).collect();
    match ESSENTIAL.iter().find(|index| !all.contains(index)) {
        None => {
            // Another thread may have surveyed at the same time, with the same result.
            let _ = travelling.set(all);
            Ok(())
        }
        Some(index) => Err(MachineError::EngineUnavailable(format!(
            "this host's KVM does not let model-specific register {index:#x} be saved and restored"
        ))),
    }
}

/// Reads the registers `indices`.
///
/// # Errors
/// When the kernel refuses the call, or an essential register.
pub(super) fn read(fd: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, MachineError> {
    const WHAT: &str = "cannot read the model-specific registers";
    let wanted: Vec<_> = indices.iter().copied().map(entry).collect();
    let mut found =
        batch(&wanted, |m| fd.get_msrs(m)).map_err(|e| MachineError::os(WHAT, io(e)))?;
    for rest in &wanted[found.len()..] {
        found.extend(
            batch(&[*rest], |m| fd.get_msrs(m)).map_err(|e| MachineError::os(WHAT, io(e)))?,
        );
    }
    if ESSENTIAL
        .iter()
        .any(|index| !found.iter().any(|msr| msr.index == *index))
    {
        return Err(MachineError::os(
            WHAT,
            std::io::Error::from_raw_os_error(libc::EIO),
        ));
    }
    Ok(found)
}

/// The guest's wall clocks (`MSR_KVM_WALL_CLOCK`, old and new number). They are commands rather
/// than state: setting one makes KVM write guest memory at once, which a destination does not have
/// yet. That memory already holds the clock that KVM wrote at the source.
const WALL_CLOCKS: [u32; 2] = [0x11, 0x4b56_4d00];
/// Hyper-V's hypercall and assist pages, which KVM would also write at once.
const HYPERV_PAGES: [u32; 2] = [0x4000_0001, 0x4000_0073];

/// Sets the registers, without a touch of guest memory. Returns those that [`write_late`] has to
/// set before the guest runs: they are disabled so far, and KVM has accepted the register.
///
/// # Errors
/// [`MachineError::BadState`] when a register that matters is missing or refused.
pub(super) fn write(
    fd: &VcpuFd,
    msrs: &[kvm_msr_entry],
) -> Result<Vec<kvm_msr_entry>, MachineError> {
    if let Some(msr) = msrs
        .iter()
        .find(|msr| HYPERV_PAGES.contains(&msr.index) && msr.data != 0)
    {
        return Err(MachineError::BadState(format!(
            "model-specific register {:#x} belongs to an interface that guests here are not offered",
            msr.index
        )));
    }
    let kept: Vec<kvm_msr_entry> = msrs
        .iter()
        .filter(|msr| !WALL_CLOCKS.contains(&msr.index))
        .map(|msr| kvm_msr_entry {
            data: msr.data & !u64::from(touches_memory(msr)),
            ..*msr
        })
        .collect();
    let late = msrs.iter().filter(|msr| touches_memory(msr)).copied();
    let late = late.collect();
    let msrs = kept.as_slice();
    if let Some(index) = ESSENTIAL
        .iter()
        .find(|index| !msrs.iter().any(|msr| msr.index == **index))
    {
        return Err(MachineError::BadState(format!(
            "model-specific register {index:#x} is missing"
        )));
    }
    let set = |entries: &[kvm_msr_entry]| {
        batch(entries, |m| fd.set_msrs(m))
            .map(|taken| taken.len())
            .map_err(|e| MachineError::os("cannot set the model-specific registers", io(e)))
    };
    let taken = set(msrs)?;
    for msr in &msrs[taken..] {
        let matters = ESSENTIAL.contains(&msr.index)
            || (MATTERS_UNLESS_ZERO.contains(&msr.index) && msr.data != 0);
        if set(&[*msr])? == 0 && matters {
            return Err(MachineError::BadState(format!(
                "KVM refuses the value {:#x} of its model-specific register {:#x}",
                msr.data, msr.index
            )));
        }
    }
    Ok(late)
}

/// Sets registers that [`write`] has left disabled. The calling thread may sleep until guest memory
/// is there.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn write_late(fd: &VcpuFd, late: &[kvm_msr_entry]) -> Result<(), MachineError> {
    late.iter()
        .try_for_each(|msr| set_one(fd, msr.index, msr.data))
}

/// Sets a register that every vCPU has.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn set_one(fd: &VcpuFd, index: u32, data: u64) -> Result<(), MachineError> {
    let msr = kvm_msr_entry {
        data,
        ..entry(index)
    };
    if !write_for_guest(fd, msr)? {
        return Err(MachineError::BadState(format!(
            "KVM refuses the value {data:#x} of its model-specific register {index:#x}"
        )));
    }
    Ok(())
}

/// Gives registers that were read the values that [`write_late`] has yet to set.
pub(super) fn overlay(msrs: &mut [kvm_msr_entry], late: &[kvm_msr_entry]) {
    for msr in msrs {
        if let Some(late) = late.iter().find(|late| late.index == msr.index) {
            msr.data = late.data;
        }
    }
}

/// The address and the bytes of the structure in guest memory that KVM accesses because of this
/// register, if the value asks for it.
fn structure(msr: &kvm_msr_entry) -> Option<(u64, u64)> {
    let (flags, bytes) = match msr.index {
        // The wall clocks have no flag.
        index if WALL_CLOCKS.contains(&index) => return (msr.data != 0).then_some((msr.data, 12)),
        index if CLOCKS.contains(&index) => (1, 32),
        // Asynchronous page faults, and steal time.
        0x4b56_4d02 | 0x4b56_4d03 => (0x3f, 64),
        // The end of an interrupt.
        0x4b56_4d04 => (3, 4),
        _ => return None,
    };
    (msr.data & 1 != 0).then_some((msr.data & !flags, bytes))
}

/// The addresses of the pages that KVM accesses when a guest has written this register. The guest
/// chooses them, so there may be no memory.
pub(super) fn pages_of(msr: &kvm_msr_entry) -> impl Iterator<Item = Gpa> + use<> {
    structure(msr).into_iter().flat_map(|(address, bytes)| {
        let last = address.saturating_add(bytes - 1);
        (address / PAGE_SIZE..=last / PAGE_SIZE).map(|page| Gpa(page * PAGE_SIZE))
    })
}

/// The addresses of the pages that KVM accesses for this vCPU while it runs: its clock, steal time
/// and the like. A wall clock is not there: KVM has written it, and does not come back to it.
pub(super) fn shared_pages(msrs: &[kvm_msr_entry]) -> impl Iterator<Item = Gpa> + '_ {
    let running = |msr: &&kvm_msr_entry| !WALL_CLOCKS.contains(&msr.index);
    msrs.iter().filter(running).flat_map(pages_of)
}

/// Lets a guest's writes of the registers of [`structure`] leave `KVM_RUN`, or carries them out in
/// the kernel again. Asynchronous page faults are left out: guests here are not offered them.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn set_writes_leave(vm: &VmFd, on: bool) -> Result<(), MachineError> {
    // A bit that is not set denies. KVM reads whole words.
    let range = |base, msr_count, bitmap| MsrFilterRange {
        flags: MsrFilterRangeFlags::WRITE,
        base,
        msr_count,
        bitmap,
    };
    let ranges = [
        range(0x11, 2, &[0; 8]),
        range(0x4b56_4d00, 5, &[1 << 2, 0, 0, 0, 0, 0, 0, 0]),
    ];
    let ranges = if on { &ranges[..] } else { &[] };
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, ranges)
        .map_err(|e| MachineError::os("cannot have writes of a clock's register leave KVM", io(e)))
}

/// Carries out a guest's write of a register. Returns false if KVM refuses the value.
///
/// # Errors
/// When the kernel fails.
pub(super) fn write_for_guest(fd: &VcpuFd, msr: kvm_msr_entry) -> Result<bool, MachineError> {
    let set = batch(&[msr], |m| fd.set_msrs(m));
    let set = set.map_err(|e| MachineError::os("cannot set a model-specific register", io(e)))?;
    Ok(!set.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(index: u32, data: u64) -> Vec<u64> {
        let msr = kvm_msr_entry {
            data,
            ..entry(index)
        };
        pages_of(&msr).map(|gpa| gpa.0).collect()
    }

    #[test]
    fn a_structure_across_a_border_has_both_pages() {
        for (index, fits, crosses) in [
            (0x11, 0x1ff4, 0x1ff8),
            (0x4b56_4d00, 0x1ff4, 0x1ff5),
            (0x12, 0x1fe1, 0x1fe5),
            (0x4b56_4d01, 0x1fe1, 0x1ffd),
        ] {
            assert_eq!(pages(index, fits), [0x1000], "{index:#x}");
            assert_eq!(pages(index, crosses), [0x1000, 0x2000], "{index:#x}");
        }
        // These are aligned to their size.
        for index in [0x4b56_4d02, 0x4b56_4d03, 0x4b56_4d04] {
            assert_eq!(pages(index, 0x1fff), [0x1000], "{index:#x}");
        }
    }

    #[test]
    fn a_value_that_disables_has_no_page() {
        for index in [0x12, 0x4b56_4d01, 0x4b56_4d02, 0x4b56_4d03, 0x4b56_4d04] {
            assert!(pages(index, 0x1000).is_empty(), "{index:#x}");
        }
        for index in [0x11, 0x4b56_4d00, TSC, TSC_DEADLINE, 0x174] {
            assert!(pages(index, 0).is_empty(), "{index:#x}");
        }
        assert!(pages(0x174, 0x1001).is_empty());
    }

    #[test]
    fn any_value_has_two_pages_at_most() {
        for index in [0x11, 0x12, 0x4b56_4d00, 0x4b56_4d01, 0x4b56_4d03] {
            for data in [1, 0xfff, u64::MAX, u64::MAX - 30, 1 << 63 | 1] {
                let pages = pages(index, data);
                assert!((1..=2).contains(&pages.len()), "{index:#x}, {data:#x}");
                assert!(pages.iter().all(|page| page % PAGE_SIZE == 0));
            }
        }
    }

    #[test]
    fn a_wall_clock_is_no_page_of_a_running_vcpu() {
        let msr = |index, data| kvm_msr_entry {
            data,
            ..entry(index)
        };
        let msrs = [
            msr(0x11, 0x1000),
            msr(0x12, 0x2001),
            msr(0x4b56_4d00, 0x3000),
        ];
        let shared: Vec<Gpa> = shared_pages(&msrs).collect();
        assert_eq!(shared, [Gpa(0x2000)]);
    }
}
