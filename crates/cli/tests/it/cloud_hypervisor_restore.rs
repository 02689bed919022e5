//! `restore --for ch:..`: a double of Cloud Hypervisor gets the VM of a snapshot.

use crate::json_document::Document;
use crate::snapshot::snapshot;
use crate::support::{Dir, Process, pageferry};
use pageferry_testkit::cloud_hypervisor::{Config, Double, Quirk};
use pageferry_testkit::{Random, rotating_seeds, wait_until};
use rustix::process::Signal;
use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn double(dir: &Dir, name: &str, regions: &[u64], quirk: Quirk) -> Option<Double> {
    Double::start(&Config {
        api: dir.path(name),
        seed: 9,
        vcpus: 2,
        regions: regions.to_vec(),
        quirk,
    })
}

/// A directory with the snapshot `web`, and a process without a VM.
fn scene(quirk: Quirk) -> Option<(Dir, Double)> {
    scene_of([4 * MIB, 2 * MIB], quirk)
}

fn scene_of(regions: [u64; 2], quirk: Quirk) -> Option<(Dir, Double)> {
    let dir = Dir::new();
    let mut source = double(&dir, "source", &regions, Quirk::Right)?;
    source.run();
    wait_until("the guest to work", || source.status().touched() > 100);
    source.pause();
    std::fs::create_dir(dir.path("web")).unwrap();
    source.snapshot(&dir.path("web"));
    let target = double(&dir, "target", &[], quirk)?;
    Some((dir, target))
}

fn text(path: PathBuf) -> String {
    path.into_os_string().into_string().unwrap()
}

fn start(dir: &Dir, snapshot: &str, flags: &[&str]) -> Process {
    let target = format!("ch:{}", text(dir.path("target")));
    let args = ["restore", "--for", &target, snapshot];
    Process::start(&[&args[..], flags].concat(), dir)
}

#[track_caller]
fn check(target: &mut Double, state: &str) {
    let status = target.verify();
    assert_eq!((status.wrong, &status.state[..]), (0, state), "{status:?}");
    assert!(status.served.is_some());
}

#[test]
fn a_vm_starts_from_its_directory_and_the_command_reports_it() {
    let Some((dir, mut target)) = scene(Quirk::Right) else {
        return;
    };
    let restore = start(&dir, &text(dir.path("web")), &["--resume", "--json"]);
    restore.wait_until_said("the VM runs; its memory comes");
    let ended = restore.end();
    ended.assert_ok();
    let report = ended.json();
    let section = Document::read().section("restore --for");
    section.assert_describes(&report, &[], &[]);
    assert_eq!(report["engine"], "cloud-hypervisor", "{report}");
    assert_eq!(
        (&report["vcpus"], &report["resumed"]),
        (&2.into(), &true.into())
    );
    assert_eq!(report["memory_bytes"], 6 * MIB, "{report}");
    assert_eq!(report["requests"], 6 * MIB / 4096, "{report}");
    check(&mut target, "Running");
}

#[test]
fn a_vm_starts_from_a_packed_snapshot_and_stays_paused() {
    let Some((dir, mut target)) = scene(Quirk::Right) else {
        return;
    };
    std::fs::rename(dir.path("web/memory-ranges"), dir.path("memory")).unwrap();
    snapshot(&dir, "pack @memory @web/memory-ranges --chunk 16K").assert_ok();
    let web = text(dir.path("web"));
    start(&dir, &web, &[])
        .end()
        .assert_failed(7, "its table in state.json has 6291456");
    let ended = start(&dir, &web, &["--packed"]).end();
    ended.assert_ok();
    for part in ["2 vCPUs, 6 MiB", "all memory", "of 1536 requests"] {
        assert!(ended.stdout.contains(part), "{ended:?}");
    }
    check(&mut target, "Paused");
}

#[cfg(feature = "peers")]
#[test]
fn a_vm_starts_from_a_snapshot_of_another_host() {
    let Some((dir, mut target)) = scene(Quirk::Right) else {
        return;
    };
    let web = text(dir.path("web"));
    let share = [
        "pager",
        "share",
        "--listen",
        "127.0.0.1:0",
        "--directory",
        &web,
    ];
    let share = Process::start(&share, &dir);
    let address = share.wait_until_said("sharing at ");
    let address = format!("pageferry://{address}");
    let ended = start(&dir, &address, &["--resume", "--json"]).end();
    ended.assert_ok();
    check(&mut target, "Running");
    share.interrupt();
    share.end().assert_ok();
}

#[cfg(feature = "object-store")]
#[test]
fn a_vm_starts_from_an_object_store() {
    use crate::object_store::{command, serve};
    let Some((dir, mut target)) = scene(Quirk::Right) else {
        return;
    };
    let read = |name: &str| std::fs::read(dir.path("web").join(name)).unwrap();
    let (port, gets) = serve(vec![
        ("web/config.json", read("config.json")),
        ("web/state.json", read("state.json")),
        ("web/memory-ranges", read("memory-ranges")),
    ]);
    let api = format!("ch:{}", text(dir.path("target")));
    let args = [
        "restore",
        "--for",
        &api,
        "s3://bucket/web",
        "--resume",
        "--json",
    ];
    let ended = Process::start_by(command(port), &args, &dir).end();
    ended.assert_ok();
    assert_eq!(ended.json()["read_bytes"], 6 * MIB, "{ended:?}");
    assert!(gets.load(std::sync::atomic::Ordering::Relaxed) > 2);
    check(&mut target, "Running");
    let none = ["restore", "--for", &api, "s3://bucket/none"];
    let ended = Process::start_by(command(port), &none, &dir).end();
    ended.assert_failed(2, "cannot restore from s3://bucket/none");
}

#[test]
fn what_cannot_be_restored_has_its_exit_code() {
    let Some((dir, mut target)) = scene(Quirk::Right) else {
        return;
    };
    let web = text(dir.path("web"));
    let refused = |code, part: &str| start(&dir, &web, &[]).end().assert_failed(code, part);
    let config = dir.path("web/config.json");
    let good = std::fs::read_to_string(&config).unwrap();
    for (from, to, code, part) in [
        (
            "\"shared\":true",
            "\"shared\":false",
            17,
            "shared=off: expected shared=on",
        ),
        (
            "\"memory\"",
            "\"nothing\"",
            7,
            "config.json is none of Cloud Hypervisor",
        ),
    ] {
        assert!(good.contains(from), "{good}");
        std::fs::write(&config, good.replace(from, to)).unwrap();
        refused(code, part);
    }
    std::fs::write(&config, &good).unwrap();
    let memory = File::options()
        .write(true)
        .open(dir.path("web/memory-ranges"))
        .unwrap();
    memory.set_len(6 * MIB - 1).unwrap();
    refused(
        7,
        "memory-ranges has 6291455 bytes: its table in state.json has 6291456",
    );
    std::fs::remove_file(&config).unwrap();
    refused(2, "config.json failed: No such file");
    assert_eq!(target.status().state, "None");
    let none = format!("ch:{}", text(dir.path("none")));
    std::fs::write(&config, &good).unwrap();
    memory.set_len(6 * MIB).unwrap();
    pageferry(&["restore", "--for", &none, &web]).assert_failed(11, "cannot reach the API socket");
}

#[test]
fn flags_that_do_not_fit_are_refused() {
    let dir = Dir::new();
    let web = text(dir.path("web"));
    for (flags, part) in [
        (&["--resume"][..], "required arguments"),
        (&["--packed"], "required arguments"),
        (&["--json"], "required arguments"),
        (&["--for", "fc:/a"], "use `pageferry pager run`"),
        (&["--for", "/a"], "expected ch:API_SOCKET"),
        (&["--for", "ch:/a", "--detach"], "cannot be used with"),
        (
            &["--for", "ch:/a", "--background", "idle"],
            "cannot be used with",
        ),
    ] {
        pageferry(&[&["restore", &web], flags].concat()).assert_failed(2, part);
    }
    #[cfg(feature = "peers")]
    pageferry(&["restore", &web, "--insecure"]).assert_failed(2, "name its process by --for");
}

#[test]
fn a_process_that_fails_has_its_exit_code() {
    for (quirk, code, part) in [
        (Quirk::RefuseConfig, 8, "refused to take the VM's Config"),
        (
            Quirk::ReceiverDiesAtState,
            11,
            "while we waited for it to load State",
        ),
        (Quirk::WrongFault, 7, "a page fault names"),
    ] {
        let Some((dir, _target)) = scene(quirk) else {
            return;
        };
        let ended = start(&dir, &text(dir.path("web")), &["--resume"]).end();
        ended.assert_failed(code, part);
    }
}

/// A chunk of the packed memory is damaged. Its page never comes, and no other one in its place.
#[test]
fn a_vm_that_waits_for_a_page_can_be_ended() {
    let Some((dir, mut target)) = scene(Quirk::Right) else {
        return;
    };
    std::fs::rename(dir.path("web/memory-ranges"), dir.path("memory")).unwrap();
    snapshot(&dir, "pack @memory @web/memory-ranges --chunk 16K").assert_ok();
    let packed = dir.path("web/memory-ranges");
    let mut bytes = std::fs::read(&packed).unwrap();
    // The first third of the memory file is the second region, and page 0 is in the first one.
    let at = bytes.len() / 6;
    bytes[at] ^= 1;
    std::fs::write(&packed, bytes).unwrap();
    let restore = start(&dir, &text(dir.path("web")), &["--packed", "--resume"]);
    restore.wait_until_said("the VM runs; its memory comes");
    restore.wait_until_said("the VM waits for a page that cannot be read");
    assert_eq!(target.status().wrong, 0);
    restore.interrupt();
    restore.wait_until_said("the VM still needs memory");
    assert_eq!(target.status().state, "Running");
    restore.interrupt();
    restore.end().assert_failed(10, "the VM lacked memory");
    assert_eq!(target.wait().code(), Some(3));
}

/// Kills at seeded moments behind the load. The guest writes its pages meanwhile: none of them may
/// be written here a second time.
#[test]
fn a_vm_outlives_the_processes_that_restore_it() {
    for seed in rotating_seeds("PAGEFERRY_RECEIVE_KILLS", 1, 15) {
        let Some((dir, mut target)) = scene_of([24 * MIB, 12 * MIB], Quirk::Right) else {
            return;
        };
        // A minute for all pages, so that each kill on a busy machine comes before the last one.
        target.slow_down(Duration::from_millis(6));
        let mut random = Random::new(seed);
        let web = text(dir.path("web"));
        for kill in 0..5 {
            let mut restore = start(&dir, &web, &["--resume"]);
            restore.wait_until_said("the VM runs; its memory comes");
            let goes_on = restore.said_on_stderr().contains("left behind");
            assert_eq!(goes_on, kill > 0, "seed {seed}");
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            restore.signal(Signal::KILL);
            wait_until("the end of the killed process", || !restore.is_running());
        }
        // Another snapshot is none of this VM.
        std::fs::create_dir(dir.path("other")).unwrap();
        for name in ["config.json", "state.json", "memory-ranges"] {
            std::fs::copy(dir.path("web").join(name), dir.path("other").join(name)).unwrap();
        }
        let other = start(&dir, &text(dir.path("other")), &["--resume"]).end();
        other.assert_failed(17, "it is of another snapshot");
        target.slow_down(Duration::ZERO);
        start(&dir, &web, &["--resume"]).end().assert_ok();
        check(&mut target, "Running");
    }
}
