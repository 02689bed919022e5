//! The cost of an exit and a resume alone. The vCPU faults on a page whose bytes are already in
//! place, and the fault is resolved at once, without a network.

use crate::demand_paging::serve;
use crate::vm::{Faults, LIMIT, create, fill, toucher};
use crate::{BenchError, Samples};
use pageferry_addr::RamPage;
use pageferry_guest::TouchOrder;
use pageferry_machine::{Access, Delivery, Engine, HookVerdict, Kicker, Machine};
use pageferry_migration::monotonic;
use pageferry_userfault::PageBitmap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// Resolves every fault at once, and records when it arrived.
struct InstantResolver {
    vm: OnceLock<(Arc<dyn Machine>, Arc<PageBitmap>)>,
    arrivals: Mutex<Vec<Duration>>,
}

impl InstantResolver {
    fn resolve(&self, page: RamPage) {
        let at = monotonic();
        if let Some((machine, missing)) = self.vm.get() {
            // If a page cannot be installed, the guest keeps faulting on it until the run times
            // out.
            let _ = machine.install(page, 1);
            if missing.clear(page) {
                self.arrivals
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(at);
            }
        }
    }
}

impl Faults for InstantResolver {
    fn memory_fault(&self, _: u32, page: RamPage, _: Access, _: &dyn Kicker) -> HookVerdict {
        self.resolve(page);
        HookVerdict::Resume
    }
}

/// Microseconds from one fault to the next, of a vCPU that only touches missing pages.
pub(crate) fn exit_and_resume(
    engine: Engine,
    delivery: Delivery,
    memory_bytes: u64,
) -> Result<Samples, BenchError> {
    let faults = Arc::new(InstantResolver {
        vm: OnceLock::new(),
        arrivals: Mutex::new(Vec::new()),
    });
    let vm = create(
        engine,
        1,
        memory_bytes,
        Arc::clone(&faults) as Arc<dyn Faults>,
    )?;
    let program = toucher(engine, 1, memory_bytes, u64::MAX, TouchOrder::Random)?;
    let pages = vm.machine.ram().pages();
    vm.machine.ram().allocate()?;
    let data = program.memory_map().data();
    fill(&vm, data.clone())?;
    vm.load(program.program())?;
    let missing = Arc::new(PageBitmap::new(pages as usize));
    missing.set_range(data.start as usize..data.end as usize);
    let events = vm
        .machine
        .arm_userfault(Arc::clone(&missing), delivery.into())?;
    let _ = faults
        .vm
        .set((Arc::clone(&vm.machine), Arc::clone(&missing)));
    vm.machine.begin_postcopy()?;
    let done = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        for mut events in events {
            let (faults, done) = (&faults, &done);
            let resolve = |page| {
                faults.resolve(page);
                Ok(())
            };
            scope.spawn(move || serve(events.as_mut(), &resolve, done));
        }
        let run = || -> Result<(), BenchError> {
            vm.machine.assist_postcopy(&|| false, &|_| {})?;
            vm.threads.resume();
            Ok(vm.wait_finished(LIMIT)?)
        };
        let outcome = run();
        done.store(true, Ordering::Release);
        outcome
    });
    outcome?;
    let arrivals = faults
        .arrivals
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    Ok(gaps_us(&arrivals))
}

/// The differences between successive times, in microseconds.
pub(crate) fn gaps_us(times: &[Duration]) -> Samples {
    times
        .windows(2)
        .map(|pair| pair[1].saturating_sub(pair[0]).as_secs_f64() * 1e6)
        .collect()
}
