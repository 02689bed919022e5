//! Snapshots as files of a file system, mapped by doubles.

use crate::process::{Order, PagerProcess};
use crate::scene::{MIB, Scratch, config, data_pages, drop_from_cache, name, pages, write_memory};
use pageferry_pager::{
    Format, Keeper, Mount, MountError, MountFile, MountFileStatus, MountSettings, Owner, Recording,
    Source, SourceError, Survival, open_source,
};
use pageferry_snapshot::{Input, Options, pack};
use pageferry_testkit::firecracker::{Backend, Config, Double, PAGE_BYTES, Task, page_contents};
use pageferry_testkit::{Random, rotating_seeds, wait_until};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, Signal, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::ops::{ControlFlow, Deref, DerefMut};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A source that is slow, hangs behind a place, or fails, as a test wants.
#[derive(Debug)]
struct Odd {
    inner: Arc<dyn Source>,
    /// Reads of bytes from here on do not come at hand.
    slow_from: u64,
    delay: Duration,
    fails: AtomicBool,
    hangs: AtomicBool,
}

impl Odd {
    fn new(memory: &Path, slow_from: u64, delay: Duration) -> Arc<Self> {
        Arc::new(Self {
            inner: open_source(memory, Format::Raw).expect("a source"),
            slow_from,
            delay,
            fails: AtomicBool::new(false),
            hangs: AtomicBool::new(false),
        })
    }
}

impl Source for Odd {
    fn bytes(&self) -> u64 {
        self.inner.bytes()
    }

    fn block(&self) -> u64 {
        self.inner.block()
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        self.inner.is_zero(offset, len)
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        if offset + buffer.len() as u64 > self.slow_from {
            return Ok(false);
        }
        self.inner.read(offset, buffer).map(|()| true)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        std::thread::sleep(self.delay);
        while self.hangs.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.fails.load(Ordering::SeqCst) {
            return Err(SourceError::Failed {
                what: "the network".to_owned(),
                why: Errno::NETUNREACH.into(),
            });
        }
        self.inner.read(offset, buffer)
    }

    fn identity(&self) -> String {
        self.inner.identity()
    }
}

/// Lets hanging reads end, also when a test fails.
struct Release<'a>(&'a Odd);

impl Drop for Release<'_> {
    fn drop(&mut self) {
        self.0.hangs.store(false, Ordering::SeqCst);
        self.0.fails.store(false, Ordering::SeqCst);
    }
}

/// A double. If its test fails, it gets an error for what it waits for. Else it could not end.
struct Vm {
    double: Option<Double>,
    path: PathBuf,
}

impl Vm {
    fn quit(mut self) -> ExitStatus {
        self.double.take().expect("it has not ended").quit()
    }

    fn wait(mut self) -> ExitStatus {
        self.double.take().expect("it has not ended").wait()
    }
}

impl Deref for Vm {
    type Target = Double;

    fn deref(&self) -> &Double {
        self.double.as_ref().expect("it has not ended")
    }
}

impl DerefMut for Vm {
    fn deref_mut(&mut self) -> &mut Double {
        self.double.as_mut().expect("it has not ended")
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = unmount(&self.path, UnmountFlags::FORCE | UnmountFlags::DETACH);
        }
    }
}

/// A directory to mount on. Nothing stays mounted there when it is dropped.
struct Place {
    scratch: Scratch,
    path: PathBuf,
}

impl Place {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let path = scratch.path("mount");
        std::fs::create_dir(&path).expect("a directory");
        Self { scratch, path }
    }

    /// A memory file on the disk, of this configuration.
    fn memory(&self, config: &Config) -> PathBuf {
        let memory = self.scratch.path("memory");
        write_memory(&memory, config);
        memory
    }

    /// Mounts one file `memory`. `None` if that is not possible here.
    fn mount(&self, source: Arc<dyn Source>, replay: Option<Recording>) -> Option<Mount> {
        start(MountSettings {
            directory: self.path.clone(),
            files: [(name("memory"), file(source, replay))].into(),
            ..MountSettings::default()
        })
    }

    /// The file `memory` of the mount.
    fn mounted(&self) -> PathBuf {
        self.path.join("memory")
    }

    /// A VM that maps the file `memory`.
    fn double(&self, config: &Config) -> Vm {
        let backend = Backend::File(self.mounted());
        let config = Config {
            backend,
            ..config.clone()
        };
        let double = Double::start(&config).expect("it needs no userfaultfd");
        Vm {
            double: Some(double),
            path: self.path.clone(),
        }
    }

    fn assert_unmounted(&self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        assert!(!mounts.contains(self.path.to_str().expect("UTF-8")));
        let left = std::fs::read_dir(&self.path).expect("a directory").count();
        assert_eq!(left, 0);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        while unmount(&self.path, UnmountFlags::DETACH).is_ok() {}
    }
}

fn file(source: Arc<dyn Source>, replay: Option<Recording>) -> MountFile {
    MountFile {
        source,
        owner: Owner::default(),
        replay,
    }
}

/// Mounts, or skips the test where that is not possible.
#[track_caller]
fn start(settings: MountSettings) -> Option<Mount> {
    match Mount::start(settings) {
        Ok(mount) => Some(mount),
        Err(why @ (MountError::NoFuse(_) | MountError::Forbidden)) => {
            pageferry_testkit::skip("fuse", why);
            None
        }
        Err(why) => panic!("{why}"),
    }
}

fn status(mount: &Mount) -> MountFileStatus {
    mount.status().files.remove(0)
}

/// All reads of a file.
fn reads(mount: &Mount) -> u64 {
    let file = status(mount);
    file.zero_reads.faults + file.at_hand_reads.faults + file.slow_reads.faults
}

#[track_caller]
fn assert_right(double: &mut Double) {
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

#[test]
fn files_have_the_contents_of_their_sources_and_nobody_writes_them() {
    let place = Place::new("contents");
    let memory = place.memory(&config(41));
    // A file may end within a page.
    let bytes = std::fs::read(&memory).expect("a file");
    let odd = &bytes[..bytes.len() - 1000];
    std::fs::write(place.scratch.path("odd"), odd).expect("a file");
    let packed = place.scratch.path("packed");
    let whole = File::open(&memory).expect("a file");
    let on = &mut |_, _| ControlFlow::Continue(());
    pack(Input::File(&whole), &packed, Options::default(), on).expect("packed");
    let source = |path: &Path, format| open_source(path, format).expect("a source");
    let raw = MountFile {
        owner: Owner {
            user: Some(7),
            group: Some(8),
            mode: 0o640,
        },
        ..file(source(&memory, Format::Raw), None)
    };
    let mount = start(MountSettings {
        directory: place.path.clone(),
        files: [
            (name("raw"), raw),
            (
                name("odd"),
                file(source(&place.scratch.path("odd"), Format::Raw), None),
            ),
            (name("packed"), file(source(&packed, Format::Packed), None)),
        ]
        .into(),
        ..MountSettings::default()
    });
    let Some(mount) = mount else {
        return;
    };
    let at = |name: &str| place.path.join(name);
    assert_eq!(crate::scene::files(&place.path), ["odd", "packed", "raw"]);
    for (name, expected) in [("raw", &bytes[..]), ("odd", odd), ("packed", &bytes)] {
        assert!(
            std::fs::read(at(name)).expect("a file") == expected,
            "{name}"
        );
        let before = mount.status().files;
        assert!(
            std::fs::read(at(name)).expect("a file") == expected,
            "{name}"
        );
        let after = mount.status().files;
        let count = |all: &[MountFileStatus]| -> u64 {
            all.iter()
                .map(|file| file.at_hand_reads.faults + file.slow_reads.faults)
                .sum()
        };
        assert_eq!(count(&after), count(&before), "{name} is in the page cache");
    }
    let found = std::fs::metadata(at("raw")).expect("a file");
    use std::os::unix::fs::MetadataExt;
    assert_eq!((found.uid(), found.gid()), (7, 8));
    assert_eq!(found.permissions().mode() & 0o777, 0o440);
    assert_eq!(found.len(), bytes.len() as u64);
    let write = File::options().write(true).open(at("raw"));
    assert_eq!(Errno::from_io_error(&write.unwrap_err()), Some(Errno::ROFS));
    assert!(std::fs::remove_file(at("raw")).is_err() && File::create(at("new")).is_err());
    assert!(!at("none").exists());
    let statistics = rustix::fs::statfs(&place.path).expect("statistics");
    assert_eq!((statistics.f_files, statistics.f_bfree), (3, 0));
    match mount.status().death_of_pager {
        Survival::Lost(why) => assert!(why.contains("no service manager"), "{why}"),
        other => panic!("{other:?}"),
    }
    unmount_unused(&mount);
    place.assert_unmounted();
}

/// Unmounts a file system that nobody uses. A child that another test forks has the open files of
/// this process until it executes its program.
fn unmount_unused(mount: &Mount) {
    wait_until("the end of all uses", || match mount.unmount() {
        Err(MountError::InUse { .. }) => false,
        ended => {
            ended.expect("unmounted");
            true
        }
    });
}

/// The sizes of a VM's mapping of a file in KiB: all pages, and those of its own.
fn resident(pid: u32, path: &Path) -> (u64, u64) {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("a process");
    let (mut all, mut own, mut is_ours) = (0, 0, false);
    for line in maps.lines() {
        if line
            .split(' ')
            .next()
            .is_some_and(|word| word.contains('-'))
        {
            is_ours = line.ends_with(path.to_str().expect("UTF-8"));
        }
        let kib = |name: &str| -> u64 {
            let value = line
                .strip_prefix(name)
                .and_then(|rest| rest.split_whitespace().next());
            value.map_or(0, |value| value.parse().expect("a number"))
        };
        if is_ours {
            all += kib("Rss:");
            own += kib("Private_Clean:") + kib("Private_Dirty:");
        }
    }
    (all, own)
}

#[test]
fn vms_share_the_clean_pages_and_a_second_one_reads_nothing() {
    let place = Place::new("shared");
    let config = config(42);
    let source = Odd::new(&place.memory(&config), 0, Duration::ZERO);
    let Some(mount) = place.mount(source, None) else {
        return;
    };
    let mut first = place.double(&config);
    first.perform(Task::VerifyAll);
    assert_right(&mut first);
    let before = reads(&mount);
    let mut second = place.double(&config);
    second.perform(Task::VerifyAll);
    assert_right(&mut second);
    assert_eq!(reads(&mount), before);
    for double in [&first, &second] {
        let (all, own) = resident(double.pid(), &place.mounted());
        assert_eq!(all, pages(&config) * 4);
        assert_eq!(own, 0, "all pages are those of the page cache");
    }
    // What a VM writes is its own.
    crate::scene::run(&mut first, 200);
    second.perform(Task::VerifyAll);
    first.perform(Task::VerifyAll);
    assert_right(&mut second);
    assert_right(&mut first);
    let refused = mount.unmount().unwrap_err();
    assert!(matches!(refused, MountError::InUse { .. }), "{refused}");
    assert!(first.quit().success() && second.quit().success());
    unmount_unused(&mount);
    place.assert_unmounted();
}

#[test]
fn readers_wait_for_a_source_that_fails_and_a_killed_one_can_end() {
    let place = Place::new("fails");
    let config = config(43);
    let source = Odd::new(&place.memory(&config), 0, Duration::ZERO);
    let _release = Release(&source);
    let Some(mount) = place.mount(source.clone(), None) else {
        return;
    };
    let mut double = place.double(&config);
    let first = data_pages(&config).next().expect("data");
    double.perform(Task::Read(first));
    source.fails.store(true, Ordering::SeqCst);
    let far = data_pages(&config).last().expect("data");
    double.begin(Task::Read(far));
    wait_until("repeated reads", || status(&mount).source_errors >= 3);
    let lost = status(&mount);
    assert_eq!(lost.waiting, 1);
    let fault = lost.fault.expect("a fault");
    assert!(fault.contains("the network"), "{fault}");
    // Its waiting thread cannot be ended but by an answer.
    let mut killed = place.double(&config);
    let other = data_pages(&config).find(|page| *page > pages(&config) / 2);
    killed.begin(Task::Read(other.expect("data")));
    wait_until("a second read", || status(&mount).waiting == 2);
    let pid = Pid::from_raw(killed.pid() as i32).expect("a process");
    rustix::process::kill_process(pid, Signal::KILL).expect("a signal");
    assert_eq!(killed.wait().signal(), Some(Signal::KILL.as_raw()));
    assert_eq!(double.status().tasks, 1);
    source.fails.store(false, Ordering::SeqCst);
    double.finish();
    assert_right(&mut double);
    wait_until("the end of the loss", || {
        let file = status(&mount);
        file.fault.is_none() && file.waiting == 0
    });
    assert!(double.quit().success());
}

#[test]
fn slow_reads_delay_none_at_hand() {
    let place = Place::new("slow");
    let config = config(44);
    let memory = place.memory(&config);
    let half = pages(&config) / 2 * PAGE_BYTES;
    let source = Odd::new(&memory, half, Duration::ZERO);
    let _release = Release(&source);
    let Some(mount) = place.mount(source.clone(), None) else {
        return;
    };
    source.hangs.store(true, Ordering::SeqCst);
    let mut waiting = place.double(&config);
    let slow: Vec<u64> = data_pages(&config)
        .filter(|page| page * PAGE_BYTES >= half + MIB / 2)
        .step_by(16)
        .take(40)
        .collect();
    assert_eq!(slow.len(), 40);
    for page in &slow {
        waiting.begin(Task::Read(*page));
    }
    wait_until("more slow reads than threads", || {
        status(&mount).waiting >= 30
    });
    let mut double = place.double(&config);
    for page in (0..half / PAGE_BYTES - 64).step_by(3) {
        double.perform(Task::Read(page));
    }
    assert_right(&mut double);
    assert!(status(&mount).waiting >= 30);
    source.hangs.store(false, Ordering::SeqCst);
    waiting.finish();
    assert_right(&mut waiting);
}

#[test]
fn a_recording_is_in_the_page_cache_before_a_vm_asks() {
    let place = Place::new("replay");
    let config = config(45);
    let memory = place.memory(&config);
    let units: Vec<u64> = (0..pages(&config) / 4).rev().step_by(3).collect();
    let recording = Recording::of(units.iter().map(|unit| unit * 4 * PAGE_BYTES));
    let source = Odd::new(&memory, 0, Duration::from_micros(200));
    let Some(mount) = place.mount(source, Some(recording)) else {
        return;
    };
    assert_eq!(reads(&mount), 0, "nobody has opened it");
    let mut double = place.double(&config);
    let expected = units.len() as u64 * 4 * PAGE_BYTES;
    wait_until("the recording", || {
        let file = status(&mount);
        let done = file.zero_reads.faults + file.at_hand_reads.faults + file.slow_reads.faults;
        file.replayed_bytes == expected && file.waiting == 0 && done >= units.len() as u64
    });
    let before = reads(&mount);
    assert_eq!(
        before,
        units.len() as u64,
        "each part once, and nothing else"
    );
    for unit in &units {
        double.perform(Task::Read(unit * 4));
    }
    assert_eq!(reads(&mount), before);
    double.perform(Task::VerifyAll);
    assert_right(&mut double);
    // The recording is replayed once, and a file that is being loaded can be unmounted.
    let mut second = place.double(&config);
    second.perform(Task::VerifyAll);
    assert_right(&mut second);
    assert_eq!(status(&mount).replayed_bytes, expected);
    assert!(double.quit().success() && second.quit().success());
    unmount_unused(&mount);
    place.assert_unmounted();
}

/// The mount of a process of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MountOrder {
    memory: PathBuf,
    replay: Option<PathBuf>,
    delay: Duration,
    /// A descriptor of the process with this id.
    kept: Option<(i32, i32)>,
}

/// Stands for a service manager: the test takes the descriptor itself.
struct Kept;

impl Keeper for Kept {
    fn keep(&self, _: &str, _: BorrowedFd<'_>) -> Result<(), String> {
        Ok(())
    }

    fn forget(&self, _: &str) {}
}

fn take(pid: i32, fd: i32) -> OwnedFd {
    let process = Pid::from_raw(pid).expect("a process");
    let process = pidfd_open(process, PidfdFlags::empty()).expect("a process");
    pidfd_getfd(process, fd, PidfdGetfdFlags::empty()).expect("a descriptor")
}

/// Becomes a process that mounts. It answers each line by its status, and ends with its input.
pub(crate) fn process(directory: &Path, order: &MountOrder, mut control: UnixStream) -> ! {
    let source = Odd::new(&order.memory, 0, order.delay);
    let load = |path: &PathBuf| Recording::load(path).expect("a recording");
    let replay = order.replay.as_ref().map(load);
    let started = Mount::start(MountSettings {
        directory: directory.to_owned(),
        files: [(name("memory"), file(source, replay))].into(),
        keeper: Some(Box::new(Kept)),
        kept: order.kept.map(|(pid, fd)| take(pid, fd)),
    });
    let lines = BufReader::new(control.try_clone().expect("a socket")).lines();
    let mount = match started {
        Ok(mount) => mount,
        Err(why) => {
            writeln!(control, "{why}").expect("a test that listens");
            std::process::exit(1);
        }
    };
    let mut say = |line: &str| writeln!(control, "{line}").is_ok();
    if say("ready") {
        for _ in lines.map_while(Result::ok) {
            say(&serde_json::to_string(&[mount.status()]).expect("JSON"));
        }
    }
    let ended = mount.unmount();
    std::process::exit(i32::from(ended.is_err()));
}

/// A pager that mounts, and the keeper of its descriptor.
struct Chain {
    place: Place,
    order: Order,
    pager: PagerProcess,
    kept: OwnedFd,
}

impl Chain {
    /// `None` if mounting is not possible here.
    fn new(name: &str, config: &Config, delay: Duration) -> Option<Self> {
        let place = Place::new(name);
        let memory = place.memory(config);
        // A trial, which says where it is not.
        let source = open_source(&memory, Format::Raw).expect("a source");
        let trial = place.mount(source, None)?;
        unmount_unused(&trial);
        let mount = MountOrder {
            memory,
            replay: None,
            delay,
            kept: None,
        };
        let order = Order {
            directory: place.path.clone(),
            mount: Some(mount),
            ..Order::default()
        };
        let pager = PagerProcess::ready(&order);
        let pid = pager.pid() as i32;
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("a process");
        let fuse = entries.flatten().find(|entry| {
            let link = std::fs::read_link(entry.path());
            link.is_ok_and(|link| link == Path::new("/dev/fuse"))
        });
        let number = fuse.expect("a descriptor").file_name();
        let kept = take(
            pid,
            number
                .to_str()
                .expect("a number")
                .parse()
                .expect("a number"),
        );
        let mut chain = Self {
            place,
            order,
            pager,
            kept,
        };
        let own = std::process::id() as i32;
        chain.set(|mount, kept| mount.kept = Some((own, kept)));
        Some(chain)
    }

    fn set(&mut self, change: impl FnOnce(&mut MountOrder, i32)) {
        let mount = self.order.mount.as_mut().expect("a mount");
        change(mount, self.kept.as_raw_fd());
    }

    fn status(&mut self) -> Value {
        self.pager.list().remove(0)
    }
}

#[test]
fn a_killed_pager_costs_no_reader_if_its_descriptor_is_kept() {
    let config = Config {
        regions: vec![12 * MIB, 4 * MIB],
        ..config(46)
    };
    let Some(mut chain) = Chain::new("killed", &config, Duration::from_micros(300)) else {
        return;
    };
    assert_eq!(chain.status()["death_of_pager"], "kept");
    // Kills also meet a pager that loads a recording, of every second part.
    let recording = chain.place.scratch.path("recording");
    let parts = (0..pages(&config)).rev().filter(|page| page / 16 % 2 == 0);
    let bytes = Recording::of(parts.map(|page| page * PAGE_BYTES)).encode();
    std::fs::write(&recording, bytes).expect("a file");
    chain.set(|mount, _| mount.replay = Some(recording));
    let range = rotating_seeds("PAGEFERRY_MOUNT_KILLS", 6, 24);
    let mut random = Random::new(range.start);
    for seed in range {
        // Nobody maps it now, so all pages come again.
        drop_from_cache(&chain.place.mounted());
        let mut doubles: Vec<_> = (0..2).map(|_| chain.place.double(&config)).collect();
        for double in &mut doubles {
            double.begin(Task::VerifyAll);
            double.run();
        }
        std::thread::sleep(Duration::from_micros(random.below(15_000)));
        chain.pager.kill();
        let away = Duration::from_micros(random.below(3_000));
        std::thread::sleep(away);
        chain.pager = PagerProcess::ready(&chain.order);
        for double in &mut doubles {
            double.finish();
            double.pause();
            double.perform(Task::VerifyAll);
            let status = double.status();
            assert_eq!(status.wrong, 0, "seed {seed}: {:?}", status.first_wrong);
        }
        for double in doubles {
            assert!(double.quit().success(), "seed {seed}");
        }
    }
    chain.pager.end();
    chain.place.assert_unmounted();
}

#[test]
fn readers_of_a_file_that_has_changed_wait_for_the_one_they_know() {
    let config = config(47);
    let Some(mut chain) = Chain::new("changed", &config, Duration::from_millis(50)) else {
        return;
    };
    let mut double = chain.place.double(&config);
    let mut of_data = data_pages(&config);
    let (first, last) = (of_data.next().expect("data"), of_data.last().expect("data"));
    double.perform(Task::Read(first));
    chain.pager.kill();
    double.begin(Task::Read(last));
    let old = chain.order.mount.as_ref().expect("a mount").memory.clone();
    let new = chain.place.scratch.path("other");
    std::fs::write(&new, [9; 8192]).expect("a file");
    chain.set(|mount, _| mount.memory = new);
    chain.pager = PagerProcess::ready(&chain.order);
    wait_until("the read", || chain.status()["stray_reads"] == 1);
    // Those who open it now get the new file.
    assert_eq!(
        std::fs::read(chain.place.mounted()).expect("a file"),
        [9; 8192]
    );
    assert_eq!(double.status().tasks, 1);
    chain.pager.kill();
    chain.set(|mount, _| mount.memory = old);
    chain.pager = PagerProcess::ready(&chain.order);
    double.finish();
    assert_right(&mut double);
    let mut page = [0; 4096];
    let mounted = File::open(chain.place.mounted()).expect("a file");
    mounted
        .read_exact_at(&mut page, last * PAGE_BYTES)
        .expect("a page");
    assert_eq!(page, page_contents(config.seed, last));
}

#[test]
fn a_directory_is_mounted_once_and_a_dead_mount_is_replaced() {
    let config = config(48);
    let Some(mut chain) = Chain::new("once", &config, Duration::ZERO) else {
        return;
    };
    let source = || open_source(&chain.place.scratch.path("memory"), Format::Raw).expect("one");
    let settings = |directory: &Path, kept| MountSettings {
        directory: directory.to_owned(),
        files: [(name("memory"), file(source(), None))].into(),
        keeper: None,
        kept,
    };
    let path = chain.place.path.clone();
    let refused = Mount::start(settings(&path, None)).unwrap_err();
    assert!(matches!(refused, MountError::Mounted { .. }), "{refused}");
    let other = chain.place.scratch.path("other");
    let kept = chain.kept.try_clone().expect("a descriptor");
    let refused = Mount::start(settings(&other, Some(kept))).unwrap_err();
    assert!(matches!(refused, MountError::Elsewhere { .. }), "{refused}");
    for absent in [&other.join("none"), Path::new("/")] {
        let refused = Mount::start(settings(absent, None)).unwrap_err();
        assert!(matches!(refused, MountError::Directory { .. }), "{refused}");
    }
    // A directory that was made goes with its mount.
    let made = chain.place.scratch.path("made");
    let mount = Mount::start(settings(&made, None)).expect("a mount");
    assert!(made.join("memory").exists());
    unmount_unused(&mount);
    assert!(!made.exists());
    // All descriptors are closed.
    chain.pager.kill();
    let void = File::open("/dev/null").expect("a file");
    chain.kept = void.into();
    // A request that is under way when the connection ends has another error (ECONNABORTED).
    wait_until("the end of the file system", || {
        let error = std::fs::read_dir(&path).err();
        error.is_some_and(|error| Errno::from_io_error(&error) == Some(Errno::NOTCONN))
    });
    let mount = Mount::start(settings(&path, None)).expect("a mount");
    let mut double = chain.place.double(&config);
    double.perform(Task::VerifyAll);
    assert_right(&mut double);
    // A mount that is dropped serves its VMs on.
    drop_from_cache(&chain.place.mounted());
    drop(mount);
    chain.place.assert_unmounted();
    double.perform(Task::VerifyAll);
    assert_right(&mut double);
    assert!(double.quit().success());
}
