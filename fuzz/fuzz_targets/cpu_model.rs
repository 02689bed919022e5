//! Texts of CPU models, and the CPUID of an offer: no panic. A CPUID that is read is written back
//! as it was.

use pageferry_machine::{CpuModel, Cpuid};

pub(crate) fn run(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = CpuModel::from_text(text);
        let least = "1 0 0 0 0 07808171\n80000001 0 0 0 0 20000800\n";
        let _ = CpuModel::from_text(&format!("{least}{text}"));
    }
    if let Ok(cpuid) = Cpuid::from_bytes(data) {
        assert_eq!(cpuid.to_bytes(), data);
    }
}
