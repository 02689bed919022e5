//! The blackout of Linux under load, beside that of the test guest with as much memory.

use super::lines::{Line, Splitter, parse};
use super::{Conditions, Guest, LIMIT, soft};
use crate::blackout::{MEMORY, VCPUS, role};
use crate::link::receive_by;
use crate::peer::{LOOPBACK, Peer, Role, listen};
use crate::vm::Vm;
use crate::{BenchError, Bound, Conditions as HowMeasured, Row, Samples};
use pageferry_machine::{Backing, Console, Engine};
use pageferry_migration::DestinationConfig;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

const LOAD: &str = "console=hvc0 panic=-1 quiet pf=load pf_mib=256";
/// The longest wait for text.
const INTERVAL: Duration = Duration::from_millis(20);
/// The time for which the load runs before the move.
const WARM_UP: Duration = Duration::from_secs(2);
/// The lines of the first process that show that the guest runs on.
const LINES: u32 = 10;

/// The milliseconds without a running vCPU.
#[derive(Default)]
pub(super) struct Moves {
    linux_ms: Samples,
    test_guest_ms: Samples,
}

impl Moves {
    /// Moves each guest once.
    pub(super) fn measure(&mut self, conditions: &Conditions<'_>) -> Result<(), BenchError> {
        let (blackout_ms, _) = conditions.blackout(&role(Engine::Soft, MEMORY))?;
        self.test_guest_ms.push(blackout_ms);
        let setting = conditions.setting;
        let (blackout_ms, vm) = conditions.blackout(&Role::Linux {
            kernel: setting.kernel.clone(),
            initrd: setting.initrd.clone(),
        })?;
        let console = vm.machine.console();
        let console = console.ok_or_else(|| BenchError::Stopped("Linux has no console".into()))?;
        let deadline = Instant::now() + LIMIT;
        listen_to(&vm, console, LINES, &|| {
            conditions.go_on(deadline, "Linux after its move")
        })?;
        self.linux_ms.push(blackout_ms);
        Ok(())
    }

    pub(super) fn rows(&self) -> Vec<Row> {
        let how = |note| HowMeasured::here(VCPUS, MEMORY, note);
        let note = "as bench blackout: the test guest, all vCPUs rewrite memory all the time";
        let bare = &self.test_guest_ms;
        vec![
            bare.row("blackout", "soft", "ms", how(note)),
            self.linux_ms
                .row(
                    "linux.blackout",
                    "soft",
                    "ms",
                    how("as blackout; Linux rewrites and checks 256 MiB and files, beside a timer"),
                )
                .against("blackout", bare.median())
                .aiming_at("ratio <= 1.5", Bound::RatioAtMost(1.5)),
        ]
    }
}

impl Conditions<'_> {
    /// Moves the VM of `role` from another process to this one.
    fn blackout(&self, role: &Role) -> Result<(f64, Vm), BenchError> {
        let mut peer = Peer::start_by(Command::new(&self.setting.executable), role)?;
        let deadline = Instant::now() + LIMIT;
        let stop = || (self.stop)() || Instant::now() > deadline;
        let config = DestinationConfig::default();
        let moved = receive_by(&mut peer, listen(LOOPBACK)?, Backing::Shmem, config, &stop);
        if moved.is_err() {
            // An interrupt ends the other process too.
            self.go_on(deadline, "a move of a VM")?;
        }
        let (report, vm) = moved?;
        let sent = peer.read_figures()?;
        let first = report
            .first_instruction_ns
            .ok_or_else(|| BenchError::Busy("no sign of the first instruction".into()))?;
        let ns = first.saturating_sub(sent.last_stop_ns);
        Ok((ns as f64 / 1e6, vm))
    }
}

/// Starts Linux under load, in the process of the source.
pub(crate) fn source(kernel: &Path, initrd: &Path) -> Result<Vm, BenchError> {
    let guest = Guest::read(kernel, initrd)?;
    let (vm, console) = soft::start(&guest.linux(LOAD), VCPUS, MEMORY)?;
    let late = Instant::now() + LIMIT;
    let go_on = || match Instant::now() > late {
        true => Err(BenchError::Busy("Linux under load did not start".into())),
        false => Ok(()),
    };
    listen_to(&vm, &console, LINES, &go_on)?;
    let warm = Instant::now() + WARM_UP;
    while Instant::now() < warm {
        listen_to(&vm, &console, 1, &go_on)?;
    }
    Ok(vm)
}

/// Reads `lines` lines of the first process. The others are the kernel's, or halves of lines.
fn listen_to(
    vm: &Vm,
    console: &Console,
    lines: u32,
    go_on: &dyn Fn() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    let (mut splitter, mut seen) = (Splitter::default(), 0);
    while seen < lines {
        for line in splitter.take(&console.read(INTERVAL)) {
            match parse(&line)? {
                Some(Line::Done) => {
                    return Err(BenchError::Stopped("its load ended".into()));
                }
                Some(_) => seen += 1,
                None => {}
            }
        }
        soft::check(vm)?;
        go_on()?;
    }
    Ok(())
}
