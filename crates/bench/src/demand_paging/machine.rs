#![expect(unsafe_code, reason = "places pages")]
//! The same guests on KVM, through the traits of `pageferry-machine`.
//!
//! Host memory is allocated before, as on the soft engine. Faults that are delivered as events are
//! read from the machine's streams, as in a migration: each stream has a thread, and the threads
//! install pages in parallel. Faults that are delivered as exits are served on the vCPU's own
//! thread.

use super::missing::{BYTES, MissingPages, Reading, Serving};
use super::plan::Plan;
use super::race::{GuestExit, Race, Runner, is_finished, race};
use super::soft::first_word;
use crate::BenchError;
use pageferry_addr::{Hva, RamPage};
use pageferry_harness::{start_of, write_image};
use pageferry_machine::{
    ArmOptions, Delivery, Engine, Exit, FaultEvents, GuestRam, MachineSpec, Vcpu,
};
use pageferry_migration::{FAULT_SPIN, prefer_short_slices};
use pageferry_transport::channel::Spinner;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

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
    let bytes = plan.toucher.memory_map().memory_bytes();
    let spec = MachineSpec {
        backing: plan.backing,
        ..MachineSpec::new(plan.vcpus(), bytes)
    };
    let new = pageferry_machine::create(engine, spec)?;
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
    let mut streams = Vec::new();
    if let (Some(delivery), Some(missing)) = (delivery, &missing) {
        let mut options = ArmOptions::from(delivery);
        if let Reading::Streams {
            userfaultfds,
            readers,
        } = serving.reading
        {
            (options.userfaultfds, options.readers) = (userfaultfds, readers);
        }
        streams = machine.arm_userfault(missing.bitmap().clone(), options)?;
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
        let write = || {
            if !in_place {
                return Ok(machine.install_copy(page, &BYTES)?);
            }
            // SAFETY: (1) `missing` calls this for a page that it has claimed, once.
            unsafe { machine.ram().unchecked() }.write(page, &BYTES);
            Ok(machine.install(page, 1)?)
        };
        missing.install(vcpu, page, write, map)
    };
    let done = AtomicBool::new(false);
    let runners = vcpus.into_iter().map(OnMachine).collect();
    let mut outcome = std::thread::scope(|scope| {
        let readers: Vec<_> = streams
            .into_iter()
            .map(|mut events| {
                let (install, done) = (&install, &done);
                scope.spawn(move || {
                    let install = |page| install(None, page);
                    match serving.reading {
                        Reading::Plain => serve_plainly(events.as_ref(), ram, &install, done),
                        Reading::Streams { .. } => serve(events.as_mut(), &install, done),
                    }
                })
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

/// Installs the pages that events ask for, until `done`. It waits the way the fault thread of a
/// migration does.
fn serve(
    events: &mut dyn FaultEvents,
    install: &dyn Fn(RamPage) -> Result<(), BenchError>,
    done: &AtomicBool,
) -> Result<(), BenchError> {
    prefer_short_slices();
    let mut spinner = Spinner::new(FAULT_SPIN);
    while !done.load(Ordering::Acquire) {
        if let Some(event) = events.next()? {
            install(event.page)?;
            spinner = Spinner::new(FAULT_SPIN);
        } else if !spinner.spin() {
            sleep(events.fd());
        }
    }
    Ok(())
}

/// [`serve`] as [`Reading::Plain`].
fn serve_plainly(
    events: &dyn FaultEvents,
    ram: &GuestRam,
    install: &dyn Fn(RamPage) -> Result<(), BenchError>,
    done: &AtomicBool,
) -> Result<(), BenchError> {
    // `struct uffd_msg` of a page fault: its type, then its flags and its address.
    let mut message = [[0; 8]; 4];
    while !done.load(Ordering::Acquire) {
        sleep(events.fd());
        match rustix::io::read(events.fd(), message.as_flattened_mut()) {
            Ok(_) => {
                let address = Hva(u64::from_ne_bytes(message[2]));
                ram.page_at_guest_hva(address).map_or(Ok(()), install)?;
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(e) => {
                return Err(BenchError::Os {
                    what: "cannot read a userfaultfd",
                    source: e.into(),
                });
            }
        }
    }
    Ok(())
}

/// Sleeps until events wait, or a little longer: the caller looks again in any case.
fn sleep(events: BorrowedFd<'_>) {
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: 5_000_000,
    };
    let _ = poll(&mut [PollFd::new(&events, PollFlags::IN)], Some(&limit));
}
