//! CPUID: the features of a new vCPU, and the check of a moved one against the host.
//!
//! A new vCPU has every feature that the host's KVM supports. A moved vCPU keeps its features,
//! because its guest has read them. So a host that lacks one of its feature bits is refused.

use kvm_bindings::kvm_cpuid_entry2;

/// A register of a leaf.
#[derive(Clone, Copy)]
enum Reg {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Reg {
    fn of(self, entry: &kvm_cpuid_entry2) -> u32 {
        match self {
            Self::Eax => entry.eax,
            Self::Ebx => entry.ebx,
            Self::Ecx => entry.ecx,
            Self::Edx => entry.edx,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Eax => "EAX",
            Self::Ebx => "EBX",
            Self::Ecx => "ECX",
            Self::Edx => "EDX",
        }
    }
}

/// Function, index, register: words of feature bits. The mask has the bits that are no features,
/// and those that KVM changes at run time (APIC on; OSXSAVE and OSPKE mirror CR4, MONITOR an MSR).
/// Source: AMD64 APM vol. 3 appendix E, Intel SDM vol. 2 "CPUID".
const FEATURES: &[(u32, u32, Reg, u32)] = &[
    (0x1, 0, Reg::Ecx, 1 << 27 | 1 << 3),
    (0x1, 0, Reg::Edx, 1 << 9),
    (0x7, 0, Reg::Ebx, 0),
    (0x7, 0, Reg::Ecx, 1 << 4),
    (0x7, 0, Reg::Edx, 0),
    (0x7, 1, Reg::Eax, 0),
    (0x7, 1, Reg::Ebx, 0),
    (0x7, 1, Reg::Ecx, 0),
    (0x7, 1, Reg::Edx, 0),
    (0x7, 2, Reg::Edx, 0),
    (0xd, 0, Reg::Eax, 0),
    (0xd, 0, Reg::Edx, 0),
    (0xd, 1, Reg::Eax, 0),
    (0xd, 1, Reg::Ecx, 0),
    (0xd, 1, Reg::Edx, 0),
    (0x4000_0001, 0, Reg::Eax, 0),
    (0x8000_0001, 0, Reg::Ecx, 0),
    (0x8000_0001, 0, Reg::Edx, 1 << 9),
    (0x8000_0007, 0, Reg::Edx, 0),
    (0x8000_0008, 0, Reg::Ebx, 0),
    (0x8000_0021, 0, Reg::Eax, 0),
];

fn find(entries: &[kvm_cpuid_entry2], function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
    entries
        .iter()
        .find(|e| e.function == function && e.index == index)
}

/// The CPUID of vCPU `id` of a new machine: all that is supported, with its own APIC id.
pub(super) fn for_vcpu(supported: &[kvm_cpuid_entry2], id: u32) -> Vec<kvm_cpuid_entry2> {
    let mut entries = supported.to_vec();
    for entry in &mut entries {
        match entry.function {
            0x1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | ((id & 0xff) << 24),
            0xb | 0x1f => entry.edx = id,
            0x8000_001e => entry.eax = id,
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
    for &(function, index, reg, not_features) in FEATURES {
        let bits = |entries| find(entries, function, index).map_or(0, |e| reg.of(e));
        let lacking = bits(wanted) & !bits(offered) & !not_features;
        if lacking != 0 {
            let register = reg.name();
            return Err(format!(
                "its CPU has features that this host does not offer: \
                 CPUID {function:#x}.{index} {register} bits {lacking:#x}"
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
        assert!(why.contains("0x7.0 EBX bits 0x2"), "{why}");
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
}
