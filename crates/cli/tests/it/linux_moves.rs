//! A real Linux under load, moved between processes at seeded moments, and with one of them killed.
//!
//! **Guarantee.** The guest finds no wrong page and no wrong file, its kernel does not complain,
//! and its clock never goes back. The clock also shows that two processes never ran the guest at
//! once.
//!
//! **Mechanism.** Each process writes the guest's console to a file of its own. The first process
//! of the guest says there what it has checked (`lab/guest-linux/init.c`).
//!
//! On KVM the guests are a small kernel of ours and Debian's kernel for clouds. They run where KVM
//! runs kernels, as in the lab (`cargo xtask lab --real-time`).

use crate::support::{Dir, PAGEFERRY, Process, pageferry, status};
use pageferry_testkit::{
    Random, guest_linux, guest_linux_cloud, guest_linux_x86_64, skip, wait_for, wait_until,
};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The moves of one VM. Some of the first are during its boot.
const MOVES_OF_A_VM: u64 = 20;
/// The moves in all, and the kills, if the environment does not say.
const MOVES: u64 = 200;
const KILLS: u64 = 40;
/// The flags of a move whose ends are killed: the other end notices soon. A busy host could be
/// silent for so long by itself.
const SOON: Flags = &["--dead-after", "300ms"];
/// A guest's clock may have stopped for less than this. The blackouts of two moves in the lab are
/// longer.
const CLOCKS_STOP: Duration = Duration::from_millis(100);
/// Flags of `receive`.
const MINOR: Flags = &["--delivery", "minor"];
const MISSING: Flags = &["--delivery", "missing"];
const POISON: Flags = &["--delivery", "poison"];
/// The time for which a guest that must not run is watched.
const STILL: Duration = Duration::from_millis(200);

/// The program. It may be another build than the tests': `PAGEFERRY_LINUX_PROGRAM`.
fn program() -> Command {
    let other = std::env::var_os("PAGEFERRY_LINUX_PROGRAM");
    Command::new(other.unwrap_or_else(|| PAGEFERRY.into()))
}

fn number(variable: &str, otherwise: u64) -> u64 {
    let text = std::env::var(variable).ok();
    text.map_or(otherwise, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is '{text}': expected a whole number"))
    })
}

type Flags = &'static [&'static str];

/// A Linux under load, and the machine that it gets.
struct Guest {
    files: [PathBuf; 2],
    /// The flags of `run`.
    machine: Flags,
    command_line: &'static str,
    engine: &'static str,
    /// The flags of `receive`.
    receive: Flags,
    /// The disk, of a guest that also has a network.
    disk: Option<PathBuf>,
}

impl Guest {
    fn soft() -> Option<Self> {
        Some(Self {
            files: guest_linux()?,
            machine: &["--memory", "128M", "--vcpus", "4"],
            command_line: "console=hvc0 panic=-1 quiet pf=load pf_mib=8",
            engine: "soft",
            receive: &[],
            disk: None,
        })
    }

    /// A guest on KVM. `None` after a skip of the resource `kernels`.
    fn on_kvm(files: Option<[PathBuf; 2]>, machine: Flags) -> Option<Self> {
        let missing = pageferry_machine::kvm::probe_kernels().err();
        if missing.is_some_and(|why| skip("kernels", why)) {
            return None;
        }
        Some(Self {
            files: files?,
            machine,
            command_line: "console=ttyS0 panic=-1 quiet pf=load pf_mib=8 pf_timer_ms=10 \
                           pf_rest_ms=50",
            engine: "kvm",
            receive: &[],
            disk: None,
        })
    }

    /// The flags for the devices, at the end `side` of a move.
    fn devices(&self, side: u64) -> Vec<String> {
        self.disk
            .iter()
            .flat_map(|disk| {
                let disk = disk.to_str().unwrap().to_owned();
                [
                    "--disk".into(),
                    disk,
                    "--net".into(),
                    format!("pf-tap{}", side % 2),
                ]
            })
            .collect()
    }
}

/// A process that has the VM, or waits for it.
struct Side {
    process: Process,
    socket: PathBuf,
    console: PathBuf,
    _dir: Dir,
}

impl Side {
    fn start(words: &[&str], kernel: &[&PathBuf]) -> Self {
        let dir = Dir::new();
        let (socket, console) = (dir.path("vm"), dir.path("console"));
        let mut command = program();
        command.args(words).arg("--control").arg(&socket);
        command.arg("--console").arg(&console);
        if let [kernel, initrd] = kernel {
            command.arg("--kernel").arg(kernel);
            command.arg("--initrd").arg(initrd);
        }
        Self {
            process: Process::spawn(command),
            socket,
            console,
            _dir: dir,
        }
    }

    fn source(guest: &Guest) -> Self {
        Self::source_with(guest, &[])
    }

    /// With more flags for `run`.
    fn source_with(guest: &Guest, flags: &[&str]) -> Self {
        let mut words = vec!["run", "--cmdline", guest.command_line];
        words.extend(guest.machine);
        words.extend(flags);
        let devices = guest.devices(0);
        words.extend(devices.iter().map(String::as_str));
        let side = Self::start(&words, &[&guest.files[0], &guest.files[1]]);
        side.process
            .wait_until_said(&format!("runs on {}", guest.engine));
        side
    }

    /// A destination and its address, behind so many moves.
    fn destination(guest: &Guest, moves: u64, flags: &[&str]) -> (Self, String) {
        let mut words = vec!["receive", "--listen", "127.0.0.1:0"];
        words.extend(guest.receive);
        words.extend(flags);
        let devices = guest.devices(moves + 1);
        words.extend(devices.iter().map(String::as_str));
        let side = Self::start(&words, &[]);
        let address = side.process.wait_until_said("listening on ");
        (side, address)
    }

    /// `pageferry migrate` to `address`, with some passes of pre-copy.
    fn migrate(&self, address: &str, passes: u64, flags: &[&str]) -> Process {
        let mut command = program();
        command.arg("migrate").arg("--vm").arg(&self.socket);
        command.args(["--to", address, "--precopy-passes", &passes.to_string()]);
        // Post-copy lasts long enough for a kill.
        command.args(["--max-postcopy-bandwidth", "800mbit"]);
        command.args(flags);
        Process::spawn(command)
    }

    fn text(&self) -> String {
        let bytes = std::fs::read(&self.console).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The guest makes progress here.
    fn assert_runs_on(&self) {
        let before = Heard::of(&self.text()).ticks.len();
        wait_until("the guest's timer", || {
            Heard::of(&self.text()).ticks.len() > before + 2
        });
    }

    fn quit(self) {
        let socket = self.socket.to_str().unwrap();
        pageferry(&["quit", "--vm", socket]).assert_ok();
        self.process.end();
    }
}

/// What a guest has said.
#[derive(Default)]
struct Heard {
    /// The guest's clock at each line of its timer.
    ticks: Vec<u64>,
    pages: u64,
    sums: u64,
    disk: u64,
    net: u64,
}

impl Heard {
    /// Fails if the guest noticed something wrong.
    #[track_caller]
    fn of(text: &str) -> Self {
        let mut heard = Self::default();
        for line in text.split_inclusive('\n') {
            for complaint in [
                "PF FAIL",
                "Oops",
                "BUG:",
                "rcu: INFO",
                "Unable to",
                "Kernel panic",
            ] {
                assert!(!line.contains(complaint), "{line} in\n{text}");
            }
            // A part of a line has wrong numbers.
            let Some(line) = line.strip_suffix('\n') else {
                continue;
            };
            let words: Vec<&str> = line.trim_end().split(' ').collect();
            let ["PF", what, first, second] = words[..] else {
                continue;
            };
            let (Ok(first), Ok(second)) = (first.parse(), second.parse::<u64>()) else {
                continue;
            };
            match what {
                "tick" => {
                    let last = heard.ticks.last().copied().unwrap_or(0);
                    assert!(first > last, "the clock went from {last} to {first}");
                    heard.ticks.push(first);
                }
                "load" => heard.pages = first,
                "md5" => heard.sums = first,
                "disk" => heard.disk = first,
                "net" => heard.net = first,
                _ => continue,
            }
            assert!(what == "tick" || second == 0, "{line}");
        }
        heard
    }
}

#[test]
#[ignore = "takes minutes: `.ci/slow` runs it"]
fn linux_moves_back_and_forth_at_seeded_moments() {
    if let Some(guest) = Guest::soft() {
        moves_back_and_forth(&guest, None, number("PAGEFERRY_LINUX_MOVES", MOVES), 600);
    }
}

const WITH_DEVICES: &str = "console=ttyS0 panic=-1 loglevel=6 pf=load pf_mib=8 pf_timer_ms=10 \
                            pf_rest_ms=50 pf_disk=1 pf_net=7777";

#[test]
#[ignore = "needs a KVM that runs kernels: `.ci/lab-linux` runs it there"]
fn linux_on_kvm_moves_with_a_level_of_features() {
    for machine in [
        &["--memory", "64M", "--vcpus", "2", "--cpu", "x86-64-v2"],
        &["--memory", "64M", "--vcpus", "2", "--cpu", "x86-64-v3"],
    ] {
        let Some(guest) = Guest::on_kvm(guest_linux_x86_64(), machine) else {
            return;
        };
        moves_back_and_forth(&guest, None, 2, 3000);
    }
}

#[test]
#[ignore = "needs a KVM that runs kernels: `.ci/lab-linux` runs it there"]
fn linux_on_kvm_moves_with_its_disk_and_its_network_by_each_delivery() {
    // Little more than the kernel needs: the emulated machine moves some hundred pages a second.
    let machine = &["--memory", "40M", "--vcpus", "2"];
    let for_poison = &["--memory", "40M", "--vcpus", "2", "--cpu", "host,poison"];
    if let Some(guest) = Guest::on_kvm(guest_linux_x86_64(), machine) {
        let poison = (POISON, &for_poison[..]);
        moves_with_devices_on_kvm(guest, &[(MINOR, machine), (MISSING, machine), poison], 3000);
    }
}

#[test]
#[ignore = "needs a KVM that runs kernels: `.ci/lab-linux` runs it there"]
fn a_stock_linux_on_kvm_moves_with_its_disk_and_its_network() {
    let machine = &["--memory", "256M", "--vcpus", "1"];
    if let Some(guest) = Guest::on_kvm(guest_linux_cloud(), machine) {
        moves_with_devices_on_kvm(guest, &[(MINOR, machine), (MISSING, machine)], 15_000);
    }
}

/// Lets `test` use the guest with a copy of the disk `image` and a network, once for each item. The
/// file system is right afterwards.
fn with_devices<T: Send>(
    mut guest: Guest,
    image: &Path,
    items: impl IntoIterator<Item = T> + Send,
    test: impl Fn(&mut Guest, &Echo, T) + Sync,
) {
    let dir = Dir::new();
    let disk = dir.path("disk");
    guest.disk = Some(disk.clone());
    Namespace::new().within(|| {
        bridge();
        let echo = Echo::start("10.77.0.1:7777");
        for item in items {
            std::fs::copy(image, &disk).unwrap();
            test(&mut guest, &echo, item);
            check_file_system(&disk);
        }
    });
}

/// [`with_devices`] on KVM, with the disk that `.ci/lab-linux` makes.
fn with_devices_on_kvm<T: Send>(
    mut guest: Guest,
    items: impl IntoIterator<Item = T> + Send,
    test: impl Fn(&mut Guest, &Echo, T) + Sync,
) {
    let Some(image) = std::env::var_os("PAGEFERRY_LINUX_DISK") else {
        panic!("PAGEFERRY_LINUX_DISK names no image of an ext4: `.ci/lab-linux` makes one");
    };
    guest.command_line = WITH_DEVICES;
    with_devices(guest, image.as_ref(), items, test);
}

/// Moves guests with devices, one for each pair of flags of `receive` and `run`. The environment
/// says how many moves these are together.
fn moves_with_devices_on_kvm(guest: Guest, ways: &[(Flags, Flags)], most_ms: u64) {
    let moves = number("PAGEFERRY_LINUX_MOVES", 24).div_ceil(ways.len() as u64);
    with_devices_on_kvm(guest, ways, |guest, echo, &(receive, machine)| {
        (guest.receive, guest.machine) = (receive, machine);
        moves_with_devices(guest, echo, moves, most_ms);
    });
}

fn moves_with_devices(guest: &Guest, echo: &Echo, moves: u64, most_ms: u64) {
    let before = echo.streams();
    moves_back_and_forth(guest, Some(echo), moves, most_ms);
    // A guest opens one stream, and a broken one would be opened once more.
    assert_eq!(echo.streams() - before, moves.div_ceil(MOVES_OF_A_VM));
}

/// A guest of the soft engine, and an image of a disk in the directory. `None` after a skip.
fn soft_with_devices(dir: &Dir) -> Option<(Guest, PathBuf)> {
    let mut guest = Guest::soft()?;
    guest.machine = &["--memory", "64M", "--vcpus", "2"];
    // It rests, so that the rounds of the disk are short.
    guest.command_line = "console=hvc0 panic=-1 quiet pf=load pf_mib=4 pf_timer_ms=20 \
                          pf_rest_ms=200 pf_disk=1 pf_net=7777";
    let mut tap = Command::new("unshare");
    let make = "PATH=$PATH:/usr/sbin:/sbin ip tuntap add dev pf-try mode tap";
    let tap = tap.args(["-n", "sh", "-c", make]);
    if !tap.output().is_ok_and(|made| made.status.success())
        && skip("tap", "no tap can be made in a network namespace")
    {
        return None;
    }
    let image = dir.path("image");
    let file = std::fs::File::create(&image).unwrap();
    file.set_len(24 << 20).unwrap();
    let mut make = Command::new("/usr/sbin/mkfs.ext4");
    let made = make.arg("-q").arg(&image).output();
    if !made.is_ok_and(|made| made.status.success())
        && skip("e2fsck", "there is no /usr/sbin/mkfs.ext4")
    {
        return None;
    }
    Some((guest, image))
}

/// `.ci/slow` has more moves.
#[test]
fn linux_moves_with_its_disk_and_its_network() {
    let dir = Dir::new();
    if let Some((guest, image)) = soft_with_devices(&dir) {
        let moves = number("PAGEFERRY_DEVICE_MOVES", 3);
        with_devices(guest, &image, [()], |guest, echo, ()| {
            moves_with_devices(guest, echo, moves, 1500);
        });
    }
}

#[test]
#[ignore = "takes minutes: `.ci/slow` runs it"]
fn linux_runs_in_one_process_at_most_and_its_disk_stays_right() {
    let dir = Dir::new();
    if let Some((guest, image)) = soft_with_devices(&dir) {
        let kills = number("PAGEFERRY_LINUX_KILLS", KILLS).div_ceil(4);
        with_devices(guest, &image, 0..kills, |guest, _, seed| {
            kill(guest, seed, 4000);
        });
    }
}

#[test]
#[ignore = "needs a KVM that runs kernels: `.ci/lab-linux` runs it there"]
fn linux_on_kvm_goes_on_after_a_restore() {
    let machine = &["--memory", "64M", "--vcpus", "2"];
    let Some(guest) = Guest::on_kvm(guest_linux_x86_64(), machine) else {
        return;
    };
    with_devices_on_kvm(guest, [()], |guest, echo, ()| {
        let dir = Dir::new();
        let saved = dir.path("saved");
        let saved = saved.to_str().unwrap();
        let before = Side::source_with(guest, &["--snapshot-to", saved]);
        let works = |text: &str| {
            let heard = Heard::of(text);
            (heard.disk > 0 && heard.net > 0 && heard.sums > 0).then_some(heard)
        };
        wait_for("the guest's work", || works(&before.text()));
        pageferry(&["quit", "--vm", before.socket.to_str().unwrap()]).assert_ok();
        before.process.end().assert_ok();
        let text = std::fs::read(&before.console).unwrap();
        let text = String::from_utf8_lossy(&text);
        assert!(!text.contains(FORK), "{text}");
        let devices = guest.devices(1);
        let mut words = vec!["restore", saved];
        words.extend(devices.iter().map(String::as_str));
        let after = Side::start(&words, &[]);
        // All clocks go on, and so does the stream.
        let last = Heard::of(&text);
        wait_until("the guest's work", || {
            works(&(text.clone() + &*after.text())).is_some_and(|now| {
                now.disk > last.disk && now.net > last.net && now.ticks.len() > last.ticks.len()
            })
        });
        assert_eq!(echo.streams(), 1);
        // The time of day has gone on meanwhile.
        let late = echo.lateness();
        assert!(late < Duration::from_secs(10), "{late:?}");
        // It repeats no random number of another that was restored from the same state.
        wait_until("the news of the restore", || after.text().contains(FORK));
        after.quit();
    });
}

/// Words of a kernel that knows that it goes on from a saved state.
const FORK: &str = "crng reseeded due to virtual machine fork";

/// A network namespace, for a test and its processes.
struct Namespace(Process);

impl Namespace {
    fn new() -> Self {
        let mut holder = Command::new("unshare");
        holder.args(["-n", "sh", "-c", "echo there is one >&2; exec sleep 3600"]);
        let holder = Process::spawn(holder);
        holder.wait_until_said("there is one");
        Self(holder)
    }

    fn within(&self, work: impl FnOnce() + Send) {
        let path = format!("/proc/{}/ns/net", self.0.pid());
        pageferry_testkit::netns::within(&path, work).unwrap();
    }
}

/// Two taps on a bridge, which has the address of the echo server.
fn bridge() {
    let script = "set -e
        export PATH=$PATH:/usr/sbin:/sbin
        ip link set lo up
        ip link add pf-br type bridge
        ip addr add 10.77.0.1/24 dev pf-br
        for tap in pf-tap0 pf-tap1; do
            ip tuntap add dev $tap mode tap 2>/dev/null || tunctl -t $tap
            ip link set $tap master pf-br
            ip link set $tap up
        done
        ip link set pf-br up";
    let status = Command::new("sh").args(["-c", script]).status().unwrap();
    assert!(status.success(), "{status}");
}

/// The journal is replayed, and then nothing is wrong. The lab has `e2fsck` if its command says so.
fn check_file_system(disk: &Path) {
    let check = Path::new("/usr/sbin/e2fsck");
    if !check.exists() && skip("e2fsck", "there is no /usr/sbin/e2fsck") {
        return;
    }
    let replay = Command::new(check).arg("-p").arg(disk).output().unwrap();
    assert!(matches!(replay.status.code(), Some(0 | 1)), "{replay:?}");
    let clean = Command::new(check).arg("-fn").arg(disk).output().unwrap();
    assert_eq!(clean.status.code(), Some(0), "{clean:?}");
}

/// A server that returns what it gets.
struct Echo {
    streams: Arc<AtomicU64>,
    /// The least lateness of a guest's clock, in ns, and the blocks that told it.
    late: Arc<Mutex<(u128, u64)>>,
}

impl Echo {
    fn start(address: &str) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let echo = Self {
            streams: Arc::default(),
            late: Arc::default(),
        };
        let (streams, late) = (Arc::clone(&echo.streams), Arc::clone(&echo.late));
        // It ends with the test's process.
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                streams.fetch_add(1, Ordering::SeqCst);
                let late = Arc::clone(&late);
                std::thread::spawn(move || {
                    let mut block = [0; 1024];
                    while stream.read_exact(&mut block).is_ok() {
                        let told = u64::from_le_bytes(block[..8].try_into().unwrap());
                        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
                        // A clock that is ahead stands out.
                        let behind = now.as_nanos().wrapping_sub(told.into());
                        let mut late = late.lock().unwrap();
                        *late = (late.0.min(behind), late.1 + 1);
                        drop(late);
                        if stream.write_all(&block).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        echo
    }

    fn streams(&self) -> u64 {
        self.streams.load(Ordering::SeqCst)
    }

    /// The time by which the guest's clock is behind the host's: the least of twenty blocks, since a
    /// block takes a while to come.
    fn lateness(&self) -> Duration {
        *self.late.lock().unwrap() = (u128::MAX, 0);
        wait_for("the guest's clock", || {
            let (late, blocks) = *self.late.lock().unwrap();
            (blocks >= 20).then(|| Duration::from_nanos(late.try_into().expect("it is not ahead")))
        })
    }
}

/// Moves guests, each of them many times, with at most so many milliseconds between two moves.
fn moves_back_and_forth(guest: &Guest, echo: Option<&Echo>, moves: u64, most_ms: u64) {
    // The soft engine's guests do not know the time of day.
    let clock = echo.filter(|_| guest.engine == "kvm");
    let (mut pages, mut sums) = (0, 0);
    for vm in 0..moves.div_ceil(MOVES_OF_A_VM) {
        let mut random = Random::new(vm + 1);
        let mut here = Side::source(guest);
        let (mut text, mut late) = (String::new(), None);
        for side in 0..MOVES_OF_A_VM.min(moves - vm * MOVES_OF_A_VM) {
            let (there, address) = Side::destination(guest, side, &[]);
            std::thread::sleep(Duration::from_millis(random.below(most_ms)));
            let moved = here.migrate(&address, random.below(2), &[]).end();
            assert_eq!(moved.code, Some(0), "VM {vm}: {moved:?}");
            let left = std::mem::replace(&mut here, there);
            left.process.end().assert_ok();
            let bytes = std::fs::read(&left.console).unwrap();
            text.push_str(&String::from_utf8_lossy(&bytes));
            Heard::of(&text);
            if let Some(echo) = clock {
                late.get_or_insert_with(|| echo.lateness());
            }
        }
        // The guest has had time for each kind of its work.
        let heard = wait_for("the guest's checks", || {
            let heard = Heard::of(&(text.clone() + &here.text()));
            let works = guest.disk.is_none() || heard.disk > 0 && heard.net > 0;
            (heard.pages > 0 && heard.sums > 0 && works).then_some(heard)
        });
        if guest.disk.is_some() {
            // The stream did not break on the way, and goes on here.
            wait_until("the stream", || {
                Heard::of(&(text.clone() + &here.text())).net > heard.net
            });
        }
        if let (Some(echo), Some(before)) = (clock, late) {
            let after = echo.lateness();
            assert!(after.abs_diff(before) < CLOCKS_STOP, "{before:?} {after:?}");
        }
        pages += heard.pages;
        sums += heard.sums;
        here.quit();
        println!(
            "{} {:?}, VM {vm}: {pages} pages and {sums} sums so far, none wrong; {} of the disk, {} \
             blocks by the network",
            guest.engine, guest.receive, heard.disk, heard.net
        );
    }
}

#[test]
fn linux_moves_while_it_is_paused() {
    let Some(guest) = Guest::soft() else {
        return;
    };
    let mut here = Side::source(&guest);
    here.assert_runs_on();
    let mut text = String::new();
    for _ in 0..2 {
        let socket = here.socket.to_str().unwrap().to_owned();
        pageferry(&["pause", "--vm", &socket]).assert_ok();
        let (there, address) = Side::destination(&guest, 0, &[]);
        here.migrate(&address, 1, &[]).end().assert_ok();
        let left = std::mem::replace(&mut here, there);
        left.process.end().assert_ok();
        text.push_str(&String::from_utf8_lossy(
            &std::fs::read(&left.console).unwrap(),
        ));
        wait_until("the VM to be here", || {
            status(&here.socket).is_some_and(|status| status["state"] == "paused")
        });
        std::thread::sleep(STILL);
        assert_eq!(here.text(), "", "a paused guest says nothing");
        let socket = here.socket.to_str().unwrap().to_owned();
        pageferry(&["resume", "--vm", &socket]).assert_ok();
        // Its timers go on, and its clock has not gone back.
        here.assert_runs_on();
        Heard::of(&(text.clone() + &here.text()));
    }
    here.quit();
}

/// The destination is gone. The source runs the guest, or keeps it still until the operator's word.
fn settle_source(source: Side, mut migrate: Process, there: &Heard) -> &'static str {
    let waits = wait_for("the source to notice", || {
        if !migrate.is_running() {
            return Some(false);
        }
        let session = &status(&source.socket)?["session"];
        let handed_over = session["stage"] == "handed-over" || session["stage"] == "drained";
        (handed_over && session["connected"] == false).then_some(true)
    });
    if !waits {
        if migrate.end().code == Some(0) {
            source.process.end().assert_ok();
            return "moved, and killed afterwards";
        }
        assert!(there.ticks.is_empty(), "it ran at the destination");
        source.assert_runs_on();
        source.quit();
        return "kept by the source";
    }
    let before = source.text();
    std::thread::sleep(STILL);
    assert_eq!(
        source.text(),
        before,
        "the guest runs after it was handed over"
    );
    let socket = source.socket.to_str().unwrap();
    pageferry(&["abandon", "--vm", socket, "--resume-here"]).assert_ok();
    migrate.end();
    source.assert_runs_on();
    source.quit();
    "resumed at the source by the operator"
}

/// The source is gone. The destination runs the guest if it has all of it.
fn settle_destination(there: Side) -> &'static str {
    let (state, session) = wait_for("the destination to notice", || {
        let status = status(&there.socket)?;
        let state = status["state"].as_str()?.to_owned();
        let session = status["session"].clone();
        let settled = state == "waiting"
            || state == "running"
            || (state == "arriving" || state == "incomplete") && !session["lost_for_ms"].is_null();
        settled.then_some((state, session))
    });
    let stage = session["stage"].as_str().unwrap_or("none");
    let outcome = match (state.as_str(), stage) {
        ("waiting", _) | (_, "ready" | "discarded") => {
            std::thread::sleep(STILL);
            assert!(Heard::of(&there.text()).ticks.is_empty(), "it ran");
            "gone with the source"
        }
        (_, "running") if session["pages_left"] != 0 => {
            // It waits for pages that never come. What it has said is right.
            "incomplete at the destination"
        }
        _ => {
            there.assert_runs_on();
            "moved whole"
        }
    };
    Heard::of(&there.text());
    outcome
}

#[test]
#[ignore = "takes minutes: `.ci/slow` runs it"]
fn linux_runs_in_one_process_at_most_when_the_other_is_killed() {
    let Some(guest) = Guest::soft() else {
        return;
    };
    let kills = number("PAGEFERRY_LINUX_KILLS", KILLS);
    let outcomes: BTreeSet<&str> = (0..kills).map(|seed| kill(&guest, seed, 2000)).collect();
    assert!(outcomes.len() > 1, "the moments are not spread");
}

#[test]
#[ignore = "needs a KVM that runs kernels: `.ci/lab-linux` runs it there"]
fn linux_on_kvm_runs_in_one_process_at_most_and_its_disk_stays_right() {
    let machine = &["--memory", "64M", "--vcpus", "2"];
    if let Some(guest) = Guest::on_kvm(guest_linux_x86_64(), machine) {
        let kills = number("PAGEFERRY_LINUX_KILLS", KILLS).div_ceil(4);
        with_devices_on_kvm(guest, 0..kills, |guest, _, seed| {
            kill(guest, seed, 20_000);
        });
    }
}

/// Kills one process of a move at a moment that follows from the seed, at most `most_ms`
/// milliseconds after the guest starts. Returns what became of the guest.
fn kill(guest: &Guest, seed: u64, most_ms: u64) -> &'static str {
    let (mut random, begun) = (Random::new(seed + 1), Instant::now());
    let source = Side::source(guest);
    let (there, address) = Side::destination(guest, 0, SOON);
    let least_ms = most_ms / 4;
    std::thread::sleep(Duration::from_millis(
        least_ms + random.below(most_ms - least_ms),
    ));
    let migrate = source.migrate(&address, random.below(2), SOON);
    if random.below(3) == 0 {
        std::thread::sleep(Duration::from_micros(random.below(400_000)));
    } else {
        // In the switch-over or after it.
        wait_for("the switch-over", || {
            let stage = status(&there.socket)?["session"]["stage"].clone();
            ["ready", "running", "complete", "completed"]
                .contains(&stage.as_str()?)
                .then_some(())
        });
        std::thread::sleep(Duration::from_micros(random.below(300_000)));
    }
    let source_dies = random.below(2) == 0;
    let killed = if source_dies { &source } else { &there };
    killed.process.signal(Signal::KILL);
    // The files have all that the guest said before the kill.
    std::thread::sleep(STILL);
    let [before, after] = [&source, &there].map(|side| Heard::of(&side.text()));
    if let (Some(last), Some(first)) = (before.ticks.last(), after.ticks.first()) {
        assert!(last < first, "seed {seed}: the guest ran at both sides");
    }
    let outcome = if source_dies {
        settle_destination(there)
    } else {
        settle_source(source, migrate, &after)
    };
    println!("seed {seed}: {outcome}, after {:?}", begun.elapsed());
    outcome
}
