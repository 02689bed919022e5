//! `pageferry pager mount`, with doubles of Firecracker that map its files.

use crate::support::service_manager::Manager;
use crate::support::{Dir, PAGEFERRY, Process};
use pageferry_testkit::firecracker::{Backend, Config, Double, Task, write_memory_file};
use pageferry_testkit::wait_until;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, capabilities};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
const SEED: u64 = 31;

/// A directory to mount on, and a memory file. `None` if mounting is not possible here.
struct Place {
    dir: Dir,
    mount: PathBuf,
    memory: PathBuf,
}

impl Place {
    fn new() -> Option<Self> {
        let may =
            capabilities(None).is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_ADMIN));
        if !may || !Path::new("/dev/fuse").exists() {
            pageferry_testkit::skip("fuse", "it needs CAP_SYS_ADMIN and /dev/fuse");
            return None;
        }
        let dir = Dir::new();
        let (mount, memory) = (dir.path("mount"), dir.path("memory"));
        std::fs::create_dir(&mount).unwrap();
        write_memory_file(&memory, SEED, 6 * MIB / 4096).unwrap();
        Some(Self { dir, mount, memory })
    }

    /// The flags of a mount of the file `web`.
    fn args(&self) -> Vec<String> {
        let mut args = ["pager", "mount"].map(str::to_owned).to_vec();
        args.push(self.mount.display().to_string());
        args.push("--snapshot".to_owned());
        args.push(format!("web={}", self.memory.display()));
        args
    }

    /// A VM that maps a file of the mount.
    fn double(&self, name: &str) -> Double {
        let double = Double::start(&Config {
            seed: SEED,
            regions: vec![4 * MIB, 2 * MIB],
            backend: Backend::File(self.mount.join(name)),
            vcpus: 2,
            ..Config::default()
        });
        double.expect("it needs no userfaultfd")
    }

    /// Checks that nothing is mounted or left.
    #[track_caller]
    fn assert_left_nothing(&self) {
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(self.mount.to_str().unwrap()), "{mounts}");
        std::fs::remove_dir(&self.mount).unwrap();
        std::fs::remove_file(&self.memory).unwrap();
        self.dir.assert_empty();
    }

    /// A test that fails must not leave a mount, and its VMs must be able to end. So it comes
    /// behind them.
    fn end(&self) -> End<'_> {
        End(&self.mount)
    }
}

struct End<'a>(&'a Path);

impl Drop for End<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::FORCE | UnmountFlags::DETACH);
    }
}

#[track_caller]
fn verify(double: &mut Double) {
    double.perform(Task::VerifyAll);
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}

#[test]
fn snapshots_are_files_as_long_as_a_vm_uses_them() {
    let Some(place) = Place::new() else {
        return;
    };
    let packed = place.dir.path("packed").to_str().unwrap().to_owned();
    let memory = place.memory.to_str().unwrap();
    Process::start(&["snapshot", "pack", memory, &packed], &place.dir)
        .end()
        .assert_ok();
    let mut args = place.args();
    let more = ["--packed", &format!("small={packed}"), "--json"].map(str::to_owned);
    args.extend(more);
    let mut process = Process::start(&args, &place.dir);
    process.wait_until_said("2 files at ");
    let mut doubles = ["web", "small"].map(|name| place.double(name));
    let _end = place.end();
    for double in &mut doubles {
        verify(double);
    }
    let said = process.said_on_stderr();
    assert!(
        said.contains("the death of this pager would cost VMs"),
        "{said}"
    );
    Process::start(&args, &place.dir)
        .end()
        .assert_failed(5, "is mounted by another pager");
    process.interrupt();
    process.wait_until_said("waiting for their end");
    for double in &mut doubles {
        double.run();
        verify(double);
    }
    assert!(process.is_running());
    for double in doubles {
        assert!(double.quit().success());
    }
    let ended = process.end();
    ended.assert_ok();
    let figures = ended.json();
    let files = figures["files"].as_array().unwrap();
    let names: Vec<_> = files
        .iter()
        .map(|file| file["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["small", "web"]);
    for file in files {
        assert_eq!(file["bytes"], 6 * MIB);
        let reads = |way: &str| file[way]["faults"].as_u64().unwrap();
        assert!(
            reads("at_hand_reads") + reads("slow_reads") > 0,
            "{figures}"
        );
    }
    std::fs::remove_file(packed).unwrap();
    place.assert_left_nothing();
}

#[test]
fn flags_that_do_not_fit_are_refused() {
    let dir = Dir::new();
    let memory = dir.path("memory");
    std::fs::write(&memory, [7; 8192]).unwrap();
    let (memory, none) = (memory.display(), dir.path("none"));
    let (none, web) = (none.display(), format!("web={memory}"));
    let at = dir.path("none/mount").display().to_string();
    for (flags, code, part) in [
        (vec![], 2, "--snapshot"),
        (
            vec!["--snapshot".into(), "web".into()],
            2,
            "expected a name and a file",
        ),
        (
            vec!["--snapshot".into(), format!("web={none}")],
            2,
            "No such file",
        ),
        (
            vec![
                "--snapshot".into(),
                web.clone(),
                "--packed".into(),
                web.clone(),
            ],
            2,
            "snapshot",
        ),
        (
            vec![
                "--snapshot".into(),
                web.clone(),
                "--snapshot".into(),
                web.clone(),
            ],
            2,
            "two snapshots have the name web",
        ),
        (
            vec![
                "--snapshot".into(),
                web.clone(),
                "--replay".into(),
                format!("a={memory}"),
            ],
            2,
            "expected a snapshot of that name",
        ),
        (
            vec![
                "--snapshot".into(),
                web.clone(),
                "--replay".into(),
                web.clone(),
            ],
            2,
            "is no recording",
        ),
        (vec!["--snapshot".into(), web.clone()], 5, "cannot mount on"),
    ] {
        let args = [
            vec!["pager".to_owned(), "mount".to_owned(), at.clone()],
            flags,
        ]
        .concat();
        let ended = Process::start(&args, &dir).end();
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
}

#[test]
fn a_killed_mount_goes_on_with_the_descriptor_that_was_kept() {
    let Some(place) = Place::new() else {
        return;
    };
    let manager = Manager::new(&place.dir);
    let args = place.args();
    let mut command = Command::new(PAGEFERRY);
    command
        .env("NOTIFY_SOCKET", &manager.path)
        .env("FDSTORE", "1");
    let process = Process::start_by(command, &args, &place.dir);
    let kept = manager.wait_for("FDNAME=fuse-mount").remove(0);
    manager.wait_for("READY=1");
    let mut double = place.double("web");
    let _end = place.end();
    double.run();
    wait_until("touches", || {
        double.status().touches.iter().all(|count| *count > 20)
    });
    let said = process.said_on_stderr();
    assert!(!said.contains("would cost VMs"), "{said}");
    process.signal(Signal::KILL);
    process.end();
    double.begin(Task::VerifyAll);
    // As systemd does: the descriptor is number 3 of the new process.
    let again = || {
        let script = format!(
            "exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_FDNAMES=fuse-mount LISTEN_PID=$$ exec \
             {PAGEFERRY} {}",
            args.join(" ")
        );
        let mut command = Command::new("sh");
        command
            .args(["-c", &script])
            .env("NOTIFY_SOCKET", &manager.path)
            .env("FDSTORE", "1")
            .env("TMPDIR", place.dir.path(""));
        let fd = kept.try_clone().unwrap();
        let process = Process::spawn_reading(command, fd.into());
        manager.wait_for("READY=1");
        process
    };
    let second = again();
    double.finish();
    double.pause();
    verify(&mut double);
    // An ordinary end leaves the VM as a kill does.
    second.interrupt();
    let ended = second.end();
    ended.assert_ok();
    assert!(
        ended.stderr.contains("they wait for the next pager"),
        "{ended:?}"
    );
    let third = again();
    verify(&mut double);
    assert!(double.quit().success());
    third.interrupt();
    manager.wait_for("FDSTOREREMOVE=1\nFDNAME=fuse-mount");
    third.end().assert_ok();
    std::fs::remove_file(&manager.path).unwrap();
    place.assert_left_nothing();
}
