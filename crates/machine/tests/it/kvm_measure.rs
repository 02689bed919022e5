//! Measurements of the engine's primitives. Run them with `cargo test --release -p
//! pageferry-machine --test it -- --ignored --nocapture --test-threads 1 kvm_measure::`.

use crate::support::{DATA, machine, no_kvm, rung, start};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{Delivery, Exit};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// l: mov [rdi],rdi; add rdi,0x1000; cmp rdi,rsi; jb l; mov ebx,0xd0000000; mov [rbx],rdi; jmp .
const WRITE_ONCE: [u8; 25] = [
    0x48, 0x89, 0x3f, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7, 0x72, 0xf1, 0xbb, 0, 0, 0,
    0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    format!(
        "p50 {:?}, p90 {:?}, p99 {:?}, max {:?}",
        at(50),
        at(90),
        at(99),
        at(100)
    )
}

#[test]
#[ignore = "measures: the cost of the engine's primitives"]
fn kick_latency() {
    if no_kvm() {
        return;
    }
    let new = machine(1, 64);
    let mut vcpu = new.vcpus.into_iter().next().unwrap();
    start(new.machine.ram(), vcpu.as_mut(), 0, &[0xeb, 0xfe], [0, 0]);
    let kicker = vcpu.kicker();
    let (out, exits) = mpsc::channel();
    const KICKS: usize = 500;
    let runner = std::thread::spawn(move || {
        for _ in 0..KICKS {
            assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
            out.send(Instant::now()).unwrap();
        }
    });
    let mut times = Vec::new();
    for _ in 0..KICKS {
        std::thread::sleep(Duration::from_micros(500));
        let begin = Instant::now();
        kicker.kick();
        times.push(exits.recv_timeout(Duration::from_secs(10)).unwrap() - begin);
    }
    runner.join().unwrap();
    println!("kick to exit: {}", percentiles(times));
}

/// The time in which one vCPU writes to `pages` pages. Each is delivered on its touch, although its
/// bytes are there already. `None` delivers nothing.
fn touch(delivery: Option<Delivery>, pages: u64) -> Option<(Duration, Duration, Duration)> {
    let mut new = machine(1, DATA.0 + pages);
    if delivery.is_some_and(|d| !new.machine.deliveries().contains(&d)) {
        return None;
    }
    let ram = Arc::clone(new.machine.ram());
    ram.allocate().unwrap();
    let missing = Arc::new(PageBitmap::new(ram.pages() as usize));
    let mut events = delivery.map(|d| {
        new.machine
            .arm_userfault(Arc::clone(&missing), d.into())
            .unwrap()
            .remove(0)
    });
    let vm = Arc::clone(&new.machine);
    let vcpu = new.vcpus[0].as_mut();
    start(
        &ram,
        vcpu,
        0,
        &WRITE_ONCE,
        [DATA.byte_offset(), ram.pages() * PAGE_SIZE],
    );
    missing.set_range(DATA.index()..ram.pages() as usize);
    if delivery.is_some() {
        vm.assist_postcopy(&|| false, &|_| {}).unwrap();
    }
    let stop = AtomicBool::new(false);
    let serve = |page: RamPage| {
        vm.install(page, 1).unwrap();
        missing.clear(page);
    };
    let mut installing = Duration::ZERO;
    std::thread::scope(|scope| {
        let (stop, serve) = (&stop, &serve);
        if let Some(mut events) = events.take() {
            scope.spawn(move || {
                while !stop.load(Ordering::Acquire) {
                    while let Some(event) = events.next().unwrap() {
                        serve(event.page);
                    }
                    let fd = events.fd();
                    let mut polls = [rustix::event::PollFd::new(
                        &fd,
                        rustix::event::PollFlags::IN,
                    )];
                    let limit = rustix::time::Timespec {
                        tv_sec: 0,
                        tv_nsec: 5_000_000,
                    };
                    let _ = rustix::event::poll(&mut polls, Some(&limit));
                }
            });
        }
        let (begin, cpu) = (Instant::now(), cpu_time());
        loop {
            match vcpu.run().unwrap() {
                Exit::MemoryFault { page, .. } => {
                    let begin = Instant::now();
                    serve(page);
                    installing += begin.elapsed();
                }
                exit => break assert_eq!(rung(exit), ram.pages() * PAGE_SIZE),
            }
        }
        let time = begin.elapsed();
        let cpu = cpu_time() - cpu;
        stop.store(true, Ordering::Release);
        Some((time, cpu, installing))
    })
}

#[test]
#[ignore = "measures: the cost of the engine's primitives"]
fn mmio_exit() {
    if no_kvm() {
        return;
    }
    const EXITS: u64 = 20_000;
    let mut new = machine(1, 64);
    // mov ebx, 0xd0000000; l: inc rdi; mov [rbx], rdi; jmp l
    let code = [
        0xbb, 0, 0, 0, 0xd0, 0x48, 0xff, 0xc7, 0x48, 0x89, 0x3b, 0xeb, 0xf8,
    ];
    let ram = Arc::clone(new.machine.ram());
    start(&ram, new.vcpus[0].as_mut(), 0, &code, [0, 0]);
    let (begin, cpu) = (Instant::now(), cpu_time());
    for round in 1..=EXITS {
        assert_eq!(rung(new.vcpus[0].run().unwrap()), round);
    }
    println!(
        "MMIO exit: {:?} each, {:?} of CPU time",
        begin.elapsed() / EXITS as u32,
        (cpu_time() - cpu) / EXITS as u32
    );
}

/// CPU time of this thread.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
#[ignore = "measures: the cost of the engine's primitives"]
fn exit_and_resume() {
    if no_kvm() {
        return;
    }
    const PAGES: u64 = 8192;
    for delivery in [None, Some(Delivery::Poison), Some(Delivery::Minor)] {
        let mut times: Vec<_> = (0..5).filter_map(|_| touch(delivery, PAGES)).collect();
        times.sort_unstable();
        if let Some((time, cpu, installing)) = times.get(2) {
            let name = delivery.map_or("no delivery", Delivery::name);
            let [time, cpu, installing] =
                [time, cpu, installing].map(|t| t.as_secs_f64() * 1e6 / PAGES as f64);
            println!(
                "{name}: {time:.2} us a page, {cpu:.2} of the vCPU thread's CPU time, {installing:.2} installing on it"
            );
        }
    }
}
