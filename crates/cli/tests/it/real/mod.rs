//! Moves, restores, refusals and kills on the real Firecracker and Cloud Hypervisor.
//!
//! **Guarantee.** The guest runs at one end and never at both, none of its pages is wrong, and a
//! destination that refuses a VM costs it nothing.
//!
//! **Mechanism.** `PAGEFERRY_FIRECRACKER` and `PAGEFERRY_CLOUD_HYPERVISOR` name the programs; tests
//! without them are skipped. Both boot one small guest, which checks its memory all the time
//! (`guest.c`). The doubles of `testkit` have faults that the real programs lack; the real ones
//! have an order of their own.
//!
//! **Neighbours.** `vmm` starts the programs. `firecracker` and `cloud_hypervisor` have the tests.

mod cloud_hypervisor;
mod firecracker;
mod script;
mod vmm;

use crate::support::{Dir, Ended, Process};
use pageferry_testkit::two_hosts::{self, Host, Link, Rate, TwoHosts};
use pageferry_testkit::{netns, rotating_seeds, skip};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use vmm::{Devices, Kind, Vmm};

/// The longest wait for a step. A VM that nobody runs must not hold a test for longer.
const STEP: Duration = Duration::from_secs(60);

/// Waits for a value. The message of the panic behind [`STEP`] has `detail`.
#[track_caller]
fn within<T>(what: &str, mut ready: impl FnMut() -> Option<T>, detail: impl Fn() -> String) -> T {
    let began = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(began.elapsed() < STEP, "no {what}: {}", detail());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits for the end of a command.
#[track_caller]
fn ended(mut process: Process) -> Ended {
    let began = Instant::now();
    while process.is_running() {
        let said = || process.said_on_stderr();
        assert!(began.elapsed() < STEP, "it does not end: {}", said());
        std::thread::sleep(Duration::from_millis(5));
    }
    process.end()
}

/// A running VM, a program without one, and a `receive` for that.
struct Scene {
    kind: Kind,
    program: PathBuf,
    source: Vmm,
    target: Vmm,
    receive: Process,
    address: String,
    dir: Dir,
    hosts: Option<TwoHosts>,
    /// A guest takes a processor. So one scene at a time is on.
    _turn: MutexGuard<'static, ()>,
}

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scene {
    /// A VM without devices.
    #[track_caller]
    fn plain(kind: Kind) -> Option<Self> {
        let program = kind.program("")?;
        Some(Self::start(
            kind,
            [&program, &program],
            &[],
            |_| Devices::default(),
            None,
        ))
    }

    /// A VM with the devices of `choose`, whose paths may be in the directory. The ends are in the
    /// namespaces of `hosts`. `flags` are those of `receive`.
    fn start(
        kind: Kind,
        programs: [&Path; 2],
        flags: &[&str],
        choose: impl Fn(&Dir) -> Devices,
        hosts: Option<TwoHosts>,
    ) -> Self {
        let (turn, dir) = (turn(), Dir::new());
        let host = |host| hosts.as_ref().map(|hosts| hosts.name(host));
        let source = Vmm::start(kind, programs[0], &dir, "source", host(Host::A));
        source.boot(&choose(&dir));
        let target = Vmm::start(kind, programs[1], &dir, "target", host(Host::B));
        let receive = receive(&target, &dir, "127.0.0.1:0", flags);
        let address = receive.wait_until_said("listening on ");
        Self {
            kind,
            program: programs[1].to_owned(),
            source,
            target,
            receive,
            address,
            dir,
            hosts,
            _turn: turn,
        }
    }

    fn migrate(&self, flags: &[&str]) -> Process {
        let vm = self.source.address();
        let args = ["migrate", "--vm", &vm, "--to", &self.address, "--json"];
        Process::start(&[&args[..], flags].concat(), &self.dir)
    }

    /// A new program and a new `receive` in the place of the old ones.
    fn renew(&mut self, flags: &[String]) {
        self.target.kill();
        kill(&mut self.receive);
        let _ = std::fs::remove_file(self.dir.path("target"));
        let host = self.hosts.as_ref().map(|hosts| hosts.name(Host::B));
        self.target = Vmm::start(self.kind, &self.program, &self.dir, "target", host);
        self.receive = receive(&self.target, &self.dir, "127.0.0.1:0", flags);
        self.address = self.receive.wait_until_said("listening on ");
    }

    /// What all of them have said.
    fn report(&self) -> String {
        format!(
            "source: {}\ntarget: {}\nreceive: {}",
            self.source.report(),
            self.target.report(),
            self.receive.said_on_stderr()
        )
    }

    /// The VM arrives, and runs there only.
    #[track_caller]
    fn assert_moves(&mut self, flags: &[&str]) {
        let sent = ended(self.migrate(flags));
        assert_eq!(sent.code, Some(0), "{sent:?}\n{}", self.report());
        self.assert_is_there();
        let began = Instant::now();
        while self.receive.is_running() {
            assert!(began.elapsed() < STEP, "{}", self.report());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The VM is at the target only, whole.
    #[track_caller]
    fn assert_is_there(&self) {
        self.target.assert_whole();
        assert_eq!(self.target.state(), "Running", "{}", self.report());
        assert!(!self.source.runs(), "it runs twice: {}", self.report());
        self.assert_ran_once();
    }

    /// The VM is at the source only, whole.
    #[track_caller]
    fn assert_is_here(&self) {
        self.source.assert_whole();
        assert_eq!(self.source.state(), "Running", "{}", self.report());
        assert!(!self.target.runs(), "it runs twice: {}", self.report());
        self.assert_ran_once();
    }

    /// No tick came at both ends.
    #[track_caller]
    fn assert_ran_once(&self) {
        let (here, there) = (self.source.said().ticks, self.target.said().ticks);
        let twice: Vec<_> = here.intersection(&there).collect();
        assert!(
            twice.is_empty(),
            "{twice:?} at both ends: {}",
            self.report()
        );
    }

    /// The destination refuses the VM in `words` of its own, and the VM runs on by itself. It moves
    /// once `mend` has made room, which returns flags for the next `receive`.
    #[track_caller]
    fn assert_refused(mut self, words: &str, mend: impl FnOnce(&Dir) -> Vec<String>) {
        let sent = ended(self.migrate(&[]));
        let report = || format!("{sent:?}\n{}", self.report());
        assert_ne!(sent.code, Some(0), "{}", report());
        assert!(sent.stderr.contains(words), "no '{words}': {}", report());
        self.assert_is_here();
        let flags = mend(&self.dir);
        self.renew(&flags);
        self.assert_moves(&[]);
    }
}

/// Starts `receive` for a program.
fn receive(target: &Vmm, dir: &Dir, listen: &str, flags: &[impl AsRef<str>]) -> Process {
    let vm = target.address();
    let mut args = vec!["receive", "--for", &vm, "--listen", listen];
    args.extend(flags.iter().map(AsRef::as_ref));
    Process::start(&args, dir)
}

/// Pages go before the VM, behind it, or both.
fn moves(kind: Kind) {
    for flags in [&[][..], &["--precopy-passes", "0"]] {
        let Some(mut scene) = Scene::plain(kind) else {
            return;
        };
        scene.assert_moves(flags);
    }
}

fn with_disk(dir: &Dir) -> Devices {
    let disk = dir.path("disk");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    Devices {
        disk: Some(disk),
        ..Devices::default()
    }
}

fn with_vsock(dir: &Dir) -> Devices {
    Devices {
        vsock: Some(dir.path("vsock")),
        ..Devices::default()
    }
}

/// A disk whose file the destination does not find.
fn missing_disk(kind: Kind) {
    let Some(program) = kind.program("") else {
        return;
    };
    let scene = Scene::start(kind, [&program, &program], &[], with_disk, None);
    let [at, away] = ["disk", "away"].map(|name| scene.dir.path(name));
    std::fs::rename(&at, &away).unwrap();
    scene.assert_refused(kind.says("backing file"), |_| {
        std::fs::rename(&away, &at).unwrap();
        Vec::new()
    });
}

/// The source's own socket is in the destination's way.
fn vsock_in_use(kind: Kind, mend: impl FnOnce(&Dir) -> Vec<String>) {
    let Some(program) = kind.program("") else {
        return;
    };
    let scene = Scene::start(kind, [&program, &program], &[], with_vsock, None);
    scene.assert_refused(kind.says("in use"), mend);
}

/// Two network namespaces with an interface `tap0` each, and `tap1` in the second, or a skip.
#[track_caller]
fn taps() -> Option<TwoHosts> {
    let hosts = two_hosts::or_skip(&Link::new(Rate::mbit(1000)))?;
    for (host, tap) in [(Host::A, "tap0"), (Host::B, "tap0"), (Host::B, "tap1")] {
        let mut ip = netns::command(hosts.name(host), "ip");
        let made = ip.args(["tuntap", "add", tap, "mode", "tap"]).status();
        if !made.is_ok_and(|status| status.success()) {
            skip("netns", "`ip tuntap add` fails: it needs /dev/net/tun");
            return None;
        }
    }
    Some(hosts)
}

fn on_tap0(_: &Dir) -> Devices {
    Devices {
        tap: Some("tap0".into()),
        ..Devices::default()
    }
}

/// Another VM at the destination has the interface.
fn busy_tap(kind: Kind) {
    let (Some(program), Some(hosts)) = (kind.program(""), taps()) else {
        return;
    };
    let there = hosts.name(Host::B).to_owned();
    let scene = Scene::start(kind, [&program, &program], &[], on_tap0, Some(hosts));
    let mut other = Vmm::start(kind, &program, &scene.dir, "other", Some(&there));
    other.boot(&on_tap0(&scene.dir));
    scene.assert_refused(kind.says("busy"), |_| {
        other.kill();
        Vec::new()
    });
}

/// A program of another version at the destination takes the VM whole, or refuses it before
/// anything is sent. Then the VM moves to one of its own version.
fn other_version(kind: Kind) {
    let (Some(program), Some(other)) = (kind.program(""), kind.program("_OTHER")) else {
        return;
    };
    for programs in [[&program, &other], [&other, &program]] {
        let programs = programs.map(PathBuf::as_path);
        let mut scene = Scene::start(kind, programs, &[], |_| Devices::default(), None);
        let sent = ended(scene.migrate(&[]));
        if sent.code == Some(0) {
            scene.assert_is_there();
            continue;
        }
        let went = ["pre-copy", "switch-over"].map(|phase| sent.stderr.contains(phase));
        assert_eq!(went, [false; 2], "something was sent: {sent:?}");
        scene.assert_is_here();
        scene.program = programs[0].to_owned();
        scene.renew(&[]);
        scene.assert_moves(&[]);
    }
}

/// The process that is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Migrate,
    Receive,
    Target,
    Source,
}
use Victim::{Migrate, Receive, Source, Target};

/// Kills at moments spread over a move. `PAGEFERRY_REAL_KILLS` is a range of seeds.
fn kills(kind: Kind, flags: &[&str]) {
    // All pages behind the VM, slowly, or most of them before it.
    let ways = [
        &["--precopy-passes", "0", "--max-bandwidth", "20M"][..],
        &[],
    ];
    let ways = ways.map(|way| [way, flags].concat());
    let Some(lengths) = ways
        .each_ref()
        .map(|way| length(kind, way))
        .into_iter()
        .collect::<Option<Vec<_>>>()
    else {
        return;
    };
    for seed in rotating_seeds("PAGEFERRY_REAL_KILLS", 4, 60) {
        let victim = [Migrate, Receive, Target, Source][seed as usize % 4];
        let way = seed as usize / 4 % 2;
        // Most kills come before the end also of a move that is faster than the measured one.
        // Steps of the golden ratio spread any number of moments.
        let moment = lengths[way].mul_f64((0.35 + seed as f64 * 0.618).fract() * 0.8);
        let mut scene = Scene::plain(kind).unwrap();
        print!("seed {seed}: {victim:?}, killed after {moment:?}: ");
        println!("{}", scene.kill(victim, &ways[way], moment));
    }
}

/// The length of a move that nobody disturbs.
fn length(kind: Kind, flags: &[&str]) -> Option<Duration> {
    let mut scene = Scene::plain(kind)?;
    let began = Instant::now();
    let sent = ended(scene.migrate(flags));
    assert_eq!(sent.code, Some(0), "{sent:?}\n{}", scene.report());
    let length = began.elapsed();
    scene.assert_is_there();
    scene.receive.interrupt();
    scene.target.kill();
    Some(length)
}

impl Scene {
    /// Kills a process a moment after the start of a move. Returns where the VM is in the end.
    fn kill(&mut self, victim: Victim, flags: &[&str], moment: Duration) -> &'static str {
        let mut migrate = self.migrate(flags);
        std::thread::sleep(moment);
        if !migrate.is_running() {
            self.assert_is_there();
            return "the move was over";
        }
        match victim {
            Migrate => {
                kill(&mut migrate);
                self.go_on(flags)
            }
            Receive => {
                kill(&mut self.receive);
                self.receive = receive(&self.target, &self.dir, &self.address, &[""; 0]);
                let sent = ended(migrate);
                self.look(sent.code == Some(0))
            }
            Target => {
                self.target.kill();
                let sent = ended(migrate);
                match self.source.state().as_str() {
                    "Running" => self.look(false),
                    // Its program died right behind the last page.
                    _ if sent.code == Some(0) => "moved, and ended",
                    "Paused" => {
                        // The host of the VM has died. What is here is an older copy.
                        assert!(sent.stderr.contains("resume"), "no way back: {sent:?}");
                        self.source.resume();
                        self.source.assert_whole();
                        "came back"
                    }
                    other => panic!("lost: {other} {sent:?}\n{}", self.report()),
                }
            }
            Source => {
                self.source.kill();
                let sent = ended(migrate);
                if sent.code == Some(0) {
                    return self.look(true);
                }
                // Its memory or its state was not with `migrate` yet.
                let says = ["does not run", "stays with its VMM"];
                let says = says.iter().any(|words| sent.stderr.contains(words));
                assert!(
                    says && self.receive.is_running(),
                    "{sent:?}\n{}",
                    self.report()
                );
                let ticks = self.target.said().ticks;
                assert!(ticks.is_empty(), "it ran: {sent:?}\n{}", self.report());
                "ended with its program"
            }
        }
    }

    /// Goes on behind a kill of `migrate`.
    fn go_on(&mut self, flags: &[&str]) -> &'static str {
        // Before the hand-over the VM runs on by itself.
        let began = Instant::now();
        while began.elapsed() < Duration::from_secs(3) {
            if self.source.runs() {
                return self.look(false);
            }
        }
        // Behind it, or if it was over already, the VM is there.
        let sent = ended(self.migrate(flags));
        assert_ne!(self.source.state(), "Running", "{sent:?}");
        self.look(true)
    }

    /// The VM is at one end, whole, and can move if it is here.
    fn look(&mut self, there: bool) -> &'static str {
        if there {
            self.assert_is_there();
            return "moved";
        }
        self.assert_is_here();
        self.renew(&[]);
        self.assert_moves(&[]);
        "stayed"
    }
}

fn kill(process: &mut Process) {
    if process.is_running() {
        process.signal(Signal::KILL);
    }
    within(
        "end of the killed process",
        || (!process.is_running()).then_some(()),
        String::new,
    );
}

impl Drop for Scene {
    /// Ends keepers that a failed test has left.
    fn drop(&mut self) {
        let folder = self.dir.path("target");
        let folder = folder.parent().unwrap().display().to_string();
        let ours = format!("TMPDIR={folder}");
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            let mut variables = environment.split(|byte| *byte == 0);
            let name = entry.file_name();
            let pid = name.to_str().and_then(|name| name.parse().ok());
            if variables.any(|each| each == ours.as_bytes())
                && let Some(pid) = pid.and_then(Pid::from_raw)
            {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}
