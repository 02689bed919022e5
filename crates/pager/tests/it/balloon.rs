//! A balloon beside threads that touch pages.

use crate::scene::{MIB, Scene, config, drop_from_cache, verify};
use pageferry_testkit::firecracker::{Config, Fields};
use pageferry_testkit::{Stop, stress_time, wait_until};
use std::time::{Duration, Instant};

/// Runs one VM after the other for a time: pages of the file come only to a young VM.
fn run_vms(name: &str, cold: bool) {
    let deadline = Instant::now() + stress_time(Duration::from_millis(1500));
    for seed in 0.. {
        let config = Config {
            regions: vec![2 * MIB, MIB],
            balloon_us: Some(seed % 4 * 20),
            ..config(seed)
        };
        let scene = Scene::new(&format!("{name}-{seed}"), config);
        let memory = scene.memory();
        let stop = Stop::new();
        let done = std::thread::scope(|scope| {
            let _ends = stop.on_drop();
            if cold {
                scope.spawn(|| {
                    while !stop.is_stopped() {
                        drop_from_cache(&memory);
                    }
                });
            }
            let Some(mut double) = scene.serve(&scene.request(), Fields::Both) else {
                return true;
            };
            double.run();
            wait_until("all memory to be touched, and removals", || {
                let (vm, status) = (scene.vm(), double.status());
                assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
                let touched = status.touches.iter().all(|touches| *touches > 300);
                touched && status.removals > 30 && vm.missing < vm.pages / 50
            });
            double.pause();
            verify(&mut double);
            // A page is marked as placed after its thread was woken. All were touched.
            wait_until("all pages to be marked", || {
                scene.vm().resident == scene.vm().pages
            });
            let vm = scene.vm();
            assert_eq!((vm.missing, vm.source_errors), (0, 0));
            assert!(vm.given_back > 0, "{vm:?}");
            assert!(double.quit().success());
            scene.assert_ended();
            Instant::now() >= deadline
        });
        if done {
            return;
        }
    }
}

#[test]
fn every_page_is_right_beside_a_balloon() {
    run_vms("warm", false);
}

#[test]
fn every_page_is_right_beside_a_balloon_while_the_source_is_slow() {
    run_vms("slow", true);
}
