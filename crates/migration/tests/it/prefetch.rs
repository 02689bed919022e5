//! Pages that are touched in a simple order come before their touch, over a real session on a slow
//! link. A thread of the destination's VMM touches them: its accesses request pages as a vCPU's do.

use crate::alone::{LeakCheck, runs_in_child};
use crate::support::{LIMIT, WorkloadVm, address_of, listen, migrate_running, receive_as};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_guest::{MemoryMap, Touch, TouchAccess, TouchOrder, Toucher};
use pageferry_harness::{Vm, isa_of};
use pageferry_machine::{AccessError, Engine, GuestRam, MachineSpec};
use pageferry_migration::{DestinationConfig, SourceConfig, SourceReport};
use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::wait_until;
use pageferry_transport::address::Address;
use std::ops::Range;
use std::time::{Duration, Instant};

const MEMORY: u64 = 8 << 20;
/// Bytes a second of the link: about 1500 pages.
const RATE: u64 = 6_000_000;
const TOUCHES: u64 = 300;

/// A VM whose guest keeps to one page, with bytes in all the others.
fn full_vm() -> (Vm, Range<u64>) {
    let map = MemoryMap::new(isa_of(Engine::Soft), 1, MEMORY).unwrap();
    let data = map.data();
    let touch = Touch {
        access: TouchAccess::Write,
        order: TouchOrder::Ascending,
        passes: 1,
    };
    let own = data.start..data.start + 1;
    let toucher = Toucher::new(map, vec![own.clone()], touch).unwrap();
    let vm = Vm::create(Engine::Soft, MachineSpec::new(1, MEMORY), None).unwrap();
    vm.load(toucher.program()).unwrap();
    let rest = own.end..data.end;
    for page in rest.clone() {
        let bytes = page.to_le_bytes();
        vm.machine.ram().try_write(RamPage(page), &bytes).unwrap();
    }
    (vm, rest)
}

/// Touches pages at half the rate of the link.
fn touch(source: &GuestRam, ram: &GuestRam, pages: &[u64]) {
    // The source freezes its memory after the destination was armed.
    wait_until("the switch-over", || {
        source.try_write(RamPage(pages[0]), &pages[0].to_le_bytes()) == Err(AccessError::Frozen)
    });
    wait_until("post-copy", || {
        ram.try_read(RamPage(0), &mut [0]) != Err(AccessError::Receiving)
    });
    let interval = Duration::from_secs_f64(2.0 * PAGE_SIZE as f64 / RATE as f64);
    let mut due = Instant::now();
    for &page in pages {
        let mut bytes = [0; 8];
        ram.read(RamPage(page), &mut bytes, &|| false).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), page);
        due = (due + interval).max(Instant::now() - interval);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
    }
}

/// Moves a VM whose pages are touched in this order. Returns the share of the touches that found
/// their page, and the source's report.
fn move_touched(
    order: impl Fn(Range<u64>) -> Vec<u64> + Sync,
    prefetch: bool,
) -> (f64, SourceReport) {
    let (source, pages) = full_vm();
    let to = WorkloadVm::empty(Engine::Soft, 1, MEMORY);
    let destination = listen(DestinationConfig::default());
    let Address::Tcp { port, .. } = address_of(&destination) else {
        panic!("a TCP address");
    };
    let plan = Plan {
        rate: Some(RATE),
        ..Plan::default()
    };
    let shaper = Shaper::start((std::net::Ipv4Addr::LOCALHOST, port).into(), plan).unwrap();
    let address = Address::Tcp {
        host: "127.0.0.1".into(),
        port: shaper.addr().port(),
    };
    source.threads.resume();
    let sent = std::thread::scope(|scope| {
        scope.spawn(|| {
            touch(source.machine.ram(), to.ram(), &order(pages));
            shaper.throttle(None);
        });
        let receiving = scope.spawn(|| receive_as(&to.running(), &to.resolver, &destination));
        let config = SourceConfig {
            settings: pageferry_migration::Switch::NOW.into(),
            prefetch,
            ..SourceConfig::default()
        };
        let sent = migrate_running(&source.running(), &address, &config).unwrap();
        receiving.join().unwrap().unwrap();
        sent
    });
    to.threads.pause(LIMIT).unwrap();
    let late = sent.pages.urgent + sent.prefetch.late;
    let first = 1.0 - late as f64 / TOUCHES as f64;
    (first, sent)
}

#[test]
fn most_pages_of_a_sequence_come_before_their_touch() {
    if runs_in_child() {
        return;
    }
    let _leaks = LeakCheck::start();
    // From the middle of memory: the rest of the push comes there last.
    type Order = fn(Range<u64>) -> Vec<u64>;
    let orders: [(&str, Order); 3] = [
        ("ascending", |pages| {
            let first = (pages.start + pages.end) / 2;
            (first..first + TOUCHES).collect()
        }),
        ("descending", |pages| {
            (pages.end - TOUCHES..pages.end).rev().collect()
        }),
        ("by strides of three pages", |pages| {
            let first = (pages.start + pages.end) / 2;
            (0..TOUCHES).map(|touch| first + 3 * touch).collect()
        }),
    ];
    for (name, order) in orders {
        // A busy host may keep the push, or the touching thread, from its core for a while: one
        // good move is enough.
        let came_first = (0..8).any(|_| {
            let (first, sent) = move_touched(order, true);
            eprintln!(
                "{name}: {first:.3} of the pages came first; {:?}, {:?}, {} ms",
                sent.prefetch,
                sent.pages,
                sent.total.as_millis()
            );
            // The last pages of a sequence have no request behind them.
            first > 0.9 && sent.prefetch.in_time > 50
        });
        assert!(came_first, "{name}");
        // By address alone, the push comes there too late.
        let came_late = (0..8).any(|_| {
            let (first, sent) = move_touched(order, false);
            eprintln!("{name}, without prefetch: {first:.3}; {:?}", sent.pages);
            first < 0.5
        });
        assert!(came_late, "{name}");
    }
}
