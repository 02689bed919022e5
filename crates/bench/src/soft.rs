//! `bench soft`: guest instructions per second of our own hypervisor, with the demo's workload.

use crate::args::Common;
use crate::row::cores;
use crate::vm::{Vm, isa_of};
use crate::{BenchError, Bound, Conditions, Row, Samples, rounds};
use pageferry_guest::{Control, Workload};
use pageferry_machine::{Engine, MachineSpec};
use std::time::{Duration, Instant};

const MEMORY: u64 = 32 << 20;
const WARM_UP: Duration = Duration::from_millis(500);
const MEASURED: Duration = Duration::from_millis(1500);

/// Runs `bench soft` and returns its rows.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn soft(common: &Common) -> Result<Vec<Row>, BenchError> {
    let (repeat, cores) = (common.rounds(5, 1), cores());
    let mut rows = Vec::new();
    for vcpus in [1, cores.max(2)] {
        let mut rates = Samples::default();
        for _ in rounds(repeat, format!("interpreting with {vcpus} vCPUs")) {
            rates.push(rate(vcpus)? / f64::from(vcpus.min(cores)));
        }
        let note =
            "demo workload; pages done times the program's instructions per page, by wall clock";
        rows.push(
            rates
                .row(
                    "soft.instructions",
                    format!("{vcpus} vCPUs, per core"),
                    "instructions/s",
                    Conditions::here(vcpus, MEMORY, note),
                )
                .aiming_at(Bound::AtLeast(60e6)),
        );
    }
    Ok(rows)
}

fn rate(vcpus: u32) -> Result<f64, BenchError> {
    let workload = Workload::new(isa_of(Engine::Soft), vcpus, MEMORY)?;
    let vm = Vm::create(Engine::Soft, MachineSpec::new(vcpus, MEMORY), None)?;
    vm.load(workload.program())?;
    let done = || -> Result<u64, BenchError> {
        (0..vcpus).try_fold(0, |sum, vcpu| {
            let mut page = [0; 4096];
            let ram = vm.machine.ram();
            ram.try_read(workload.control_page(vcpu), &mut page)?;
            Ok(sum + Control::parse(&page)?.done)
        })
    };
    vm.threads.resume();
    std::thread::sleep(WARM_UP);
    let (before, began) = (done()?, Instant::now());
    std::thread::sleep(MEASURED);
    let (after, took) = (done()?, began.elapsed());
    let a_page = workload
        .instructions_per_page()
        .ok_or_else(|| BenchError::Setting("the program's instructions are not counted".into()))?;
    Ok((after - before) as f64 * a_page / took.as_secs_f64())
}
