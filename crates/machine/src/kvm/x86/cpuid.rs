//! CPUID: the features of a new vCPU, and the check of a moved one against the host.
//!
//! A new vCPU has every feature that the host's KVM supports, or those of them that a model allows.
//! A moved vCPU keeps its features, because its guest has read them. So a host that lacks one of
//! its feature bits is refused.

use super::device::{open, unavailable};
use crate::cpu_model::{self, REGISTERS};
use crate::{CpuModel, Cpuid, CpuidLeaf, MachineError};
use kvm_bindings::{KVM_CAP_TSC_DEADLINE_TIMER, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

/// A register of a leaf: its place in [`REGISTERS`].
#[derive(Clone, Copy)]
enum Reg {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Reg {
    fn of(self, entry: &mut kvm_cpuid_entry2) -> &mut u32 {
        match self {
            Self::Eax => &mut entry.eax,
            Self::Ebx => &mut entry.ebx,
            Self::Ecx => &mut entry.ecx,
            Self::Edx => &mut entry.edx,
        }
    }
}

/// A register with feature bits.
struct Word {
    function: u32,
    index: u32,
    reg: Reg,
    /// The bits that are no features, and those that KVM changes at run time (APIC on; OSXSAVE and
    /// OSPKE mirror CR4, MONITOR an MSR).
    not_features: u32,
    /// The names from bit 0 on, as in Linux's `/proc/cpuinfo`. A bit without a name is `-`.
    names: &'static str,
}

const fn word(function: u32, index: u32, reg: Reg, not_features: u32, names: &'static str) -> Word {
    Word {
        function,
        index,
        reg,
        not_features,
        names,
    }
}

/// Source: Linux's `arch/x86/include/uapi/asm/kvm_para.h`.
const PARAVIRTUAL_FEATURES: Word = word(
    PARAVIRTUAL,
    0,
    Reg::Eax,
    0,
    "clocksource nop_io_delay mmu_op clocksource2 async_pf steal_time pv_eoi pv_unhalt - \
     pv_tlb_flush async_pf_vmexit pv_send_ipi poll_control pv_sched_yield async_pf_int \
     msi_ext_dest_id hc_map_gpa_range migration_control - - - - - - clocksource_stable",
);

/// Source: AMD64 APM vol. 3 appendix E, Intel SDM vol. 2 "CPUID".
const FEATURES: &[Word] = &[
    word(
        0x1,
        0,
        Reg::Ecx,
        1 << 27 | 1 << 3,
        "sse3 pclmulqdq dtes64 monitor ds_cpl vmx smx est tm2 ssse3 cid sdbg fma cx16 xtpr pdcm - \
         pcid dca sse4_1 sse4_2 x2apic movbe popcnt tsc_deadline_timer aes xsave osxsave avx f16c \
         rdrand hypervisor",
    ),
    word(
        0x1,
        0,
        Reg::Edx,
        1 << 9,
        "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - \
         dts acpi mmx fxsr sse sse2 ss ht tm ia64 pbe",
    ),
    word(
        0x7,
        0,
        Reg::Ebx,
        0,
        "fsgsbase tsc_adjust sgx bmi1 hle avx2 fdp_excptn_only smep bmi2 erms invpcid rtm cqm \
         zero_fcs_fds mpx rdt_a avx512f avx512dq rdseed adx smap avx512ifma - clflushopt clwb \
         intel_pt avx512pf avx512er avx512cd sha_ni avx512bw avx512vl",
    ),
    word(
        0x7,
        0,
        Reg::Ecx,
        1 << 4,
        "prefetchwt1 avx512vbmi umip pku ospke waitpkg avx512_vbmi2 shstk gfni vaes vpclmulqdq \
         avx512_vnni avx512_bitalg tme avx512_vpopcntdq - la57 - - - - - rdpid - bus_lock_detect \
         cldemote - movdiri movdir64b enqcmd sgx_lc pks",
    ),
    word(
        0x7,
        0,
        Reg::Edx,
        0,
        "- - avx512_4vnniw avx512_4fmaps fsrm uintr - - avx512_vp2intersect srbds_ctrl md_clear \
         rtm_always_abort - tsx_force_abort serialize hybrid tsxldtrk - pconfig arch_lbr ibt - \
         amx_bf16 avx512_fp16 amx_tile amx_int8 spec_ctrl stibp flush_l1d arch_capabilities \
         core_capabilities ssbd",
    ),
    word(
        0x7,
        1,
        Reg::Eax,
        0,
        "- - - - avx_vnni avx512_bf16 lass cmpccxadd",
    ),
    word(0x7, 1, Reg::Ebx, 0, ""),
    word(0x7, 1, Reg::Ecx, 0, ""),
    word(0x7, 1, Reg::Edx, 0, ""),
    word(0x7, 2, Reg::Edx, 0, ""),
    word(
        0xd,
        0,
        Reg::Eax,
        0,
        "x87 sse avx bndregs bndcsr opmask zmm_hi256 hi16_zmm pt pkru - - - - - - - xtilecfg \
         xtiledata",
    ),
    word(0xd, 0, Reg::Edx, 0, ""),
    word(0xd, 1, Reg::Eax, 0, "xsaveopt xsavec xgetbv1 xsaves xfd"),
    word(0xd, 1, Reg::Ecx, 0, ""),
    word(0xd, 1, Reg::Edx, 0, ""),
    PARAVIRTUAL_FEATURES,
    word(
        0x8000_0001,
        0,
        Reg::Ecx,
        0,
        "lahf_lm cmp_legacy svm extapic cr8_legacy abm sse4a misalignsse 3dnowprefetch osvw ibs \
         xop skinit wdt - lwp fma4 tce - nodeid_msr - tbm topoext perfctr_core perfctr_nb - bpext \
         ptsc perfctr_llc mwaitx",
    ),
    word(
        0x8000_0001,
        0,
        Reg::Edx,
        1 << 9,
        "- - - - - - - - - - - syscall - - - - - - - - nx - mmxext - - fxsr_opt pdpe1gb rdtscp - \
         lm 3dnowext 3dnow",
    ),
    word(0x8000_0007, 0, Reg::Edx, 0, "- - - - - - - - invariant_tsc"),
    word(
        0x8000_0008,
        0,
        Reg::Ebx,
        0,
        "clzero irperf xsaveerptr - rdpru - - - - wbnoinvd - - ibpb - ibrs stibp - - - - - - - - \
         ssbd virt_ssbd ssb_no",
    ),
    word(0x8000_0021, 0, Reg::Eax, 0, ""),
];

impl Word {
    fn of(&self, entries: &[kvm_cpuid_entry2]) -> u32 {
        find(entries, self.function, self.index).map_or(0, |e| *self.reg.of(&mut { *e }))
    }

    /// The register and its `bits`, with their names.
    fn show(&self, bits: u32) -> String {
        let index = match self.index {
            0 => String::new(),
            index => format!(".{index}"),
        };
        let names: Vec<&str> = self.names.split_whitespace().collect();
        let show = |bit: u32| match names.get(bit as usize) {
            None | Some(&"-") => bit.to_string(),
            Some(name) => format!("{bit} ({name})"),
        };
        let set = (0..32).filter(|bit| bits >> bit & 1 != 0).map(show);
        format!(
            "CPUID leaf {:#x}{index} {} bit {}",
            self.function,
            REGISTERS[self.reg as usize],
            set.collect::<Vec<_>>().join(", ")
        )
    }
}

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    entries
        .iter()
        .find(|e| e.function == function && e.index == index)
}

/// Features that a kernel finds with interrupt controllers: the timer of the LAPIC by TSC deadline,
/// and that there is a hypervisor.
const TSC_DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// Features whose state does not travel: VMX and SVM.
const VMX: u32 = 1 << 5;
const SVM: u32 = 1 << 2;
/// KVM's asynchronous page faults (`KVM_FEATURE_ASYNC_PF`, `_VMEXIT` and `_INT`). A page that is
/// missing from a VM that moves is no page that the host has swapped out.
const ASYNC_PF: u32 = 1 << 4 | 1 << 10 | 1 << 14;
/// Features that forced poison cannot serve: asynchronous page faults, steal time, and what relies
/// on its page (`KVM_FEATURE_PV_UNHALT`, `KVM_FEATURE_PV_TLB_FLUSH`). KVM cannot clear "preempted"
/// in a page with a marker. Then another vCPU skips a TLB flush of a vCPU that runs.
const NOT_BY_POISON: u32 = ASYNC_PF | 1 << 5 | 1 << 7 | 1 << 9;
const HTT: u32 = 1 << 28;
/// The features of KVM's own interface.
const PARAVIRTUAL: u32 = 0x4000_0001;
/// `KVM_CPUID_FLAG_SIGNIFCANT_INDEX`
const BY_INDEX: u32 = 1;

/// Makes the supported CPUID that of a PC with `vcpus` cores in one package, without threads. The
/// ids of the vCPUs come later, by [`for_vcpu`].
fn make_pc(entries: &mut Vec<kvm_cpuid_entry2>, vcpus: u32, tsc_deadline: bool) {
    let core_bits = 32 - vcpus.saturating_sub(1).leading_zeros();
    let has_topology = find(entries, 0, 0).is_some_and(|e| e.eax >= 0xb);
    entries.retain(|e| !matches!(e.function, 0xb | 0x1f));
    for entry in entries.iter_mut() {
        match entry.function {
            0x1 => {
                let deadline = if tsc_deadline { TSC_DEADLINE } else { 0 };
                entry.ecx = entry.ecx & !(VMX | TSC_DEADLINE) | HYPERVISOR | deadline;
                entry.ebx = (entry.ebx & 0xff00_ffff) | vcpus.min(255) << 16;
                entry.edx = entry.edx & !HTT | if vcpus > 1 { HTT } else { 0 };
            }
            // Caches: the ids that cores take in the package.
            0x4 if entry.eax & 0x1f != 0 => {
                let ids = (1_u32 << core_bits.min(6)) - 1;
                entry.eax = (entry.eax & 0x03ff_ffff) | ids << 26;
            }
            PARAVIRTUAL => entry.eax &= !ASYNC_PF,
            0x8000_0001 => entry.ecx &= !SVM,
            0x8000_0008 => {
                entry.ecx = (entry.ecx & !0xf0ff) | (vcpus - 1).min(255) | core_bits.min(15) << 12;
            }
            0x8000_001e => (entry.ebx, entry.ecx) = (0, 0),
            _ => {}
        }
    }
    if has_topology {
        // One thread a core; then the cores of the package; then the end.
        for (index, kind, shift, count) in [(0, 1, 0, 1), (1, 2, core_bits, vcpus), (2, 0, 0, 0)] {
            entries.push(kvm_cpuid_entry2 {
                function: 0xb,
                index,
                flags: BY_INDEX,
                eax: shift,
                ebx: count,
                ecx: index | kind << 8,
                ..Default::default()
            });
        }
    }
}

/// The CPUID that this host supports for a PC.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn of_pc(kvm: &Kvm, vcpus: u32) -> Result<Vec<kvm_cpuid_entry2>, MachineError> {
    let mut entries = of_host(kvm)?;
    let deadline = kvm.check_extension_raw(KVM_CAP_TSC_DEADLINE_TIMER.into()) > 0;
    make_pc(&mut entries, vcpus, deadline);
    Ok(entries)
}

/// The CPUID that this host supports.
///
/// # Errors
/// When the kernel refuses.
pub(super) fn of_host(kvm: &Kvm) -> Result<Vec<kvm_cpuid_entry2>, MachineError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(|e| unavailable("KVM does not say which CPUID it supports", e))?;
    Ok(supported.as_slice().to_vec())
}

/// The CPUID of a PC with `vcpus` vCPUs of `model` on this host.
///
/// # Errors
/// [`MachineError::EngineUnavailable`] if KVM cannot be used. [`MachineError::Cpu`] if the host
/// lacks a feature that the model requires.
pub fn cpuid_of(model: &CpuModel, vcpus: u32) -> Result<Cpuid, MachineError> {
    let mut entries = of_pc(&open(c"/dev/kvm")?, vcpus)?;
    apply(model, &mut entries).map_err(MachineError::Cpu)?;
    Ok(Cpuid::new(entries.iter().map(to_leaf).collect()))
}

/// Tests whether a PC with `vcpus` vCPUs and this CPUID can run on this host.
///
/// # Errors
/// [`MachineError::EngineUnavailable`] if KVM cannot be used. [`MachineError::Cpu`] if the host
/// lacks a feature.
pub fn check_cpuid(cpuid: &Cpuid, vcpus: u32) -> Result<(), MachineError> {
    let offered = of_pc(&open(c"/dev/kvm")?, vcpus)?;
    refuse_unoffered(&to_entries(cpuid), &offered).map_err(MachineError::Cpu)
}

/// Tests whether a PC with this CPUID can be received with [`Delivery::Poison`](crate::Delivery),
/// if the user forces it.
///
/// # Errors
/// [`MachineError::Cpu`] with the features of KVM that this delivery cannot serve.
pub fn check_forced_poison(cpuid: &Cpuid) -> Result<(), MachineError> {
    let seen = PARAVIRTUAL_FEATURES.of(&to_entries(cpuid)) & NOT_BY_POISON;
    if seen == 0 {
        return Ok(());
    }
    Err(MachineError::Cpu(format!(
        "its guest sees features of KVM that delivery poison cannot serve: {}; receive it with \
         --delivery minor or missing, or start it with --cpu host,poison, which hides them",
        PARAVIRTUAL_FEATURES.show(seen)
    )))
}

fn to_leaf(entry: &kvm_cpuid_entry2) -> CpuidLeaf {
    CpuidLeaf {
        function: entry.function,
        index: entry.index,
        by_index: entry.flags & BY_INDEX != 0 || entry.index != 0,
        registers: [entry.eax, entry.ebx, entry.ecx, entry.edx],
    }
}

pub(super) fn to_entries(cpuid: &Cpuid) -> Vec<kvm_cpuid_entry2> {
    let entry = |leaf: &CpuidLeaf| {
        let [eax, ebx, ecx, edx] = leaf.registers;
        kvm_cpuid_entry2 {
            function: leaf.function,
            index: leaf.index,
            flags: if leaf.by_index { BY_INDEX } else { 0 },
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    };
    cpuid.leaves().iter().map(entry).collect()
}

/// Features of every PC here, whatever a model says: KVM brings them on any host, or they are about
/// topology.
const X2APIC: u32 = 1 << 21;
const APIC: u32 = 1 << 9;
/// `XSAVE`, without which leaf 0xd means nothing.
const XSAVE: u32 = 1 << 26;

/// Whether a leaf stays even if a model does not have it. It has no features that [`FEATURES`]
/// lacks, so those with other processor features go (tracing, performance counters, AMX).
const fn is_general(function: u32) -> bool {
    matches!(
        function,
        0..=7 | 0xb | 0xd | 0x4000_0000..=0x4fff_ffff | 0x8000_0000..=0x8000_0008 | 0x8000_001d..=0x8000_001e
    )
}

/// Takes away what `model` does not have.
///
/// # Errors
/// The features that the model requires and `entries` lack.
fn apply(model: &CpuModel, entries: &mut Vec<kvm_cpuid_entry2>) -> Result<(), String> {
    let in_model = |leaves: &[CpuidLeaf], word: &Word| {
        let leaf = cpu_model::find(leaves, word.function, word.index);
        leaf.map_or(0, |leaf| leaf.registers[word.reg as usize])
    };
    for word in FEATURES {
        let lacking = in_model(&model.required, word) & !word.of(entries);
        if lacking != 0 {
            let lacking = word.show(lacking);
            return Err(format!(
                "this host lacks a feature of the CPU model: {lacking}; choose a lesser model"
            ));
        }
    }
    if model.for_poison
        && let Some(entry) = entries.iter_mut().find(|e| e.function == PARAVIRTUAL)
    {
        entry.eax &= !NOT_BY_POISON;
    }
    let Some(most) = &model.most else {
        return Ok(());
    };
    let listed = |function, index| cpu_model::find(most, function, index);
    entries.retain(|e| is_general(e.function) || listed(e.function, e.index).is_some());
    for word in FEATURES {
        let kept = match (word.function, word.reg) {
            (1, Reg::Ecx) => X2APIC | TSC_DEADLINE | HYPERVISOR,
            (1, Reg::Edx) => APIC | HTT,
            (0x8000_0001, Reg::Edx) => APIC,
            (PARAVIRTUAL, _) if listed(PARAVIRTUAL, 0).is_none() => u32::MAX,
            _ => 0,
        };
        let bits = in_model(most, word) | kept;
        let same = |e: &&mut kvm_cpuid_entry2| (e.function, e.index) == (word.function, word.index);
        if let Some(entry) = entries.iter_mut().find(same) {
            *word.reg.of(entry) &= bits;
        }
    }
    // The number of bits of an address is a bound too.
    let bound = listed(0x8000_0008, 0).map_or(0, |leaf| leaf.registers[0] & 0xff);
    if let Some(entry) = entries.iter_mut().find(|e| e.function == 0x8000_0008)
        && bound != 0
    {
        entry.eax = (entry.eax & !0xff) | (entry.eax & 0xff).min(bound);
    }
    shrink_xsave(entries);
    Ok(())
}

/// Makes leaf 0xd that of the components that are left.
fn shrink_xsave(entries: &mut Vec<kvm_cpuid_entry2>) {
    let has_xsave = find(entries, 1, 0).is_some_and(|e| e.ecx & XSAVE != 0);
    let of_user = find(entries, 0xd, 0).map_or(0, |e| e.eax);
    let all = of_user | find(entries, 0xd, 1).map_or(0, |e| e.ecx);
    let is_left =
        |e: &kvm_cpuid_entry2| e.index < 2 || all.checked_shr(e.index).unwrap_or(0) & 1 != 0;
    entries.retain(|e| e.function != 0xd || (has_xsave && is_left(e)));
    // The legacy area and the header have 576 bytes.
    let ends = entries
        .iter()
        .filter(|e| e.function == 0xd && e.index >= 2 && of_user >> e.index & 1 != 0)
        .map(|e| e.ebx.saturating_add(e.eax));
    let bytes = ends.max().unwrap_or(0).max(576);
    let size = entries
        .iter_mut()
        .find(|e| (e.function, e.index) == (0xd, 0));
    if let Some(entry) = size {
        entry.ecx = bytes;
    }
}

/// The CPUID of vCPU `id` of a new machine: that of the machine, with its own APIC id.
pub(super) fn for_vcpu(supported: &[kvm_cpuid_entry2], id: u32) -> Vec<kvm_cpuid_entry2> {
    let mut entries = supported.to_vec();
    for entry in &mut entries {
        match entry.function {
            0x1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | ((id & 0xff) << 24),
            0xb | 0x1f => entry.edx = id,
            0x8000_001e => {
                entry.eax = id;
                entry.ebx = (entry.ebx & !0xff) | (id & 0xff);
            }
            _ => {}
        }
    }
    entries
}

/// Checks whether a guest that has seen `wanted` can run where `offered` is supported.
///
/// # Errors
/// The first difference that matters.
pub(super) fn refuse_unoffered(
    wanted: &[kvm_cpuid_entry2],
    offered: &[kvm_cpuid_entry2],
) -> Result<(), String> {
    let vendor = |entries| find(entries, 0, 0).map(|e| [e.ebx, e.edx, e.ecx]);
    if vendor(wanted) != vendor(offered) {
        return Err(format!(
            "its CPU is of another vendor ({}) than this host's ({})",
            vendor_name(vendor(wanted)),
            vendor_name(vendor(offered))
        ));
    }
    for word in FEATURES {
        let lacking = word.of(wanted) & !word.of(offered) & !word.not_features;
        if lacking != 0 {
            let lacking = word.show(lacking);
            return Err(format!(
                "its CPU has a feature that this host does not offer: {lacking}"
            ));
        }
    }
    let address_bits = |entries| find(entries, 0x8000_0008, 0).map_or(36, |e| e.eax & 0xff);
    if address_bits(wanted) > address_bits(offered) {
        return Err(format!(
            "its physical addresses have {} bits, and this host's {}",
            address_bits(wanted),
            address_bits(offered)
        ));
    }
    Ok(())
}

fn vendor_name(words: Option<[u32; 3]>) -> String {
    let bytes: Vec<u8> = words
        .unwrap_or_default()
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    String::from_utf8_lossy(&bytes).escape_default().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32, [eax, ebx, ecx, edx]: [u32; 4]) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        }
    }

    fn host() -> Vec<kvm_cpuid_entry2> {
        vec![
            entry(0, 0, [0x10, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
            entry(1, 0, [0, 0x0100_0000, 0xff, 0xff]),
            entry(7, 0, [1, 0b111, 0, 0]),
            entry(0x8000_0008, 0, [48, 0, 0, 0]),
        ]
    }

    #[test]
    fn the_same_host_offers_all_it_has() {
        assert_eq!(refuse_unoffered(&host(), &host()), Ok(()));
        let vcpu = for_vcpu(&host(), 5);
        assert_eq!(vcpu[1].ebx, 0x0500_0000);
        assert_eq!(refuse_unoffered(&vcpu, &host()), Ok(()));
    }

    #[test]
    fn a_missing_feature_is_named() {
        let mut less = host();
        less[2].ebx = 0b101;
        let why = refuse_unoffered(&host(), &less).unwrap_err();
        assert!(why.contains("leaf 0x7 EBX bit 1 (tsc_adjust)"), "{why}");
        assert_eq!(refuse_unoffered(&less, &host()), Ok(()));
        less.remove(2);
        assert!(refuse_unoffered(&host(), &less).is_err());
    }

    #[test]
    fn another_vendor_and_wider_addresses_are_refused() {
        let mut other = host();
        other[0].ebx = 0x756e_6547;
        assert!(
            refuse_unoffered(&other, &host())
                .unwrap_err()
                .contains("AuthenticAMD")
        );
        let mut wide = host();
        wide[3].eax = 52;
        assert!(
            refuse_unoffered(&wide, &host())
                .unwrap_err()
                .contains("52 bits")
        );
    }

    #[test]
    fn bits_that_change_at_run_time_do_not_count() {
        let mut running = host();
        running[1].ecx |= 1 << 27;
        assert_eq!(refuse_unoffered(&running, &host()), Ok(()));
    }

    /// A host with all features of x86-64-v3, and some more.
    fn v3_host() -> Vec<kvm_cpuid_entry2> {
        let mut host = host();
        let all = u32::MAX;
        host[1] = entry(1, 0, [0, 0, all, all]);
        host[2] = entry(7, 0, [1, all, all, all]);
        for (function, index, registers) in [
            (0xa, 0, [1, 0, 0, 0]),
            (0xd, 0, [0xe7, 0, 2696, 0]),
            (0xd, 1, [0xf, 0, 0x100, 0]),
            (0xd, 2, [256, 576, 0, 0]),
            (0xd, 5, [64, 1088, 0, 0]),
            (0xd, 8, [128, 0, 1, 0]),
            (0x4000_0001, 0, [0x100_7efb, 0, 0, 0]),
            (0x8000_0001, 0, [0, 0, all, all]),
            (0x8000_0021, 0, [4, 0, 0, 0]),
        ] {
            host.push(entry(function, index, registers));
        }
        host[3].eax = 0x3034;
        host
    }

    fn registers(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<[u32; 4]> {
        find(entries, function, index).map(|e| [e.eax, e.ebx, e.ecx, e.edx])
    }

    #[test]
    fn a_level_hides_what_is_beyond_it() {
        let mut v3 = v3_host();
        apply(&CpuModel::named("x86-64-v3").unwrap(), &mut v3).unwrap();
        let [_, ebx, ecx, edx] = registers(&v3, 1, 0).unwrap();
        assert_eq!(ebx, 0, "no feature word stays");
        // MONITOR, VMX, PCID and AES are in no level. AVX is; x2APIC and the rest every PC has.
        assert_eq!(ecx & (1 << 3 | VMX | 1 << 17 | 1 << 25), 0);
        let has = 1 << 28 | XSAVE | X2APIC | TSC_DEADLINE | HYPERVISOR;
        assert_eq!(ecx & has, has);
        assert_eq!(edx & 0x0780_ffff, 0x0780_ffff & !(1 << 10));
        // BMI1, AVX2, SMEP, BMI2, SMAP; and the controls of speculation.
        let protecting = 1 << 31 | 1 << 27 | 1 << 26 | 1 << 10;
        assert_eq!(registers(&v3, 7, 0), Some([1, 0x10_01a8, 0, protecting]));
        assert_eq!(registers(&v3, 0xd, 0), Some([7, 0, 832, 0]));
        assert_eq!(registers(&v3, 0xd, 1), Some([0; 4]));
        assert_eq!(registers(&v3, 0xd, 2), Some([256, 576, 0, 0]));
        assert_eq!(registers(&v3, 0xd, 5), None);
        assert_eq!(registers(&v3, 0xd, 8), None);
        assert_eq!(registers(&v3, 0xa, 0), None);
        assert_eq!(registers(&v3, 0x8000_0021, 0), None);
        assert_eq!(registers(&v3, PARAVIRTUAL, 0), Some([0x100_7efb, 0, 0, 0]));
        assert_eq!(registers(&v3, 0x8000_0008, 0), Some([0x302e, 0, 0, 0]));
        assert_eq!(refuse_unoffered(&v3, &v3_host()), Ok(()));

        let mut v2 = v3_host();
        apply(&CpuModel::named("x86-64-v2").unwrap(), &mut v2).unwrap();
        let [.., ecx, _] = registers(&v2, 1, 0).unwrap();
        assert_eq!(ecx & (XSAVE | 1 << 28), 0);
        assert_eq!(registers(&v2, 0xd, 0), None, "no XSAVE");
        assert_eq!(refuse_unoffered(&v2, &v3), Ok(()));
        assert_eq!(v2.len() + 3, v3.len(), "three leaves of XSAVE");
    }

    #[test]
    fn a_level_needs_its_features() {
        let v3 = CpuModel::named("x86-64-v3").unwrap();
        let lacking = |change: &dyn Fn(&mut Vec<kvm_cpuid_entry2>)| {
            let mut host = v3_host();
            change(&mut host);
            apply(&v3, &mut host).unwrap_err()
        };
        let why = lacking(&|host| host[2].ebx &= !(1 << 5));
        assert!(why.contains("leaf 0x7 EBX bit 5 (avx2);"), "{why}");
        let why = lacking(&|host| host.retain(|e| e.function != 7));
        let all = "leaf 0x7 EBX bit 3 (bmi1), 5 (avx2), 8 (bmi2);";
        assert!(why.contains(all), "{why}");
        let why = lacking(&|host| host.retain(|e| e.function != 0xd));
        assert!(
            why.contains("leaf 0xd EAX bit 0 (x87), 1 (sse), 2 (avx);"),
            "{why}"
        );
        // A host of level 2, by what level 2 leaves of a larger one.
        let why = lacking(&|host| apply(&CpuModel::named("x86-64-v2").unwrap(), host).unwrap());
        assert!(
            why.contains("leaf 0x1 ECX bit 12 (fma), 22 (movbe)"),
            "{why}"
        );
    }

    #[test]
    fn the_model_of_the_host_changes_nothing() {
        let mut entries = v3_host();
        apply(&CpuModel::named("host").unwrap(), &mut entries).unwrap();
        assert_eq!(entries, v3_host());
    }

    #[test]
    fn a_text_bounds_features_and_keeps_what_a_pc_needs() {
        let model = |more: &str| {
            let text = format!("1 0 0 0 0 {BASELINE_EDX:x}\n80000001 0 0 0 0 20000800\n{more}");
            CpuModel::from_text(&text).unwrap()
        };
        let mut entries = v3_host();
        apply(&model(""), &mut entries).unwrap();
        let pc = [
            X2APIC | TSC_DEADLINE | HYPERVISOR,
            BASELINE_EDX | APIC | HTT,
        ];
        assert_eq!(registers(&entries, 1, 0), Some([0, 0, pc[0], pc[1]]));
        assert_eq!(registers(&entries, 7, 0), Some([1, 0, 0, 0]));
        assert_eq!(registers(&entries, 0x8000_0008, 0), Some([0x3034, 0, 0, 0]));
        assert_eq!(registers(&entries, 0xa, 0), None);

        let mut entries = v3_host();
        let more = "7 0 0 21 0 0\na 0 0 0 0 0\n40000001 0 1 0 0 0\n80000008 0 27 0 0 0";
        apply(&model(more), &mut entries).unwrap();
        assert_eq!(registers(&entries, 7, 0), Some([1, 0x21, 0, 0]));
        assert_eq!(registers(&entries, PARAVIRTUAL, 0), Some([1, 0, 0, 0]));
        assert_eq!(registers(&entries, 0x8000_0008, 0), Some([0x3027, 0, 0, 0]));
        // A listed leaf without features stays as the host has it.
        assert_eq!(registers(&entries, 0xa, 0), Some([1, 0, 0, 0]));
    }

    #[test]
    fn what_poison_cannot_serve_is_named_and_can_be_hidden() {
        let cpuid = |entries: &[_]| Cpuid::new(entries.iter().map(to_leaf).collect());
        let why = check_forced_poison(&cpuid(&v3_host())).unwrap_err();
        let names = "leaf 0x40000001 EAX bit 4 (async_pf), 5 (steal_time), 7 (pv_unhalt), 9 \
                     (pv_tlb_flush), 10 (async_pf_vmexit), 14 (async_pf_int);";
        assert!(why.to_string().contains(names), "{why}");
        for name in ["host", "x86-64-v2", "x86-64-v3"] {
            let model = CpuModel::named(name).unwrap();
            let [mut plain, mut hidden] = [v3_host(), v3_host()];
            apply(&model.clone().for_poison(), &mut hidden).unwrap();
            check_forced_poison(&cpuid(&hidden)).unwrap();
            // Clocks and PV EOI stay, as does all else.
            let [eax, ..] = registers(&hidden, PARAVIRTUAL, 0).unwrap();
            assert_eq!(eax, 0x100_7efb & !0x46b0);
            apply(&model, &mut plain).unwrap();
            let entry = plain.iter_mut().find(|e| e.function == PARAVIRTUAL);
            entry.unwrap().eax = eax;
            assert_eq!(plain, hidden, "{name}");
        }
        check_forced_poison(&cpuid(&host())).unwrap();
    }

    const BASELINE_EDX: u32 = 0x0780_8171;

    #[test]
    fn a_machine_has_the_cpuid_of_its_model_and_its_state_moves() {
        use crate::kvm::{Irqchip, KvmOptions, create_with};
        if let Err(why) = crate::kvm::probe_vm() {
            pageferry_testkit::skip("kvm", why);
            return;
        }
        let least = format!("1 0 0 0 0 {BASELINE_EDX:x}\n80000001 0 0 0 0 20000800");
        let mut models = vec![CpuModel::default(), CpuModel::from_text(&least).unwrap()];
        // A KVM without hardware for it may offer no level.
        let levels = ["x86-64-v2", "x86-64-v3"].map(|name| CpuModel::named(name).unwrap());
        models.extend(
            levels
                .into_iter()
                .filter(|level| cpuid_of(level, 2).is_ok()),
        );
        let tables = models.iter().map(|model| {
            let cpuid = cpuid_of(model, 2).unwrap();
            assert_eq!(Cpuid::from_bytes(&cpuid.to_bytes()).unwrap(), cpuid);
            check_cpuid(&cpuid, 2).unwrap();
            cpuid
        });
        let tables: Vec<Cpuid> = tables.collect();
        let machine = |cpuid| {
            let options = KvmOptions {
                irqchip: Irqchip::Kernel,
                cpuid,
                ..KvmOptions::default()
            };
            create_with(crate::MachineSpec::new(2, 1 << 20), options)
        };
        for cpuid in &tables {
            let mut from = machine(Some(cpuid)).unwrap();
            let mut to = machine(Some(cpuid)).unwrap();
            let mut wider = machine(None).unwrap();
            for vcpu in 0..2 {
                let state = from.vcpus[vcpu].save().unwrap();
                to.vcpus[vcpu].restore(&state).unwrap();
                wider.vcpus[vcpu].restore(&state).unwrap();
            }
        }
        // A state with more than the offer had is refused.
        let wide = machine(Some(&tables[0])).unwrap().vcpus[0].save().unwrap();
        let narrow = machine(Some(&tables[1])).unwrap();
        let why = narrow.vcpus[0].check(&wide).unwrap_err().to_string();
        assert!(why.contains("CPUID leaf 0x1 "), "{why}");
        // As is a machine with more than the host has.
        let mut leaves = tables[0].leaves().to_vec();
        let leaf = leaves.iter_mut().find(|leaf| leaf.function == 1).unwrap();
        leaf.registers[3] |= 1 << 30;
        let beyond = Cpuid::new(leaves);
        let lacks = "does not offer: CPUID leaf 0x1 EDX bit 30 (ia64)";
        let why = check_cpuid(&beyond, 2).unwrap_err().to_string();
        assert!(why.contains(lacks), "{why}");
        let why = machine(Some(&beyond)).err().unwrap().to_string();
        assert!(why.contains(lacks), "{why}");
    }
}
