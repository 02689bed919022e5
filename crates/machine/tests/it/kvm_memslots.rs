//! The same requests to the kernel's `KVM_SET_USER_MEMORY_REGION`, to `SlotWriter::set` and to the
//! soft engine's hypervisor. All must accept and refuse alike, and refuse for the same class of
//! reason.
//!
//! The tests compare only what both have. These differ on purpose, and are left out:
//! - `KVM_MEM_GUEST_MEMFD` needs a guest_memfd and the newer ioctl, and `KVM_MEM_USERFAULT` a
//!   kernel that has it.
//! - Only the kernel refuses host addresses that no user may have. The table knows no address space
//!   layout.
//! - Both accept slots of terabytes, but the kernel allocates memory for them by their size.
//! - KVM's private slots (`KVM_SET_TSS_ADDR`, the APIC page) are not made here: they take guest
//!   frames away.
//! - The soft engine has one address space, and the frames of its own page tables. Only requests
//!   inside both go to it.
#![expect(unsafe_code, reason = "hands memory to KVM and to the hypervisor")]

use crate::support::no_kvm;
use kvm_bindings::{KVM_CAP_MULTI_ADDRESS_SPACE, KVM_CAP_NR_MEMSLOTS, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VmFd};
use pageferry_addr::{Gfn, Gpa, Hva, PAGE_SIZE, RamPage};
use pageferry_hypervisor::{HostMemory, Region, Vm, VmConfig, VmError};
use pageferry_machine::{GuestRam, RamLayout};
use pageferry_memslot::{Limits, Request, SlotError, SlotFlags, SlotWriter};
use pageferry_testkit::sized;
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// Pages of host memory that slots may share.
const MEMORY_PAGES: u64 = 64;

/// The origin of a request's number. It becomes a number once host and memory are known.
#[derive(Clone, Copy, Debug)]
enum At {
    Page(u64),
    /// At a page, plus this many bytes.
    Off(u64, u64),
    /// This many pages below the first frame that KVM does not map.
    BelowLimit(u64),
    /// The last page of 64 bits of addresses.
    Top,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    address_space: u16,
    id: u16,
    gpa: At,
    size: At,
    hva: At,
    flags: u32,
}

fn asked() -> impl Strategy<Value = Asked> {
    let id = prop_oneof![
        12 => 0..5u16,
        1 => Just(32_763u16),
        1 => Just(32_764u16),
        1 => Just(u16::MAX)
    ];
    let gpa = prop_oneof![
        24 => (0..24u64).prop_map(At::Page),
        1 => (0..24u64, 1..PAGE_SIZE).prop_map(|(page, by)| At::Off(page, by)),
        3 => (0..6u64).prop_map(At::BelowLimit),
        1 => Just(At::Top),
    ];
    let size = prop_oneof![
        16 => (1..5u64).prop_map(At::Page),
        8 => Just(At::Page(2)),
        8 => Just(At::Page(0)),
        1 => (0..3u64, 1..PAGE_SIZE).prop_map(|(page, by)| At::Off(page, by)),
        1 => Just(At::Page(1 << 31)),
        1 => Just(At::Top),
    ];
    let hva = prop_oneof![
        12 => Just(At::Page(0)),
        4 => (0..MEMORY_PAGES - 5).prop_map(At::Page),
        1 => (0..8u64, 1..PAGE_SIZE).prop_map(|(page, by)| At::Off(page, by)),
    ];
    let flags = prop_oneof![
        8 => Just(0u32),
        4 => Just(1u32),
        2 => 2..4u32,
        1 => (4..32u32).prop_map(|bit| 1 << bit)
    ];
    let space = prop_oneof![16 => Just(0u16), 3 => Just(1u16), 1 => 2..4u16];
    (space, id, gpa, size, hva, flags).prop_map(|(address_space, id, gpa, size, hva, flags)| {
        Asked {
            address_space,
            id,
            gpa,
            size,
            hva,
            flags,
        }
    })
}

fn sequences() -> impl Strategy<Value = Vec<Asked>> {
    proptest::collection::vec(asked(), 1..90)
}

/// Memory that lives as long as the soft engine's slots need it.
struct Owner(Arc<GuestRam>);

// SAFETY: 1. `GuestRam` maps its guest mapping readable and writable for life and seals the memfd
// against shrinking. 2. The mapping came from `mmap`. 3. Nothing accesses it in these tests: there
// is no vCPU.
unsafe impl HostMemory for Owner {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.0.guest_hva(RamPage(0));
        start..Hva(start.0 + MEMORY_PAGES * PAGE_SIZE)
    }
}

/// A VM of KVM without vCPUs, a table with its limits, and a VM of the soft engine's hypervisor.
struct Both {
    vm: VmFd,
    writer: SlotWriter<()>,
    soft: Vm,
    /// Whether the soft engine got every request that KVM carried out.
    in_step: bool,
    memory: Arc<GuestRam>,
}

impl Both {
    fn new() -> Self {
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        let memory = RamLayout::for_memory(MEMORY_PAGES * PAGE_SIZE).unwrap();
        let memory = Arc::new(GuestRam::new(memory).unwrap());
        let offers = |cap: u32| u16::try_from(vm.check_extension_raw(cap.into())).unwrap();
        let limits = Limits {
            // 0: the kernel does not know the capability, and there is one.
            address_spaces: offers(KVM_CAP_MULTI_ADDRESS_SPACE).max(1),
            max_slots: offers(KVM_CAP_NR_MEMSLOTS),
            ..Limits::default()
        };
        let mut both = Self {
            vm,
            writer: SlotWriter::new(limits),
            soft: Vm::new(VmConfig::default()),
            in_step: true,
            memory,
        };
        both.writer = SlotWriter::new(Limits {
            gfn_limit: both.gfn_limit(),
            ..limits
        });
        both
    }

    /// The first frame that this host's KVM does not map. No call returns it, so this tries.
    fn gfn_limit(&self) -> Gfn {
        let bits = (36..=52).rev().find(|bits| {
            let region = self.region(0, 1 << (bits - 1), PAGE_SIZE, 0);
            let accepted = self.kernel(region).is_ok();
            if accepted {
                self.kernel(kvm_userspace_memory_region {
                    memory_size: 0,
                    ..region
                })
                .unwrap();
            }
            accepted
        });
        Gfn(1 << (bits.expect("36 bits of addresses are everywhere") - 12))
    }

    fn region(&self, slot: u32, gpa: u64, size: u64, flags: u32) -> kvm_userspace_memory_region {
        kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: gpa,
            memory_size: size,
            userspace_addr: self.memory.guest_hva(RamPage(0)).0,
        }
    }

    fn kernel(&self, region: kvm_userspace_memory_region) -> Result<(), i32> {
        // SAFETY: no vCPU ever runs in this VM, so nothing is accessed through its slots.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(|e| e.errno())
    }

    /// Whether the kernel has a slot of that name with a dirty log.
    fn kernel_logs(&self, slot: u32, bytes: u64) -> bool {
        self.vm.get_dirty_log(slot, bytes as usize).is_ok()
    }

    fn bytes(&self, at: At) -> u64 {
        match at {
            At::Page(page) => page * PAGE_SIZE,
            At::Off(page, by) => page * PAGE_SIZE + by,
            At::BelowLimit(pages) => Gfn(self.writer.limits().gfn_limit.0 - pages).gpa().0,
            At::Top => !(PAGE_SIZE - 1),
        }
    }

    /// Sends a request to both, and compares.
    fn ask(&mut self, asked: &Asked) -> Result<(), TestCaseError> {
        let Asked {
            address_space, id, ..
        } = *asked;
        let slot = u32::from(address_space) << 16 | u32::from(id);
        let (gpa, size) = (self.bytes(asked.gpa), self.bytes(asked.size));
        let mut region = self.region(slot, gpa, size, asked.flags);
        region.userspace_addr += self.bytes(asked.hva);
        let told = self.kernel(region);
        let table = self.writer.set(Request {
            address_space,
            id,
            gpa: Gpa(gpa),
            size,
            hva: Hva(region.userspace_addr),
            flags: SlotFlags(asked.flags),
            userfault_bitmap: None,
            data: (),
        });
        let ours = table.map(|_| ()).map_err(|e| match e {
            SlotError::Overlap { .. } => libc::EEXIST,
            _ => libc::EINVAL,
        });
        prop_assert_eq!(told, ours, "{:x?}: kernel left, table right", region);
        let view = self.writer.view().space(address_space);
        let kept = view.and_then(|view| view.by_id(id));
        let logs = kept.is_some_and(|slot| slot.flags.contains(SlotFlags::LOG_DIRTY_PAGES));
        let bytes = kept.map_or(PAGE_SIZE, |slot| slot.range.pages() * PAGE_SIZE);
        prop_assert_eq!(
            self.kernel_logs(slot, bytes),
            logs,
            "the log of slot {:#x}",
            slot
        );
        self.ask_soft(asked, &region, told, logs)
    }

    /// Sends the request to the soft engine too, and compares with the kernel's answer.
    fn ask_soft(
        &mut self,
        asked: &Asked,
        region: &kvm_userspace_memory_region,
        told: Result<(), i32>,
        logs: bool,
    ) -> Result<(), TestCaseError> {
        if asked.address_space != 0 || matches!(asked.gpa, At::BelowLimit(_)) {
            // The soft engine cannot follow. If the kernel carried the request out, the two
            // diverge.
            self.in_step &= asked.address_space != 0 || told.is_err();
            return Ok(());
        }
        if !self.in_step || asked.flags & SlotFlags::USERFAULT.0 != 0 {
            return Ok(());
        }
        let soft = self.soft.set_user_memory_region2(Region {
            slot: asked.id,
            flags: SlotFlags(asked.flags),
            gpa: Gpa(region.guest_phys_addr),
            size: region.memory_size,
            hva: Hva(region.userspace_addr),
            memory: Some(Arc::new(Owner(Arc::clone(&self.memory)))),
            userfault: None,
        });
        let soft = soft.map_err(|e| match e {
            VmError::Slot(SlotError::Overlap { .. }) => libc::EEXIST,
            _ => libc::EINVAL,
        });
        prop_assert_eq!(told, soft, "{:x?}: kernel left, soft engine right", region);
        let kept = self.writer.view().by_id(asked.id);
        let words = kept.map_or(1, |slot| slot.range.pages().div_ceil(64));
        let mut words = vec![0; words as usize];
        let log = self.soft.read_dirty_log(asked.id, &mut words);
        prop_assert_eq!(log.is_ok(), logs, "its log of slot {}", asked.id);
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn kernel_and_table_accept_and_refuse_alike(sequence in sequences()) {
        if no_kvm() {
            return Ok(());
        }
        let mut both = Both::new();
        for asked in &sequence {
            both.ask(asked)?;
        }
    }
}

/// The cases that a random sequence meets rarely, in order.
#[test]
fn each_rule_is_the_kernels() {
    if no_kvm() {
        return;
    }
    let mut both = Both::new();
    let mut ask = |gpa: u64, pages: u64, hva: u64, flags: u32, id: u16| {
        let asked = Asked {
            address_space: 0,
            id,
            gpa: At::Page(gpa),
            size: At::Page(pages),
            hva: At::Page(hva),
            flags,
        };
        both.ask(&asked).unwrap();
    };
    ask(0, 4, 0, 0, 0); // create
    ask(0, 4, 0, 0, 0); // nothing
    ask(4, 4, 0, 0, 1); // touching, same host memory
    ask(3, 1, 8, 0, 2); // overlaps the end of 0
    ask(7, 9, 8, 0, 2); // overlaps the end of 1
    ask(2, 4, 0, 0, 0); // a move onto 1
    ask(16, 4, 0, 0, 0); // a move
    ask(17, 4, 0, 0, 0); // a move over itself
    ask(17, 4, 0, 1, 0); // the log
    ask(18, 4, 0, 0, 0); // a move that takes the log away
    ask(18, 4, 0, 2, 0); // READONLY is fixed
    ask(18, 3, 0, 0, 0); // so is the size
    ask(18, 4, 1, 0, 0); // and the host address
    ask(30, 2, 1, 3, 3); // read-only with a log
    ask(30, 2, 1, 2, 3); // log off
    ask(30, 2, 1, 0, 3); // READONLY cannot go
    ask(30, 0, 1, 0, 3); // deleted: flags and address do not matter ..
    ask(30, 0, 1, 0, 3); // .. but there must be one
    ask(30, 2, 1, 0, 3); // the id is free for another kind
    ask(18, 0, 0, 1 << 9, 0); // unknown flags, even to delete
}

/// KVM's first and last slots, and one more. The slow tests take all.
#[test]
fn both_take_the_same_number_of_slots() {
    if no_kvm() {
        return;
    }
    let mut both = Both::new();
    let max = both.writer.limits().max_slots;
    let half = sized(500, 16382) as u16;
    for id in (0..half).chain(max - half..=max) {
        let asked = Asked {
            address_space: 0,
            id,
            gpa: At::Page(2 * u64::from(id)),
            size: At::Page(1),
            hva: At::Page(0),
            flags: 0,
        };
        both.ask(&asked).unwrap();
    }
    assert_eq!(both.writer.len(), 2 * usize::from(half));
}
