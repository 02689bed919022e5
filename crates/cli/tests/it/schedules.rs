//! Seeded schedules of faults on two processes and the network between them.
//!
//! **Guarantee.** After each schedule at most one side has run the VM. A VM with all its pages
//! passes its own verification. A VM that lacks pages waits for the operator.
//!
//! **Mechanism.** A seed determines the migration, the moments of the faults, and the faults. One
//! thread for each side samples the status all the time. These samples show whether the guest went
//! on at the source after it ran at the destination.
//!
//! **Neighbours.** `migration/tests/it/recovery.rs` has more schedules, inside one process.

use crate::support::{Destination, Ended, Process, Source, assert_whole, pageferry, status};
use pageferry_testkit::shaper::{Plan, Schedule, Shaper, Which};
use pageferry_testkit::{Random, Stop, rotating_seeds, wait_for, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Schedules mostly wait, so several run at once.
const AT_ONCE: usize = 3;
/// The longest time that a schedule may take on a busy machine. The source waits 10 s for a
/// destination that is gone in the switch-over.
const SCHEDULE_LIMIT: Duration = Duration::from_secs(300);
/// Every so many schedules run on KVM, if the host has it.
const KVM_SHARE: u64 = 6;
/// The time for which a VM that must not run is watched.
const STILL: Duration = Duration::from_millis(100);

/// The outcomes of a schedule.
const OUTCOMES: [&str; 5] = [MOVED, KEPT, DISCARDED, INCOMPLETE, RESUMED];
const MOVED: &str = "moved whole";
/// It never ran at the destination. Its source may be gone.
const KEPT: &str = "kept by the source";
/// It was ready, and its source was gone.
const DISCARDED: &str = "ready and discarded";
/// It ran, and the source was gone with the missing pages.
const INCOMPLETE: &str = "incomplete at the destination";
/// The operator resumed it, since the destination was gone.
const RESUMED: &str = "resumed at the source";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Source,
    Destination,
}

/// When a fault comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moment {
    Precopy,
    SwitchOver,
    Postcopy,
    /// Nearly every page is there, or all are.
    Drained,
    /// All connections were reset just before.
    Recovery,
}

#[derive(Clone, Debug)]
enum Fault {
    /// Faults of the connections.
    Network(Schedule),
    /// All connections get RST.
    Cut,
    /// The side stands still for this time.
    Stop(Side, Duration),
    /// The side's process is gone.
    Kill(Side),
}

/// All that a seed determines.
#[derive(Clone, Debug)]
struct Chosen {
    engine: &'static str,
    passes: u64,
    channels: u64,
    urgent_channels: u64,
    moment: Moment,
    /// The delay from the moment to the first fault.
    delay: Duration,
    /// One fault or two, each with the delay to the next.
    faults: Vec<(Fault, Duration)>,
}

impl Chosen {
    fn of(seed: u64, kvm: bool) -> Self {
        // `Random` takes the seeds 0 and 1 for the same.
        let mut random = Random::new(seed + 1);
        let moment = match random.below(6) {
            0 => Moment::Precopy,
            1 => Moment::SwitchOver,
            2 | 3 => Moment::Postcopy,
            4 => Moment::Drained,
            _ => Moment::Recovery,
        };
        let longest = match moment {
            Moment::SwitchOver | Moment::Drained => 4000,
            Moment::Recovery => 30_000,
            Moment::Precopy | Moment::Postcopy => 250_000,
        };
        let delay = Duration::from_micros(random.below(longest));
        let first = Fault::of(seed, &mut random);
        let mut faults = vec![(first, Duration::from_micros(random.below(40_000)))];
        if random.below(2) == 0 {
            let second = Fault::of(!seed, &mut random);
            // With both processes gone, nothing is left to check.
            let both = matches!((&faults[0].0, &second), (Fault::Kill(_), Fault::Kill(_)));
            if !both {
                faults.push((second, Duration::ZERO));
            }
        }
        Self {
            engine: if kvm && seed % KVM_SHARE == KVM_SHARE - 1 {
                "kvm"
            } else {
                "soft"
            },
            passes: match moment {
                Moment::Precopy => 1 + random.below(2),
                _ => random.below(2),
            },
            channels: 1 + random.below(3),
            urgent_channels: 1 + random.below(2),
            moment,
            delay,
            faults,
        }
    }
}

impl Fault {
    fn of(seed: u64, random: &mut Random) -> Self {
        let side = [Side::Source, Side::Destination][random.below(2) as usize];
        match random.below(8) {
            0..=2 => Self::Network(Schedule::random(seed, Duration::from_millis(250))),
            3 => Self::Cut,
            4 | 5 => Self::Stop(side, Duration::from_millis(20 + random.below(700))),
            _ => Self::Kill(side),
        }
    }
}

/// The status of a side, in its own words.
struct Sample {
    asked: Instant,
    answered: Instant,
    status: Value,
}

impl Sample {
    fn stage(&self) -> &str {
        self.status["session"]["stage"].as_str().unwrap_or("none")
    }

    /// Whether the guest has run at this destination.
    fn ran_there(&self) -> bool {
        ["running", "complete", "completed", "incomplete"].contains(&self.stage())
    }

    fn pages_done(&self) -> Option<u64> {
        let done = self.status["guest"]["pages_done"].as_array()?;
        done.iter().map(Value::as_u64).sum()
    }
}

/// The samples of both sides.
#[derive(Default)]
struct Samples {
    source: Mutex<Vec<Sample>>,
    destination: Mutex<Vec<Sample>>,
}

impl Samples {
    /// Samples a side until `stop`.
    fn watch(of: &Mutex<Vec<Sample>>, socket: &Path, stop: &Stop) {
        while !stop.is_stopped() {
            let asked = Instant::now();
            if let Some(status) = status(socket) {
                let answered = Instant::now();
                of.lock().unwrap().push(Sample {
                    asked,
                    answered,
                    status,
                });
            }
            std::thread::sleep(Duration::from_millis(3));
        }
    }

    fn last<T>(of: &Mutex<Vec<Sample>>, get: impl FnOnce(&Sample) -> T) -> Option<T> {
        of.lock().unwrap().last().map(get)
    }

    fn has_come(&self, moment: Moment) -> bool {
        let there = |get: fn(&Sample) -> bool| Self::last(&self.destination, get) == Some(true);
        match moment {
            Moment::Precopy => {
                let get = |sample: &Sample| sample.stage() == "pre-copy";
                Self::last(&self.source, get) == Some(true) || there(Sample::ran_there)
            }
            Moment::SwitchOver => {
                let get = |sample: &Sample| {
                    !["none", "setup", "pre-copy"].contains(&sample.stage())
                        // Without a pass the switch-over follows the set-up.
                        || sample.status["phase"] == "switch-over"
                };
                Self::last(&self.source, get) == Some(true) || there(Sample::ran_there)
            }
            Moment::Postcopy | Moment::Recovery => there(Sample::ran_there),
            Moment::Drained => there(|sample| {
                let left = sample.status["session"]["pages_left"].as_u64();
                sample.ran_there() && left.is_none_or(|left| left < 100)
            }),
        }
    }

    /// The guest never ran at the source after it ran at the destination, until the operator
    /// resumed it.
    fn assert_never_ran_twice(&self, resumed: Option<Instant>) {
        let there = self.destination.lock().unwrap();
        let Some(ran) = there.iter().find(|sample| sample.ran_there()) else {
            return;
        };
        let here = self.source.lock().unwrap();
        let before_operator =
            |sample: &&Sample| resumed.is_none_or(|resumed| sample.answered < resumed);
        let later = here.iter().filter(|sample| sample.asked > ran.answered);
        let mut done = later.filter(before_operator).filter_map(Sample::pages_done);
        if let Some(first) = done.next() {
            assert!(
                done.all(|done| done == first),
                "the guest ran at both sides"
            );
        }
    }

    fn assert_never_ran_there(&self) {
        let there = self.destination.lock().unwrap();
        assert!(!there.iter().any(Sample::ran_there), "it ran there");
    }
}

fn abandon(socket: &Path, more: &[&str]) -> Ended {
    let mut args = vec!["abandon", "--vm", socket.to_str().unwrap()];
    args.extend(more);
    pageferry(&args)
}

/// Ends a process that is left. Nothing stays behind.
fn quit(process: Process, socket: &Path, dir: &crate::support::Dir, code: i32) {
    pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
    let ended = process.end();
    assert_eq!(ended.code, Some(code), "{ended:?}");
    dir.assert_empty();
}

fn stage_of(socket: &Path) -> Option<(String, String, Value)> {
    let status = status(socket)?;
    let session = status["session"].clone();
    let text = |value: &Value| value.as_str().unwrap_or("none").to_owned();
    Some((text(&status["state"]), text(&session["stage"]), session))
}

/// Both processes live: exactly one has the VM, whole.
fn settle_both(
    source: Source,
    destination: Destination,
    migrate: Process,
    samples: &Samples,
) -> &'static str {
    let ended = migrate.end();
    if ended.code == Some(0) {
        source.process.end().assert_ok();
        source.dir.assert_empty();
        assert_whole(&destination.socket);
        quit(
            destination.process,
            &destination.socket,
            &destination.dir,
            0,
        );
        return MOVED;
    }
    assert_ne!(ended.code, Some(10), "nobody gave up: {ended:?}");
    wait_until("the destination to wait again", || {
        stage_of(&destination.socket).is_some_and(|(state, ..)| state == "waiting")
    });
    samples.assert_never_ran_there();
    quit(
        destination.process,
        &destination.socket,
        &destination.dir,
        0,
    );
    source.assert_unharmed();
    KEPT
}

/// The source is gone: the destination runs a whole VM, or waits for what never comes.
fn settle_destination(
    destination: Destination,
    migrate: Process,
    samples: &Samples,
) -> &'static str {
    assert_ne!(migrate.end().code, None);
    let socket = &destination.socket;
    let (state, stage, session) = wait_for("the destination to notice", || {
        let (state, stage, session) = stage_of(socket)?;
        let lost = !session["lost_for_ms"].is_null();
        let settled = match stage.as_str() {
            _ if state == "waiting" || state == "running" => true,
            "ready" | "running" | "complete" | "discarded" => lost,
            _ => false,
        };
        settled.then_some((state, stage, session))
    });
    match (state.as_str(), stage.as_str()) {
        ("waiting", _) => {
            samples.assert_never_ran_there();
            quit(destination.process, socket, &destination.dir, 0);
            KEPT
        }
        (_, "ready" | "discarded") => {
            // It waits for the source, and does not run.
            std::thread::sleep(STILL);
            assert_eq!(stage_of(socket).unwrap().1, stage);
            wait_until("the copy to be discarded", || {
                let waits = stage_of(socket).is_some_and(|(state, ..)| state == "waiting");
                // The first discards the copy, and the second drops the answer for the source.
                waits || abandon(socket, &[]).code.is_none()
            });
            samples.assert_never_ran_there();
            quit(destination.process, socket, &destination.dir, 0);
            DISCARDED
        }
        (_, "running") if session["pages_left"] != 0 => {
            let left = session["pages_left"].as_u64().unwrap();
            let ended = abandon(socket, &[]);
            ended.assert_ok();
            let lost = format!("{left} of its pages never came");
            assert!(ended.stdout.contains(&lost), "{lost}: {ended:?}");
            wait_until("the VM to stand still", || {
                stage_of(socket).is_some_and(|(state, ..)| state == "incomplete")
            });
            assert_eq!(status(socket).unwrap()["guest"]["errors"], 0);
            quit(destination.process, socket, &destination.dir, 10);
            INCOMPLETE
        }
        (state, stage) => {
            // Every page is there, so the VM is whole. Only the source's word is missing.
            if state != "running" {
                // The session may end by itself meanwhile.
                abandon(socket, &[]);
            }
            wait_until(&format!("a whole VM to stay ({state}, {stage})"), || {
                stage_of(socket).is_some_and(|(state, ..)| state == "running")
            });
            assert_whole(socket);
            quit(destination.process, socket, &destination.dir, 0);
            MOVED
        }
    }
}

/// The destination is gone: the source runs the VM, or keeps it paused until the operator's word.
/// Returns when the operator gave it.
fn settle_source(
    source: Source,
    mut migrate: Process,
    samples: &Samples,
    gives_up_first: bool,
) -> (&'static str, Option<Instant>) {
    let socket = source.socket.clone();
    let waits = wait_for("the source to notice", || {
        if !migrate.is_running() {
            return Some(false);
        }
        let (_, stage, session) = stage_of(&socket)?;
        let handed_over = stage == "handed-over" || stage == "drained";
        (handed_over && session["connected"] == false).then_some(true)
    });
    if !waits {
        let ended = migrate.end();
        if ended.code == Some(0) {
            source.process.end().assert_ok();
            source.dir.assert_empty();
            return (MOVED, None);
        }
        assert_ne!(ended.code, Some(10), "nobody gave up: {ended:?}");
        samples.assert_never_ran_there();
        source.assert_unharmed();
        return (KEPT, None);
    }
    let done = || crate::support::pages_done(&socket);
    let before = done();
    std::thread::sleep(STILL);
    assert_eq!(done(), before, "the guest runs at the source after `Go`");
    if gives_up_first {
        abandon(&socket, &[]).assert_ok();
        wait_until("the source to give up", || {
            stage_of(&socket).is_some_and(|(state, ..)| state == "given-up")
        });
        assert_eq!(done(), before, "the guest runs after it was given up");
    }
    let resumed = Instant::now();
    abandon(&socket, &["--resume-here"]).assert_ok();
    let ended = migrate.end();
    assert_eq!(ended.code, Some(10), "{ended:?}");
    source.assert_unharmed();
    (RESUMED, Some(resumed))
}

/// Runs one schedule. Returns its outcome.
fn play(seed: u64, chosen: &Chosen) -> &'static str {
    let began = Instant::now();
    let limits = ["--dead-after", "300ms"];
    let mut receive = Vec::from(limits);
    if chosen.engine == "soft" {
        // Without a choice, the destination first tries what KVM offers. That takes seconds here.
        receive.extend(["--delivery", "exit"]);
    }
    let destination = Destination::start_on_tcp(&receive);
    let plan = Plan {
        seed,
        rate: Some(12 << 20),
        ..Plan::default()
    };
    let shaper = Shaper::start(destination.address.parse().unwrap(), plan).unwrap();
    let source = Source::start_on(chosen.engine, "8M");
    source.wait_until_all_is_written();
    let (samples, stop) = (Samples::default(), Stop::new());
    let sockets = (source.socket.clone(), destination.socket.clone());
    std::thread::scope(|scope| {
        let _stop = stop.on_drop();
        scope.spawn(|| Samples::watch(&samples.source, &sockets.0, &stop));
        scope.spawn(|| Samples::watch(&samples.destination, &sockets.1, &stop));
        let number = |n: u64| n.to_string();
        let (passes, channels) = (number(chosen.passes), number(chosen.channels));
        let urgent = number(chosen.urgent_channels);
        let mut more = vec!["--precopy-passes", &passes, "--channels", &channels];
        more.extend(["--urgent-channels", &urgent]);
        more.extend(limits);
        let mut migrate = source.migrate_with(&shaper.addr().to_string(), &more);
        wait_until("the moment of the fault", || {
            samples.has_come(chosen.moment) || !migrate.is_running()
        });
        if chosen.moment == Moment::Recovery {
            shaper.reset(Which::All);
        }
        std::thread::sleep(chosen.delay);
        let process = |side| match side {
            Side::Source => &source.process,
            Side::Destination => &destination.process,
        };
        let (mut killed, mut stopped) = (None, Vec::new());
        for (fault, pause) in &chosen.faults {
            match fault {
                Fault::Network(schedule) => shaper.play(schedule),
                Fault::Cut => shaper.reset(Which::All),
                Fault::Stop(side, lasts) => {
                    process(*side).signal(Signal::STOP);
                    stopped.push((Instant::now() + *lasts, *side));
                }
                Fault::Kill(side) => {
                    process(*side).signal(Signal::KILL);
                    killed = Some(*side);
                }
            }
            std::thread::sleep(*pause);
        }
        stopped.sort_by_key(|(until, _)| *until);
        for (until, side) in stopped {
            std::thread::sleep(until.saturating_duration_since(Instant::now()));
            process(side).signal(Signal::CONT);
        }
        let (outcome, resumed) = match killed {
            None => (settle_both(source, destination, migrate, &samples), None),
            Some(Side::Source) => (settle_destination(destination, migrate, &samples), None),
            Some(Side::Destination) => {
                settle_source(source, migrate, &samples, seed.is_multiple_of(2))
            }
        };
        samples.assert_never_ran_twice(resumed);
        let took = began.elapsed();
        println!("seed {seed}: {outcome}, {took:.1?}");
        assert!(took < SCHEDULE_LIMIT, "it took {took:?}");
        outcome
    })
}

/// Runs the schedules of these seeds. A failure says how to repeat its schedule.
fn play_all(seeds: std::ops::Range<u64>) {
    let kvm = pageferry_machine::kvm::probe_vm();
    if let Err(why) = &kvm {
        pageferry_testkit::skip("kvm", why);
    }
    let began = Instant::now();
    let count = seeds.end - seeds.start;
    let next = AtomicU64::new(seeds.start);
    let counts: [AtomicU64; OUTCOMES.len()] = Default::default();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let chosen = Chosen::of(seed, kvm.is_ok());
                    let played = || play(seed, &chosen);
                    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(played));
                    let outcome = outcome.unwrap_or_else(|panic| {
                        eprintln!("seed {seed} failed: {chosen:?}");
                        eprintln!(
                            "repeat it: PAGEFERRY_PROCESS_SCHEDULES={seed}..{} cargo test -p \
                             pageferry --test it -- schedules::",
                            seed + 1
                        );
                        std::panic::resume_unwind(panic)
                    });
                    let kind = OUTCOMES.iter().position(|each| *each == outcome).unwrap();
                    counts[kind].fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let took = began.elapsed();
    let rate = count as f64 / took.as_secs_f64();
    println!("{count} schedules in {took:.1?}: {rate:.2} a second");
    for (outcome, times) in OUTCOMES.iter().zip(counts) {
        let times = times.into_inner();
        println!("{times:>6} {outcome}");
        // Only a ready copy is rare: the hand-over takes a millisecond.
        let due = count >= 100 && *outcome != DISCARDED;
        assert!(times > 0 || !due, "no schedule of {count}: {outcome}");
    }
}

/// Runs four of a hundred seeded schedules by the commit, or those of
/// `PAGEFERRY_PROCESS_SCHEDULES`.
#[test]
fn seeded_faults_of_processes_and_network_leave_one_vm() {
    play_all(rotating_seeds("PAGEFERRY_PROCESS_SCHEDULES", 4, 100));
}
