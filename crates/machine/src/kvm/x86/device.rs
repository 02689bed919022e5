//! KVM's device: opened, and checked for the features that this engine needs.

use crate::MachineError;
use kvm_bindings::{KVM_CAP_IMMEDIATE_EXIT, KVM_CAP_XCRS, KVM_CAP_XSAVE};
use kvm_ioctls::Kvm;
use std::ffi::CStr;

/// The API's version since 2007. It will not change (`Documentation/virt/kvm/api.rst`).
const API_VERSION: i32 = 12;
/// The error of an unusable engine: "`what`: the kernel's answer".
pub(super) fn unavailable(what: &str, error: kvm_ioctls::Error) -> MachineError {
    MachineError::EngineUnavailable(format!(
        "{what}: {}",
        std::io::Error::from_raw_os_error(error.errno())
    ))
}

/// Opens KVM and checks the features that this engine needs.
///
/// # Errors
/// [`MachineError::EngineUnavailable`] with a remedy, where there is one.
pub(super) fn open(path: &CStr) -> Result<Kvm, MachineError> {
    let shown = path.to_string_lossy();
    let no = |why: String| Err(MachineError::EngineUnavailable(why));
    let kvm = match Kvm::new_with_path(path) {
        Ok(kvm) => kvm,
        Err(e) if e.errno() == libc::ENOENT => {
            return no(format!(
                "{shown} does not exist: load kvm_intel or kvm_amd, enable virtualization in the firmware, or enable \
                 nested virtualization where this host is a VM itself"
            ));
        }
        Err(e) if matches!(e.errno(), libc::EACCES | libc::EPERM) => {
            return no(format!(
                "this process may not open {shown}: run it as root or as a member of the device's group (usually kvm)"
            ));
        }
        Err(e) if matches!(e.errno(), libc::ENODEV | libc::ENXIO) => {
            return no(format!(
                "{shown} is there but no driver answers: load kvm_intel or kvm_amd"
            ));
        }
        Err(e) => return Err(unavailable(&format!("{shown} cannot be opened"), e)),
    };
    match kvm.get_api_version() {
        API_VERSION => {}
        version if version < 0 => return no(format!("{shown} is not KVM's device")),
        version => {
            return no(format!(
                "KVM has API version {version}, expected {API_VERSION}"
            ));
        }
    }
    let needed = [
        (
            KVM_CAP_IMMEDIATE_EXIT,
            "KVM_CAP_IMMEDIATE_EXIT (Linux 4.13)",
        ),
        (KVM_CAP_XSAVE, "KVM_CAP_XSAVE"),
        (KVM_CAP_XCRS, "KVM_CAP_XCRS"),
    ];
    match needed
        .iter()
        .find(|(cap, _)| kvm.check_extension_raw((*cap).into()) <= 0)
    {
        None => Ok(kvm),
        Some((_, name)) => no(format!("this host's KVM lacks {name}")),
    }
}

/// Whether this host's KVM uses EPT or NPT. `false` if its modules do not say.
pub(super) fn has_nested_paging() -> bool {
    ["kvm_intel/parameters/ept", "kvm_amd/parameters/npt"]
        .into_iter()
        .filter_map(|parameter| std::fs::read_to_string(format!("/sys/module/{parameter}")).ok())
        .any(|value| value.trim() == "Y" || value.trim() == "1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(path: &CStr) -> String {
        match open(path) {
            Err(MachineError::EngineUnavailable(why)) => why,
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("{path:?} is KVM"),
        }
    }

    #[test]
    fn what_is_wrong_with_the_device_is_said() {
        let absent = why(c"/dev/there-is-no-kvm-here");
        assert!(
            absent.contains("does not exist") && absent.contains("kvm_intel"),
            "{absent}"
        );
        assert!(why(c"/dev/null").contains("is not KVM's device"));
    }
}
