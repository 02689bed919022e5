//! Linux on KVM: its moves beside those of the test guest and of QEMU, and reads of its disk.
//!
//! **Mechanism.** Each end of a move is a process, started by the command that an operator uses.
//! All guests have as much memory and as many vCPUs. Linux has a disk. On QEMU it has none: the
//! guest's kernel has no driver for devices on a PCI bus. Each move sends
//! all pages once and then switches to post-copy, over a unix socket.

use super::lines::{Line, Splitter, parse};
use super::moved::{LINES, Times, WARM_UP};
use super::{Guest, LinuxFlags, go_on};
use crate::error::{os, scratch};
use crate::{BenchError, Bound, Conditions, Row, Samples, note};
use pageferry_machine::kvm;
use pageferry_testkit::qemu::{KernelMachine, KernelSpec, Qemu};
use serde_json::Value;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const VCPUS: u32 = 2;
/// The longest wait for a part of a move. An emulated host takes minutes.
const LIMIT: Duration = Duration::from_secs(900);
/// The time between two looks.
const POLL: Duration = Duration::from_millis(20);
/// The disk, in bytes.
const DISK: u64 = 64 << 20;
const BLOCK: usize = 4096;
/// The time in which blocks are read.
const READS: Duration = Duration::from_secs(5);

/// Runs `bench linux` on KVM and returns its rows.
pub(super) fn linux_on_kvm(
    flags: &LinuxFlags,
    guest: &Guest,
    qemu: Option<&Qemu>,
    count: u32,
) -> Result<Vec<Row>, BenchError> {
    if flags.minutes.is_some() {
        let why = "--minutes is for --engine soft: leave it out";
        return Err(BenchError::Setting(why.into()));
    }
    kvm::probe_kernels()?;
    let bench = Bench {
        guest,
        memory_bytes: flags.memory,
    };
    let [mut test_guest, mut linux, mut theirs] = [(); 3].map(|()| Times::default());
    let [mut guest_reads, mut host_reads, mut exits] = [(); 3].map(|()| Samples::default());
    for round in 1..=count {
        let doing = |what: &str| note(&format!("{what}, round {round} of {count}"));
        doing("moving the test guest");
        test_guest.push(bench.move_ours(false)?);
        doing("moving Linux");
        linux.push(bench.move_ours(true)?);
        if let Some(qemu) = qemu {
            doing("moving Linux on QEMU");
            theirs.push(bench.move_qemus(qemu)?);
        }
        doing("reading a disk");
        let scratch = scratch()?;
        let disk = write_disk(&scratch)?;
        let (reads, exit_us) = bench.guest_reads(&scratch, &disk)?;
        guest_reads.push(reads);
        exits.push(exit_us);
        host_reads.push(host_reads_of(&disk)?);
    }
    let mut rows = bench.rows(&test_guest, &linux, qemu.map(|qemu| (qemu, &theirs)));
    let how = |note| Conditions::here(VCPUS, flags.memory, note);
    let reads = "blocks of 4 KiB in no order, 32 at a time, past the guest's page cache";
    let thread = "the same blocks by one thread, one at a time";
    rows.push(host_reads.row("host.reads", "a host's thread", "reads/s", how(thread)));
    let cpuid = "CPUID in the guest, which only KVM handles; guest clock";
    rows.push(exits.row("linux.exit", "kvm", "us", how(cpuid)));
    // A read that takes the host's time and one exit.
    let best = 1e6 / (1e6 / host_reads.median() + exits.median());
    rows.push(
        guest_reads
            .row("linux.reads", "kvm", "reads/s", how(reads))
            .against("host.reads + linux.exit", best)
            .aiming_at(Bound::RatioAtLeast(0.7)),
    );
    Ok(rows)
}

/// The conditions of all measurements of a run.
struct Bench<'a> {
    guest: &'a Guest,
    memory_bytes: u64,
}

impl Bench<'_> {
    /// The command line of Linux under load.
    fn load(&self) -> String {
        let mib = (self.memory_bytes / 2) >> 20;
        format!("console=ttyS0 panic=-1 quiet pf=load pf_mib={mib}")
    }

    /// Moves a VM of ours: Linux under load, or the test guest. Returns what [`Times`] has.
    fn move_ours(&self, linux: bool) -> Result<[f64; 3], BenchError> {
        let scratch = scratch()?;
        let disk = linux.then(|| write_disk(&scratch)).transpose()?;
        let (here, there) = (scratch.path().join("here"), scratch.path().join("there"));
        let consoles = ["console-here", "console-there"].map(|name| scratch.path().join(name));
        let devices = |command: &mut Command, side: usize| {
            if let Some(disk) = &disk {
                command.arg("--disk").arg(disk);
                command.arg("--console").arg(&consoles[side]);
            }
        };
        let source = Process::start(&scratch, "run", |command| {
            command.args(["--engine", "kvm", "--vcpus", &VCPUS.to_string()]);
            let memory = format!("{}M", self.memory_bytes >> 20);
            command.args(["--memory", &memory]).arg("--control");
            command.arg(&here);
            if linux {
                self.boots(command, &self.load());
            }
            devices(command, 0);
        });
        let mut source = source?;
        wait_for("the VM", || {
            source.check()?;
            Ok(here.exists().then_some(()))
        })?;
        if linux {
            listen_to(&consoles[0], 2 * LINES, &mut || source.check())?;
        }
        warm_up()?;
        let at = format!("unix:{}", scratch.path().join("in").display());
        let destination = Process::start(&scratch, "receive", |command| {
            command.args(["--listen", &at, "--json", "--control"]);
            command.arg(&there);
            devices(command, 1);
        });
        let mut destination = destination?;
        wait_for("the destination", || {
            destination.check()?;
            Ok(scratch.path().join("in").exists().then_some(()))
        })?;
        let migrate = Process::start(&scratch, "migrate", |command| {
            command.args(["--to", &at, "--precopy-passes", "1", "--json", "--vm"]);
            command.arg(&here);
        })?;
        let sent = end(migrate)?;
        if linux {
            listen_to(&consoles[1], LINES, &mut || destination.check())?;
        }
        let quit = Process::start(&scratch, "quit", |command| {
            command.arg("--vm").arg(&there);
        })?;
        end(quit)?;
        let arrived = end(destination)?;
        end(source)?;
        Ok([
            figure(&sent, "/blackout_ms")?,
            figure(&arrived, "/stall_us/p50")?,
            figure(&arrived, "/stall_us/p99")?,
        ])
    }

    /// As [`Self::move_ours`], of Linux on QEMU.
    fn move_qemus(&self, qemu: &Qemu) -> Result<[f64; 3], BenchError> {
        let spec = KernelSpec {
            kernel: &self.guest.files.kernel,
            initrd: &self.guest.files.initrd,
            command_line: &self.load(),
            vcpus: VCPUS,
            memory_bytes: self.memory_bytes,
        };
        let mut machine = KernelMachine::boot(qemu, &spec)?;
        listen_to(&machine.console(), 2 * LINES, &mut || Ok(machine.check()?))?;
        warm_up()?;
        let late = Instant::now() + LIMIT;
        let go_on = || go_on(late, "a move of QEMU");
        let (mut there, took) = machine.moved(qemu, &spec, &go_on)?;
        listen_to(&there.console(), LINES, &mut || Ok(there.check()?))?;
        let stalls: Samples = took
            .traced
            .stalls
            .iter()
            .map(|&ns| ns as f64 / 1e3)
            .collect();
        Ok([took.downtime_ms, stalls.median(), stalls.quantile(0.99)])
    }

    /// The blocks of the disk that Linux reads in a second, and the microseconds of an exit.
    fn guest_reads(&self, scratch: &TempDir, disk: &Path) -> Result<(f64, f64), BenchError> {
        let console = scratch.path().join("console");
        let seconds = READS.as_secs();
        let line = format!("console=ttyS0 panic=-1 quiet pf=reads pf_seconds={seconds}");
        let run = Process::start(scratch, "run", |command| {
            command.args(["--engine", "kvm", "--vcpus", &VCPUS.to_string()]);
            command.args(["--memory", "128M", "--disk"]).arg(disk);
            command.arg("--console").arg(&console);
            self.boots(command, &line);
        })?;
        end(run)?;
        let (mut reads, mut exit_us) = (None, None);
        for line in Splitter::default().take(&text_of(&console)) {
            match parse(&line)? {
                Some(Line::Reads(ns, blocks)) => {
                    reads = Some(blocks as f64 / (ns.max(1) as f64 / 1e9));
                }
                Some(Line::Exit(ns)) => exit_us = Some(ns as f64 / 1e3),
                _ => {}
            }
        }
        let old = "this initrd is too old for pf=reads: build it again by `cargo xtask guest-linux \
                   --arch x86_64`";
        reads
            .zip(exit_us)
            .ok_or_else(|| BenchError::Setting(old.into()))
    }

    fn boots(&self, command: &mut Command, line: &str) {
        command.arg("--kernel").arg(&self.guest.files.kernel);
        command.arg("--initrd").arg(&self.guest.files.initrd);
        command.args(["--cmdline", line]);
    }

    fn rows(&self, test_guest: &Times, linux: &Times, qemu: Option<(&Qemu, &Times)>) -> Vec<Row> {
        let how = |note: &str| Conditions::here(VCPUS, self.memory_bytes, note);
        let mib = (self.memory_bytes / 2) >> 20;
        let load =
            format!("with a disk; it rewrites and checks {mib} MiB and files, beside a timer");
        let page = "of a move: from the fault of a vCPU on a missing page until it may go on; the \
                    page comes over a unix socket";
        let median = format!("the median {page}");
        let test = "the test guest: all vCPUs rewrite memory all the time; 1 pre-copy pass";
        let mut rows = vec![
            test_guest.blackouts.row("blackout", "kvm", "ms", how(test)),
            linux
                .blackouts
                .row("linux.blackout", "kvm", "ms", how(&load))
                .against("blackout", test_guest.blackouts.median())
                .aiming_at(Bound::RatioAtMost(1.5)),
            test_guest.pages.row("page", "kvm", "us", how(&median)),
        ];
        let late = format!("the 99th percentile {page}");
        let pages = |times: &Times, subject: &str| {
            [
                times.pages.row("linux.page", subject, "us", how(&median)),
                times
                    .late_pages
                    .row("linux.page_p99", subject, "us", how(&late)),
            ]
        };
        let ours = pages(linux, "kvm");
        let Some((qemu, theirs)) = qemu else {
            rows.extend(ours);
            return rows;
        };
        let name = format!("QEMU {}", qemu.version);
        let downtime = how("what QEMU calls the downtime; no disk");
        rows.push(
            theirs
                .blackouts
                .row("linux.blackout", &*name, "ms", downtime),
        );
        for (ours, theirs) in ours.into_iter().zip(pages(theirs, &name)) {
            rows.push(ours.against(&*name, theirs.value));
            rows.push(theirs);
        }
        rows
    }
}

/// Waits for the end of a process that must succeed. Returns what it has written.
fn end(mut process: Process) -> Result<Vec<u8>, BenchError> {
    wait_for(process.name, || process.ended())?;
    Ok(text_of(&process.output))
}

/// Waits for so many lines of the first process.
fn listen_to(
    console: &Path,
    lines: u32,
    check: &mut dyn FnMut() -> Result<(), BenchError>,
) -> Result<(), BenchError> {
    wait_for("a line of Linux", || {
        // The beginning of the first line may be at the other end.
        if Splitter::default().seen(&text_of(console))? >= lines {
            return Ok(Some(()));
        }
        check()?;
        Ok(None)
    })
}

/// Lets a guest run for a while before its move.
fn warm_up() -> Result<(), BenchError> {
    let warm = Instant::now() + WARM_UP;
    wait_for("the warm-up", || Ok((Instant::now() > warm).then_some(())))
}

fn wait_for<T>(
    what: &str,
    mut ready: impl FnMut() -> Result<Option<T>, BenchError>,
) -> Result<T, BenchError> {
    let late = Instant::now() + LIMIT;
    loop {
        if let Some(value) = ready()? {
            return Ok(value);
        }
        go_on(late, what)?;
        std::thread::sleep(POLL);
    }
}

/// A command of `pageferry` that runs. Dropping it kills it.
struct Process {
    child: Child,
    name: &'static str,
    output: PathBuf,
    errors: PathBuf,
}

impl Process {
    /// Starts a command of `pageferry`, which is beside this program.
    fn start(
        scratch: &TempDir,
        name: &'static str,
        more: impl FnOnce(&mut Command),
    ) -> Result<Self, BenchError> {
        let program = crate::peer::executable()?.with_file_name("pageferry");
        if !program.is_file() {
            let build = "`cargo build --release -p pageferry` builds it";
            let why = format!("there is no {}: {build}", program.display());
            return Err(BenchError::Setting(why));
        }
        let [output, errors] =
            ["out", "err"].map(|kind| scratch.path().join(format!("{name}-{kind}")));
        let os = os("cannot start another process");
        let mut command = Command::new(program);
        command
            .arg(name)
            .stdin(Stdio::null())
            .stdout(File::create(&output).map_err(os)?)
            .stderr(File::create(&errors).map_err(os)?);
        more(&mut command);
        Ok(Self {
            child: command.spawn().map_err(os)?,
            name,
            output,
            errors,
        })
    }

    /// `Some` once it has succeeded.
    fn ended(&mut self) -> Result<Option<()>, BenchError> {
        match self.child.try_wait() {
            Ok(Some(status)) if status.success() => Ok(Some(())),
            Ok(Some(status)) => {
                let errors = String::from_utf8_lossy(&text_of(&self.errors)).into_owned();
                let last = errors.lines().last().unwrap_or("it does not say why");
                let why = format!("'{}' ended ({status}): {last}", self.name);
                Err(BenchError::Peer(why))
            }
            Ok(None) => Ok(None),
            Err(why) => Err(BenchError::peer(why)),
        }
    }

    /// Fails if it has ended.
    fn check(&mut self) -> Result<(), BenchError> {
        match self.ended()? {
            Some(()) => Err(BenchError::Peer(format!("'{}' ended early", self.name))),
            None => Ok(()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A number in a report.
fn figure(report: &[u8], at: &str) -> Result<f64, BenchError> {
    let wrong = |why: &str| BenchError::Peer(format!("its report: {why}"));
    let report: Value = serde_json::from_slice(report).map_err(|why| wrong(&why.to_string()))?;
    let figure = report.pointer(at).and_then(Value::as_f64);
    figure.ok_or_else(|| wrong(&format!("there is no {at}")))
}

/// The contents of a file so far.
fn text_of(path: &Path) -> Vec<u8> {
    std::fs::read(path).unwrap_or_default()
}

/// Writes a disk whose blocks differ.
fn write_disk(scratch: &TempDir) -> Result<PathBuf, BenchError> {
    let path = scratch.path().join("disk");
    let bytes: Vec<u8> = (0..DISK / 8).flat_map(u64::to_le_bytes).collect();
    std::fs::write(&path, bytes).map_err(os("cannot write a disk"))?;
    Ok(path)
}

/// The blocks of the disk that a thread reads in a second, in the order of the guest's first
/// reader.
fn host_reads_of(disk: &Path) -> Result<f64, BenchError> {
    let os = os("cannot read the disk");
    let file = File::open(disk).map_err(os)?;
    let (mut x, mut reads, mut block) = (0_u64, 0_u64, [0; BLOCK]);
    let start = Instant::now();
    while start.elapsed() < READS {
        x = x
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let at = (x >> 33) % (DISK / BLOCK as u64) * BLOCK as u64;
        file.read_exact_at(&mut block, at).map_err(os)?;
        reads += 1;
    }
    Ok(reads as f64 / start.elapsed().as_secs_f64())
}
