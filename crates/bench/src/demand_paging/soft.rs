#![expect(
    unsafe_code,
    reason = "promises the hypervisor that guest memory stays mapped, and reads single words of it"
)]
//! The guests on our own hypervisor, called directly: so its scheme of memory slots can be chosen.
//!
//! Host memory is allocated once and used by one VM after the other. So no touch waits for the
//! host's allocator, and what is measured is the hypervisor's own fault path: a VM is new each
//! time, with empty tables and TLBs.

use super::bring::Bring;
use super::plan::Plan;
use super::race::{Left, Race, Runner, race};
use super::watched::Clock;
use crate::BenchError;
use pageferry_addr::{Hva, PAGE_SIZE, RamPage};
use pageferry_guest::{Doorbell, Event};
use pageferry_hypervisor::hart::Hart;
use pageferry_hypervisor::{
    Exit, HostMemory, Memslots, Region, SlotFlags, UserfaultBits, VcpuCore, Vm, VmConfig, VmError,
};
use pageferry_machine::{GuestRam, RamLayout};
use pageferry_userfault::PageBitmap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

const SP: usize = 2;
const A0: usize = 10;
const A1: usize = 11;

/// Memory for guests, and a promise about it.
pub(crate) struct Host(Arc<GuestRam>);

// SAFETY: 1. `GuestRam` maps the alias readable and writable when it is made, unmaps it when it is
// dropped, and seals the memfd so that it cannot shrink; an `Arc` of it is held here. 2. The
// mapping came from `mmap`, and `alias_hva` casts its pointer to an integer, which exposes it. 3.
// `GuestRam` hands out no references and accesses the mapping by volatile words.
unsafe impl HostMemory for Host {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.0.alias_hva(RamPage(0));
        start..Hva(start.0 + self.0.layout().bytes())
    }
}

impl Host {
    /// Memory of so many bytes, all of it allocated.
    pub(crate) fn new(bytes: u64) -> Result<Arc<Self>, BenchError> {
        let layout = RamLayout::for_memory(bytes).map_err(pageferry_machine::MachineError::from)?;
        let ram = GuestRam::new(layout)?;
        ram.allocate()?;
        Ok(Arc::new(Self(Arc::new(ram))))
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        &self.0
    }
}

/// A VM whose vCPUs have not begun.
pub(crate) struct Stage<M: Memslots> {
    pub(super) vcpus: Vec<VcpuCore<M>>,
    layout: RamLayout,
    /// Kept for its vCPUs, and for those who want to look at its tables.
    #[cfg_attr(not(test), expect(dead_code, reason = "only tests look"))]
    pub(super) vm: Vm<M>,
}

fn refused(error: &VmError) -> BenchError {
    BenchError::Memslot(format!("the hypervisor refused a call: {error}"))
}

impl<M: Memslots> Stage<M> {
    /// Loads the guest; pages whose bit in `missing` is set are missing.
    pub(crate) fn new(
        host: &Arc<Host>,
        plan: &Plan,
        missing: Option<&Arc<PageBitmap>>,
    ) -> Result<Self, BenchError> {
        let program = plan.toucher.program();
        let bytes = plan.toucher.layout().memory_bytes();
        let layout = RamLayout::for_memory(bytes).map_err(pageferry_machine::MachineError::from)?;
        for page in plan.touched.clone() {
            host.ram().write_at(RamPage(page), 0, &[0; 8]);
        }
        for (gpa, piece) in program.image() {
            let page = layout.page_of(gpa.gfn()).expect("a program lies in RAM");
            host.ram().write_at(page, gpa.page_offset(), &piece);
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
            })
            .map_err(|e| refused(&e))?;
        }
        let vcpus = (0..plan.vcpus())
            .map(|id| {
                let mut vcpu = vm.create_vcpu(id).map_err(|e| refused(&e))?;
                let (start, mut state) = (program.start(id), Hart::new().state());
                state.pc = start.entry;
                state.x[SP] = start.stack;
                state.x[A0] = start.args[0];
                state.x[A1] = start.args[1];
                vcpu.set_state(&state)
                    .map_err(|e| BenchError::Memslot(e.to_string()))?;
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
    fn run(&mut self) -> Result<Left, BenchError> {
        let unexpected = |exit: Exit| {
            Err(BenchError::Memslot(format!(
                "unexpected exit of the guest: {exit:?}"
            )))
        };
        match self.core.run() {
            Exit::MemoryFault {
                gpa,
                userfault: true,
                ..
            } => match self.layout.page_of(gpa.gfn()) {
                Some(page) => Ok(Left::Missing(page)),
                None => Err(BenchError::Memslot(format!("no RAM is at {gpa}"))),
            },
            Exit::Kicked => Ok(Left::Kicked),
            exit @ Exit::MmioWrite { value, .. } => match Doorbell::parse(value as u32) {
                Ok(bell) if bell.event == Event::Finished => Ok(Left::Finished),
                _ => unexpected(exit),
            },
            exit => unexpected(exit),
        }
    }

    fn kicker(&self) -> Box<dyn Fn() + Send + Sync> {
        let handle = self.core.kick_handle();
        Box::new(move || handle.kick())
    }
}

/// Lets all vCPUs touch all their pages; with `exits`, every page is missing at first, and the vCPU
/// that touches it brings it on its own thread.
///
/// # Errors
/// [`BenchError::WrongValue`] where a page has not what was stored to it.
pub(crate) fn touch<M: Memslots, T: Send>(
    host: &Arc<Host>,
    plan: &Plan,
    exits: bool,
    before: &(dyn Fn() + Sync),
    end: &(dyn Fn() -> T + Sync),
) -> Result<Race<T>, BenchError>
where
    VcpuCore<M>: Send,
{
    let bring = exits.then(|| Bring::all(host.ram().pages(), plan));
    let stage = Stage::<M>::new(host, plan, bring.as_ref().map(Bring::missing))?;
    let install = |page: RamPage| {
        // Only a clock looks at this.
        Clock::was_missing();
        let Some(bring) = &bring else {
            return Err(BenchError::Memslot(format!("{page:?} is not missing")));
        };
        let write = |bytes: &_| {
            host.ram().write(page, bytes);
            Ok(())
        };
        bring.page(page, write, || Ok(()))
    };
    let layout = &stage.layout;
    let runners = stage
        .vcpus
        .into_iter()
        .map(|core| Vcpu { core, layout })
        .collect();
    let race = race(runners, before, &install, end)?;
    plan.check(|page| first_word(host.ram(), page))?;
    bring.as_ref().map_or(Ok(()), Bring::check)?;
    Ok(race)
}

/// The first word of a page.
pub(super) fn first_word(ram: &GuestRam, page: u64) -> u64 {
    #[expect(
        clippy::cast_ptr_alignment,
        reason = "a page is aligned to more than a word"
    )]
    let word = ram.alias(RamPage(page), 1).cast::<u64>();
    // SAFETY: the page is inside the mapping, which lives as long as `ram`; volatile, as `GuestRam`
    // asks.
    u64::from_le(unsafe { word.read_volatile() })
}

/// Nanoseconds that leaving and entering the guest take: of a vCPU that does nothing but store to
/// an address without memory.
pub(crate) fn exit_and_entry(host: &Arc<Host>, plan: &Plan, exits: u32) -> Result<f64, BenchError> {
    let mut stage = Stage::<pageferry_hypervisor::Scalable>::new(host, plan, None)?;
    let mut vcpu = Vcpu {
        core: stage.vcpus.remove(0),
        layout: &stage.layout,
    };
    // Its program first, then it rings for ever.
    let mut finished = || match vcpu.run()? {
        Left::Finished => Ok(()),
        other => Err(BenchError::Memslot(format!(
            "unexpected exit of the guest: {other:?}"
        ))),
    };
    finished()?;
    let began = Instant::now();
    for _ in 0..exits {
        finished()?;
    }
    Ok(began.elapsed().as_nanos() as f64 / f64::from(exits))
}
