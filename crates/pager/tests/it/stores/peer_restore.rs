//! A whole VM starts from a peer's file.

use crate::stores::scene::Scene;
use pageferry_pager::{Format, Pager, Phase, Restore, Settings, Stores};
use pageferry_snapshot::{Input, Options, pack};
use pageferry_testkit::firecracker::{Config, Double, Fields, PAGE_BYTES, Task, write_memory_file};
use pageferry_testkit::wait_until;
use std::fs::File;
use std::ops::ControlFlow;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// Starts a VM from a file of the scene, and loses the server for a while.
fn restores(scene: &mut Scene, file: &str, format: Format, seed: u64) {
    let config = Config {
        seed,
        regions: vec![8 * MIB, MIB],
        vcpus: 4,
        ..Config::default()
    };
    let Some(mut double) = Double::start(&config) else {
        return;
    };
    let settings = Settings {
        directory: scene.scratch.path("state"),
        stores: Stores::new([Arc::new(scene.store()) as _]),
        ..Settings::default()
    };
    let pager = Pager::start(settings).unwrap();
    let socket = scene.scratch.path("socket");
    let mut restore = Restore::new(scene.address(file), &socket);
    restore.format = format;
    let name = "vm".parse().unwrap();
    pager.restore(&name, restore).unwrap();
    double.connect(&socket, Fields::Both).unwrap();
    let status = || pager.status(&name).unwrap();
    wait_until("the VM to be served", || status().phase == Phase::Serving);
    double.run();
    let touched = |double: &mut Double, count: u64| {
        let before = double.status().touches;
        wait_until("touches", || {
            let now = double.status().touches;
            now.iter()
                .zip(&before)
                .all(|(now, before)| *now >= before + count)
        });
    };
    touched(&mut double, 20);
    scene.stop();
    wait_until("the pager to notice", || {
        let vm = status().vm.unwrap();
        vm.source_errors > 0 || vm.missing == 0
    });
    scene.start();
    touched(&mut double, 50);
    double.pause();
    double.perform(Task::VerifyAll);
    let checked = double.status();
    assert_eq!(checked.wrong, 0, "{:?}", checked.first_wrong);
    wait_until("no page to be missing", || {
        status().vm.unwrap().missing == 0
    });
    assert!(double.quit().success());
    assert!(pager.wait_ended(&name, pageferry_testkit::LIMIT));
}

#[test]
fn a_vm_starts_from_a_memory_file_of_a_peer() {
    let mut scene = Scene::new("vm-raw");
    write_memory_file(&scene.file("memory"), 5, 9 * MIB / PAGE_BYTES).unwrap();
    restores(&mut scene, "memory", Format::Raw, 5);
}

#[test]
fn a_vm_starts_from_a_packed_snapshot_of_a_peer() {
    let mut scene = Scene::new("vm-packed");
    let memory = scene.scratch.path("memory");
    write_memory_file(&memory, 6, 9 * MIB / PAGE_BYTES).unwrap();
    let input = File::open(&memory).unwrap();
    let on = &mut |_, _| ControlFlow::Continue(());
    pack(
        Input::File(&input),
        &scene.file("packed"),
        Options::default(),
        on,
    )
    .unwrap();
    restores(&mut scene, "packed", Format::Packed, 6);
}
