#![expect(unsafe_code, reason = "places pages")]
//! The same guests on KVM, through the traits of `pageferry-machine`.
//!
//! Host memory is allocated before, as on the soft engine. One userfaultfd covers all guest memory,
//! as in a migration. One or more threads serve the faults that it delivers as events; they take
//! events in turns, under a lock, and install pages in parallel. Faults that are delivered as exits
//! are served on the vCPU's own thread.

use super::missing::{BYTES, MissingPages, Serving};
use super::plan::Plan;
use super::race::{GuestExit, Race, Runner, is_finished, race};
use super::soft::first_word;
use crate::BenchError;
use crate::vm::isa_of;
use pageferry_addr::RamPage;
use pageferry_guest::Isa;
use pageferry_harness::{deliveries_of, start_of, write_image};
use pageferry_machine::{Delivery, Engine, Exit, FaultEvents, MachineSpec, Vcpu};
use pageferry_migration::FAULT_SPIN;
use pageferry_migration::channel::Spinner;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

struct OnMachine(Box<dyn Vcpu>);

impl Runner for OnMachine {
    fn run(&mut self) -> Result<GuestExit, BenchError> {
        match self.0.run()? {
            Exit::MemoryFault { page, .. } => Ok(GuestExit::Missing(page)),
            Exit::Kicked => Ok(GuestExit::Kicked),
            Exit::MmioWrite { value, .. } if is_finished(value) => Ok(GuestExit::Finished),
            exit => Err(BenchError::unexpected_exit(&exit)),
        }
    }

    fn kicker(&self) -> Box<dyn Fn() + Send + Sync> {
        let kicker = self.0.kicker();
        Box::new(move || kicker.kick())
    }
}

/// The instruction set of guests on this engine.
pub(super) fn isa(engine: Engine) -> Isa {
    isa_of(engine)
}

/// Whether machines of `engine` have `delivery` on this host.
pub(super) fn has(engine: Engine, delivery: Delivery) -> bool {
    deliveries_of(engine).contains(&delivery)
}

/// Runs all vCPUs over all their pages. With a `delivery`, every page is missing at first, and
/// faults are served as `serving` says.
///
/// # Errors
/// [`BenchError::WrongValue`] if a page does not hold the stored value.
pub(super) fn touch(
    engine: Engine,
    plan: &Plan,
    delivery: Option<Delivery>,
    serving: Serving,
) -> Result<Race<()>, BenchError> {
    let new = pageferry_machine::create(
        engine,
        MachineSpec {
            vcpus: plan.vcpus(),
            memory_bytes: plan.toucher.memory_map().memory_bytes(),
        },
    )?;
    let (machine, mut vcpus) = (new.machine, new.vcpus);
    let ram = machine.ram();
    ram.allocate()?;
    let program = plan.toucher.program();
    write_image(&*machine, program)?;
    for (id, vcpu) in (0..).zip(&mut vcpus) {
        vcpu.set_start(&start_of(program, id))?;
    }
    let missing = match delivery {
        Some(_) => Some(MissingPages::all(ram.pages(), plan, serving)?),
        None => None,
    };
    let mut events = None;
    if let (Some(delivery), Some(missing)) = (delivery, &missing) {
        events = machine.arm_userfault(missing.bitmap().clone(), Some(delivery))?;
        machine.begin_postcopy()?;
        machine.assist_postcopy(&|| false, &|_| {})?;
    }
    let install = |vcpu: Option<usize>, page: RamPage| {
        let Some(missing) = &missing else {
            return Err(BenchError::Hypervisor(format!("{page:?} is not missing")));
        };
        let in_place = machine.receives_in_place();
        let map = || match in_place {
            true => Ok(machine.install(page, 1)?),
            // The copy has mapped the page already.
            false => Ok(()),
        };
        let write = |first: RamPage, pages: u64| {
            for page in (first.0..first.0 + pages).map(RamPage) {
                if in_place {
                    // SAFETY: (1) `missing` calls this for pages that it has claimed, once each.
                    unsafe { machine.ram().unchecked() }.write(page, &BYTES);
                } else {
                    machine.install_copy(page, &BYTES)?;
                }
            }
            if in_place {
                machine.install(first, pages)?;
            }
            Ok(())
        };
        missing.install(vcpu, page, write, map)
    };
    let done = AtomicBool::new(false);
    let runners = vcpus.into_iter().map(OnMachine).collect();
    let events = events.map(Events::new).transpose()?;
    let mut outcome = std::thread::scope(|scope| {
        let readers: Vec<_> = events
            .iter()
            .flat_map(|events| (0..serving.readers).map(move |_| events))
            .map(|events| {
                let (install, done) = (&install, &done);
                scope.spawn(move || events.serve(&|page| install(None, page), done))
            })
            .collect();
        let on_vcpu = |vcpu, page| install(Some(vcpu), page);
        let outcome = race(runners, &|| {}, &on_vcpu, &|| ());
        done.store(true, Ordering::Release);
        // The error of the installation is the cause. The guests only report that they waited.
        readers
            .into_iter()
            .filter_map(|reader| reader.join().ok()?.err())
            .next()
            .map_or(outcome, Err)
    })?;
    plan.check(|page| first_word(machine.ram(), page))?;
    if let Some(missing) = missing {
        missing.check()?;
        outcome.fault_ns = missing.fault_to_fault();
    }
    Ok(outcome)
}

/// The fault events of a machine, for several readers.
struct Events {
    events: Mutex<Box<dyn FaultEvents>>,
    /// The same descriptor, so that a reader can sleep without the lock.
    fd: OwnedFd,
}

impl Events {
    fn new(events: Box<dyn FaultEvents>) -> Result<Self, BenchError> {
        let fd = events
            .fd()
            .try_clone_to_owned()
            .map_err(|source| BenchError::Os {
                what: "cannot duplicate the userfaultfd",
                source,
            })?;
        Ok(Self {
            events: Mutex::new(events),
            fd,
        })
    }

    /// Installs the pages that events ask for, until `done`. Several threads may call it at once.
    fn serve(
        &self,
        install: &dyn Fn(RamPage) -> Result<(), BenchError>,
        done: &AtomicBool,
    ) -> Result<(), BenchError> {
        let mut spinner = Spinner::new(FAULT_SPIN);
        while !done.load(Ordering::Acquire) {
            // A panic leaves no event half taken.
            let event = self
                .events
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .next()?;
            if let Some(event) = event {
                install(event.page)?;
                spinner = Spinner::new(FAULT_SPIN);
            } else if !spinner.spin() {
                let limit = Timespec {
                    tv_sec: 0,
                    tv_nsec: 5_000_000,
                };
                // The loop retries in any case.
                let _ = poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], Some(&limit));
            }
        }
        Ok(())
    }
}
