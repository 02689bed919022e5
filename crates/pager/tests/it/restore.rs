//! A VM's memory is right, and the figures of its restore are.

use crate::scene::{
    MIB, Scene, config, data_pages, drop_from_cache, files, is_cold, name, pages, run, verify,
};
use pageferry_pager::{
    Background, EndError, FileSource, Pager, Phase, Restore, RestoreError, Settings, Source,
    SourceError, Store, Stores, VmStatus,
};
use pageferry_testkit::firecracker::{Backend, Config, Fields, Task};
use pageferry_testkit::process::{descriptors, runs_in_child};
use pageferry_testkit::{HugePages, skip, wait_until};
use std::num::NonZeroU64;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::time::Duration;

/// Checks the figures of a VM without a balloon, all of whose pages were touched.
#[track_caller]
fn assert_whole(scene: &Scene) {
    let expected = pages(&scene.config);
    // Two faults on one page may each count, and place it once.
    let came = |vm: &VmStatus| {
        let faults = vm.zero_faults.faults + vm.at_hand_faults.faults + vm.read_faults.faults;
        faults + vm.neighbours + vm.replayed + vm.background
    };
    // A page is marked, and a fault counted, after its thread was woken.
    wait_until("all faults to be counted", || {
        let vm = scene.vm();
        came(&vm) >= expected && vm.missing == 0
    });
    let vm = scene.vm();
    assert_eq!((vm.pages, vm.resident, vm.missing), (expected, expected, 0));
    assert_eq!((vm.given_back, vm.waiting, vm.source_errors), (0, 0, 0));
    for times in [vm.zero_faults, vm.at_hand_faults, vm.read_faults] {
        // The histogram keeps two digits.
        assert!(times.p50 <= times.p99 && times.p99 <= times.max + times.max / 50);
        assert_eq!(times.faults == 0, times.max == 0, "{times:?}");
    }
}

#[test]
fn touching_threads_find_the_right_pages() {
    for (seed, fields, backend) in [
        (1, Fields::Both, Backend::Uffd),
        (2, Fields::KibOnly, Backend::UffdOld),
        (3, Fields::Unknown, Backend::Uffd),
    ] {
        let sees_removals = backend == Backend::Uffd;
        let config = Config {
            vcpus: 6,
            backend,
            ..config(seed)
        };
        let scene = Scene::new(&format!("right-{seed}"), config);
        let Some(mut double) = scene.serve(&scene.request(), fields) else {
            return;
        };
        let vm = scene.vm();
        assert_eq!((vm.pid as u32, vm.page_bytes), (double.pid(), 4096));
        assert_eq!(vm.sees_removals, sees_removals);
        assert_eq!((vm.resident, vm.missing), (0, pages(&scene.config)));
        assert!(!scene.scratch.path("socket").exists());
        run(&mut double, 200);
        // The two are counted one after the other.
        wait_until("the last page to be marked", || {
            let vm = scene.vm();
            vm.resident + vm.missing == vm.pages
        });
        verify(&mut double);
        assert_whole(&scene);
        let vm = scene.vm();
        assert!(vm.zero_faults.faults > 0 && vm.zeros > 0, "{vm:?}");
        assert!(vm.at_hand_faults.faults > 0, "{vm:?}");
        assert!(double.quit().success());
        scene.assert_ended();
        assert_eq!(scene.vm().resident, vm.resident);
    }
}

#[test]
fn a_file_that_is_not_in_memory_is_read() {
    let scene = Scene::new("cold", config(4));
    drop_from_cache(&scene.memory());
    let page = data_pages(&scene.config).next().expect("data");
    if !is_cold(&scene.memory(), page) {
        skip("disk", "the temporary directory is in memory");
        return;
    }
    let Some(mut double) = scene.serve(&scene.request(), Fields::Both) else {
        return;
    };
    // A look makes the kernel read ahead. So a fast disk may have a page by the second look.
    for page in data_pages(&scene.config).step_by(16) {
        drop_from_cache(&scene.memory());
        double.perform(Task::Read(page));
    }
    wait_until("a read", || scene.vm().read_faults.faults > 0);
    run(&mut double, 100);
    verify(&mut double);
    assert_whole(&scene);
    assert!(double.quit().success());
    scene.assert_ended();
}

#[test]
fn huge_pages_are_right() {
    let Some(_pages) = HugePages::at_least(4) else {
        return;
    };
    let config = Config {
        regions: vec![4 * MIB, 2 * MIB],
        backend: Backend::UffdHuge,
        balloon_us: Some(500),
        ..config(5)
    };
    let scene = Scene::new("huge", config);
    let Some(mut double) = scene.serve(&scene.request(), Fields::Both) else {
        return;
    };
    assert_eq!((scene.vm().page_bytes, scene.vm().pages), (2 * MIB, 3));
    run(&mut double, 200);
    verify(&mut double);
    assert!(double.quit().success());
    scene.assert_ended();
}

#[test]
fn a_vm_whose_memory_is_there_is_released() {
    let rate = NonZeroU64::new(32 * MIB).expect("a rate");
    for (seed, background) in [(6, Background::Idle), (7, Background::Rate(rate))] {
        let scene = Scene::new(&format!("loaded-{seed}"), config(seed));
        let mut request = scene.request();
        request.background = background;
        let Some(mut double) = scene.serve(&request, Fields::Both) else {
            return;
        };
        wait_until("all memory", || scene.vm().missing == 0);
        assert_whole(&scene);
        let vm = scene.vm();
        assert_eq!(vm.background, vm.pages);
        scene.pager.end(&name("vm"), false).expect("released");
        assert!(scene.pager.status(&name("vm")).is_none());
        assert_eq!(files(&scene.scratch.state()), ["lock"]);
        let first = data_pages(&scene.config).next().expect("data");
        double.perform(Task::Remove { first, pages: 1 });
        double.perform(Task::Read(first));
        run(&mut double, 100);
        verify(&mut double);
        assert!(double.quit().success());
    }
}

#[test]
fn a_balloon_at_work_survives_the_release() {
    for round in 0..12 {
        let config = Config {
            regions: vec![MIB / 2],
            vcpus: 1,
            balloon_us: Some(0),
            ..config(100 + round)
        };
        let scene = Scene::new(&format!("released-{round}"), config);
        let mut request = scene.request();
        request.background = Background::Rate(NonZeroU64::MAX);
        let Some(mut double) = scene.serve(&request, Fields::Both) else {
            return;
        };
        double.run();
        wait_until("all memory", || scene.vm().missing == 0);
        scene.pager.end(&name("vm"), false).expect("released");
        let before = double.status();
        wait_until("touches and removals", || {
            let now = double.status();
            now.removals > before.removals + 20 && now.touches[0] > before.touches[0] + 20
        });
        double.pause();
        verify(&mut double);
        assert!(double.quit().success());
    }
}

#[test]
fn a_vm_that_needs_its_pager_is_kept_or_killed() {
    let scene = Scene::new("needed", config(8));
    let Some(mut double) = scene.serve(&scene.request(), Fields::Both) else {
        return;
    };
    let refused = scene.pager.end(&name("vm"), false);
    let all = pages(&scene.config);
    assert!(
        matches!(&refused, Err(EndError::Needed { pages }) if *pages == all),
        "{refused:?}"
    );
    let again = scene.pager.restore(&name("vm"), scene.request());
    assert!(matches!(again, Err(RestoreError::Exists(_))), "{again:?}");
    verify(&mut double);
    scene.pager.end(&name("vm"), true).expect("killed");
    assert!(!double.wait().success());
    assert!(scene.pager.list().is_empty());
    assert_eq!(files(&scene.scratch.state()), ["lock"]);
    let absent = scene.pager.end(&name("vm"), true);
    assert!(matches!(absent, Err(EndError::Absent(_))), "{absent:?}");
}

#[test]
fn a_restore_that_ends_during_a_handshake_leaves_nothing() {
    let scene = Scene::new("leaves", config(9));
    let record = scene.scratch.state().join("vm.json");
    for _ in 0..20 {
        let request = scene.request();
        scene.pager.restore(&name("vm"), request).expect("begun");
        assert_eq!(scene.status().phase, Phase::Waiting);
        let silent = UnixStream::connect(scene.scratch.path("socket")).expect("connected");
        wait_until("the handshake to begin", || {
            let text = std::fs::read_to_string(&record).expect("a record");
            text.contains("\"pid\"")
        });
        scene.pager.end(&name("vm"), false).expect("ended");
        assert_eq!(files(&scene.scratch.state()), ["lock"]);
        assert!(!scene.scratch.path("socket").exists());
        drop(silent);
    }
}

/// A store whose reads take a while. They fail once none is left.
#[derive(Clone, Debug)]
struct Slow {
    memory: Arc<dyn Source>,
    pause: Duration,
    left: Arc<AtomicUsize>,
}

impl Store for Slow {
    fn schemes(&self) -> &[&str] {
        &["slow"]
    }

    fn open(&self, address: &str) -> Result<Arc<dyn Source>, SourceError> {
        assert_eq!(address, "slow://memory");
        Ok(Arc::new(self.clone()))
    }
}

impl Source for Slow {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn block(&self) -> u64 {
        self.memory.block()
    }

    fn is_zero(&self, _: u64, _: u64) -> bool {
        false
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        std::thread::sleep(self.pause);
        let left = self
            .left
            .fetch_update(AcqRel, Acquire, |left| left.checked_sub(1));
        left.map_err(|_| SourceError::Failed {
            what: self.identity(),
            why: std::io::Error::other("no more reads"),
        })?;
        self.memory.read(offset, buffer)
    }

    fn identity(&self) -> String {
        self.memory.identity()
    }
}

/// Settings of a pager of the scene, whose memory is at `slow://memory`. Each read takes `pause`.
/// It fails if none is `left`.
pub(crate) fn slow(scene: &Scene, pause: Duration, left: Arc<AtomicUsize>) -> Settings {
    let file = FileSource::open(&scene.memory()).expect("a source");
    let store: Arc<dyn Store> = Arc::new(Slow {
        memory: Arc::new(file),
        pause,
        left,
    });
    Settings {
        directory: scene.scratch.state(),
        stores: Stores::new([store]),
        ..Settings::default()
    }
}

/// Its reads are over by then: one of them holds the directory, and may place a page.
#[test]
fn a_pager_that_ends_leaves_its_directory_to_the_next() {
    let mut scene = Scene::new("next", config(41));
    let endless = || Arc::new(usize::MAX.into());
    let first = slow(&scene, Duration::from_millis(100), endless());
    let second = slow(&scene, Duration::ZERO, endless());
    drop(scene.pager);
    scene.pager = Pager::start(first).expect("a pager");
    let request = Restore::new("slow://memory", scene.scratch.path("socket"));
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    double.run();
    wait_until("slow reads", || scene.vm().waiting > 0);
    drop(scene.pager);
    scene.pager = Pager::start(second).expect("the directory is free");
    double.pause();
    verify(&mut double);
    assert!(double.quit().success());
    scene.assert_ended();

    let request = Restore::new("fast://memory", scene.scratch.path("socket"));
    let refused = scene
        .pager
        .restore(&name("vm"), request)
        .expect_err("no such store");
    assert!(refused.to_string().contains("one of slow://"), "{refused}");
}

/// Calls something that must not hang.
fn in_time<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    let (done, wait) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || done.send(what()));
        wait.recv_timeout(pageferry_testkit::LIMIT)
            .unwrap_or_else(|_| {
                eprintln!("it hangs");
                // A scope would wait for ever.
                std::process::abort()
            })
    })
}

#[test]
fn a_restore_that_has_ended_can_be_ended_and_holds_no_descriptor() {
    if runs_in_child() {
        return;
    }
    let scene = Scene::new("twice", config(10));
    let before = descriptors();
    for _ in 0..2 {
        let Some(double) = scene.serve(&scene.request(), Fields::Both) else {
            return;
        };
        assert!(double.quit().success());
        scene.assert_ended();
        wait_until("all descriptors to be closed", || descriptors() == before);
    }
    in_time(|| scene.pager.end(&name("vm"), false)).expect("ended");
    assert!(in_time(|| scene.pager.list()).is_empty());
}

#[test]
fn one_of_many_requests_gets_a_name_and_a_path() {
    let scene = Scene::new("many", config(11));
    let memory = scene.memory();
    for round in 0..40 {
        let same_name = round % 2 == 0;
        let id = |number: u32| match same_name {
            true => name("vm"),
            false => name(&format!("vm-{number}")),
        };
        let socket = scene.scratch.path(&format!("socket-{round}"));
        let barrier = std::sync::Barrier::new(4);
        let begun: Vec<_> = std::thread::scope(|scope| {
            let request = |number| {
                let restore = Restore::new(&memory, &socket);
                barrier.wait();
                scene.pager.restore(&id(number), restore).is_ok()
            };
            let threads: Vec<_> = (0..4).map(|n| scope.spawn(move || request(n))).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("no panic"))
                .collect()
        });
        assert_eq!(
            begun.iter().filter(|begun| **begun).count(),
            1,
            "round {round}"
        );
        UnixStream::connect(&socket).expect("the one that has begun listens");
        for status in scene.pager.list() {
            scene.pager.end(&name(&status.id), false).expect("ended");
        }
        assert!(!socket.exists());
    }
}

#[test]
fn requests_that_mean_nothing_are_refused() {
    let scene = Scene::new("nothing", config(12));
    let refusal = |change: &dyn Fn(&mut Restore)| {
        let mut request = scene.request();
        change(&mut request);
        let refused = scene.pager.restore(&name("vm"), request);
        assert_eq!(files(&scene.scratch.state()), ["lock"]);
        refused.expect_err("a refusal").to_string()
    };
    let empty = scene.scratch.path("empty");
    std::fs::write(&empty, "").expect("a file");
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Restore));
    let changes: [Change<'_>; 8] = [
        ("is empty", &|request| request.memory = empty.clone()),
        ("no absolute path", &|request| {
            request.memory = "memory".into();
        }),
        ("no absolute path", &|request| {
            request.socket = "socket".into();
        }),
        ("no absolute path", &|request| {
            request.record = Some("a".into());
        }),
        ("no absolute path", &|request| {
            request.replay = Some("a".into());
        }),
        ("mode 1224", &|request| request.owner.mode = 660),
        ("4294967295", &|request| request.owner.user = Some(u32::MAX)),
        ("4294967295", &|request| {
            request.owner.group = Some(u32::MAX);
        }),
    ];
    for (part, change) in changes {
        let why = refusal(change);
        assert!(why.contains(part), "{why}");
    }
}
