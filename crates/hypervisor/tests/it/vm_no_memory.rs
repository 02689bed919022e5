//! A lack of memory is an error, and then nothing has changed.

use crate::allocator::with_allocations;
use crate::support::vm::{HostRam, vm};
use pageferry_hypervisor::{Exit, SlotFlags, Vm, VmConfig, VmError};

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

/// The allocations of a bitmap: its words, and their summary.
const BITMAP: usize = 2;

#[test]
fn a_slot_without_memory_for_its_log_or_its_tracked_pages_is_as_before() {
    let ram = HostRam::new(8);
    let vm = vm(&ram);
    let mut logged = ram.region(0, 0, 0, 8);
    logged.flags = SlotFlags::LOG_DIRTY_PAGES;
    for count in 0..BITMAP {
        let refused = with_allocations(count, || vm.set_user_memory_region2(logged.clone()));
        assert!(
            matches!(refused, Err(VmError::OutOfMemory(_))),
            "{count} allocations: {refused:?}"
        );
        assert_eq!(vm.get_dirty_log(0, &mut [0]), Err(VmError::NoDirtyLog(0)));
        let refused = with_allocations(count, || vm.track_writes(0, 0..1));
        assert!(
            matches!(refused, Err(VmError::OutOfMemory(_))),
            "{count} allocations: {refused:?}"
        );
    }
    vm.set_user_memory_region2(logged).unwrap();
    assert_eq!(vm.get_dirty_log(0, &mut [0]), Ok(0));
    assert_eq!(vm.track_writes(0, 0..1), Ok(1));
}
