//! Pagers die, and the next ones take their VMs over.

use crate::process::{Order, PagerProcess};
use crate::scene::{
    MIB, Scratch, config, data_pages, drop_from_cache, files, run, verify, write_memory,
};
use pageferry_pager::{Background, DirectoryError, Pager, Restore, Settings, StartError};
use pageferry_testkit::firecracker::{Config, Contents, Double, Fields, Task, Wrong};
use pageferry_testkit::{Random, Stop, rotating_seeds, skip, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

/// The kills of the long test, by their numbers. The first one is the seed.
fn kills() -> Range<u64> {
    rotating_seeds("PAGEFERRY_PAGER_KILLS", 10, 1000)
}

/// VMs of 4 MiB, served by pagers in processes of their own.
struct Vms {
    order: Order,
    doubles: Vec<Double>,
    configs: Vec<Config>,
    scratch: Scratch,
}

impl Vms {
    fn file(scratch: &Scratch, seed: u64) -> PathBuf {
        scratch.path(&format!("memory-{seed}"))
    }

    /// Starts VMs that a first pager serves. `None` if that is not possible here.
    fn start(name: &str, count: u64, balloon_us: Option<u64>) -> Option<(Self, PagerProcess)> {
        let scratch = Scratch::new(name);
        let configs: Vec<_> = (0..count)
            .map(|number| Config {
                seed: number % 4,
                regions: vec![2 * MIB, MIB, MIB],
                vcpus: 2,
                balloon_us,
                ..config(0)
            })
            .collect();
        for config in configs.iter().take(4) {
            let file = Self::file(&scratch, config.seed);
            write_memory(&file, config);
        }
        let mut order = Order {
            directory: scratch.state(),
            ..Order::default()
        };
        for (number, config) in configs.iter().enumerate() {
            let socket = scratch.path(&format!("socket-{number}"));
            let restore = Restore::new(Self::file(&scratch, config.seed), socket);
            order.restores.insert(format!("vm-{number}"), restore);
        }
        let mut doubles = Vec::new();
        for config in &configs {
            doubles.push(Double::start(config)?);
        }
        let mut pager = PagerProcess::ready(&order);
        for (number, double) in doubles.iter_mut().enumerate() {
            let socket = scratch.path(&format!("socket-{number}"));
            double.connect(&socket, Fields::Both).expect("connected");
        }
        wait_until("all VMs to be served", || are_served(&mut pager));
        for status in pager.list() {
            if let Some(why) = status["vm"]["death_of_pager"]["lost"].as_str() {
                skip("ptrace", why);
                return None;
            }
        }
        order.restores.clear();
        order.take_over = true;
        let vms = Self {
            order,
            doubles,
            configs,
            scratch,
        };
        Some((vms, pager))
    }

    /// The touches of all threads, and the removals, of each VM.
    fn progress(&mut self) -> Vec<(Vec<u64>, u64)> {
        let statuses = self.doubles.iter_mut().map(Double::status);
        statuses.map(|now| (now.touches, now.removals)).collect()
    }

    /// Waits until each thread of the VMs that run has gone on.
    fn wait_progress(&mut self, running: &VecDeque<usize>) {
        let before = self.progress();
        wait_until("each thread to go on", || {
            let now = self.progress();
            running.iter().all(|&vm| {
                let (now, before) = (&now[vm], &before[vm]);
                let mut touches = now.0.iter().zip(&before.0);
                touches.all(|(now, before)| *now > before + 5) && now.1 > before.1
            })
        });
    }

    /// Checks all pages of all VMs, and ends them. The pager forgets them.
    fn verify_and_quit(mut self, pager: &mut PagerProcess) {
        self.doubles.iter_mut().for_each(Double::pause);
        for double in &mut self.doubles {
            verify(double);
        }
        for double in self.doubles.drain(..) {
            assert!(double.quit().success());
        }
        wait_until("all restores to end", || {
            files(&self.order.directory) == ["lock"]
        });
        let ended = |status: &Value| status["phase"] == "ended";
        wait_until("the end", || pager.list().iter().all(ended));
    }
}

/// Whether all VMs of a pager are served. A failure of one fails the test.
fn are_served(pager: &mut PagerProcess) -> bool {
    let list = pager.list();
    for status in &list {
        assert!(status["fault"].is_null(), "{status}");
    }
    list.iter().all(|status| status["phase"] == "serving")
}

#[test]
fn every_page_is_right_while_pagers_are_killed() {
    let Some((mut vms, mut pager)) = Vms::start("kills", 20, Some(200)) else {
        return;
    };
    let slow = Vms::file(&vms.scratch, 0);
    let stop = Stop::new();
    std::thread::scope(|scope| {
        let _ends = stop.on_drop();
        // A quarter of the VMs waits for a disk.
        scope.spawn(|| {
            while !stop.is_stopped() {
                drop_from_cache(&slow);
                sleep(Duration::from_millis(5));
            }
        });
        let kills = kills();
        let mut random = Random::new(11 + kills.start);
        let mut running: VecDeque<usize> = VecDeque::new();
        for kill in kills {
            let moment = Duration::from_micros(random.below(30_000));
            let way = random.below(8);
            if way >= 3 {
                pager.wait_ready();
                // A few run, so that a small machine has time for the pager. Young VMs need pages
                // of the file, and old ones zeros.
                if running.len() == 4
                    && let Some(oldest) = running.pop_front()
                {
                    vms.doubles[oldest].pause();
                }
                let next = running
                    .back()
                    .map_or(0, |last| (last + 1) % vms.doubles.len());
                vms.doubles[next].run();
                running.push_back(next);
            }
            match way {
                // A successor ends it, and may be killed meanwhile.
                3 | 4 => {
                    let mut former = std::mem::replace(&mut pager, PagerProcess::start(&vms.order));
                    if way == 3 {
                        former.wait();
                    }
                    sleep(moment);
                    pager.kill();
                }
                5 => pager.end(),
                // A pager that was not ready is often killed while it takes over.
                _ => {
                    sleep(moment);
                    pager.kill();
                }
            }
            pager = PagerProcess::start(&vms.order);
            if kill % 10 == 9 {
                vms.wait_progress(&running);
            }
        }
        pager.wait_ready();
        assert!(are_served(&mut pager));
        vms.wait_progress(&running);
    });
    vms.verify_and_quit(&mut pager);
}

/// A VM that was taken over gets all its memory, and then needs nobody.
#[test]
fn a_vm_whose_memory_is_loaded_needs_no_pager() {
    let Some((mut vms, mut pager)) = Vms::start("graduates", 2, Some(500)) else {
        return;
    };
    for double in &mut vms.doubles {
        run(double, 10);
    }
    pager.kill();
    // A slow pace that is set for one, and then none: the last word counts, also for a successor.
    let slow = Background::Rate(NonZeroU64::MIN);
    for background in [slow, Background::Idle] {
        vms.order.backgrounds.insert("vm-0".to_owned(), background);
        pager = PagerProcess::ready(&vms.order);
        assert_eq!(
            pager.list()[0]["restore"]["background"],
            to_json(background)
        );
        if background == slow {
            let refused = pager.end_restore("vm-0");
            assert!(refused.contains("--when-loaded"), "{refused}");
            pager.kill();
        }
    }
    wait_until("all its memory", || pager.list()[0]["vm"]["missing"] == 0);
    assert!(pager.list()[1]["vm"]["missing"].as_u64() > Some(0));
    assert_eq!(pager.end_restore("vm-0"), "ended");
    pager.kill();
    let double = &mut vms.doubles[0];
    double.run();
    run(double, 100);
    verify(double);
    // Nobody places what it gives back from now on.
    let first = data_pages(&vms.configs[0]).next().expect("data");
    double.perform(Task::Remove { first, pages: 1 });
    double.perform(Task::Read(first));
    verify(double);
    vms.order.backgrounds.clear();
    let mut pager = PagerProcess::ready(&vms.order);
    assert_eq!(pager.list().len(), 1);
    vms.verify_and_quit(&mut pager);
}

fn to_json(background: Background) -> Value {
    serde_json::to_value(background).expect("JSON")
}

/// The next pager finds no memory file, then another one, then a copy.
#[test]
fn a_memory_file_that_is_gone_is_told_and_its_copy_is_taken() {
    let Some((mut vms, mut pager)) = Vms::start("gone", 1, None) else {
        return;
    };
    let death = |pager: &mut PagerProcess| pager.list()[0]["vm"]["death_of_pager"].clone();
    assert_eq!(death(&mut pager), "taken");
    let memory = Vms::file(&vms.scratch, 0);
    let time = std::fs::metadata(&memory).and_then(|found| found.modified());
    let time = time.expect("a time");
    let bytes = std::fs::read(&memory).expect("a file");
    std::fs::remove_file(&memory).expect("removed");
    wait_until("the status to tell", || {
        let lost = death(&mut pager)["lost"].clone();
        lost.as_str()
            .is_some_and(|why| why.contains("not the memory file any more"))
    });
    pager.kill();
    let mut pager = PagerProcess::ready(&vms.order);
    let page = data_pages(&vms.configs[0]).next().expect("data");
    vms.doubles[0].begin(Task::Read(page));
    let put = |bytes: &[u8]| {
        std::fs::write(&memory, bytes).expect("written");
        let file = std::fs::File::options().write(true).open(&memory);
        file.and_then(|file| file.set_modified(time))
            .expect("a time");
    };
    let lost = |part: &str, pager: &mut PagerProcess| {
        wait_until(part, || {
            let fault = pager.list()[0]["fault"].clone();
            fault.as_str().is_some_and(|fault| fault.contains(part))
        });
    };
    lost("No such file", &mut pager);
    // Another snapshot of the same length and time.
    put(&vec![7; bytes.len()]);
    lost("has changed", &mut pager);
    put(&bytes);
    vms.doubles[0].finish();
    wait_until("the VM to be served", || {
        pager.list()[0]["phase"] == "serving" && death(&mut pager) == "taken"
    });
    vms.verify_and_quit(&mut pager);
}

#[test]
fn a_removal_that_is_lost_is_found() {
    for loses in [false, true] {
        let Some((mut vms, mut pager)) = Vms::start(&format!("loses-{loses}"), 1, None) else {
            return;
        };
        let page = data_pages(&vms.configs[0]).next().expect("data");
        let double = &mut vms.doubles[0];
        double.perform(Task::Read(page));
        let first = page;
        double.perform(Task::Remove { first, pages: 1 });
        pager.kill();
        let state = vms.order.directory.join("vm-0.state");
        if loses {
            // The ring and the bitmaps.
            let bytes = std::fs::metadata(&state).expect("a state").len() - 4096;
            let file = std::fs::File::options().write(true).open(&state);
            let zeros = vec![0; bytes as usize];
            file.expect("a state")
                .write_all_at(&zeros, 4096)
                .expect("written");
        }
        let mut pager = PagerProcess::ready(&vms.order);
        assert!(are_served(&mut pager));
        double.perform(Task::Read(page));
        let wrong = Wrong {
            page,
            expected: Contents::Zeros,
            found: Contents::File,
        };
        let expected = if loses { vec![wrong] } else { vec![] };
        assert_eq!(double.status().first_wrong, expected);
    }
}

/// The kernel drops pages some time after their removal was read. A page that is placed meanwhile
/// is dropped too, and its mark stays.
#[test]
fn a_removed_page_that_is_marked_as_placed_comes_again() {
    let Some((mut vms, mut pager)) = Vms::start("marked", 1, None) else {
        return;
    };
    let page = data_pages(&vms.configs[0]).next().expect("data");
    let double = &mut vms.doubles[0];
    double.perform(Task::Remove {
        first: page,
        pages: 1,
    });
    pager.kill();
    let state = vms.order.directory.join("vm-0.state");
    let len = std::fs::metadata(&state).expect("a state").len();
    // The second half behind the ring is `placed`.
    let bytes = (len - 8192) / 2;
    let file = std::fs::File::options().write(true).open(&state);
    let marks = vec![0xff; bytes as usize];
    file.expect("a state")
        .write_all_at(&marks, len - bytes)
        .expect("written");
    let mut pager = PagerProcess::ready(&vms.order);
    assert!(are_served(&mut pager));
    double.perform(Task::Read(page));
    assert_eq!(double.status().first_wrong, []);
}

#[test]
fn a_stopped_pager_is_fenced_and_its_vm_goes_on() {
    let Some((mut vms, mut pager)) = Vms::start("fence", 1, None) else {
        return;
    };
    run(&mut vms.doubles[0], 20);
    let settings = Settings {
        directory: vms.order.directory.clone(),
        ..Settings::default()
    };
    let held = Pager::start(settings).expect_err("a directory that is held");
    let StartError::Directory(DirectoryError::Held { pid, .. }) = held else {
        panic!("{held}");
    };
    assert_eq!(pid as u32, pager.pid());
    let stopped = Pid::from_raw(pid).expect("a process");
    kill_process(stopped, Signal::STOP).expect("a signal");
    wait_until("all its threads to stop", || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
        tasks.flatten().all(|task| {
            let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
            stat.contains(") T ")
        })
    });
    vms.doubles[0].begin(Task::VerifyAll);
    let mut successor = PagerProcess::ready(&vms.order);
    let signal = Signal::KILL.as_raw();
    assert_eq!(pager.wait().signal(), Some(signal));
    vms.doubles[0].finish();
    assert!(are_served(&mut successor));
    vms.verify_and_quit(&mut successor);
}

#[test]
fn a_vm_that_ends_without_a_pager_is_forgotten() {
    let Some((vms, mut pager)) = Vms::start("orphan", 2, None) else {
        return;
    };
    pager.kill();
    // Nobody waits for it, so it stays a zombie.
    let pid = vms.doubles[0].pid();
    let ended = Pid::from_raw(pid as i32).expect("a process");
    kill_process(ended, Signal::KILL).expect("a signal");
    wait_until("a zombie", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a process");
        stat.contains(") Z ")
    });
    let mut pager = PagerProcess::ready(&vms.order);
    let list = pager.list();
    assert_eq!((list.len(), &list[0]["id"]), (1, &"vm-1".into()));
    assert!(are_served(&mut pager));
    let expected = ["lock", "vm-1.json", "vm-1.state"];
    assert_eq!(files(&vms.order.directory), expected);
}

#[test]
fn a_death_during_a_handshake_is_told() {
    let scratch = Scratch::new("handshake");
    let config = config(3);
    let memory = scratch.path("memory");
    write_memory(&memory, &config);
    let Some(mut double) = Double::start(&config) else {
        return;
    };
    let socket = scratch.path("socket");
    let mut order = Order {
        directory: scratch.state(),
        ..Order::default()
    };
    let restore = Restore::new(&memory, &socket);
    order.restores.insert("vm".to_owned(), restore);
    let mut pager = PagerProcess::ready(&order);
    order.restores.clear();
    let silent = UnixStream::connect(&socket).expect("connected");
    wait_until("the handshake to begin", || {
        let record = std::fs::read_to_string(order.directory.join("vm.json"));
        record.expect("a record").contains("\"pid\"")
    });
    pager.kill();
    drop(silent);
    let mut pager = PagerProcess::ready(&order);
    let status = &pager.list()[0];
    let fault = status["fault"].as_str().expect("a fault");
    let own = format!("of process {}:", std::process::id());
    assert!(fault.contains(&own), "{fault}");
    // Another VM may have the restore.
    double.connect(&socket, Fields::Both).expect("connected");
    wait_until("the VM to be served", || {
        pager.list()[0]["phase"] == "serving"
    });
    verify(&mut double);
    assert!(double.quit().success());
}
