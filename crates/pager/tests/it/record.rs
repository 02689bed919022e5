//! Recordings of first touches, and restores that load them.

use crate::process::{Order, PagerProcess};
use crate::restore::slow;
use crate::scene::{Scene, config, data_pages, drop_from_cache, files, name, pages};
use pageferry_pager::{Pager, Recording, Restore, RestoreError, Settings};
use pageferry_testkit::firecracker::{Double, Fields, PAGE_BYTES, Task};
use pageferry_testkit::wait_until;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[test]
fn recorded_pages_are_there_before_they_are_touched() {
    let scene = Scene::new("record", config(31));
    let path = scene.scratch.path("recording");
    let mut request = scene.request();
    request.record = Some(path.clone());
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    // One page of each 128 KiB, the last one first: no page comes with another.
    let block = |page: &u64| page / 32;
    let touched: Vec<u64> = {
        let data: Vec<_> = data_pages(&scene.config).collect();
        let blocks = data.chunk_by(|a, b| block(a) == block(b));
        blocks.map(|pages| pages[0]).rev().collect()
    };
    assert!(touched.len() as u64 > pages(&scene.config) / 40);
    for page in &touched {
        double.perform(Task::Read(*page));
    }
    assert!(double.quit().success());
    scene.assert_ended();
    let recording = Recording::load(&path).expect("a recording");
    let recorded: Vec<_> = recording.offsets().map(|at| at / PAGE_BYTES).collect();
    assert_eq!(recorded, touched);

    drop_from_cache(&scene.memory());
    request.record = None;
    request.replay = Some(path.clone());
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    // One page in 64, from the 33rd on, is left out as a sample.
    let sampled = touched.len().div_ceil(64) as u64 - u64::from(touched.len() % 64 <= 32);
    let count = touched.len() as u64 - sampled;
    wait_until("the recorded pages", || scene.vm().replayed == count);
    assert_eq!(scene.vm().resident, count);
    assert_eq!(
        (scene.vm().sampled, scene.vm().sampled_touched),
        (sampled, 0)
    );
    for page in &touched {
        double.perform(Task::Read(*page));
    }
    let vm = scene.vm();
    let faults = [vm.zero_faults, vm.at_hand_faults, vm.read_faults];
    assert_eq!(faults.map(|way| way.faults), [0, sampled, 0]);
    assert_eq!((vm.sampled, vm.sampled_touched), (sampled, sampled));
    assert_eq!(vm.resident, touched.len() as u64);
    crate::scene::verify(&mut double);
    assert!(double.quit().success());
    scene.assert_ended();

    let mut bytes = std::fs::read(&path).expect("a file");
    bytes[17] ^= 1;
    std::fs::write(&path, bytes).expect("written");
    let refused = scene.pager.restore(&name("vm"), request);
    assert!(
        matches!(refused, Err(RestoreError::Recording(_))),
        "{refused:?}"
    );
    assert_eq!(files(&scene.scratch.state()), ["lock"]);
    assert!(!scene.scratch.path("socket").exists());
}

#[test]
fn the_next_pager_goes_on_with_a_replay() {
    let mut scene = Scene::new("replay", config(32));
    let path = scene.scratch.path("recording");
    let offsets = data_pages(&scene.config).map(|page| page * PAGE_BYTES);
    let recording = Recording::of(offsets);
    recording.save(&path).expect("a file");
    // Each pager stops where its source does. The first one also reads a fingerprint, of 8 pages.
    let first = slow(&scene, Duration::ZERO, Arc::new(16.into()));
    let reads = Arc::new(AtomicUsize::new(0));
    let second = slow(&scene, Duration::ZERO, Arc::clone(&reads));
    drop(scene.pager);
    scene.pager = Pager::start(first).expect("a pager");
    let mut request = Restore::new("slow://memory", scene.scratch.path("socket"));
    request.replay = Some(path);
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    wait_until("a part of the replay", || scene.vm().replayed > 0);
    drop(scene.pager);
    scene.pager = Pager::start(second).expect("a pager");
    let before = scene.vm().resident;
    assert!(before < recording.len() as u64 / 2, "{before} pages");
    reads.store(usize::MAX, Ordering::Release);
    // One page in 64, from the 33rd on, is left out as a sample.
    let all = (0..recording.len()).filter(|at| at % 64 != 32).count() as u64;
    wait_until("the rest of the replay", || scene.vm().resident == all);
    crate::scene::verify(&mut double);
    assert!(double.quit().success());
    scene.assert_ended();
}

#[test]
fn a_recording_needs_room_and_its_own_snapshot() {
    let scene = Scene::new("room", config(34));
    let path = scene.scratch.path("recording");
    let mut request = scene.request();
    let refusal = |request: &Restore| {
        let refused = scene.pager.restore(&name("vm"), request.clone());
        assert_eq!(files(&scene.scratch.state()), ["lock"]);
        assert!(!request.socket.exists());
        refused.expect_err("a refusal").to_string()
    };
    for bad in [
        scene.scratch.path("absent/recording"),
        scene.scratch.path(""),
    ] {
        request.record = Some(bad.clone());
        let why = refusal(&request);
        assert!(why.contains(bad.to_str().expect("UTF-8")), "{why}");
    }
    // The room is there while it waits, and goes with it.
    request.record = Some(path.clone());
    let room = scene.scratch.path("recording.new");
    scene
        .pager
        .restore(&name("vm"), request.clone())
        .expect("begun");
    assert!(std::fs::metadata(&room).expect("room").len() > pages(&scene.config) * 4);
    scene.pager.end(&name("vm"), false).expect("ended");
    assert!(!room.exists() && !path.exists());

    let Some(double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    assert!(double.quit().success());
    scene.assert_ended();
    assert!(!room.exists());
    request.record = None;
    request.replay = Some(path);
    scene
        .pager
        .restore(&name("vm"), request.clone())
        .expect("of its snapshot");
    scene.pager.end(&name("vm"), false).expect("ended");
    let bytes = std::fs::read(scene.memory()).expect("a file");
    for other in [[&bytes[..], &bytes[..4096]].concat(), vec![7; bytes.len()]] {
        std::fs::write(scene.memory(), other).expect("written");
        let why = refusal(&request);
        assert!(why.contains("a recording of another snapshot"), "{why}");
    }
}

/// The order of the touches that the killed pager saw is lost, and none of the pages.
#[test]
fn a_recording_outlives_a_kill_of_the_pager() {
    let mut scene = Scene::new("killed", config(33));
    let path = scene.scratch.path("recording");
    let mut request = scene.request();
    request.record = Some(path.clone());
    drop(scene.pager);
    let mut order = Order {
        directory: scene.scratch.state(),
        ..Order::default()
    };
    order.restores.insert("vm".to_owned(), request.clone());
    let mut killed = PagerProcess::ready(&order);
    let Some(mut double) = Double::start(&scene.config) else {
        return;
    };
    let connected = double.connect(&request.socket, Fields::Both);
    connected.expect("connected");
    wait_until("the VM to be served", || {
        killed.list()[0]["phase"] == "serving"
    });
    let data: Vec<_> = data_pages(&scene.config).step_by(8).collect();
    let (before, behind) = data.split_at(data.len() / 2);
    for page in before.iter().rev() {
        double.perform(Task::Read(*page));
    }
    // A page is marked after its thread was woken.
    wait_until("the last mark", || {
        killed.list()[0]["vm"]["resident"] == before.len()
    });
    killed.kill();

    let settings = Settings {
        directory: scene.scratch.state(),
        ..Settings::default()
    };
    scene.pager = Pager::start(settings).expect("a pager");
    for page in behind.iter().rev() {
        double.perform(Task::Read(*page));
    }
    assert!(double.quit().success());
    scene.assert_ended();
    let recording = Recording::load(&path).expect("a recording");
    let recorded: Vec<_> = recording.offsets().map(|at| at / PAGE_BYTES).collect();
    let expected: Vec<_> = before.iter().chain(behind.iter().rev()).copied().collect();
    assert_eq!(recorded, expected);
}

/// Faults on recorded pages wait for the read of the replay, or take the block out of its plan.
#[test]
fn a_block_that_is_replayed_is_read_once() {
    let mut scene = Scene::new("once", config(34));
    let path = scene.scratch.path("recording");
    let data: Vec<_> = data_pages(&scene.config).collect();
    let recording = Recording::of(data.iter().map(|page| page * PAGE_BYTES));
    recording.save(&path).expect("a file");
    let left = Arc::new(AtomicUsize::new(usize::MAX));
    let settings = slow(&scene, Duration::from_millis(20), left.clone());
    drop(scene.pager);
    scene.pager = Pager::start(settings).expect("a pager");
    let mut request = Restore::new("slow://memory", scene.scratch.path("socket"));
    request.replay = Some(path);
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    // A block and eight pages are read before the VMM may connect.
    let (proof, blocks) = (9, pages(&scene.config) / 16);
    // Against the order of the replay.
    for page in data.iter().rev() {
        double.perform(Task::Read(*page));
    }
    wait_until("the end of the replay", || {
        let vm = scene.vm();
        vm.resident + vm.sampled - vm.sampled_touched >= data.len() as u64
    });
    let reads = usize::MAX - left.load(Ordering::Acquire);
    // A page of the sample may be touched right when its bytes are put aside.
    assert!(
        reads as u64 <= proof + blocks + scene.vm().sampled,
        "{reads} reads, {blocks} blocks"
    );
    assert!(scene.vm().replayed > 0);
    assert!(double.quit().success());
    scene.assert_ended();
}
