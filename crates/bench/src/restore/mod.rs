//! `bench restore`: how soon the working set of a VM from a snapshot is there.
//!
//! **Guarantee.** All ways restore the same memory file and touch the same pages in the same order,
//! in turns. A process of its own is the VMM; no guest runs in it.
//!
//! **Mechanism.** Some threads touch a working set of runs of 1 to 16 pages at random places, and
//! write every fourth page. The time begins with the handshake. *Plain* is a handler of ours with
//! one thread that reads and copies page by page: it stands for published examples. *Mapping* is a
//! private mapping of the memory file, as in Firecracker's backend `File`. *Mount* is a private
//! mapping of the file that a pager shows, whose pages a *second VM* finds in the page cache.
//! *Warm* means that the file is in the page cache, *cold* that it was dropped from there. *Peer*
//! means that another host shares the file, over a link of 1 Gbit/s between two network namespaces.
//! Its lower bound is the time that the working set alone needs on the link. It is left out without
//! root.

mod background;
mod paced;
mod packed;
mod plain;
mod remote;
mod restart;
mod vmm;

pub(crate) use paced::Paced;
pub(crate) use restart::Restarted;
pub(crate) use vmm::{Memory, Restored};

use crate::args::Common;
use crate::error::{os, scratch};
use crate::peer::{Peer, within};
use crate::{BenchError, Bound, Conditions, Row, Samples, note};
use pageferry_harness::size;
use pageferry_hosts::Host;
use pageferry_pager::{
    Format, Mount, MountFile, MountFileStatus, MountSettings, Name, Owner, Pager, Restore,
    Settings, Stores, VmStatus, open_source,
};
use remote::Remote;
use rustix::fs::{Advice, fadvise};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;
use vmm::Touched;

/// The time in which a pager notices that a VMM has ended.
const END: Duration = Duration::from_secs(30);

/// `pageferry-bench restore`.
#[derive(Debug, clap::Args)]
pub(crate) struct RestoreFlags {
    /// The memory of the VM
    #[arg(long, default_value = "1G", value_name = "SIZE", value_parser = size::parse)]
    memory: u64,
    /// The part of it that the VM touches, at most half
    #[arg(long, default_value = "64M", value_name = "SIZE", value_parser = size::parse)]
    working_set: u64,
    /// The threads that touch it at once
    #[arg(long, default_value_t = 8, value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=64))]
    threads: u64,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// A way to restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Mapping,
    Plain,
    Pager,
    /// Not measured: it writes the recording.
    Record,
    Replay,
    Mount,
    /// A VM after another one of the same mount.
    MountAgain,
    Peer,
    PeerReplay,
}

/// The ways, in the order of a round. Those over a link are the last.
const WAYS: [(Way, bool); 11] = [
    (Way::Mapping, false),
    (Way::Plain, false),
    (Way::Pager, false),
    (Way::Replay, false),
    (Way::Mount, false),
    (Way::MountAgain, false),
    (Way::Mapping, true),
    (Way::Pager, true),
    (Way::Replay, true),
    (Way::Peer, false),
    (Way::PeerReplay, false),
];

/// The number of ways without a link.
const LOCAL_WAYS: usize = WAYS.len() - 2;

fn subject(way: Way, cold: bool) -> String {
    let name = match way {
        Way::Mapping => "mapping of the file",
        Way::Plain => "plain handler of ours",
        Way::Pager => "pager",
        Way::Record => "pager that records",
        Way::Replay => "pager with replay",
        Way::Peer => return "pager, peer over 1 Gbit/s".to_owned(),
        Way::PeerReplay => return "pager with replay, peer over 1 Gbit/s".to_owned(),
        Way::Mount => "mount",
        Way::MountAgain => "mount, second VM",
    };
    format!("{name}, {}", if cold { "cold" } else { "warm" })
}

/// The samples of a way, by case.
type Figures = BTreeMap<&'static str, Samples>;

/// The cases with their units.
const CASES: [(&str, &str); 5] = [
    ("restore.touched", "ms"),
    ("restore.touch_p50", "us"),
    ("restore.touch_p99", "us"),
    ("restore.private", "B"),
    ("restore.faults", "faults"),
];

/// The name of the memory file in a mount.
const MOUNTED: &str = "memory";

/// The reads of a mount so far.
fn reads(mount: &Mount) -> u64 {
    let of = |file: &MountFileStatus| {
        let ways = [&file.zero_reads, &file.at_hand_reads, &file.slow_reads];
        ways.map(|way| way.faults).iter().sum::<u64>()
    };
    mount.status().files.iter().map(of).sum()
}

/// Runs `bench restore` and returns its rows.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn restore(flags: &RestoreFlags) -> Result<Vec<Row>, BenchError> {
    if flags.working_set > flags.memory / 2 {
        let why = "the working set is more than half of the memory: choose less";
        return Err(BenchError::Setting(why.into()));
    }
    let repeat = flags.common.rounds(5, 1);
    let scratch = scratch()?;
    note("writing a memory file");
    let memory = scratch.path().join("memory");
    write_memory(&memory, flags.memory).map_err(os("cannot write a memory file"))?;
    let remote = Remote::start(&memory)?;
    let ways = match remote {
        Some(_) => WAYS.len(),
        None => {
            note("two hosts need root and iproute2: there is no peer");
            LOCAL_WAYS
        }
    };
    let mut all: Vec<Figures> = vec![Figures::default(); ways];
    let file = File::open(&memory).map_err(os("the memory file"))?;
    let one = |cold| One {
        flags,
        scratch: scratch.path(),
        memory: &memory,
        file: &file,
        remote: remote.as_ref(),
        cold,
    };
    note("recording the working set");
    one(false).measure(Way::Record)?;
    let mounted = one(false).mount();
    if let Err(why) = &mounted {
        note(&format!("no mount is measured: {why}"));
    }
    let may_mount = mounted.is_ok();
    drop(mounted);
    let is_possible = |way| may_mount || !matches!(way, Way::Mount | Way::MountAgain);
    for round in 1..=repeat {
        for ((way, cold), figures) in WAYS.into_iter().zip(&mut all) {
            if !is_possible(way) {
                continue;
            }
            note(&format!(
                "{}, round {round} of {repeat}",
                subject(way, cold)
            ));
            let (touched, faults) = one(cold).measure(way)?;
            for ((case, _), sample) in CASES.into_iter().zip([
                Some(touched.took.as_secs_f64() * 1e3),
                Some(touched.p50_us),
                Some(touched.p99_us),
                Some(touched.private_bytes as f64),
                faults.map(|faults| faults as f64),
            ]) {
                if let Some(sample) = sample {
                    figures.entry(case).or_default().push(sample);
                }
            }
        }
    }
    let mut rows = rows(flags, &all);
    let file = (&*memory, flags.memory);
    rows.extend(background::measure(repeat, scratch.path(), file)?);
    rows.extend(packed::measure(repeat, flags.memory, scratch.path())?);
    rows.extend(restart::measure(repeat, scratch.path())?);
    Ok(rows)
}

fn rows(flags: &RestoreFlags, all: &[Figures]) -> Vec<Row> {
    let note = format!(
        "no guest; {} threads touch {} MiB, every fourth page by a write",
        flags.threads,
        flags.working_set >> 20
    );
    let mut rows = Vec::new();
    for ((way, cold), figures) in WAYS.into_iter().zip(all) {
        for (case, unit) in CASES {
            let Some(samples) = figures.get(case) else {
                continue;
            };
            let conditions = Conditions::here(0, flags.memory, note.clone());
            let row = samples.row(case, subject(way, cold), unit, conditions);
            if let Some((other, most)) = aim(case, way, cold) {
                let at = WAYS.iter().position(|each| *each == (other, cold));
                let figures = &all[at.expect("it is measured")];
                let row = row.against(subject(other, cold), figures[case].median());
                rows.push(row.aiming_at(Bound::RatioAtMost(most)));
            } else if matches!(way, Way::Peer | Way::PeerReplay) && unit == "ms" {
                let best = flags.working_set as f64 * 8e3 / remote::BITS as f64;
                rows.push(row.against("the working set at 1 Gbit/s", best));
            } else {
                rows.push(row);
            }
        }
    }
    rows
}

/// The way whose figure is the baseline, and the largest ratio to it.
fn aim(case: &str, way: Way, cold: bool) -> Option<(Way, f64)> {
    match (case, way, cold) {
        ("restore.touched", Way::Pager, false) => Some((Way::Plain, 0.67)),
        ("restore.touched", Way::Replay, false) => Some((Way::Mapping, 1.3)),
        ("restore.touched", Way::Pager | Way::Replay, true) => Some((Way::Mapping, 1.0)),
        ("restore.touch_p99", Way::Pager, false) => Some((Way::Plain, 1.0)),
        ("restore.private", Way::MountAgain, false) => Some((Way::Mapping, 1.05)),
        _ => None,
    }
}

/// Writes a memory file without zero pages, to the disk.
fn write_memory(path: &Path, bytes: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let mut random = crate::kit::Random::new(1);
    let mut part = vec![0_u8; 1 << 20];
    for word in part.chunks_exact_mut(8) {
        word.copy_from_slice(&(random.next() | 0x0101_0101_0101_0101).to_ne_bytes());
    }
    for _ in 0..bytes.div_ceil(1 << 20) {
        file.write_all(&part)?;
    }
    file.set_len(bytes)?;
    file.sync_all()
}

/// One restore.
struct One<'a> {
    flags: &'a RestoreFlags,
    scratch: &'a Path,
    memory: &'a Path,
    file: &'a File,
    remote: Option<&'a Remote>,
    cold: bool,
}

impl One<'_> {
    /// Restores once. Returns the figures, and the number of faults if something counts them.
    fn measure(&self, way: Way) -> Result<(Touched, Option<u64>), BenchError> {
        let socket = self.scratch.join("socket");
        match way {
            Way::Mapping => Ok((self.touch(Memory::File(self.memory.to_owned()))?, None)),
            Way::Plain => {
                let listener = UnixListener::bind(&socket).map_err(os("a socket"))?;
                let (touched, faults) = std::thread::scope(|scope| {
                    let serving = scope.spawn(|| plain::serve(&listener, self.file));
                    let touched = self.touch(Memory::Pager(socket.clone()));
                    // A VMM that failed before it connected leaves the handler waiting.
                    drop(std::os::unix::net::UnixStream::connect(&socket));
                    (touched, serving.join().expect("it does not panic"))
                });
                std::fs::remove_file(&socket).map_err(os("a socket"))?;
                Ok((touched?, Some(faults?)))
            }
            Way::Pager | Way::Record | Way::Replay => self.by_pager(way, self.memory, &socket),
            Way::Peer | Way::PeerReplay => {
                let remote = self.remote.expect("it is measured with one only");
                // The threads of the pager are there too, and so are their connections.
                within(&remote.hosts, Host::B, || {
                    self.by_pager(way, &remote.memory(), &socket)
                })
            }
            Way::Mount | Way::MountAgain => {
                let mount = self.mount()?;
                let file = self.scratch.join("mount").join(MOUNTED);
                if way == Way::MountAgain {
                    self.touch(Memory::File(file.clone()))?;
                }
                let before = reads(&mount);
                let touched = self.touch(Memory::File(file))?;
                let faults = reads(&mount) - before;
                mount.unmount().map_err(BenchError::peer)?;
                Ok((touched, Some(faults)))
            }
        }
    }

    /// Mounts the memory file, without a page in the page cache.
    fn mount(&self) -> Result<Mount, BenchError> {
        let name: Name = MOUNTED.parse().map_err(BenchError::peer)?;
        let file = MountFile {
            source: open_source(self.memory, Format::Raw).map_err(BenchError::peer)?,
            owner: Owner::default(),
            replay: None,
        };
        let settings = MountSettings {
            directory: self.scratch.join("mount"),
            files: [(name, file)].into(),
            ..MountSettings::default()
        };
        Mount::start(settings).map_err(BenchError::peer)
    }

    fn by_pager(
        &self,
        way: Way,
        memory: &Path,
        socket: &Path,
    ) -> Result<(Touched, Option<u64>), BenchError> {
        let settings = Settings {
            directory: self.scratch.join("state"),
            stores: Stores::new([Remote::store()]),
            ..Settings::default()
        };
        let pager = Pager::start(settings).map_err(BenchError::peer)?;
        let name: Name = "bench".parse().map_err(BenchError::peer)?;
        let recording = self.scratch.join("recording");
        let mut restore = Restore::new(memory, socket);
        match way {
            Way::Record => restore.record = Some(recording),
            Way::Replay | Way::PeerReplay => restore.replay = Some(recording),
            _ => {}
        }
        pager.restore(&name, restore).map_err(BenchError::peer)?;
        let touched = self.touch(Memory::Pager(socket.to_owned()))?;
        if !pager.wait_ended(&name, END) {
            return Err(BenchError::peer(
                "the pager has not noticed the end of its VMM",
            ));
        }
        let vm = pager.status(&name).and_then(|status| status.vm);
        let faults =
            |vm: VmStatus| vm.zero_faults.faults + vm.at_hand_faults.faults + vm.read_faults.faults;
        Ok((touched, vm.map(faults)))
    }

    /// Starts a VMM, lets it touch its working set, and ends it.
    fn touch(&self, memory: Memory) -> Result<Touched, BenchError> {
        let mut vmm = Peer::start(&Restored {
            memory,
            bytes: self.flags.memory,
            working_set: self.flags.working_set,
            threads: self.flags.threads as usize,
        })?;
        vmm.expect("ready")?;
        self.prepare_cache()?;
        vmm.send_line("go")?;
        vmm.figures()
    }

    /// Drops the file from the page cache, or reads it into it.
    fn prepare_cache(&self) -> Result<(), BenchError> {
        if self.cold {
            return drop_cache(self.file);
        }
        std::io::copy(&mut { self.file }, &mut std::io::sink())
            .map(drop)
            .map_err(os("cannot read the memory file"))
    }
}

/// Drops a file from the page cache.
fn drop_cache(file: &File) -> Result<(), BenchError> {
    fadvise(file, 0, None, Advice::DontNeed)
        .map_err(os("cannot drop the memory file from the page cache"))
}
