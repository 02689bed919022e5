//! `bench restore`: how soon the working set of a VM from a snapshot is there.
//!
//! **Guarantee.** All ways restore the same memory file and touch the same pages in the same order,
//! in turns. A process of its own is the VMM; no guest runs in it.
//!
//! **Mechanism.** Eight threads touch a working set of runs of 1 to 16 pages at random places, and
//! write every fourth page. The time begins with the handshake. *Plain* is a handler of ours with
//! one thread that reads and copies page by page: it stands for published examples. *Mapping* is a
//! private mapping of the memory file, as in Firecracker's backend `File`. *Mount* is a private
//! mapping of the file that a pager shows, whose pages a *second VM* finds in the page cache.
//! *Warm* means that the file is in the page cache, *cold* that it was dropped from there. *Peer*
//! means that another host shares the file, over a link of 1 Gbit/s between two network namespaces.
//! Its lower bound is the time that the working set alone needs on the link. It is left out without
//! root. *Store* is a source whose reads take 20 ms longer, which is simulated, behind the cache of
//! object stores.

mod background;
mod far;
mod paced;
mod packed;
mod plain;
mod remote;
mod restart;
mod vmm;

pub(crate) use paced::Paced;
pub(crate) use restart::Restarted;
pub(crate) use vmm::{Memory, Restored};

use crate::error::{os, scratch};
use crate::peer::Peer;
use crate::{BenchError, Bound, Conditions, Row, Samples, Setting, note};
use pageferry_pager::{
    Format, Mount, MountFile, MountFileStatus, MountSettings, Name, Owner, Pager, Restore,
    Settings, Stores, VmStatus, open_source,
};
use remote::Remote;
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use vmm::{THREADS, Touched};

/// The time in which a pager notices that a VMM has ended.
const END: Duration = Duration::from_secs(30);

/// The sizes of `bench restore`, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RestoreSizes {
    /// The memory of the VM.
    pub(crate) memory: u64,
    /// The part of it that the VM touches.
    pub(crate) working_set: u64,
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
    Far,
    FarReplay,
    Peer,
    PeerReplay,
}

/// The ways, in the order of a round. Those over a link are the last.
const WAYS: [(Way, bool); 13] = [
    (Way::Mapping, false),
    (Way::Plain, false),
    (Way::Pager, false),
    (Way::Replay, false),
    (Way::Mount, false),
    (Way::MountAgain, false),
    (Way::Mapping, true),
    (Way::Pager, true),
    (Way::Replay, true),
    (Way::Far, false),
    (Way::FarReplay, false),
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
        Way::Far => return "pager, store at 20 ms (simulated)".to_owned(),
        Way::FarReplay => return "pager with replay, store at 20 ms (simulated)".to_owned(),
        Way::Peer => return "pager, peer over 1 Gbit/s".to_owned(),
        Way::PeerReplay => return "pager with replay, peer over 1 Gbit/s".to_owned(),
        Way::Mount => "mount",
        Way::MountAgain => "mount, second VM",
    };
    format!("{name}, {}", if cold { "cold" } else { "warm" })
}

#[derive(Default)]
struct Figures {
    ms: Samples,
    p50_us: Samples,
    p99_us: Samples,
    private: Samples,
    faults: Samples,
}

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
pub(crate) fn restore(setting: &Setting, sizes: &RestoreSizes) -> Result<Vec<Row>, BenchError> {
    let scratch = scratch()?;
    note("writing a memory file");
    let memory = scratch.path().join("memory");
    write_memory(&memory, sizes.memory).map_err(os("cannot write a memory file"))?;
    let remote = Remote::start(&memory)?;
    let ways = match remote {
        Some(_) => WAYS.len(),
        None => {
            note("two hosts need root and iproute2: there is no peer");
            LOCAL_WAYS
        }
    };
    let mut all: Vec<Figures> = (0..ways).map(|_| Figures::default()).collect();
    let file = File::open(&memory).map_err(os("the memory file"))?;
    let one = |cold| One {
        sizes,
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
    let mut transfer = Samples::default();
    for round in 1..=setting.repeat {
        let bare = far::transfer(&memory, sizes.memory, sizes.working_set)?;
        transfer.push(bare.as_secs_f64() * 1e3);
        for ((way, cold), figures) in WAYS.into_iter().zip(&mut all) {
            if !is_possible(way) {
                continue;
            }
            note(&format!(
                "{}, round {round} of {}",
                subject(way, cold),
                setting.repeat
            ));
            let (touched, faults) = one(cold).measure(way)?;
            figures.ms.push(touched.took.as_secs_f64() * 1e3);
            figures.p50_us.push(touched.p50.as_secs_f64() * 1e6);
            figures.p99_us.push(touched.p99.as_secs_f64() * 1e6);
            figures.private.push(touched.private_bytes as f64);
            if let Some(faults) = faults {
                figures.faults.push(faults as f64);
            }
        }
    }
    let mut rows = rows(sizes, &all, &transfer);
    let file = (&*memory, sizes.memory);
    rows.extend(background::measure(setting, scratch.path(), file)?);
    rows.extend(packed::measure(setting, sizes, scratch.path())?);
    rows.extend(restart::measure(setting, scratch.path())?);
    Ok(rows)
}

fn rows(sizes: &RestoreSizes, all: &[Figures], transfer: &Samples) -> Vec<Row> {
    let of = |way, cold| {
        let at = WAYS.iter().position(|each| *each == (way, cold));
        &all[at.expect("it is measured")]
    };
    let warm = of(Way::Mapping, false).ms.median();
    let mut rows = Vec::new();
    for ((way, cold), figures) in WAYS.into_iter().zip(all) {
        if figures.ms.is_empty() {
            continue;
        }
        let note = format!(
            "no guest; {THREADS} threads touch {} MiB, every fourth page by a write",
            sizes.working_set >> 20
        );
        let row = |samples: &Samples, case, unit| {
            let conditions = Conditions::here(0, sizes.memory, note.clone());
            samples.row(case, subject(way, cold), unit, conditions)
        };
        let time = row(&figures.ms, "restore.touched", "ms");
        rows.push(match (way, cold) {
            (Way::Pager, false) => time
                .against(
                    subject(Way::Plain, false),
                    of(Way::Plain, false).ms.median(),
                )
                .aiming_at(Bound::RatioAtMost(0.67)),
            (Way::Replay, false) => time
                .against(subject(Way::Mapping, false), warm)
                .aiming_at(Bound::RatioAtMost(1.3)),
            (Way::Pager | Way::Replay, true) => time
                .against(
                    subject(Way::Mapping, true),
                    of(Way::Mapping, true).ms.median(),
                )
                .aiming_at(Bound::RatioAtMost(1.0)),
            (Way::FarReplay, _) => time
                .against("transfer of its blocks by 64 threads", transfer.median())
                .aiming_at(Bound::RatioAtMost(1.2)),
            (Way::Far, _) => time
                .against(
                    subject(Way::FarReplay, false),
                    of(Way::FarReplay, false).ms.median(),
                )
                .aiming_at(Bound::RatioAtLeast(5.0)),
            (Way::Peer | Way::PeerReplay, _) => time.against(
                "the working set at 1 Gbit/s",
                sizes.working_set as f64 * 8e3 / remote::BITS as f64,
            ),
            _ => time,
        });
        rows.push(row(&figures.p50_us, "restore.touch_p50", "us"));
        let p99 = row(&figures.p99_us, "restore.touch_p99", "us");
        rows.push(if (way, cold) == (Way::Pager, false) {
            p99.against(
                subject(Way::Plain, false),
                of(Way::Plain, false).p99_us.median(),
            )
            .aiming_at(Bound::RatioAtMost(1.0))
        } else {
            p99
        });
        let private = row(&figures.private, "restore.private", "B");
        rows.push(match way {
            Way::MountAgain => private
                .against(
                    subject(Way::Mapping, false),
                    of(Way::Mapping, false).private.median(),
                )
                .aiming_at(Bound::RatioAtMost(1.05)),
            _ => private,
        });
        if !figures.faults.is_empty() {
            rows.push(row(&figures.faults, "restore.faults", "faults"));
        }
    }
    rows
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
    sizes: &'a RestoreSizes,
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
            Way::Far | Way::FarReplay => self.by_pager(way, &far::address(self.memory), &socket),
            Way::Peer | Way::PeerReplay => {
                let remote = self.remote.expect("it is measured with one only");
                // The threads of the pager are there too, and so are their connections.
                remote.within(|| self.by_pager(way, &remote.memory(), &socket))
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
                mount
                    .unmount()
                    .map_err(|why| BenchError::Peer(why.to_string()))?;
                Ok((touched, Some(faults)))
            }
        }
    }

    /// Mounts the memory file, without a page in the page cache.
    fn mount(&self) -> Result<Mount, BenchError> {
        let failed = |why: &dyn std::fmt::Display| BenchError::Peer(why.to_string());
        let name: Name = MOUNTED.parse().map_err(|why| failed(&why))?;
        let file = MountFile {
            source: open_source(self.memory, Format::Raw).map_err(|why| failed(&why))?,
            owner: Owner::default(),
            replay: None,
        };
        let settings = MountSettings {
            directory: self.scratch.join("mount"),
            files: [(name, file)].into(),
            ..MountSettings::default()
        };
        Mount::start(settings).map_err(|why| failed(&why))
    }

    fn by_pager(
        &self,
        way: Way,
        memory: &Path,
        socket: &Path,
    ) -> Result<(Touched, Option<u64>), BenchError> {
        let failed = |why: &dyn std::fmt::Display| BenchError::Peer(why.to_string());
        let settings = Settings {
            directory: self.scratch.join("state"),
            stores: Stores::new([Remote::store(), Arc::new(far::Far)]),
            ..Settings::default()
        };
        let pager = Pager::start(settings).map_err(|why| failed(&why))?;
        let name: Name = "bench".parse().map_err(|why| failed(&why))?;
        let recording = self.scratch.join("recording");
        let mut restore = Restore::new(memory, socket);
        match way {
            Way::Record => restore.record = Some(recording),
            Way::Replay | Way::FarReplay | Way::PeerReplay => restore.replay = Some(recording),
            _ => {}
        }
        pager.restore(&name, restore).map_err(|why| failed(&why))?;
        let touched = self.touch(Memory::Pager(socket.to_owned()))?;
        if !pager.wait_ended(&name, END) {
            return Err(failed(&"the pager has not noticed the end of its VMM"));
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
            bytes: self.sizes.memory,
            working_set: self.sizes.working_set,
        })?;
        let ready = vmm.next_line()?;
        if ready != "ready" {
            return Err(BenchError::Peer(format!("'{ready}': expected 'ready'")));
        }
        self.prepare_cache()?;
        vmm.send_line("go")?;
        vmm.figures()
    }

    /// Drops the file from the page cache, or reads it into it.
    fn prepare_cache(&self) -> Result<(), BenchError> {
        let what = "cannot change the page cache of the memory file";
        if self.cold {
            fadvise(self.file, 0, None, Advice::DontNeed).map_err(|errno| BenchError::Os {
                what,
                source: errno.into(),
            })
        } else {
            std::io::copy(&mut { self.file }, &mut std::io::sink())
                .map(drop)
                .map_err(|source| BenchError::Os { what, source })
        }
    }
}
