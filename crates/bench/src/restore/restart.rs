//! A pager that is killed beside many VMs, and started again.

use super::paced::{self, Paced};
use super::vmm::{Memory, Restored};
use super::write_memory;
use crate::error::os;
use crate::peer::{Part, Peer, read_line, send_line};
use crate::{BenchError, Bound, Conditions, Row, Samples, rounds};
use pageferry_pager::{Name, Pager, Restore, Settings};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The VMs.
const VMS: u32 = 100;
/// The memory of each.
const MEMORY: u64 = 16 << 20;
/// The time between two touches of a VM: all together have 5 000 faults a second.
const PACE: Duration = Duration::from_millis(20);
/// The time in which VMs run before the pager is killed, and after it has come back.
const RUN: Duration = Duration::from_millis(500);

/// A pager in a process of its own, with a restore for each VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Restarted {
    /// Its directory. Sockets are beside it.
    pub(crate) directory: PathBuf,
    /// The memory file of all VMs.
    pub(crate) memory: PathBuf,
}

impl Restarted {
    fn socket(&self, vm: u32) -> PathBuf {
        self.directory.with_extension(format!("{vm}.sock"))
    }
}

impl Part for Restarted {
    const NAME: &'static str = "restarted";

    /// Serves the VMs of a former pager, or new ones, until standard input ends.
    fn play(&self) -> Result<(), BenchError> {
        let settings = Settings {
            directory: self.directory.clone(),
            ..Settings::default()
        };
        let pager = Pager::start(settings).map_err(BenchError::peer)?;
        let taken = pager.list().len();
        for vm in 0..if taken == 0 { VMS } else { 0 } {
            let name: Name = format!("vm-{vm}").parse().map_err(BenchError::peer)?;
            let restore = Restore::new(&self.memory, self.socket(vm));
            pager.restore(&name, restore).map_err(BenchError::peer)?;
        }
        send_line(&format!("ready {taken}"))?;
        read_line().map(drop)
    }
}

/// Measures a restart, in `repeat` rounds.
pub(super) fn measure(repeat: u32, scratch: &Path) -> Result<Vec<Row>, BenchError> {
    let memory = scratch.join("small");
    write_memory(&memory, MEMORY).map_err(os("cannot write a memory file"))?;
    let (mut served, mut longest) = (Samples::default(), Samples::default());
    for round in rounds(repeat, format!("killing the pager of {VMS} VMs")) {
        let pager = Restarted {
            directory: scratch.join(format!("restarted-{round}")),
            memory: memory.clone(),
        };
        let (again, stall_us) = one(&pager)?;
        served.push(again.as_secs_f64() * 1e3);
        longest.push(stall_us / 1e3);
    }
    let note = format!("{VMS} VMMs without guests, each touches a page in {PACE:?}");
    let subject = "pager that is killed and started again";
    let limit = served.median() + 50.0;
    let row = |samples: &Samples, case| {
        let conditions = Conditions::here(0, MEMORY, note.clone());
        samples.row(case, subject, "ms", conditions)
    };
    Ok(vec![
        row(&served, "restore.restart").aiming_at(Bound::Below(100.0)),
        row(&longest, "restore.restart_fault").aiming_at(Bound::Below(limit)),
    ])
}

/// One restart: the time from the kill until all VMs are served, and the longest touch in
/// microseconds.
fn one(pager: &Restarted) -> Result<(Duration, f64), BenchError> {
    let mut first = Peer::start(pager)?;
    first.expect("ready 0")?;
    let mut vmms = Vec::new();
    for vm in 0..VMS {
        let vmm = Paced {
            vm: Restored {
                memory: Memory::Pager(pager.socket(vm)),
                bytes: MEMORY,
                working_set: MEMORY,
                threads: 1,
            },
            pace: PACE,
        };
        vmms.push(Peer::start(&vmm)?);
    }
    for vmm in &mut vmms {
        vmm.expect("ready")?;
    }
    std::thread::sleep(RUN);
    // The start of so many processes has stalls of its own.
    for vmm in &mut vmms {
        vmm.send_line("count")?;
    }
    std::thread::sleep(2 * PACE);
    let killed = Instant::now();
    drop(first);
    let mut second = Peer::start(pager)?;
    second.expect(&format!("ready {VMS}"))?;
    let again = killed.elapsed();
    std::thread::sleep(RUN);
    let mut longest = 0.0;
    for vmm in &mut vmms {
        longest = f64::max(longest, paced::end(vmm)?.longest_us);
    }
    Ok((again, longest))
}
