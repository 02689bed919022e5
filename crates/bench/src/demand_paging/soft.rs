#![expect(
    unsafe_code,
    reason = "guarantees the hypervisor that guest memory stays mapped, and places pages"
)]
//! The guests on our own hypervisor. It is called directly, so that the caller can choose the
//! scheme of memory slots.
//!
//! Host memory is allocated once, and one VM after the other uses it. So no touch waits for the
//! host's allocator, and the figures show the hypervisor's own fault path. Each VM is new and
//! begins with empty tables and TLBs.

use super::missing::{BYTES, MissingPages, Serving};
use super::plan::Plan;
use super::race::{GuestExit, Race, Runner, is_finished, race};
use crate::BenchError;
use crate::watched::Clock;
use pageferry_addr::{Hva, PAGE_SIZE, RamPage};
use pageferry_hypervisor::hart::Hart;
use pageferry_hypervisor::{
    Exit, HostMemory, Memslots, Region, SlotFlags, UserfaultBits, VcpuCore, Vm, VmConfig,
};
use pageferry_machine::{Backing, GuestRam, RamLayout, UncheckedRam};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const SP: usize = 2;
const A0: usize = 10;
const A1: usize = 11;

/// Memory for guests.
pub(crate) struct HostRam(Arc<GuestRam>);

// SAFETY:
// 1. `GuestRam` maps the alias readable and writable when it is created, and unmaps it when it is
//    dropped. It seals the memfd, so that it cannot shrink. This type holds an `Arc` of it.
// 2. The mapping came from `mmap`. `alias_hva` casts its pointer to an integer, which exposes its
//    provenance.
// 3. `GuestRam` hands out no references, and accesses the mapping by volatile words.
unsafe impl HostMemory for HostRam {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.0.alias_hva(RamPage(0));
        start..Hva(start.0 + self.0.layout().bytes())
    }
}

impl HostRam {
    /// Allocates memory for a guest of `bytes` bytes.
    pub(crate) fn new(bytes: u64) -> Result<Arc<Self>, BenchError> {
        Self::on(Backing::Shmem, bytes)
    }

    /// Allocates memory of `backing` for a guest of `bytes` bytes.
    pub(super) fn on(backing: Backing, bytes: u64) -> Result<Arc<Self>, BenchError> {
        let layout = RamLayout::for_memory(bytes).map_err(pageferry_machine::MachineError::from)?;
        let ram = GuestRam::with_backing(layout, backing)?;
        ram.allocate()?;
        Ok(Arc::new(Self(Arc::new(ram))))
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        &self.0
    }

    /// Its bytes, for threads that place pages.
    pub(crate) fn placing(&self) -> UncheckedRam<'_> {
        // SAFETY: (1) no `Machine` has this memory, so no thread relies on a missing bitmap, and
        // none has a slice of it: all accesses are volatile.
        unsafe { self.0.unchecked() }
    }
}

/// A VM that is ready to run.
pub(crate) struct PreparedVm<M: Memslots> {
    pub(super) vcpus: Vec<VcpuCore<M>>,
    layout: RamLayout,
    /// Kept so that tests can read its tables.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests look"))]
    pub(super) vm: Vm<M>,
}

impl<M: Memslots> PreparedVm<M> {
    /// Creates a VM and loads the guest. The pages whose bit in `missing` is set are missing.
    pub(crate) fn new(
        host: &Arc<HostRam>,
        plan: &Plan,
        missing: Option<&Arc<PageBitmap>>,
    ) -> Result<Self, BenchError> {
        let program = plan.toucher.program();
        let bytes = plan.toucher.memory_map().memory_bytes();
        let layout = RamLayout::for_memory(bytes).map_err(pageferry_machine::MachineError::from)?;
        for page in plan.touched.clone() {
            host.placing().write_at(RamPage(page), 0, &[0; 8]);
        }
        for (gpa, piece) in program.image() {
            let page = layout.page_of(gpa.gfn()).expect("a program lies in RAM");
            host.placing().write_at(page, gpa.page_offset(), &piece);
        }
        let vm = Vm::<M>::with_memslots(VmConfig {
            max_vcpus: plan.vcpus(),
            ..VmConfig::default()
        });
        for region in layout.regions() {
            let (mut flags, mut userfault) = (SlotFlags::EMPTY, None);
            if let Some(bitmap) = missing {
                flags = SlotFlags::USERFAULT;
                userfault = Some(UserfaultBits {
                    bitmap: Arc::clone(bitmap),
                    first: region.first,
                });
            }
            vm.set_user_memory_region2(Region {
                slot: u16::try_from(region.slot).expect("RAM has few regions"),
                flags,
                gpa: region.gfn.gpa(),
                size: region.pages * PAGE_SIZE,
                hva: host.ram().alias_hva(region.first),
                memory: Some(Arc::clone(host) as Arc<dyn HostMemory>),
                userfault,
            })?;
        }
        let vcpus = (0..plan.vcpus())
            .map(|id| {
                let mut vcpu = vm.create_vcpu(id)?;
                let (start, mut state) = (program.start(id), Hart::new().state());
                state.pc = start.entry;
                state.x[SP] = start.stack;
                state.x[A0] = start.args[0];
                state.x[A1] = start.args[1];
                vcpu.set_state(&state)
                    .map_err(|e| BenchError::Hypervisor(e.to_string()))?;
                Ok(vcpu)
            })
            .collect::<Result<_, BenchError>>()?;
        Ok(Self { vcpus, layout, vm })
    }
}

struct Vcpu<'a, M: Memslots> {
    core: VcpuCore<M>,
    layout: &'a RamLayout,
}

impl<M: Memslots> Runner for Vcpu<'_, M>
where
    VcpuCore<M>: Send,
{
    fn run(&mut self) -> Result<GuestExit, BenchError> {
        match self.core.run() {
            Exit::MemoryFault {
                gpa,
                userfault: true,
                ..
            } => match self.layout.page_of(gpa.gfn()) {
                Some(page) => Ok(GuestExit::Missing(page)),
                None => Err(BenchError::Hypervisor(format!("no RAM is at {gpa}"))),
            },
            Exit::Kicked => Ok(GuestExit::Kicked),
            Exit::MmioWrite { value, .. } if is_finished(value) => Ok(GuestExit::Finished),
            exit => Err(BenchError::unexpected_exit(&exit)),
        }
    }

    fn kicker(&self) -> Box<dyn Fn() + Send + Sync> {
        let handle = self.core.kick_handle();
        Box::new(move || handle.kick())
    }
}

/// Runs all vCPUs over all their pages. With `exits`, every page is missing at first, and the vCPU
/// that touches a page first installs it on its own thread.
///
/// # Errors
/// [`BenchError::WrongValue`] if a page does not hold the stored value.
pub(crate) fn touch<M: Memslots, T: Send>(
    host: &Arc<HostRam>,
    plan: &Plan,
    exits: Option<Serving>,
    before: &(dyn Fn() + Sync),
    end: &(dyn Fn() -> T + Sync),
) -> Result<Race<T>, BenchError>
where
    VcpuCore<M>: Send,
{
    let missing = match exits {
        Some(serving) => Some(MissingPages::all(host.ram().pages(), plan, serving)?),
        None => None,
    };
    let prepared = PreparedVm::<M>::new(host, plan, missing.as_ref().map(MissingPages::bitmap))?;
    let install = |vcpu, page: RamPage| {
        // Only runs with a clock read this.
        Clock::was_missing();
        let Some(missing) = &missing else {
            return Err(BenchError::Hypervisor(format!("{page:?} is not missing")));
        };
        let write = || {
            host.placing().write(page, &BYTES);
            Ok(())
        };
        missing.install(Some(vcpu), page, write, || Ok(()))
    };
    let layout = &prepared.layout;
    let runners = prepared
        .vcpus
        .into_iter()
        .map(|core| Vcpu { core, layout })
        .collect();
    let mut race = race(runners, before, &install, end)?;
    plan.check(|page| first_word(host.ram(), page))?;
    if let Some(missing) = missing {
        missing.check()?;
        race.fault_ns = missing.fault_to_fault();
    }
    Ok(race)
}

/// The first word of a page.
pub(super) fn first_word(ram: &GuestRam, page: u64) -> u64 {
    let mut word = [0; 8];
    // A missing page has not the stored value.
    let read = ram.try_read(RamPage(page), &mut word);
    read.map_or(0, |()| u64::from_le_bytes(word))
}

/// Nanoseconds to leave and enter the guest. The vCPU does nothing but store to an address without
/// memory.
pub(crate) fn exit_and_entry(
    host: &Arc<HostRam>,
    plan: &Plan,
    exits: u32,
) -> Result<f64, BenchError> {
    let mut prepared = PreparedVm::<pageferry_hypervisor::Scalable>::new(host, plan, None)?;
    let mut vcpu = Vcpu {
        core: prepared.vcpus.remove(0),
        layout: &prepared.layout,
    };
    // The first exit is the end of its program. From then on it stores to the doorbell in a loop.
    let mut finished = || match vcpu.run()? {
        GuestExit::Finished => Ok(()),
        other => Err(BenchError::unexpected_exit(&other)),
    };
    finished()?;
    let began = Instant::now();
    for _ in 0..exits {
        finished()?;
    }
    Ok(began.elapsed().as_nanos() as f64 / f64::from(exits))
}
