//! `pageferry run`: a VM that can be migrated away.

use crate::args::RunArgs;
use crate::control::server::Server;
use crate::exit::Failure;
use crate::host::{Activity, Ended, Host, HostService};
use crate::output;
use crate::signals::Interrupts;
use crate::size;
use crate::vm::{GuestDescription, Vm, check_backing};
use std::sync::Arc;

/// Runs a VM until it has left or somebody asks for its end.
///
/// # Errors
/// The reason why the VM does not run.
pub(crate) fn run(args: &RunArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let (engine, because) = pageferry_machine::select(args.machine.engine)?;
    let guest = GuestDescription::new(engine, args.machine.vcpus, args.machine.memory);
    guest.workload()?;
    let backing = args.backing.backing;
    check_backing(backing, guest.memory_bytes, 1)?;
    let (host, jobs) = Host::new();
    let server = Server::start(&args.control, Arc::new(HostService(Arc::clone(&host))))?;
    let _metrics = crate::metrics::serve(&args.metrics, &host)?;
    let vm = Arc::new(Vm::create(&guest, backing, None)?);
    vm.boot()?;
    host.set_vm(Some(&vm));
    host.set_activity(Activity::Here);
    output::note(&format!(
        "a VM with {} vCPUs and {} runs on {engine} ({because}); control socket {}",
        guest.vcpus,
        size::human(guest.memory_bytes),
        args.control.display()
    ));
    let ended = host.keep(&jobs, interrupts)?;
    drop(server);
    match ended {
        Ended::Asked => output::note("the VM was ended"),
        Ended::Migrated(to) => output::result(&format!("the VM runs at {to} now\n")),
    }
    Ok(())
}
