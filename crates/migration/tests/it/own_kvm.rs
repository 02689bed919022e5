//! The example of a VMM that drives KVM itself.

#[path = "../../examples/own_kvm/vmm.rs"]
mod vmm;

use pageferry_testkit::skip;

#[test]
fn a_vmm_that_drives_kvm_itself_moves_its_vm() {
    if let Err(why) = pageferry_machine::kvm::probe_vm() {
        skip("kvm", why);
        return;
    }
    if pageferry_machine::kvm::delivery_trials()[0]
        .per_fault
        .is_empty()
    {
        skip("uffd", "no delivery on this host");
        return;
    }
    vmm::run().unwrap();
}
