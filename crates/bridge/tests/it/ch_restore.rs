//! VMs of Cloud Hypervisor start from their snapshots, and find their memory.

use crate::ch::{Directory, PAGES, REGIONS};
use pageferry_bridge::ch::{RestoreOptions, RestoreReport, Restoring, Snapshot, restore};
use pageferry_bridge::foreign::VmmError;
use pageferry_pager::{Format, Source, SourceError, Stores};
use pageferry_testkit::cloud_hypervisor::{Config, Double, Quirk};
use pageferry_testkit::wait_until;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The longest restore of a test.
const LIMIT: Duration = Duration::from_secs(120);

/// A snapshot, and a process that has no VM.
struct Scene {
    directory: Directory,
    snapshot: Snapshot,
    memory: Arc<dyn Source>,
    target: Double,
}

fn double(directory: &Directory, name: &str, regions: &[u64], quirk: Quirk) -> Option<Double> {
    Double::start(&Config {
        api: directory.join(name),
        seed: 5,
        regions: regions.to_vec(),
        vcpus: 2,
        quirk,
    })
}

impl Scene {
    fn new(quirk: Quirk) -> Option<Self> {
        let directory = Directory::new();
        let mut source = double(&directory, "source", &REGIONS, Quirk::Right)?;
        source.run();
        wait_until("the guest to work", || source.status().touched() > 200);
        source.pause();
        source.snapshot(directory.as_ref());
        drop(source);
        let stores = Stores::default();
        let opened = Snapshot::open(directory.as_ref(), &stores, Format::Raw);
        let (snapshot, memory) = opened.unwrap();
        assert_eq!(snapshot.memory_bytes(), PAGES * 4096);
        assert_eq!(snapshot.vcpus(), Some(2));
        let target = double(&directory, "target", &[], quirk)?;
        Some(Self {
            directory,
            snapshot,
            memory,
            target,
        })
    }

    fn restore(
        &self,
        source: &dyn Source,
        resume: bool,
        stop: &(dyn Fn() -> bool + Sync),
        tell: &(dyn Fn(Restoring<'_>) + Sync),
    ) -> Result<RestoreReport, VmmError> {
        let mut options = RestoreOptions {
            api: self.directory.join("target"),
            resume,
            keeper: None,
        };
        let began = Instant::now();
        let stop = || stop() || began.elapsed() > LIMIT;
        restore(&mut options, &self.snapshot, source, &stop, tell)
    }

    /// The VM has all its pages, and each is right.
    fn check(&mut self, state: &str) {
        assert_eq!(self.target.outcome().outcome, "received");
        let status = self.target.verify();
        assert_eq!(status.first_wrong, []);
        assert_eq!((status.wrong, status.served.is_some()), (0, true));
        assert_eq!(status.state, state);
    }
}

/// A source in the way of whose reads a test stands.
struct Hard<R> {
    source: Arc<dyn Source>,
    before: R,
}

impl<R> std::fmt::Debug for Hard<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hard")
    }
}

impl<R: Fn(u64) -> Result<(), SourceError> + Send + Sync> Source for Hard<R> {
    fn bytes(&self) -> u64 {
        self.source.bytes()
    }
    fn block(&self) -> u64 {
        self.source.block()
    }
    fn reads(&self) -> usize {
        8
    }
    fn is_zero(&self, offset: u64, len: u64) -> bool {
        self.source.is_zero(offset, len)
    }
    fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }
    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        (self.before)(offset)?;
        self.source.read(offset, buffer)
    }
    fn identity(&self) -> String {
        self.source.identity()
    }
}

fn failed() -> Result<(), SourceError> {
    Err(SourceError::Failed {
        what: "the snapshot".into(),
        why: std::io::Error::other("no disk"),
    })
}

#[test]
fn a_restored_vm_runs_and_finds_its_memory() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let memory = Arc::clone(&scene.memory);
    let report = scene.restore(&*memory, true, &|| false, &|_| ()).unwrap();
    assert_eq!((report.pages, report.requests), (PAGES, PAGES));
    assert!(report.loaded <= report.ready && report.ready <= report.took);
    // Half of the pages were never written, most of these are in blocks with data.
    assert!(report.read_bytes <= PAGES * 4096, "{report:?}");
    assert_eq!(report.failed_reads, 0);
    scene.check("Running");
    let touches = scene.target.status().touched();
    wait_until("the guest to go on", || {
        scene.target.status().touched() > touches + 200
    });
    assert_eq!(scene.target.status().wrong, 0);
}

#[test]
fn a_restored_vm_stays_paused_unless_it_is_resumed() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let memory = Arc::clone(&scene.memory);
    scene.restore(&*memory, false, &|| false, &|_| ()).unwrap();
    scene.check("Paused");
    scene.target.run();
    let touches = scene.target.status().touched();
    wait_until("its owner's resume", || {
        scene.target.status().touched() > touches
    });
    assert_eq!(scene.target.status().wrong, 0);
}

/// Page 0, which the process touches while it loads State, comes from behind the other region.
#[test]
fn a_vm_is_loaded_before_the_rest_of_its_memory_can_be_read() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let loaded = AtomicBool::new(false);
    let source = Hard {
        source: Arc::clone(&scene.memory),
        before: |offset| {
            let began = Instant::now();
            while offset != REGIONS[1] && !loaded.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
                assert!(began.elapsed() < LIMIT, "the VM waits for another page");
            }
            Ok(())
        },
    };
    let tell = |happened: Restoring<'_>| {
        if matches!(happened, Restoring::Loaded) {
            loaded.store(true, Ordering::Release);
        }
    };
    scene.restore(&source, true, &|| false, &tell).unwrap();
    assert!(loaded.load(Ordering::Acquire));
    scene.check("Running");
}

#[test]
fn a_slow_source_has_many_reads_under_way() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let source = Hard {
        source: Arc::clone(&scene.memory),
        before: |_| {
            let reads = now.fetch_add(1, Ordering::AcqRel) + 1;
            most.fetch_max(reads, Ordering::AcqRel);
            // It waits for the others. A read that a page fault needs may be alone.
            let began = Instant::now();
            while most.load(Ordering::Acquire) < 4 && began.elapsed() < Duration::from_millis(200) {
                std::thread::sleep(Duration::from_millis(1));
            }
            now.fetch_sub(1, Ordering::AcqRel);
            Ok(())
        },
    };
    let report = scene.restore(&source, true, &|| false, &|_| ()).unwrap();
    assert!(most.load(Ordering::Acquire) >= 4, "{report:?}");
    scene.check("Running");
}

/// Reads fail for a while. The VM waits, and no page is wrong.
#[test]
fn a_source_that_fails_is_asked_again() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let (reads, lost, found) = (
        AtomicUsize::new(0),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let source = Hard {
        source: Arc::clone(&scene.memory),
        before: |_| match reads.fetch_add(1, Ordering::AcqRel) {
            4..40 => failed(),
            _ => Ok(()),
        },
    };
    let tell = |happened: Restoring<'_>| match happened {
        Restoring::Lost(why) => {
            assert_eq!(why.to_string(), "reading the snapshot failed: no disk");
            lost.fetch_add(1, Ordering::AcqRel);
        }
        Restoring::Found => {
            found.fetch_add(1, Ordering::AcqRel);
        }
        _ => {}
    };
    let report = scene.restore(&source, true, &|| false, &tell).unwrap();
    assert_eq!(report.failed_reads, 36, "{report:?}");
    let (lost, found) = (lost.into_inner(), found.into_inner());
    assert!(lost > 0 && lost == found, "lost {lost}, found {found}");
    scene.check("Running");
}

/// No answer is given for a page that never comes. The VM ends with the restore.
#[test]
fn a_source_that_is_gone_leaves_its_page_without_an_answer() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let (loaded, lost) = (AtomicBool::new(false), AtomicBool::new(false));
    let source = Hard {
        source: Arc::clone(&scene.memory),
        before: |_| match loaded.load(Ordering::Acquire) {
            true => failed(),
            false => {
                std::thread::sleep(Duration::from_millis(20));
                Ok(())
            }
        },
    };
    let tell = |happened: Restoring<'_>| match happened {
        Restoring::Loaded => loaded.store(true, Ordering::Release),
        Restoring::Lost(_) => lost.store(true, Ordering::Release),
        _ => {}
    };
    let since = std::sync::OnceLock::new();
    let stop = || {
        lost.load(Ordering::Acquire)
            && since.get_or_init(Instant::now).elapsed() > Duration::from_millis(300)
    };
    let error = scene.restore(&source, true, &stop, &tell).unwrap_err();
    assert!(matches!(error, VmmError::Stopped), "{error}");
    assert_eq!(scene.target.wait().code(), Some(3));
}

/// A memory file of holes. The guest finds zeros, and nothing is read.
#[test]
fn zero_pages_cost_no_read() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let path = scene.directory.join("memory-ranges");
    let file = std::fs::File::create(path).unwrap();
    file.set_len(PAGES * 4096).unwrap();
    let opened = Snapshot::open(scene.directory.as_ref(), &Stores::default(), Format::Raw);
    let source = Hard {
        source: opened.unwrap().1,
        before: |_| failed(),
    };
    let report = scene.restore(&source, false, &|| false, &|_| ()).unwrap();
    assert_eq!((report.reads, report.requests), (0, PAGES));
    assert!(scene.target.outcome().served.is_some());
}

#[test]
fn a_process_that_fails_ends_the_restore_in_a_sentence() {
    for (quirk, sentence) in [
        (Quirk::RefuseConfig, "refused to take the VM's Config"),
        (
            Quirk::ReceiverDiesAtConfig,
            "while we waited for it to take the VM's Config",
        ),
        (Quirk::RefuseState, "State is refused"),
        (
            Quirk::ReceiverDiesAtState,
            "while we waited for it to load State",
        ),
        (Quirk::ReceiverDiesAtFaults, "the VMM"),
        (
            Quirk::WrongFault,
            "a page fault names 4096 bytes at 0x4000000000000",
        ),
        (Quirk::WrongCommand, "sent Start where PageFault was due"),
    ] {
        let Some(scene) = Scene::new(quirk) else {
            return;
        };
        let memory = Arc::clone(&scene.memory);
        let began = Instant::now();
        let error = scene.restore(&*memory, true, &|| false, &|_| ());
        let error = error.unwrap_err().to_string();
        assert!(error.contains(sentence), "{quirk:?}: {error}");
        assert!(began.elapsed() < Duration::from_secs(20), "{quirk:?}");
    }
}

#[test]
fn a_process_that_is_killed_takes_its_vm_along() {
    let Some(mut scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let loaded = AtomicBool::new(false);
    let source = Hard {
        source: Arc::clone(&scene.memory),
        before: |_| {
            std::thread::sleep(Duration::from_millis(50));
            Ok(())
        },
    };
    let mut options = RestoreOptions {
        api: scene.directory.join("target"),
        resume: true,
        keeper: None,
    };
    let tell = |happened: Restoring<'_>| {
        loaded.fetch_or(matches!(happened, Restoring::Loaded), Ordering::AcqRel);
    };
    let began = Instant::now();
    let error = std::thread::scope(|scope| {
        let stop = || began.elapsed() > LIMIT;
        let (snapshot, source, tell) = (&scene.snapshot, &source, &tell);
        let restoring = scope.spawn(move || restore(&mut options, snapshot, source, &stop, tell));
        wait_until("the VM", || loaded.load(Ordering::Acquire));
        scene.target.kill();
        restoring.join().unwrap().unwrap_err()
    });
    let pages = PAGES;
    assert!(
        matches!(error, VmmError::Gone { asked, pages: all } if asked < pages && all == pages),
        "{error}"
    );
}

#[test]
fn a_process_that_has_a_vm_takes_no_other() {
    let Some(scene) = Scene::new(Quirk::Right) else {
        return;
    };
    let Some(mut other) = double(&scene.directory, "other", &REGIONS, Quirk::Right) else {
        return;
    };
    other.run();
    let mut options = RestoreOptions {
        api: scene.directory.join("other"),
        resume: true,
        keeper: None,
    };
    let error = restore(
        &mut options,
        &scene.snapshot,
        &*scene.memory,
        &|| false,
        &|_| (),
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("there is a VM"), "{error}");
    assert_eq!(other.verify().wrong, 0);
    assert_eq!(other.status().state, "Running");
}

/// The rate of the same process if each page cost a round trip to the source.
#[test]
#[ignore = "measures: run with --release and --nocapture"]
fn pages_a_second_of_a_slow_source() {
    for delay in [1, 5, 20] {
        let Some(mut scene) = Scene::new(Quirk::Right) else {
            return;
        };
        let source = Hard {
            source: Arc::clone(&scene.memory),
            before: |_| {
                std::thread::sleep(Duration::from_millis(delay));
                Ok(())
            },
        };
        let report = scene.restore(&source, true, &|| false, &|_| ()).unwrap();
        scene.check("Running");
        let rate = PAGES as f64 / scene.target.status().served.unwrap().as_secs_f64();
        let alone = 1000 / delay;
        println!("{delay} ms a read: {rate:.0} pages/s, one page a read {alone}; {report:?}");
    }
}
