//! The blackout of Linux under load, and its waits for missing pages, beside those of the test
//! guest with as much memory.

use super::lines::Splitter;
use super::{Guest, LIMIT, go_on, soft};
use crate::blackout::{self, MEMORY, VCPUS};
use crate::mover::{SourceFigures, receive_by, send_vm};
use crate::peer::{LOOPBACK, Part, Peer, listen};
use crate::vm::Vm;
use crate::{BenchError, Bound, Conditions, Row, Samples};
use pageferry_harness::guest_linux::GuestLinux;
use pageferry_machine::{Backing, Console, Engine};
use pageferry_migration::{DestinationConfig, SourceConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const LOAD: &str = "console=hvc0 panic=-1 quiet pf=load pf_mib=256";
/// The longest wait for text.
const INTERVAL: Duration = Duration::from_millis(20);
/// The time for which the load runs before the move.
pub(super) const WARM_UP: Duration = Duration::from_secs(2);
/// The lines of the first process that show that the guest runs on.
pub(super) const LINES: u32 = 10;

/// The moves of both guests.
#[derive(Default)]
pub(super) struct Moves {
    linux: Times,
    test_guest: Times,
}

/// What the moves of one guest took.
#[derive(Default)]
pub(super) struct Times {
    /// Milliseconds without a running vCPU.
    pub(super) blackouts: Samples,
    /// Microseconds for which a missing page stopped a vCPU: the median of each move.
    pub(super) pages: Samples,
    /// The same: the 99th percentile of each move.
    pub(super) late_pages: Samples,
}

impl Times {
    pub(super) fn push(&mut self, [blackout_ms, page_us, late_page_us]: [f64; 3]) {
        self.blackouts.push(blackout_ms);
        self.pages.push(page_us);
        self.late_pages.push(late_page_us);
    }
}

impl Moves {
    /// Moves each guest once.
    pub(super) fn measure(&mut self, guest: &Guest) -> Result<(), BenchError> {
        let (vm, times) = move_here(&blackout::source(Engine::Soft, MEMORY))?;
        self.test_guest.push(times);
        drop(vm);
        let (vm, times) = move_here(&LinuxSource {
            kernel: guest.files.kernel.clone(),
            initrd: guest.files.initrd.clone(),
        })?;
        let console = vm.machine.console();
        let console = console.ok_or_else(|| BenchError::Stopped("Linux has no console".into()))?;
        let deadline = Instant::now() + LIMIT;
        listen_to(&vm, console, LINES, deadline)?;
        self.linux.push(times);
        Ok(())
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        let how = |note| Conditions::here(VCPUS, MEMORY, note);
        let note = "as bench blackout: the test guest, all vCPUs rewrite memory all the time";
        let load = "as blackout; Linux rewrites and checks 256 MiB and files, beside a timer";
        let page = "the median of a move: from the fault of a vCPU on a missing page until it may go \
                    on; the page comes over the loopback interface";
        let (linux, bare) = (&self.linux, &self.test_guest);
        vec![
            bare.blackouts.row("blackout", "soft", "ms", how(note)),
            linux
                .blackouts
                .row("linux.blackout", "soft", "ms", how(load))
                .against("blackout", bare.blackouts.median())
                .aiming_at(Bound::RatioAtMost(1.5)),
            bare.pages.row("page", "soft", "us", how(page)),
            linux
                .pages
                .row("linux.page", "soft", "us", how(page))
                .against("page", bare.pages.median())
                .aiming_at(Bound::RatioAtMost(1.1)),
        ]
    }
}

/// Moves the VM of `source` from another process to this one. Returns it, and what [`Times`] has.
fn move_here(source: &impl Part) -> Result<(Vm, [f64; 3]), BenchError> {
    let mut peer = Peer::start(source)?;
    let deadline = Instant::now() + LIMIT;
    let stop = || crate::is_cancelled() || Instant::now() > deadline;
    let config = DestinationConfig::default();
    let moved = receive_by(&mut peer, listen(LOOPBACK)?, Backing::Shmem, config, &stop);
    if moved.is_err() {
        // An interrupt ends the other process too.
        go_on(deadline, "a move of a VM")?;
    }
    let (report, vm) = moved?;
    let sent = peer.figures::<SourceFigures>()?;
    let first = report
        .first_instruction
        .ok_or_else(|| BenchError::Busy("no sign of the first instruction".into()))?;
    let blackout = first.saturating_sub(sent.last_stop);
    let [page_us, late_page_us] =
        [0.5, 0.99].map(|q| report.stalls.value_at_quantile(q) as f64 / 1e3);
    Ok((vm, [blackout.as_secs_f64() * 1e3, page_us, late_page_us]))
}

/// Runs Linux under load, and moves it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LinuxSource {
    kernel: PathBuf,
    initrd: PathBuf,
}

impl Part for LinuxSource {
    const NAME: &'static str = "linux";

    fn play(&self) -> Result<(), BenchError> {
        let guest = Guest::read(GuestLinux {
            kernel: self.kernel.clone(),
            initrd: self.initrd.clone(),
        })?;
        let (vm, console) = soft::start(&guest.linux(LOAD), VCPUS, MEMORY)?;
        let deadline = Instant::now() + LIMIT;
        listen_to(&vm, &console, LINES, deadline)?;
        let warm = Instant::now() + WARM_UP;
        while Instant::now() < warm {
            listen_to(&vm, &console, 1, deadline)?;
        }
        send_vm(&vm, &SourceConfig::default(), 1)
    }
}

/// Reads `lines` lines of the first process. The others are the kernel's, or halves of lines.
fn listen_to(vm: &Vm, console: &Console, lines: u32, deadline: Instant) -> Result<(), BenchError> {
    let (mut splitter, mut seen) = (Splitter::default(), 0);
    while seen < lines {
        seen += splitter.seen(&console.read(INTERVAL))?;
        soft::check(vm)?;
        go_on(deadline, "the load of Linux")?;
    }
    Ok(())
}
