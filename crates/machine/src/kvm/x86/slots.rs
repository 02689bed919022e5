#![expect(unsafe_code, reason = "hands guest memory to KVM")]
//! The VM's memory slots, here and in the kernel.
//!
//! **Guarantee.** The table and the kernel have the same slots. Every change goes through
//! [`Slots::change`], which checks it by the table's rules, passes it to the kernel, and commits
//! it. If either refuses, the change has not happened. A slot's memory stays mapped until the
//! kernel has dropped the slot and no reader can see it.
//!
//! **Mechanism.** `pageferry-memslot` with the mapping's owner in each slot. A slot that is deleted
//! or moved becomes invalid in the table before the kernel learns of it, and stays so until the
//! change is done. A new slot enters the table after the kernel has it. The rules are the kernel's
//! own; a test compares them request by request on `/dev/kvm`. Only the host knows two of them: the
//! highest frame it maps, and whether it has memory for the slot.

use crate::{GuestRam, MachineError, RamRegion};
use kvm_bindings::{
    KVM_CAP_NR_MEMSLOTS, kvm_userspace_memory_region, kvm_userspace_memory_region2,
};
use kvm_ioctls::VmFd;
use pageferry_addr::{Gfn, Hva, PAGE_SIZE, RamPage};
use pageferry_memslot::{Barrier, Limits, Request, Slot, SlotFlags, SlotTable, SlotWriter};
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// KVM's number of slots on x86-64 (`KVM_USER_MEM_SLOTS`), for kernels that do not report it.
const MAX_SLOTS: u16 = 32_764;
/// No x86-64 page table maps more than 52 bits (AMD64 APM vol. 2, 5.1). A host's KVM may map less,
/// and then refuses the slot.
const GFN_LIMIT: Gfn = Gfn(1 << 40);

/// The data of each slot: its memory.
#[derive(Clone, Debug)]
pub struct KvmSlot {
    /// Stays mapped as long as the slot can be reached.
    pub(super) memory: Arc<GuestRam>,
}

impl KvmSlot {
    /// The memory that the slot shows to the guest.
    #[must_use]
    pub fn memory(&self) -> &Arc<GuestRam> {
        &self.memory
    }
}

/// The slots of one VM.
pub(super) struct Slots {
    writer: Mutex<SlotWriter<KvmSlot>>,
    table: SlotTable<KvmSlot>,
}

impl Slots {
    /// An empty table, for as many slots as `vm` allows.
    pub(super) fn new(vm: &VmFd) -> Self {
        let max_slots = u16::try_from(vm.check_extension_raw(KVM_CAP_NR_MEMSLOTS.into()));
        let limits = Limits {
            max_slots: max_slots.ok().filter(|n| *n > 0).unwrap_or(MAX_SLOTS),
            gfn_limit: GFN_LIMIT,
            ..Limits::default()
        };
        let writer = SlotWriter::with_barrier(limits, Barrier::membarrier())
            .with_relax(std::thread::yield_now);
        Self {
            table: writer.table(),
            writer: Mutex::new(writer),
        }
    }

    pub(super) fn table(&self) -> &SlotTable<KvmSlot> {
        &self.table
    }

    /// Carries out the request that `ask` makes of slot `id`, given the slot's present state. The
    /// change happens here and in the kernel, or in neither.
    pub(super) fn change(
        &self,
        vm: &VmFd,
        id: u16,
        ask: impl FnOnce(Option<&Slot<KvmSlot>>) -> Result<Request<KvmSlot>, MachineError>,
    ) -> Result<(), MachineError> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let request = ask(writer.view().by_id(id))?;
        let region = kvm_userspace_memory_region {
            slot: request.id.into(),
            flags: request.flags.0,
            guest_phys_addr: request.gpa.0,
            memory_size: request.size,
            userspace_addr: request.hva.0,
        };
        let bitmap = request.userfault_bitmap;
        let update = writer.begin(request).map_err(MachineError::engine)?;
        // SAFETY: (1) the callers below pass ranges of a `GuestRam`'s guest mapping, to which Rust
        // never holds a reference; (2) the slot's data keeps that mapping until the commit of the
        // change that removes the slot, so beyond the call that takes it from the kernel; (3) the
        // table outlives the vCPUs, each of which holds `VmShared`; (4) the rules that were checked
        // keep slots apart; (5) the kernel only reads a userfault bitmap.
        unsafe {
            match bitmap {
                None => vm.set_user_memory_region(region),
                Some(bitmap) => vm.set_user_memory_region2(with_bitmap(region, bitmap)),
            }
        }
        .map_err(|e| {
            MachineError::os(
                "KVM refuses a memory slot",
                io::Error::from_raw_os_error(e.errno()),
            )
        })?;
        update.commit();
        Ok(())
    }

    /// Creates the slot of a region of RAM.
    pub(super) fn create_ram(
        &self,
        vm: &VmFd,
        ram: &Arc<GuestRam>,
        region: &RamRegion,
    ) -> Result<(), MachineError> {
        let request = Request {
            address_space: 0,
            id: u16::try_from(region.slot).expect("RAM has few regions"),
            gpa: region.gfn.gpa(),
            size: region.pages * PAGE_SIZE,
            hva: ram.guest_hva(region.first),
            flags: SlotFlags::EMPTY,
            userfault_bitmap: None,
            data: KvmSlot {
                memory: Arc::clone(ram),
            },
        };
        self.change(vm, request.id, |_| Ok(request))
    }

    /// Switches the dirty log of a region of RAM.
    pub(super) fn set_log(
        &self,
        vm: &VmFd,
        region: &RamRegion,
        on: bool,
    ) -> Result<(), MachineError> {
        self.change_ram(vm, region, |request| {
            let log = SlotFlags::LOG_DIRTY_PAGES;
            request.flags = with(request.flags, log, on);
        })
    }

    /// Gives KVM the userfault bitmap of a region of RAM, or takes it away. The bits must stay in
    /// place meanwhile.
    pub(super) fn set_userfault(
        &self,
        vm: &VmFd,
        region: &RamRegion,
        bitmap: Option<Hva>,
    ) -> Result<(), MachineError> {
        self.change_ram(vm, region, |request| {
            request.flags = with(request.flags, SlotFlags::USERFAULT, bitmap.is_some());
            request.userfault_bitmap = bitmap;
        })
    }

    fn change_ram(
        &self,
        vm: &VmFd,
        region: &RamRegion,
        alter: impl FnOnce(&mut Request<KvmSlot>),
    ) -> Result<(), MachineError> {
        let id = u16::try_from(region.slot).expect("RAM has few regions");
        self.change(vm, id, |slot| {
            let mut request = same(slot.expect("slots of RAM are never deleted"));
            alter(&mut request);
            Ok(request)
        })
    }
}

fn with(flags: SlotFlags, flag: SlotFlags, on: bool) -> SlotFlags {
    if on {
        SlotFlags(flags.0 | flag.0)
    } else {
        flags.without(flag)
    }
}

/// The region with `userfault_bitmap` of the KVM Userfault series (James Houghton, December 2024),
/// which is the first padding word in released headers.
fn with_bitmap(region: kvm_userspace_memory_region, bitmap: Hva) -> kvm_userspace_memory_region2 {
    let mut with_bitmap = kvm_userspace_memory_region2 {
        slot: region.slot,
        flags: region.flags,
        guest_phys_addr: region.guest_phys_addr,
        memory_size: region.memory_size,
        userspace_addr: region.userspace_addr,
        ..Default::default()
    };
    with_bitmap.pad2[0] = bitmap.0;
    with_bitmap
}

/// The request that leaves a slot unchanged.
pub(super) fn same(slot: &Slot<KvmSlot>) -> Request<KvmSlot> {
    Request {
        address_space: slot.address_space,
        id: slot.id,
        gpa: slot.range.start().gpa(),
        size: slot.range.pages() * PAGE_SIZE,
        hva: slot.hva,
        flags: slot.flags,
        userfault_bitmap: slot.userfault_bitmap(),
        data: slot.data.clone(),
    }
}

/// Checks that the guest's mapping of `ram` has all its pages at adjacent addresses, so that one
/// range is all of it.
pub(super) fn check_adjacent(ram: &GuestRam) -> Result<(), MachineError> {
    if ram.is_adjacent() {
        return Ok(());
    }
    Err(MachineError::Adopt(
        "this engine's slots show mappings of its own: adopt the memory without `mapped_at`".into(),
    ))
}

/// The addresses of the guest's mapping of `ram`, which is adjacent.
pub(super) fn guest_mapping(ram: &GuestRam) -> Range<Hva> {
    let start = ram.guest_hva(RamPage(0));
    start..Hva(start.0 + ram.pages() * PAGE_SIZE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamLayout;
    use pageferry_addr::Gpa;

    /// The address is in the kernel's half. The table has no rule against it, the kernel has.
    #[test]
    fn what_the_kernel_refuses_is_not_in_the_table() {
        let Ok(kvm) = super::super::device::open(c"/dev/kvm") else {
            pageferry_testkit::skip("kvm", "/dev/kvm cannot be opened");
            return;
        };
        let vm = kvm.create_vm().unwrap();
        let slots = Slots::new(&vm);
        let layout = RamLayout::for_memory(4 * PAGE_SIZE).unwrap();
        let ram = Arc::new(GuestRam::new(layout).unwrap());
        let region = ram.layout().regions()[0];
        slots.create_ram(&vm, &ram, &region).unwrap();
        let elsewhere = |id, old: Option<&Slot<KvmSlot>>, hva| {
            assert!(old.is_none());
            let memory = Arc::clone(&ram);
            Ok(Request {
                address_space: 0,
                id,
                gpa: Gpa(0x10_0000),
                size: PAGE_SIZE,
                hva,
                flags: SlotFlags::EMPTY,
                userfault_bitmap: None,
                data: KvmSlot { memory },
            })
        };
        let before = slots.table().generation();
        let refused = slots.change(&vm, 1, |old| elsewhere(1, old, Hva(0xffff_8000_0000_0000)));
        assert!(
            matches!(refused, Err(MachineError::Os { .. })),
            "{refused:?}"
        );
        // A change that was given up takes a generation, and nothing else.
        let now = slots.table().generation();
        assert_eq!(now.number(), before.number() + 1);
        assert!(!now.in_progress());
        let mut reader = slots.table().reader();
        let lookup = |reader: &mut pageferry_memslot::SlotReader<KvmSlot>| {
            reader.pin().lookup(Gpa(0x10_0000).gfn()).is_some()
        };
        assert!(!lookup(&mut reader));
        // The id is free, in both.
        let hva = ram.guest_hva(RamPage(2));
        slots.change(&vm, 1, |old| elsewhere(1, old, hva)).unwrap();
        assert!(lookup(&mut reader));
        // The log of RAM goes on and off, and a repetition changes nothing.
        let after = slots.table().generation().number();
        for (log, changes) in [(true, 1), (true, 1), (false, 2)] {
            slots.set_log(&vm, &region, log).unwrap();
            assert_eq!(slots.table().generation().number(), after + changes);
            assert_eq!(vm.get_dirty_log(0, 4 * PAGE_SIZE as usize).is_ok(), log);
        }
    }
}
