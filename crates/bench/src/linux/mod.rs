//! `bench linux`: how fast Linux runs on our own hypervisor, beside QEMU and beside a bare guest.
//! The module `kvm` measures how it moves on KVM.
//!
//! **Guarantee.** Every figure was measured by the run that prints it. The guests of all rows are
//! the same kernel with the same first process. A wrong value in a guest ends the benchmark.
//!
//! **Mechanism.** Each round starts Linux on the soft engine and, as a peer, on QEMU. The two take
//! turns in being first. The first process (`lab/guest-linux/init.c`) times what it does by the
//! guest's clock, and says so on the console (`lines`). Each round also runs the loop of the first
//! process in a bare guest (`bare`), and moves a loaded Linux from another process to this one
//! (`moved`). On request, Linux works for minutes after all rounds (`busy`).
//!
//! QEMU translates code, and our engine interprets it: arithmetic is about 10 times slower here.

mod bare;
mod busy;
mod figures;
mod kvm;
mod lines;
mod moved;
mod qemu;
mod soft;

use crate::args::{Common, PeerFlag};
use crate::{BenchError, Bound, Conditions, Row, Samples, note, stop_on_interrupt};
use bare::{BareLoop, INSTRUCTIONS, ROUNDS, measure_bare};
use clap::value_parser;
use figures::Figures;
use lines::UP;
pub(crate) use moved::LinuxSource;
use moved::Moves;
use pageferry_harness::{guest_linux, size};
use pageferry_machine::{Engine, Linux};
use pageferry_testkit::qemu::{self as testkit_qemu, Qemu};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The memory of guests that are timed, in bytes.
const MEMORY: u64 = 256 << 20;
/// The numbers of vCPUs. Only figures of one vCPU have targets.
const VCPUS: [u32; 2] = [1, 4];
/// The longest a guest may take for its work.
const LIMIT: Duration = Duration::from_secs(180);
/// The kernel's command line for timed work.
const MEASURE: &str = "console=hvc0 panic=-1 quiet pf=measure";
/// The name of the figure of the bare loop.
const BARE: &str = "bare.loop";

/// The figures of a start.
const CASES: [&str; 7] = [
    UP,
    "linux.up_wall",
    "linux.fork",
    "linux.exec",
    "linux.pipe",
    "linux.touch",
    "linux.loop_time",
];

/// How a figure is measured.
fn note_of(case: &str) -> &'static str {
    match case {
        UP => "from the kernel's first instructions to the first process; guest clock",
        "linux.up_wall" => {
            "from the start of the machine to the first process's first line; wall clock; QEMU's \
             includes its process and its firmware"
        }
        "linux.fork" => "a fork with exit and wait; guest clock",
        "linux.exec" => "the same with an exec; guest clock",
        "linux.pipe" => "a round trip of a byte through two pipes; guest clock",
        "linux.touch" => "the first store to a page; guest clock",
        _ => "20 million rounds of 13 instructions in a process; guest clock; QEMU translates code",
    }
}

/// The unit of a figure, and its nanoseconds.
fn unit_of(case: &str) -> (&'static str, f64) {
    match case {
        UP | "linux.up_wall" | "linux.loop_time" => ("ms", 1e6),
        _ => ("us", 1e3),
    }
}

/// The target of a figure beside QEMU's.
fn target(case: &str) -> Option<Bound> {
    match case {
        "linux.touch" => None,
        "linux.loop_time" => Some(Bound::RatioAtMost(10.0)),
        _ => Some(Bound::RatioAtMost(1.0)),
    }
}

/// `pageferry-bench linux`.
#[derive(Debug, clap::Args)]
pub(crate) struct LinuxFlags {
    /// The engine: on soft, Linux's speed and its moves; on kvm, its moves beside the test guest's,
    /// and reads of its disk
    #[arg(long, default_value = "soft", value_name = "kvm|soft")]
    engine: Engine,
    /// The kernel: an uncompressed riscv64 Image for RV64IMA, or for kvm a bzImage
    #[arg(long, value_name = "FILE", requires = "initrd")]
    kernel: Option<PathBuf>,
    /// Its initrd, with the first process of lab/guest-linux
    #[arg(long, value_name = "FILE", requires = "kernel")]
    initrd: Option<PathBuf>,
    /// Measure another hypervisor beside: the same kernel and initrd, emulated
    #[arg(long, value_name = "qemu", value_enum)]
    peer: Option<PeerFlag>,
    /// The program of the peer [default: qemu-system-riscv64; for kvm qemu-system-x86_64]
    #[arg(long, value_name = "FILE", requires = "peer")]
    peer_program: Option<PathBuf>,
    /// The memory of the guests that move on kvm
    #[arg(long, default_value = "512M", value_name = "SIZE", value_parser = size::parse)]
    memory: u64,
    /// On soft: minutes of mixed work at the end, 2 or more: the last one's speed next to the first
    /// one's
    #[arg(long, value_name = "N", value_parser = value_parser!(u32).range(2..=1440))]
    minutes: Option<u32>,
    #[command(flatten)]
    pub(crate) common: Common,
}

impl LinuxFlags {
    /// The QEMU to measure beside.
    fn qemu(&self) -> Option<PathBuf> {
        let default = match self.engine {
            Engine::Soft => testkit_qemu::PROGRAM,
            Engine::Kvm => "qemu-system-x86_64",
        };
        let named = self.peer_program.clone();
        self.peer.map(|_| named.unwrap_or_else(|| default.into()))
    }
}

/// The guest's files, and their contents.
struct Guest {
    files: guest_linux::GuestLinux,
    kernel: Vec<u8>,
    initrd: Vec<u8>,
}

impl Guest {
    fn read(files: guest_linux::GuestLinux) -> Result<Self, BenchError> {
        let read = |what, path: &PathBuf| {
            let wrong = |why| format!("the {what} {} cannot be read: {why}", path.display());
            std::fs::read(path).map_err(|why| BenchError::Setting(wrong(why)))
        };
        Ok(Self {
            kernel: read("kernel", &files.kernel)?,
            initrd: read("initrd", &files.initrd)?,
            files,
        })
    }

    fn linux<'a>(&'a self, command_line: &'a str) -> Linux<'a> {
        Linux {
            kernel: &self.kernel,
            initrd: Some(&self.initrd),
            command_line,
        }
    }
}

/// Checks that a wait for `what` may go on.
fn go_on(deadline: Instant, what: &str) -> Result<(), BenchError> {
    if crate::is_cancelled() {
        return Err(BenchError::Cancelled);
    }
    match Instant::now() > deadline {
        true => Err(BenchError::Busy(format!("{what} was not done in time"))),
        false => Ok(()),
    }
}

/// Runs `bench linux` and returns its rows. It ends early when the user asks.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn linux(flags: &LinuxFlags) -> Result<Vec<Row>, BenchError> {
    let (kernel, initrd) = (flags.kernel.as_deref(), flags.initrd.as_deref());
    let files = guest_linux::find(flags.engine, kernel, initrd).map_err(BenchError::Setting)?;
    let guest = Guest::read(files)?;
    let qemu = flags.qemu().as_deref().map(Qemu::find).transpose();
    let qemu = qemu.map_err(BenchError::Setting)?;
    stop_on_interrupt()?;
    let count = flags.common.rounds(7, 1);
    if flags.engine == Engine::Kvm {
        return kvm::linux_on_kvm(flags, &guest, qemu.as_ref(), count);
    }
    let mut rounds = Rounds::default();
    for round in 1..=count {
        for vcpus in VCPUS {
            note(&format!(
                "Linux with {vcpus} vCPUs, round {round} of {count}"
            ));
            rounds.measure(&guest, qemu.as_ref(), vcpus, round)?;
        }
        rounds.add_bare(&measure_bare(ROUNDS)?)?;
        note(&format!("moving Linux, round {round} of {count}"));
        rounds.moves.measure(&guest)?;
    }
    let mut rows = rounds.rows(qemu.as_ref());
    if let Some(minutes) = flags.minutes {
        rows.extend(guest.busy_rows(minutes)?);
    }
    Ok(rows)
}

/// The samples of all rounds.
#[derive(Default)]
struct Rounds {
    soft: BTreeMap<u32, Column>,
    qemu: BTreeMap<u32, Column>,
    /// Instructions a second.
    bare: Samples,
    moves: Moves,
    /// What every loop has computed.
    loop_result: Option<u64>,
}

/// The samples of one hypervisor with one number of vCPUs, by case and in its unit.
type Column = BTreeMap<&'static str, Samples>;

fn add(column: &mut Column, figures: &Figures) {
    for case in CASES {
        let samples = column.entry(case).or_default();
        samples.push(figures.ns[case] as f64 / unit_of(case).1);
    }
    let looped = column.entry("linux.loop").or_default();
    looped.push(rate(figures.ns["linux.loop_time"]));
}

/// Instructions of a loop a second.
fn rate(ns: u64) -> f64 {
    (ROUNDS * INSTRUCTIONS) as f64 / (ns.max(1) as f64 / 1e9)
}

impl Rounds {
    /// Measures one start on each hypervisor. They take turns in being first.
    fn measure(
        &mut self,
        guest: &Guest,
        qemu: Option<&Qemu>,
        vcpus: u32,
        round: u32,
    ) -> Result<(), BenchError> {
        for first in [true, false] {
            let ours = first == (round % 2 == 1);
            let (columns, figures) = match qemu {
                _ if ours => (&mut self.soft, guest.measure_soft(vcpus)?),
                Some(qemu) => (&mut self.qemu, guest.measure_qemu(qemu, vcpus)?),
                None => continue,
            };
            add(columns.entry(vcpus).or_default(), &figures);
            self.check(figures.loop_result)?;
        }
        Ok(())
    }

    fn add_bare(&mut self, bare: &BareLoop) -> Result<(), BenchError> {
        self.bare.push(rate(bare.ns));
        self.check(bare.result)
    }

    /// All loops compute the same.
    fn check(&mut self, result: u64) -> Result<(), BenchError> {
        let first = *self.loop_result.get_or_insert(result);
        if first != result {
            return Err(BenchError::WrongValue(format!(
                "a loop computed {result:#x}, and the first one {first:#x}"
            )));
        }
        Ok(())
    }

    fn rows(&self, qemu: Option<&Qemu>) -> Vec<Row> {
        let mut rows = Vec::new();
        for (&vcpus, ours) in &self.soft {
            let theirs = self.qemu.get(&vcpus).zip(qemu);
            for case in CASES {
                rows.extend(beside(case, ours, theirs, vcpus));
            }
        }
        rows.extend(self.loop_rows());
        rows.extend(self.moves.rows());
        rows
    }

    /// The loop in a process of Linux, beside the same in a bare guest.
    fn loop_rows(&self) -> Vec<Row> {
        let bare = "no operating system, no page tables; guest clock";
        let bare = Conditions::here(1, MEMORY, bare);
        let unit = "instructions/s";
        let mut rows = vec![self.bare.row(BARE, "soft, 1 vCPU", unit, bare)];
        rows.extend(self.soft.get(&1).map(|ours| {
            let note = "the loop in a process of Linux; guest clock";
            let how = Conditions::here(1, MEMORY, note);
            let row = ours["linux.loop"].row("linux.loop", "soft, 1 vCPU", unit, how);
            row.against(BARE, self.bare.median())
                .aiming_at(Bound::RatioAtLeast(0.95))
        }));
        rows
    }
}

/// The rows of one case: ours, and QEMU's if there is one. Only those of one vCPU have targets.
fn beside(
    case: &'static str,
    ours: &Column,
    theirs: Option<(&Column, &Qemu)>,
    vcpus: u32,
) -> Vec<Row> {
    let row = |column: &Column, name: &str| {
        let s = if vcpus == 1 { "" } else { "s" };
        let subject = format!("{name}, {vcpus} vCPU{s}");
        let how = Conditions::here(vcpus, MEMORY, note_of(case));
        column[case].row(case, subject, unit_of(case).0, how)
    };
    let ours = row(ours, "soft");
    let Some((theirs, qemu)) = theirs else {
        return vec![ours];
    };
    let name = format!("QEMU {}", qemu.version);
    let theirs = row(theirs, &name);
    let ours = ours.against(name, theirs.value);
    let ours = match target(case).filter(|_| vcpus == 1) {
        Some(bound) => ours.aiming_at(bound),
        None => ours,
    };
    vec![ours, theirs]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(ms: u64) -> Figures {
        let ns = ms * 1_000_000;
        Figures {
            ns: CASES.iter().map(|case| (*case, ns)).collect(),
            loop_result: 7,
        }
    }

    #[test]
    fn figures_of_one_vcpu_are_judged_beside_qemu() {
        let mut rounds = Rounds::default();
        for vcpus in VCPUS {
            add(rounds.soft.entry(vcpus).or_default(), &figures(3));
            add(rounds.qemu.entry(vcpus).or_default(), &figures(2));
        }
        rounds
            .add_bare(&BareLoop {
                ns: 2_900_000,
                result: 7,
            })
            .expect("the first");
        let qemu = Qemu::named("7.2");
        let rows = rounds.rows(Some(&qemu));
        let judged: Vec<_> = rows
            .iter()
            .filter_map(|row| Some((&*row.case, row.met?)))
            .collect();
        assert_eq!(
            judged,
            [
                ("linux.up", false),
                ("linux.up_wall", false),
                ("linux.fork", false),
                ("linux.exec", false),
                ("linux.pipe", false),
                ("linux.loop_time", true),
                ("linux.loop", true)
            ]
        );
        assert!(
            rows.iter()
                .all(|row| row.met.is_none() || row.subject == "soft, 1 vCPU")
        );
        let alone = rounds.rows(None);
        assert_eq!(alone.iter().filter(|row| row.met.is_some()).count(), 1);
    }

    #[test]
    fn loops_that_differ_are_a_wrong_value() {
        let mut rounds = Rounds::default();
        rounds.check(1).expect("the first");
        rounds.check(1).expect("the same");
        let why = rounds.check(2).expect_err("another");
        assert!(matches!(why, BenchError::WrongValue(_)), "{why}");
    }

    #[test]
    fn files_that_are_not_there_are_a_setting() {
        let files = guest_linux::GuestLinux {
            kernel: "/nonexistent/Image".into(),
            initrd: "/nonexistent/initrd".into(),
        };
        let why = Guest::read(files).err().expect("no kernel");
        assert!(matches!(why, BenchError::Setting(_)), "{why}");
        assert!(why.to_string().contains("/nonexistent/Image"), "{why}");
    }

    #[test]
    fn a_peer_is_measured_only_if_it_is_named() {
        use crate::args::{Cli, Command};
        let peer = |more: &[&str]| {
            let words = [&["pageferry-bench", "linux"], more].concat();
            match clap::Parser::parse_from(words) {
                Cli {
                    command: Command::Linux(flags),
                } => flags.qemu(),
                other => panic!("another benchmark: {other:?}"),
            }
        };
        assert_eq!(peer(&[]), None);
        let named = ["--peer", "qemu"];
        assert_eq!(peer(&named), Some("qemu-system-riscv64".into()));
        let kvm = [&named[..], &["--engine", "kvm"]].concat();
        assert_eq!(peer(&kvm), Some("qemu-system-x86_64".into()));
        let program = [&named[..], &["--peer-program", "q"]].concat();
        assert_eq!(peer(&program), Some("q".into()));
    }
}
