#![expect(unsafe_code, reason = "places pages")]
//! The soft engine: `pageferry-hypervisor` behind the traits of this crate.
//!
//! **Guarantee.** No vCPU ever reads or writes a missing page. The hypervisor tests the missing
//! bitmap itself, and the vCPU leaves on its own thread ([`Delivery::Exit`]). So the engine needs
//! no other delivery, and [`Machine::install`] does nothing. Clearing the page's bit makes the page
//! present.
//!
//! **Mechanism.** One memory slot for each region of RAM, which points at the alias mapping: no
//! userfaultfd watches anything here. All slots share the one missing bitmap, each from the bit of
//! its first page on.
//!
//! An ECALL of a guest's operating system is a call of SBI, which the vCPU's thread answers here
//! (`calls`). Harts start stopped: [`Vcpu::set_start`] starts one, and that one starts others. A
//! hart that waits for an interrupt sleeps inside [`Vcpu::run`], until an interrupt or a kick. A
//! machine for devices has an interrupt controller (`plic`), which the vCPU's thread serves here.
//!
//! **Neighbours.** [`pageferry_hypervisor::Vm`] does the work; [`crate::engine`](crate::Machine)
//! has the contract.

mod calls;
mod harts;
mod memory;
mod plic;
mod state;
mod vcpu;

use crate::access::{Extent, Store};
use crate::board::PLIC_SOURCES;
use crate::huge::{self, whole_range};
use crate::{
    AccessError, ArmOptions, BlackoutCost, Collapsed, Console, Delivery, Device, Engine,
    FaultEvents, GuestRam, Interrupt, LayoutError, MAX_VCPUS, Machine, MachineError, MachineKind,
    MachineSpec, NewMachine, RamLayout, RamRegion, Vcpu,
};
use core::ops::Range;
use harts::Harts;
use memory::RamOwner;
use pageferry_addr::{Hva, PAGE_SIZE, PageSize, RamPage};
use pageferry_hypervisor::{
    HostMemory, Region, SlotFlags, UserfaultBits, VcpuCore, Vm, VmConfig, VmError,
};
use pageferry_userfault::PageBitmap;
use plic::Plic;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use vcpu::SoftVcpu;

pub use pageferry_hypervisor::LrSc;

struct SoftMachine {
    vm: Vm,
    ram: Arc<GuestRam>,
    owner: Arc<dyn HostMemory>,
    console: Arc<Console>,
    /// The interrupt controller, if devices need one.
    plic: OnceLock<Arc<Plic>>,
    /// The current settings of the slots. A thread that changes the slots holds the lock.
    slots: Mutex<Slots>,
}

#[derive(Clone, Default)]
struct Slots {
    logging: bool,
    missing: Option<Arc<PageBitmap>>,
}

/// The parts of a machine that a caller may choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct SoftOptions {
    /// The rule of LR and SC.
    pub lr_sc: LrSc,
    /// Whether it has an interrupt controller, for devices. Both ends of a migration choose alike.
    pub interrupts: bool,
}

/// Creates a machine of this engine with zeroed RAM. Its vCPUs are not started.
///
/// # Errors
/// When the sizes are out of range or the host has no room for the memory.
pub fn create(spec: MachineSpec) -> Result<NewMachine, MachineError> {
    create_with(spec, SoftOptions::default())
}

/// [`create`], with parts that the caller chooses.
///
/// # Errors
/// As [`create`].
pub fn create_with(spec: MachineSpec, options: SoftOptions) -> Result<NewMachine, MachineError> {
    let layout = RamLayout::for_memory(spec.memory_bytes)?;
    let ram = GuestRam::with_backing(layout, spec.backing)?;
    create_on(spec.vcpus, ram, options)
}

/// [`create`], with memory that the caller has made or adopted.
///
/// # Errors
/// When the number of vCPUs is out of range.
pub fn create_on(
    vcpus: u32,
    ram: GuestRam,
    options: SoftOptions,
) -> Result<NewMachine, MachineError> {
    if vcpus == 0 || vcpus > MAX_VCPUS {
        return Err(LayoutError::Vcpus(vcpus).into());
    }
    let machine = SoftMachine::new(vcpus, ram, options)?;
    let vcpus = (0..vcpus)
        .map(|id| machine.vm.create_vcpu(id).map_err(|e| refused(&e)))
        .collect::<Result<Vec<_>, MachineError>>()?;
    let harts = Arc::new(Harts::new(vcpus.iter().map(VcpuCore::kick_handle)));
    if options.interrupts {
        machine.plic.get_or_init(|| Plic::new(&harts));
    }
    let vcpus = vcpus
        .into_iter()
        .map(|core| Box::new(SoftVcpu::new(core, &machine, &harts)) as Box<dyn Vcpu>)
        .collect();
    Ok(NewMachine { machine, vcpus })
}

/// The error for a request that the hypervisor refused.
fn refused(error: &VmError) -> MachineError {
    MachineError::EngineUnavailable(format!("the hypervisor refuses: {error}"))
}

impl SoftMachine {
    /// A machine that has no vCPU yet.
    fn new(max_vcpus: u32, ram: GuestRam, options: SoftOptions) -> Result<Arc<Self>, MachineError> {
        let ram = Arc::new(ram);
        let machine = Arc::new(Self {
            vm: Vm::new(VmConfig {
                max_vcpus,
                lr_sc: options.lr_sc,
                ..VmConfig::default()
            }),
            owner: Arc::new(RamOwner(Arc::clone(&ram))),
            ram,
            console: Arc::default(),
            plic: OnceLock::new(),
            slots: Mutex::default(),
        });
        machine.follow_rules();
        machine.set_slots(&Slots::default())?;
        Ok(machine)
    }

    /// Makes the VMM's stores follow the rules of guest stores.
    fn follow_rules(self: &Arc<Self>) {
        // Weak, since the machine holds the memory.
        let machine = Arc::downgrade(self);
        self.ram.rules.get_or_init(|| {
            Box::new(move |extent, kind, store| match machine.upgrade() {
                Some(machine) => machine.store(extent, kind, store),
                None => {
                    store(0..extent.bytes);
                    Ok(())
                }
            })
        });
    }

    /// Stores by the rules of guest stores: no SC misses them, and no tracked page gets them unless
    /// they are done.
    fn store(
        &self,
        extent: Extent,
        kind: Store,
        store: &mut dyn FnMut(Range<u64>),
    ) -> Result<(), AccessError> {
        let stores = self.vm.stores();
        let pages = match kind {
            Store::Asked => extent.pages(),
            Store::Done => 0..0,
        };
        for region in self.ram.layout().regions() {
            let first = region.first.0;
            let inside = pages.start.max(first)..pages.end.min(first + region.pages);
            if inside.is_empty() {
                continue;
            }
            let inside = inside.start - first..inside.end - first;
            if let Some(page) = stores.first_tracked(slot_id(region), inside) {
                return Err(AccessError::Tracked(RamPage(first + page)));
            }
        }
        let at = self.ram.alias_hva(extent.page).0 + extent.offset;
        stores.store(Hva(at), extent.bytes, store);
        Ok(())
    }

    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_slots(&self, slots: &Slots) -> Result<(), MachineError> {
        let mut flags = SlotFlags::EMPTY;
        if slots.logging {
            flags = flags | SlotFlags::LOG_DIRTY_PAGES;
        }
        if slots.missing.is_some() {
            flags = flags | SlotFlags::USERFAULT;
        }
        for region in self.ram.layout().regions() {
            let userfault = slots.missing.as_ref().map(|bitmap| UserfaultBits {
                bitmap: Arc::clone(bitmap),
                first: region.first,
            });
            self.vm
                .set_user_memory_region2(Region {
                    slot: slot_id(region),
                    flags,
                    gpa: region.gfn.gpa(),
                    size: region.pages * PAGE_SIZE,
                    hva: self.ram.alias_hva(region.first),
                    memory: Some(Arc::clone(&self.owner)),
                    userfault,
                })
                .map_err(|e| refused(&e))?;
        }
        Ok(())
    }
}

fn slot_id(region: &RamRegion) -> u16 {
    u16::try_from(region.slot).expect("RAM has few regions")
}

impl Machine for SoftMachine {
    fn blackout_cost(&self) -> BlackoutCost {
        BlackoutCost::new(Duration::from_micros(550), Duration::from_micros(5))
    }

    fn kind(&self) -> MachineKind<'_> {
        Engine::Soft.kind()
    }

    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    fn console(&self) -> Option<&Arc<Console>> {
        Some(&self.console)
    }

    fn devices(&self) -> Vec<Arc<dyn Device>> {
        let plic = self.plic.get().map(|plic| Arc::clone(plic) as _);
        let console = Arc::clone(&self.console) as _;
        std::iter::once(console).chain(plic).collect()
    }

    fn interrupt(&self, line: u32) -> Result<Arc<dyn Interrupt>, MachineError> {
        let plic = self.plic.get().ok_or(MachineError::WrongState(
            "this machine has no interrupt controller",
        ))?;
        plic.line(line).ok_or_else(|| {
            let why = format!("no interrupt line {line}: expected 1 to {PLIC_SOURCES}");
            MachineError::Device(why)
        })
    }

    fn set_dirty_log(&self, on: bool) -> Result<(), MachineError> {
        let mut slots = self.slots();
        if slots.logging == on {
            return Ok(());
        }
        let next = Slots {
            logging: on,
            ..slots.clone()
        };
        self.set_slots(&next)?;
        self.ram.forget_writes();
        *slots = next;
        Ok(())
    }

    fn harvest_dirty(&self, dirty: &PageBitmap, rearm: bool) -> Result<usize, MachineError> {
        let slots = self.slots();
        if !slots.logging {
            return Err(MachineError::WrongState("the dirty log is not on"));
        }
        let mut added = self.ram.harvest_writes(dirty, rearm)?;
        for region in self.ram.layout().regions() {
            let first = region.words().start;
            let mut add = |word: usize, bits: u64| {
                added += dirty.or_word(first + word, bits).count_ones() as usize;
            };
            if rearm {
                let mut log = vec![0; region.words().len()];
                let pages = self.vm.get_dirty_log(slot_id(region), &mut log);
                if pages.map_err(|e| refused(&e))? != 0 {
                    log.into_iter()
                        .enumerate()
                        .for_each(|(w, bits)| add(w, bits));
                }
            } else {
                let visited = self.vm.visit_dirty_log(slot_id(region), add);
                visited.map_err(|e| refused(&e))?;
            }
        }
        Ok(added)
    }

    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        if let Some(other) = options.delivery.filter(|wanted| *wanted != Delivery::Exit) {
            return Err(MachineError::NoDelivery(other));
        }
        self.ram.arm(&missing, &options, || {
            let mut slots = self.slots();
            let next = Slots {
                missing: Some(Arc::clone(&missing)),
                ..slots.clone()
            };
            self.set_slots(&next)?;
            *slots = next;
            Ok(())
        })?;
        Ok(Vec::new())
    }

    fn install_copy(&self, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        let bytes = bytes
            .try_into()
            .map_err(|_| MachineError::WrongState("a page to install has not 4096 bytes"))?;
        // SAFETY: (1) the caller places the page, as `Machine::install_copy` says. No vCPU reads it
        // before its bit is cleared.
        unsafe { self.ram.unchecked() }.write(page, bytes);
        Ok(())
    }

    fn collapse(&self, first: RamPage) -> Collapsed {
        let range = whole_range(&self.ram, first);
        let missing = self.slots().missing.clone();
        match missing.and_then(|missing| missing.next_set(range.start)) {
            Some(missing) if missing < range.end => Collapsed::Missing,
            _ => huge::collapse(&self.ram, self.ram.alias_hva(first), first),
        }
    }

    fn engine_large_bytes(&self) -> Option<u64> {
        let leaves = PageSize::ALL.into_iter().zip(self.vm.mapped_leaves());
        let large = leaves.skip(1).map(|(size, leaves)| size.bytes() * leaves);
        Some(large.sum())
    }

    fn disarm_userfault(&self) -> Result<(), MachineError> {
        let mut slots = self.slots();
        self.ram.disarm()?;
        let next = Slots {
            missing: None,
            ..slots.clone()
        };
        self.set_slots(&next)?;
        *slots = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_addr::Gpa;

    #[test]
    fn calls_out_of_turn_are_refused() {
        let new = create(MachineSpec::new(1, 100 << 12)).unwrap();
        let machine = new.machine;
        let dirty = PageBitmap::new(100);
        assert!(matches!(
            machine.harvest_dirty(&dirty, true),
            Err(MachineError::WrongState(_))
        ));
        assert!(matches!(
            machine.disarm_userfault(),
            Err(MachineError::WrongState(_))
        ));
        let missing = Arc::new(PageBitmap::new(100));
        let minor = machine.arm_userfault(Arc::clone(&missing), Delivery::Minor.into());
        assert!(matches!(
            minor,
            Err(MachineError::NoDelivery(Delivery::Minor))
        ));
        missing.set(RamPage(99));
        assert!(
            machine
                .arm_userfault(Arc::clone(&missing), None.into())
                .unwrap()
                .is_empty()
        );
        assert!(matches!(
            machine.disarm_userfault(),
            Err(MachineError::WrongState(_))
        ));
        missing.clear(RamPage(99));
        machine.disarm_userfault().unwrap();
        assert!(machine.install_copy(RamPage(0), &[0; 5]).is_err());
    }

    /// lr.w a0, (a1); wfi, and then sc.w a0, a2, (a1); wfi.
    const LR_SC: [u32; 4] = [0x1005_a52f, 0x1050_0073, 0x18c5_a52f, 0x1050_0073];
    const PLACE: u64 = 0x2010;

    fn machine() -> Arc<SoftMachine> {
        let layout = RamLayout::for_memory(64 << 12).unwrap();
        let ram = GuestRam::new(layout).unwrap();
        SoftMachine::new(2, ram, SoftOptions::default()).unwrap()
    }

    /// Whether an SC succeeds if the VMM does `store` between it and its LR.
    fn sc_after(store: impl FnOnce(&Arc<GuestRam>)) -> bool {
        sc_on(&machine(), store)
    }

    fn sc_on(machine: &SoftMachine, store: impl FnOnce(&Arc<GuestRam>)) -> bool {
        let code = LR_SC.map(u32::to_le_bytes).concat();
        machine.ram.try_write(RamPage(0), &code).unwrap();
        let mut vcpu = machine.vm.create_vcpu(0).unwrap();
        vcpu.hart_mut().set_x(11, PLACE);
        vcpu.hart_mut().set_x(12, 7);
        assert_eq!(vcpu.run(), pageferry_hypervisor::Exit::Halted);
        store(&machine.ram);
        assert_eq!(vcpu.run(), pageferry_hypervisor::Exit::Halted);
        vcpu.hart().x(10) == 0
    }

    #[test]
    fn the_accessor_ends_the_reservations_of_the_bytes_it_writes() {
        assert!(sc_after(|_| ()));
        for beside in [PLACE + 8, PLACE - 1] {
            assert!(sc_after(|ram| ram.try_write(Gpa(beside), &[1]).unwrap()));
        }
        assert!(sc_after(|ram| ram
            .try_read(Gpa(PLACE), &mut [0; 8])
            .unwrap()));
        // The LR reserves 4 bytes, and with them the 4 that follow.
        for (at, bytes) in [
            (PLACE, 1),
            (PLACE + 4, 4),
            (PLACE + 7, 1),
            (PLACE + 7, 2),
            (PLACE - 1, 2),
            (PLACE - 5, 6),
            (PLACE - 0x10, 0x11),
            (PLACE - 0x1000, 0x2000),
        ] {
            let write = |ram: &Arc<GuestRam>| {
                ram.try_write(Gpa(at), &vec![0; bytes]).unwrap();
            };
            assert!(!sc_after(write), "{bytes} bytes at {at:#x}");
        }
    }

    #[test]
    fn the_accessor_writes_no_tracked_page() {
        let machine = machine();
        let ram = &machine.ram;
        machine.set_dirty_log(true).unwrap();
        machine.vm.track_writes(0, 3..4).unwrap();
        let tracked = Err(AccessError::Tracked(RamPage(3)));
        assert_eq!(ram.try_write(Gpa(0x3008), &[1]), tracked);
        assert_eq!(ram.try_write(Gpa(0x2000), &[1; 0x1001]), tracked);
        assert_eq!(ram.write(RamPage(1), &[1; 0x4000], &|| false), tracked);
        let mut bytes = [9; 0x4000];
        ram.try_read(RamPage(1), &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "nothing was written");
        let dirty = PageBitmap::new(64);
        assert_eq!(machine.harvest_dirty(&dirty, true).unwrap(), 0);
        ram.try_write(Gpa(0x2000), &[1; 0x1000]).unwrap();
        machine.vm.untrack_writes(0, 3..4).unwrap();
        ram.try_write(Gpa(0x3008), &[1]).unwrap();
        assert_eq!(machine.harvest_dirty(&dirty, true).unwrap(), 2);
    }

    #[cfg(feature = "vm-memory")]
    #[test]
    fn slices_of_devices_follow_the_rules_too() {
        use crate::DeviceMemory;
        use vm_memory::{Bytes, GuestAddress, GuestAddressSpace};
        // Its handle of the memory is the machine's.
        let write = |ram: &Arc<GuestRam>, at| {
            let memory = DeviceMemory::new(Arc::clone(ram), || false);
            memory.memory().write_obj(0_u32, GuestAddress(at))
        };
        for (at, stored) in [
            (PLACE, false),
            (PLACE + 4, false),
            (PLACE + 7, false),
            (PLACE - 3, false),
            (PLACE + 8, true),
            (PLACE - 4, true),
        ] {
            assert_eq!(sc_after(|ram| write(ram, at).unwrap()), stored, "{at:#x}");
        }
        let machine = machine();
        machine.vm.track_writes(0, 3..4).unwrap();
        let refused = write(&machine.ram, 0x3000).unwrap_err().to_string();
        assert!(refused.contains("write-tracked"), "{refused}");
        write(&machine.ram, 0x4000).unwrap();
    }

    /// A page becomes tracked while a device holds its slice. The device's write cannot be refused
    /// any more: it is in the log, and no SC misses it.
    #[cfg(feature = "vm-memory")]
    #[test]
    fn a_slice_of_a_page_that_becomes_tracked_follows_the_rules() {
        use crate::DeviceMemory;
        use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend};
        let (page, dirty) = (PLACE / PAGE_SIZE, PageBitmap::new(64));
        let machine = machine();
        machine.set_dirty_log(true).unwrap();
        let sc = sc_on(&machine, |ram| {
            let view = DeviceMemory::new(Arc::clone(ram), || false).memory();
            let slice = view.get_slice(GuestAddress(PLACE), 4).unwrap();
            machine.vm.track_writes(0, page..page + 1).unwrap();
            machine.harvest_dirty(&dirty, true).unwrap();
            slice.write_obj(0_u32, 0).unwrap();
            machine.vm.untrack_writes(0, page..page + 1).unwrap();
            dirty.clear(RamPage(page));
            machine.harvest_dirty(&dirty, true).unwrap();
        });
        assert!(!sc, "the SC missed the write");
        assert!(dirty.test(RamPage(page)), "the write is in no log");
    }

    #[test]
    fn absurd_sizes_are_refused() {
        for (vcpus, memory_bytes) in [(0, 4096), (MAX_VCPUS + 1, 4096), (1, 0), (1, 4097)] {
            assert!(matches!(
                create(MachineSpec::new(vcpus, memory_bytes)),
                Err(MachineError::Layout(_))
            ));
        }
    }
}
