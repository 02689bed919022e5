//! Figures of a reset of all channels while the path is up.
//!
//! **Guarantee.** Every figure comes from the run that prints it. `PAGEFERRY_FIGURES` says how many
//! runs there are. Medians mean something in an optimised build on an idle machine only.
//!
//! **Mechanism.** The guest uses a small part of the memory. The push brings the rest through a
//! shaper, which resets all connections in the middle. Its buffers and its thread are part of each
//! figure.

use crate::support::{address_of, listen};
use pageferry_addr::RamPage;
use pageferry_guest::Workload;
use pageferry_harness::{Vm, isa_of};
use pageferry_machine::{AccessError, Engine, MachineSpec};
use pageferry_migration::{
    DestinationConfig, Resolver, Route, SourceConfig, SourceSession, Switch, Unobserved, migrate,
};
use pageferry_testkit::shaper::{Plan, Shaper, Which};
use pageferry_testkit::{LIMIT, wait_for, wait_until};
use pageferry_transport::address::Address;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// The memory that the guest uses.
const USED: u64 = 2 << 20;
/// The memory of the machine.
const ALL: u64 = 256 << 20;
/// The rate of the link, in bytes a second.
const RATE: u64 = 200_000_000;
/// The time before and after the reset in which arrivals are watched.
const WINDOW: Duration = Duration::from_millis(100);
/// The time in which the last pages of the lost channels arrive.
const AT_ONCE: Duration = Duration::from_millis(5);
/// One page of so many is watched. Frames are longer.
const STEP: usize = 16;

/// The cost of one reset.
#[derive(Clone, Copy, Debug)]
struct Figures {
    /// From the reset to the next page, in ms.
    again_ms: f64,
    /// Pages sent more than once.
    twice: u64,
    /// Pages without a receipt, by the last status before the reset.
    under_way: u64,
    /// How often the vCPU slept, before the reset and after it.
    sleeps: [u64; 2],
    /// The longest time in which the guest did no page, before the reset and after it, in ms.
    gaps_ms: [f64; 2],
}

fn machine() -> (Vm, Arc<Resolver>) {
    let resolver = Resolver::new();
    let spec = MachineSpec::new(1, ALL);
    let vm = Vm::create(Engine::Soft, spec, Some(Arc::clone(&resolver) as _)).unwrap();
    (vm, resolver)
}

fn vcpu_threads() -> HashSet<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let paths = tasks.map(|task| task.path().display().to_string());
    let is_vcpu = |path: &String| {
        std::fs::read_to_string(format!("{path}/comm")).is_ok_and(|name| name.starts_with("vcpu"))
    };
    paths.filter(is_vcpu).collect()
}

/// How often the thread has given its core away by itself.
fn sleeps(thread: &str) -> u64 {
    let status = std::fs::read_to_string(format!("{thread}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Watches arrivals and the guest for [`WINDOW`]. Returns the end of the longest time without an
/// arrival that began at once, and the longest time without progress in ms.
fn watch(vm: &Vm, workload: &Workload, missing: &mut Vec<RamPage>) -> (Instant, f64) {
    let done = || vm.control(workload, 0).expect("present").done;
    let is_missing = |page: &RamPage| {
        vm.machine.ram().try_read(*page, &mut [0]) == Err(AccessError::Missing(*page))
    };
    let began = Instant::now();
    let (mut arrival, mut progress, mut before) = (began, began, done());
    let (mut longest, mut end, mut gap) = (Duration::ZERO, began, Duration::ZERO);
    while began.elapsed() < WINDOW {
        let left = missing.len();
        missing.retain(is_missing);
        let now = Instant::now();
        if missing.len() < left {
            if now - arrival > longest && arrival - began < AT_ONCE {
                (longest, end) = (now - arrival, now);
            }
            arrival = now;
        }
        let after = done();
        if after > before {
            gap = gap.max(now - progress);
            (progress, before) = (now, after);
        }
        std::thread::sleep(Duration::from_micros(50));
    }
    (end, gap.as_secs_f64() * 1e3)
}

fn measure() -> Figures {
    let workload = Workload::new(isa_of(Engine::Soft), 1, USED).unwrap();
    let (source, _unused) = machine();
    source.load(workload.program()).unwrap();
    let page = [0x5a; 4096];
    for number in USED / 4096..ALL / 4096 {
        source
            .machine
            .ram()
            .try_write(RamPage(number), &page)
            .unwrap();
    }
    source.threads.resume();
    let before = vcpu_threads();
    let destination = listen(DestinationConfig::default());
    let to = address_of(&destination).to_string();
    let plan = Plan {
        rate: Some(RATE),
        ..Plan::default()
    };
    let shaper = Shaper::start(to.trim_start_matches("tcp:").parse().unwrap(), plan).unwrap();
    let route = Route::To(Address::Tcp {
        host: shaper.addr().ip().to_string(),
        port: shaper.addr().port(),
    });
    let session = SourceSession::new().unwrap();
    let config = SourceConfig {
        settings: Switch::AfterPasses(0).into(),
        ..SourceConfig::default()
    };
    let (vms, built) = channel();
    std::thread::scope(|scope| {
        let there = Arc::clone(&destination);
        let receiver = scope.spawn(move || {
            let deadline = Instant::now() + LIMIT;
            let late = || Instant::now() > deadline;
            let incoming = there.accept(&late).unwrap();
            let (vm, resolver) = machine();
            let vm = Arc::new(vm);
            vms.send(Arc::clone(&vm)).unwrap();
            incoming
                .receive(&vm.running(), &resolver, &late, &Unobserved)
                .unwrap()
        });
        let sender = scope.spawn(|| {
            let vm = source.running();
            migrate(&vm, &route, b"test", &config, &session, &Unobserved).unwrap()
        });
        let vm = built.recv_timeout(LIMIT).unwrap();
        let thread = wait_for("its vCPU", || {
            vcpu_threads().difference(&before).next().cloned()
        });
        // After two passes, all that the guest uses is present.
        wait_until("two passes there", || {
            destination.status().stage == "running"
                && vm.control(&workload, 0).is_some_and(|control| {
                    control.done > source.control(&workload, 0).unwrap().done + 2 * USED / 4096
                })
        });
        let pages = (USED / 4096..ALL / 4096).step_by(STEP).map(RamPage);
        let mut missing: Vec<RamPage> = pages.collect();
        let mut slept = [sleeps(&thread), 0];
        let (_, gap_before) = watch(&vm, &workload, &mut missing);
        let under_way = session.status().pages_in_flight;
        slept[1] = sleeps(&thread);
        let reset = Instant::now();
        shaper.reset(Which::All);
        let (again, gap_after) = watch(&vm, &workload, &mut missing);
        let slept = [slept[1] - slept[0], sleeps(&thread) - slept[1]];
        assert!(!missing.is_empty(), "the migration was over too early");
        let sent = sender.join().unwrap();
        receiver.join().unwrap();
        assert!(sent.reconnects >= 1, "the reset came too late");
        let pages = sent.pages;
        Figures {
            again_ms: again.saturating_duration_since(reset).as_secs_f64() * 1e3,
            twice: pages.urgent + pages.background + pages.zero - sent.missing_at_start,
            under_way,
            sleeps: slept,
            gaps_ms: [gap_before, gap_after],
        }
    })
}

fn median(figures: &[Figures], get: impl Fn(&Figures) -> f64) -> f64 {
    let mut values: Vec<f64> = figures.iter().map(get).collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures once, or as often as `PAGEFERRY_FIGURES` says.
#[test]
#[ignore = "measures: PAGEFERRY_FIGURES=15 on an idle machine, in an optimised build"]
fn a_reset_of_all_channels_costs_little() {
    let runs = std::env::var("PAGEFERRY_FIGURES");
    let runs: u32 = runs.map_or(1, |text| text.parse().expect("a number"));
    let figures: Vec<Figures> = (0..runs).map(|_| measure()).collect();
    for figures in &figures {
        println!("{figures:?}");
        // A status may be 50 ms old. The limits are wide, for busy machines.
        assert!(figures.twice <= 2 * figures.under_way + 512, "{figures:?}");
        assert!(figures.again_ms > 0.0, "no page arrived within {WINDOW:?}");
    }
    println!("medians of {runs} runs:");
    let show = |what: &str, get: fn(&Figures) -> f64, aim: &str| {
        println!("  {what:<44} {:>9.2}  {aim}", median(&figures, get));
    };
    show("reset to the next page, ms", |f| f.again_ms, "aim: 20");
    show(
        "pages sent twice",
        |f| f.twice as f64,
        "aim: those under way",
    );
    show("pages under way before", |f| f.under_way as f64, "");
    show("sleeps of the vCPU before", |f| f.sleeps[0] as f64, "");
    show(
        "sleeps of the vCPU after",
        |f| f.sleeps[1] as f64,
        "aim: as before",
    );
    show("longest gap of the guest before, ms", |f| f.gaps_ms[0], "");
    show(
        "longest gap of the guest after, ms",
        |f| f.gaps_ms[1],
        "aim: as before",
    );
}
