//! A lack of memory is an error, and then nothing has changed.

use crate::allocator::with_allocations;
use pageferry_hypervisor::{Exit, Vm, VmConfig, VmError};

/// The allocations for which a new vCPU handles a lack of memory: the record of its reader of the
/// slots, the two records of its worker, and its TLB. They come first. The small allocations after
/// them abort the process on a lack of memory.
const HANDLED: usize = 4;

#[test]
fn a_vcpu_without_memory_is_an_error_and_uses_no_id() {
    for count in 0..HANDLED {
        // In a new VM, there are no records to reuse.
        let vm = Vm::new(VmConfig::default());
        let refused = with_allocations(count, || vm.create_vcpu(0));
        assert!(
            matches!(refused, Err(VmError::OutOfMemory(_))),
            "{count} allocations"
        );
        let mut vcpu = vm.create_vcpu(0).unwrap();
        vcpu.kick_handle().kick();
        assert_eq!(vcpu.run(), Exit::Kicked);
    }
}
