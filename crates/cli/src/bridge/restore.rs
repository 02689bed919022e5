//! `pageferry restore --for ch:..`: a VM of Cloud Hypervisor starts before its memory is read.
//!
//! **Mechanism.** The crate `bridge` restores, in a thread. This one answers requests to stop. Once
//! the VM may run, the first of them waits for its memory, and the second one ends it.

use super::keeper;
use crate::args::RestoreArgs;
use crate::exit::{Exit, Failure, of_vmm};
use crate::host::{Answers, StopRequests, catch_defect, wait_for_outcome};
use crate::output;
use crate::signals::Interrupts;
use pageferry_bridge::ch::{
    RestoreOptions, RestoreReport, Restoring, Snapshot, SnapshotError, restore as restore_into,
};
use pageferry_bridge::foreign::end_keepers;
use pageferry_charts::time;
use pageferry_harness::size::human;
use pageferry_pager::{Format, SourceError};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

fn of_snapshot(directory: &Path, why: &SnapshotError) -> Failure {
    let exit = match why {
        SnapshotError::Source(SourceError::Damaged { .. }) => Exit::Protocol,
        SnapshotError::Source(_) => Exit::Usage,
        SnapshotError::Unfit(_) => Exit::Declined,
        _ => Exit::Protocol,
    };
    let directory = directory.display();
    Failure::new(exit, format!("cannot restore from {directory}: {why}"))
}

/// Restores a snapshot into the Cloud Hypervisor process with this API socket, until that has all
/// memory.
///
/// # Errors
/// Why the VM does not run.
pub(super) fn restore(
    api: &Path,
    args: &RestoreArgs,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let format = match args.packed {
        true => Format::Packed,
        false => Format::Raw,
    };
    let opened = Snapshot::open(&args.directory, &args.stores.open()?, format);
    let (snapshot, memory) = opened.map_err(|why| of_snapshot(&args.directory, &why))?;
    let vcpus = snapshot.vcpus().unwrap_or_default();
    let bytes = snapshot.memory_bytes();
    let mut options = RestoreOptions {
        api: api.to_owned(),
        resume: args.resume,
        keeper: keeper(),
    };
    let resume = args.resume;
    let [stop, loaded] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
    let (stopping, loading) = (Arc::clone(&stop), Arc::clone(&loaded));
    let (sender, outcome) = channel();
    let thread = std::thread::Builder::new()
        .name("restore".into())
        .spawn(move || {
            let stop = || stopping.load(Ordering::Acquire);
            let tell = |happened: Restoring<'_>| match happened {
                Restoring::Loaded => {
                    loading.store(true, Ordering::Release);
                    output::note(match resume {
                        true => "the VM runs; its memory comes",
                        false => "the VM is there, paused; its memory comes",
                    });
                }
                Restoring::GoesOn => {
                    output::note("going on with the restore that an earlier one left behind");
                }
                Restoring::Lost(why) => output::note(&format!(
                    "the VM waits for a page that cannot be read, which is tried again: {why}"
                )),
                Restoring::Found => output::note("the page could be read: the VM goes on"),
                _ => {}
            };
            let result =
                catch_defect(|| restore_into(&mut options, &snapshot, &*memory, &stop, &tell));
            let _ = sender.send(result);
        })
        .map_err(|e| Failure::os("cannot start the thread of the restore", e))?;
    let answers = Answers {
        switched_over: &|| loaded.load(Ordering::Acquire),
        cancel: &|_| stop.store(true, Ordering::Release),
        finishing: &|| {
            output::note("the VM still needs memory: to end it now, ask again");
        },
        hangup_cancels: true,
    };
    let mut stops = StopRequests::new(interrupts, None);
    let ended = wait_for_outcome(&outcome, &mut stops, &answers);
    stop.store(true, Ordering::Release);
    let ended =
        ended.map_err(|none| none.failure("the VM lacked memory, and ended with this command"));
    // The thread may wait for the source for long.
    let ended = ended.inspect_err(|_| end_keepers())?;
    // It has sent its outcome.
    let _ = thread.join();
    let report = ended?.map_err(|why| match of_vmm(&why) {
        Exit::Cancelled => Failure::new(Exit::Cancelled, "cancelled: no VM was restored"),
        exit => Failure::new(exit, why.to_string()),
    })?;
    if args.json {
        output::json(&to_json(&report, vcpus, bytes, args.resume));
    } else {
        output::note("Cloud Hypervisor has all memory of the VM");
        output::result(&table(&report, vcpus, bytes));
    }
    Ok(())
}

fn ms(took: Duration) -> f64 {
    (took.as_secs_f64() * 1e6).round() / 1e3
}

fn to_json(report: &RestoreReport, vcpus: u32, bytes: u64, resumed: bool) -> Value {
    json!({
        "engine": "cloud-hypervisor",
        "vcpus": vcpus,
        "memory_bytes": bytes,
        "resumed": resumed,
        "loaded_ms": ms(report.loaded),
        "ready_ms": ms(report.ready),
        "total_ms": ms(report.took),
        "requests": report.requests,
        "waits": report.waits,
        "waited_ms": ms(report.waited),
        "longest_wait_ms": ms(report.longest_wait),
        "reads": report.reads,
        "read_bytes": report.read_bytes,
        "failed_reads": report.failed_reads,
    })
}

fn table(report: &RestoreReport, vcpus: u32, bytes: u64) -> String {
    let mut table = String::new();
    let mut row = |name: &str, value: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(table, "  {name:<12}{value}");
    };
    let micros = |took: Duration| time(took.as_secs_f64() * 1e6);
    row("restored", format!("{vcpus} vCPUs, {}", human(bytes)));
    row("ready", format!("after {}", micros(report.ready)));
    row("all memory", format!("after {}", micros(report.took)));
    let read = human(report.read_bytes);
    row("read", format!("{read} by {} reads", report.reads));
    if report.failed_reads > 0 {
        row("failed", format!("{} reads, repeated", report.failed_reads));
    }
    let longest = match report.waits {
        0 => String::new(),
        _ => format!(", {} at most", micros(report.longest_wait)),
    };
    let (waits, all) = (report.waits, report.requests);
    row("waits", format!("{waits} of {all} requests{longest}"));
    table
}
