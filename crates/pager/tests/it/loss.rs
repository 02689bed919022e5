//! The memory file is cut off or changed under a VM.

use crate::scene::{Scene, config, data_pages, pages, verify, write_memory};
use pageferry_pager::{OnLoss, Phase};
use pageferry_testkit::firecracker::{Double, Fields, PAGE_BYTES, Task};
use pageferry_testkit::wait_until;
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;

/// A VM that waits for its last page of data, which is lost.
fn lose(name: &str, on_loss: OnLoss, damage: impl FnOnce(&File)) -> Option<(Scene, Double)> {
    let scene = Scene::new(name, config(21));
    let mut request = scene.request();
    request.on_loss = on_loss;
    let mut double = scene.serve(&request, Fields::Both)?;
    let first = data_pages(&scene.config).next().expect("data");
    double.perform(Task::Read(first));
    let file = File::options().write(true).open(scene.memory());
    damage(&file.expect("a file"));
    let last = data_pages(&scene.config).last().expect("data");
    if on_loss == OnLoss::Wait {
        double.begin(Task::Read(last));
    } else {
        double.begin_last(Task::Read(last));
    }
    Some((scene, double))
}

/// Checks that the VM waits, and still gets the pages that it has given back.
fn assert_waits(scene: &Scene, double: &mut Double, fault: &str) {
    wait_until("repeated reads", || scene.vm().source_errors >= 3);
    let status = scene.status();
    assert_eq!(status.phase, Phase::Lost);
    let why = status.fault.expect("a fault");
    assert!(why.contains(fault), "{why}");
    let first = pages(&scene.config) / 2;
    double.begin(Task::Remove { first, pages: 4 });
    wait_until("the removal", || double.status().removals == 1);
    double.begin(Task::Read(first));
    wait_until("the removed page", || double.status().tasks == 1);
    assert_eq!(double.status().wrong, 0);
    assert_eq!(scene.vm().waiting, 1);
}

#[test]
fn a_vm_waits_for_a_file_that_is_cut_off() {
    let cut = |file: &File| file.set_len(8192).expect("cut off");
    if let Some((scene, mut double)) = lose("cut", OnLoss::Wait, cut) {
        assert_waits(
            &scene,
            &mut double,
            "cut off; the VM goes on when that is undone",
        );
    }
}

#[test]
fn a_vm_waits_for_a_file_that_is_cut_off_and_grown_again() {
    let mut before = None;
    let regrow = |file: &File| {
        let metadata = file.metadata().expect("a file");
        file.set_len(8192).expect("cut off");
        file.set_len(metadata.len()).expect("grown");
        before = metadata.modified().ok();
    };
    let Some((scene, mut double)) = lose("regrown", OnLoss::Wait, regrow) else {
        return;
    };
    assert_waits(&scene, &mut double, "has changed");
    // Its old bytes, and its old time.
    write_memory(&scene.memory(), &scene.config);
    let file = File::options().write(true).open(scene.memory());
    let restored = file.and_then(|file| file.set_modified(before.expect("a time")));
    restored.expect("the time of the file");
    double.finish();
    scene.wait_served();
    verify(&mut double);
    assert!(double.quit().success());
    scene.assert_ended();
}

#[test]
fn a_vm_of_a_changed_file_is_killed() {
    let change = |file: &File| file.write_all_at(b"changed", 0).expect("written");
    let Some((scene, mut double)) = lose("killed", OnLoss::Kill, change) else {
        return;
    };
    let signal = Signal::KILL.as_raw();
    assert_eq!(double.wait().signal(), Some(signal));
    scene.assert_ended();
}

#[test]
fn a_vm_of_a_changed_file_is_paused() {
    let change = |file: &File| file.write_all_at(b"changed", 0).expect("written");
    let Some((scene, double)) = lose("paused", OnLoss::Pause, change) else {
        return;
    };
    wait_until("the VMM to stop", || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", double.pid()));
        stat.expect("a process").contains(") T ")
    });
    let status = scene.status();
    assert_eq!(status.phase, Phase::Lost);
    scene
        .pager
        .end(&crate::scene::name("vm"), true)
        .expect("killed");
}

/// Times are no evidence: `--on-loss kill` kills for bytes.
#[test]
fn a_touch_of_the_file_kills_no_vm() {
    let scene = Scene::new("touched", config(21));
    let mut request = scene.request();
    request.on_loss = OnLoss::Kill;
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    let file = File::options().write(true).open(scene.memory());
    let epoch = std::time::SystemTime::UNIX_EPOCH;
    let touched = file.and_then(|file| file.set_modified(epoch));
    touched.expect("the time of the file");
    verify(&mut double);
    assert_eq!(scene.vm().source_errors, 0);
    assert!(double.quit().success());
    scene.assert_ended();
}

/// A map of holes is as old as its file was then.
#[test]
fn a_hole_of_a_file_that_was_filled_since_is_no_zero() {
    let scene = Scene::new("filled", config(22));
    let data: Vec<_> = data_pages(&scene.config).collect();
    let file = File::create(scene.memory()).expect("a file");
    let size = pages(&scene.config) * PAGE_BYTES;
    file.set_len(size).expect("a hole");
    let half = size / 2;
    file.write_all_at(&vec![7; half as usize], half)
        .expect("data");
    let mut request = scene.request();
    request.on_loss = OnLoss::Kill;
    let Some(mut double) = scene.serve(&request, Fields::Both) else {
        return;
    };
    file.write_all_at(&[7; 4096], 8 * PAGE_BYTES)
        .expect("written");
    double.begin_last(Task::Read(data[0]));
    assert_eq!(double.wait().signal(), Some(Signal::KILL.as_raw()));
    scene.assert_ended();
}
