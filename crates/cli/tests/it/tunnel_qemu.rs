//! QEMU's VMs move between two network namespaces, through a pair of tunnels and without.
//!
//! **Guarantee.** With tunnels, QEMU reports `completed` at both ends whatever the link did
//! meanwhile. The guest goes on at the destination, every page of it is right, and both tunnels
//! succeed.
//!
//! **Mechanism.** The guest rewrites and checks its memory all the time. Its memory is a file at
//! both ends, so the test reads the guest's progress and, at the end, all its pages. A seed
//! determines the kind of migration, the fault of the link, and its moment.

use crate::support::{Dir, PAGEFERRY, Process};
use pageferry_guest::{Isa, Workload};
use pageferry_testkit::qemu::{self, Error, Machine, Qemu};
use pageferry_testkit::shaper::{Plan, Shaper, Which};
use pageferry_testkit::two_hosts::{self, Host, Link, Rate, TwoHosts};
use pageferry_testkit::{Random, netns, seeds, skip, wait_for, wait_until};
use serde_json::json;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The guest's memory.
const MEMORY: u64 = 16 << 20;
/// The port at the destination's host.
const PORT: u16 = 4444;

/// A link on which post-copy takes 17 s, so that a fault on a busy machine comes before its end.
/// The queue holds less than half of what the link carries before a tunnel takes its peer for dead.
fn slow() -> Link {
    Link {
        limit: 192 << 10,
        ..Link::new(Rate::mbit(8))
    }
}

fn fast() -> Link {
    Link::new(Rate::mbit(100))
}

/// A kind of migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// One stream, which carries all pages in post-copy.
    Postcopy,
    /// Requested pages have a stream of their own.
    Preempt,
    /// Several streams in pre-copy. QEMU has no post-copy with them.
    Multifd,
}

impl Way {
    fn capabilities(self) -> &'static [&'static str] {
        match self {
            Self::Postcopy => &["postcopy-ram"],
            Self::Preempt => &["postcopy-ram", "postcopy-preempt"],
            Self::Multifd => &["multifd"],
        }
    }
}

/// Two machines of QEMU, of which the first runs a guest that has written all its memory.
struct Pair {
    source: Machine,
    destination: Machine,
    workload: Workload,
}

impl Pair {
    fn start(qemu: &Qemu, hosts: &TwoHosts, way: Way) -> Self {
        let workload = Workload::new(Isa::Rv64, 1, MEMORY).expect("a workload");
        let program = workload.program();
        let source = qemu.source(hosts.name(Host::A), program);
        let destination = qemu.destination(hosts.name(Host::B), program);
        let mut pair = Self {
            source: source.expect("a source"),
            destination: destination.expect("a destination"),
            workload,
        };
        for end in [&mut pair.source, &mut pair.destination] {
            end.turn_on(way.capabilities()).expect("capabilities");
        }
        pair.source.call("cont", json!({})).expect("it runs");
        wait_until("the guest to have written its memory", || {
            control(&pair.source).is_some_and(|control| control.pass > 1)
        });
        if way == Way::Multifd {
            // Without post-copy, all but the first pass would be those of QEMU's dirty log.
            pair.source.call("stop", json!({})).expect("it stops");
        }
        pair
    }

    /// Starts the migration. The first pass of pre-copy takes a minute. QEMU's emulation was seen
    /// to lose a page that its guest wrote between two passes, also without tunnels. So a guest
    /// that runs has to switch over in the first.
    fn migrate(&mut self, from: &str, to: &str) {
        // Milliseconds: so little that the guest always writes more meanwhile.
        let limit = json!({ "downtime-limit": 1, "max-bandwidth": MEMORY / 60 });
        let source = &mut self.source;
        source
            .call("migrate-set-parameters", limit)
            .expect("a limit");
        let listens = self
            .destination
            .call("migrate-incoming", json!({ "uri": to }));
        listens.expect("it listens");
        source
            .call("migrate", json!({ "uri": from }))
            .expect("it migrates");
        wait_until("pre-copy", || {
            source.migration().expect("a state") == "active"
        });
    }

    /// Switches over to post-copy, if there is one.
    fn switch_over(&mut self, way: Way) {
        if way != Way::Multifd {
            let switched = self.source.call("migrate-start-postcopy", json!({}));
            switched.expect("it accepts that");
        }
    }

    /// Waits until the guest runs at the destination, before its memory is there.
    fn wait_for_postcopy(&mut self) {
        wait_until("post-copy", || {
            let [state, _] = self.states().expect("no failure");
            assert_ne!(state, "completed", "post-copy was not seen");
            state == "postcopy-active"
        });
    }

    /// Lets the rest of pre-copy move fast, which must not need another pass.
    fn hurry(&mut self) {
        let no_limit = json!({ "max-bandwidth": 0 });
        let lifted = self.source.call("migrate-set-parameters", no_limit);
        lifted.expect("no limit");
    }

    /// The states of both ends.
    fn states(&mut self) -> Result<[String; 2], Error> {
        Ok([self.source.migration()?, self.destination.migration()?])
    }

    /// Both ends have completed, the guest goes on, and its memory is right.
    #[track_caller]
    fn assert_moved(mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let states = self.states().expect("no failure");
            if states.iter().all(|state| state == "completed") {
                break;
            }
            assert!(Instant::now() < deadline, "the states are {states:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
        self.destination.call("cont", json!({})).expect("it runs");
        let done = control(&self.destination).expect("it has arrived").done;
        wait_until("the guest to go on", || {
            control(&self.destination).is_some_and(|control| control.done > done + MEMORY / 4096)
        });
        self.assert_right(done);
    }

    /// Stops the guest at the destination. Its memory is right, and it has done more than `done`.
    #[track_caller]
    fn assert_right(&mut self, done: u64) {
        self.destination.call("stop", json!({})).expect("it stops");
        let destination = &self.destination;
        let verdict = self
            .workload
            .verify::<Error>(&mut |page, bytes| destination.read_page(page, bytes));
        let verdict = verdict.expect("all pages can be read");
        assert_eq!(
            (verdict.error_count, verdict.guest_errors),
            (0, 0),
            "{verdict:?}"
        );
        assert!(verdict.pages_done > done, "{verdict:?}");
    }
}

fn control(machine: &Machine) -> Option<pageferry_guest::Control> {
    machine.control(0).expect("its memory can be read")
}

/// QEMU and two hosts. `None` if this machine lacks either, after the test was reported as skipped.
fn start() -> Option<(Qemu, TwoHosts)> {
    let qemu = match Qemu::find(Path::new(qemu::PROGRAM)) {
        Ok(qemu) => qemu,
        Err(why) => {
            skip("qemu", why);
            return None;
        }
    };
    Some((qemu, two_hosts::or_skip(&slow())?))
}

/// A proxy in the first host for streams to the second, which can reset them.
fn shaper(hosts: &TwoHosts) -> Shaper {
    let to = SocketAddr::from((hosts.address(Host::B), PORT));
    let started = netns::within(hosts.name(Host::A), || Shaper::start(to, Plan::default()));
    started.expect("a namespace").expect("a proxy")
}

#[test]
fn without_tunnels_a_reset_stops_a_vm_in_postcopy() {
    let Some((qemu, hosts)) = start() else {
        return;
    };
    let shaper = shaper(&hosts);
    let mut pair = Pair::start(&qemu, &hosts, Way::Postcopy);
    let to = format!("tcp:{}:{PORT}", hosts.address(Host::B));
    pair.migrate(&format!("tcp:{}", shaper.addr()), &to);
    pair.switch_over(Way::Postcopy);
    pair.wait_for_postcopy();
    std::thread::sleep(Duration::from_millis(300));
    shaper.reset(Which::All);
    wait_until("both ends to notice", || {
        pair.states().expect("no failure") == ["postcopy-paused"; 2]
    });
    wait_until("the guest to need a page that does not come", || {
        let done = || control(&pair.destination).map(|control| control.done);
        let before = done();
        std::thread::sleep(Duration::from_millis(300));
        before == done()
    });
    assert_eq!(pair.states().expect("no failure"), ["postcopy-paused"; 2]);
}

#[test]
fn without_tunnels_a_reset_ends_a_migration_in_precopy() {
    let Some((qemu, hosts)) = start() else {
        return;
    };
    for way in [Way::Preempt, Way::Multifd] {
        let shaper = shaper(&hosts);
        let mut pair = Pair::start(&qemu, &hosts, way);
        let to = format!("tcp:{}:{PORT}", hosts.address(Host::B));
        pair.migrate(&format!("tcp:{}", shaper.addr()), &to);
        std::thread::sleep(Duration::from_millis(300));
        shaper.reset(Which::All);
        let failed = wait_for("the source to fail", || pair.source.migration().err());
        assert!(
            failed.to_string().contains("its migration failed"),
            "{failed}"
        );
        // The test has stopped the guest of multifd itself.
        if way != Way::Multifd {
            let done = control(&pair.source).expect("it was never gone").done;
            wait_until("the guest to go on", || {
                control(&pair.source).is_some_and(|control| control.done > done)
            });
        }
    }
}

/// What happens to the link between the hosts.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The network device of the destination's host is down.
    Cut,
    /// All packets but the smallest vanish.
    Freeze,
    /// All connections get RST.
    Reset,
    /// The source's host gets another address for good.
    SourceMoves,
    /// The destination's host has no address for a while.
    DestinationAway,
}

/// All that a seed determines.
#[derive(Clone, Copy, Debug)]
struct Chosen {
    way: Way,
    fault: Fault,
    /// Whether the fault comes in post-copy.
    in_postcopy: bool,
    /// Whether a fault in pre-copy lasts beyond the switch-over.
    over_switch: bool,
    /// The delay from the start of the phase to the fault.
    delay: Duration,
    lasts: Duration,
}

impl Chosen {
    const FAULTS: [Fault; 5] = [
        Fault::Cut,
        Fault::Reset,
        Fault::Freeze,
        Fault::SourceMoves,
        Fault::DestinationAway,
    ];
    const PHASES: [(Way, bool); 5] = [
        (Way::Preempt, true),
        (Way::Multifd, false),
        (Way::Postcopy, true),
        (Way::Preempt, false),
        (Way::Postcopy, false),
    ];

    /// 25 seeds in sequence have every fault in every phase.
    fn of(seed: u64) -> Self {
        // `Random` takes the seeds 0 and 1 for the same.
        let mut random = Random::new(seed + 1);
        let (way, in_postcopy) = Self::PHASES[((seed + seed / 5) % 5) as usize];
        // One in six of the seeds of slow tests is long.
        let longest = if seed >= QUICK && random.below(6) == 0 {
            30_000
        } else {
            1000
        };
        Self {
            way,
            fault: Self::FAULTS[(seed % 5) as usize],
            in_postcopy,
            over_switch: random.below(2) == 0,
            delay: Duration::from_millis(random.below(500)),
            lasts: Duration::from_millis(50 + random.below(longest - 50)),
        }
    }
}

/// The seeds of an ordinary test.
const QUICK: u64 = 5;
/// The cases that run at the same time. They mostly wait.
const AT_ONCE: usize = 2;

/// The longest wait for the end of a migration after the fault.
const PATIENCE: Duration = Duration::from_secs(100);

/// Shows what tunnels have said if the test panics.
struct Shown<'a>(&'a Tunnels);

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for tunnel in [&self.0.source, &self.0.destination] {
                println!("{}{}", tunnel.said(), tunnel.said_on_stderr());
            }
        }
    }
}

/// A pair of tunnels.
struct Tunnels {
    source: Process,
    destination: Process,
    dir: Dir,
}

impl Tunnels {
    /// The tunnel at the source connects to `to`.
    fn start(hosts: &TwoHosts, to: SocketAddr) -> Self {
        let dir = Dir::new();
        let unix = |name| format!("unix:{}", dir.path(name).display());
        let start = |host, ends: [&str; 4]| {
            let command = netns::command(hosts.name(host), PAGEFERRY);
            let more = [
                "--insecure",
                "--once",
                "--dead-after",
                "500ms",
                "--give-up-after",
                "2m",
            ];
            let process =
                Process::start_by(command, &[&["tunnel"], &ends[..], &more].concat(), &dir);
            process.wait_until_said("listening at ");
            process
        };
        let accept = format!("{}:{PORT}", hosts.address(Host::B));
        let destination = start(Host::B, ["--accept", &accept, "--connect", &unix("b")]);
        let source = start(Host::A, ["--listen", &unix("a"), "--to", &to.to_string()]);
        Self {
            source,
            destination,
            dir,
        }
    }

    /// Both end and have succeeded.
    #[track_caller]
    fn assert_ended(self) {
        self.source.end().assert_ok();
        self.destination.end().assert_ok();
    }
}

/// Moves a guest while the link has a fault.
fn play(qemu: &Qemu, chosen: Chosen) {
    let hosts = two_hosts::or_skip(&slow()).expect("two hosts");
    let shaper = matches!(chosen.fault, Fault::Reset).then(|| shaper(&hosts));
    let direct = SocketAddr::from((hosts.address(Host::B), PORT));
    let to = shaper.as_ref().map_or(direct, Shaper::addr);
    let tunnels = Tunnels::start(&hosts, to);
    let shown = Shown(&tunnels);
    let mut pair = Pair::start(qemu, &hosts, chosen.way);
    let unix = |name| format!("unix:{}", tunnels.dir.path(name).display());
    let switches_late = !chosen.in_postcopy && chosen.over_switch;
    pair.migrate(&unix("a"), &unix("b"));
    if chosen.in_postcopy {
        std::thread::sleep(Duration::from_millis(200));
        pair.switch_over(chosen.way);
        pair.wait_for_postcopy();
    }
    std::thread::sleep(chosen.delay);
    let (a, b) = (hosts.address(Host::A), hosts.address(Host::B));
    match chosen.fault {
        Fault::Cut => hosts.plug(false).expect("unplugged"),
        Fault::Freeze => hosts.reshape(&slow().drops_above(28)).expect("frozen"),
        Fault::Reset => shaper.iter().for_each(|shaper| {
            shaper.refuse(true);
            shaper.reset(Which::All);
        }),
        Fault::SourceMoves => {
            let new = Ipv4Addr::new(198, 18, 0, 11);
            hosts.add_address(Host::A, new).expect("an address");
            hosts.remove_address(Host::A, a).expect("its old address");
        }
        Fault::DestinationAway => hosts.remove_address(Host::B, b).expect("its address"),
    }
    if switches_late {
        pair.switch_over(chosen.way);
    }
    std::thread::sleep(chosen.lasts);
    match chosen.fault {
        Fault::Cut => hosts.plug(true).expect("plugged"),
        Fault::Reset => shaper.iter().for_each(|shaper| shaper.refuse(false)),
        Fault::Freeze | Fault::SourceMoves => {}
        Fault::DestinationAway => hosts.add_address(Host::B, b).expect("its address"),
    }
    // A frozen link thaws.
    hosts.reshape(&fast()).expect("a fast link");
    if !chosen.in_postcopy && !switches_late {
        pair.switch_over(chosen.way);
    }
    if chosen.way == Way::Multifd {
        pair.hurry();
    }
    pair.assert_moved();
    drop(shown);
    tunnels.assert_ended();
}

#[test]
fn with_tunnels_a_vm_moves_whatever_happens_to_the_link() {
    let Some((qemu, _)) = start() else {
        return;
    };
    let left = Mutex::new(seeds("PAGEFERRY_TUNNEL_CUTS", QUICK));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let Some(seed) = left.lock().unwrap().next() else {
                        return;
                    };
                    let chosen = Chosen::of(seed);
                    let began = Instant::now();
                    println!("seed {seed}: {chosen:?}");
                    play(&qemu, chosen);
                    println!("seed {seed} took {:?}", began.elapsed());
                }
            });
        }
    });
}
