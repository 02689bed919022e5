#![expect(unsafe_code, reason = "hands memory to KVM and to userfaultfd")]
//! Measurements of the engine's primitives. Run them with `cargo test --release -p
//! pageferry-machine --test it -- --ignored --nocapture --test-threads 1 kvm_measure::`.

use crate::support::{CODE, DATA, machine, memory, no_kvm, rung, start, write_tables};
use kvm_bindings::{kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{Delivery, Exit};
use pageferry_testkit::skip;
use pageferry_userfault::PageBitmap;
use pageferry_userfault::uffd::{Features, RegisterMode, Userfaultfd, Wake};
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

/// The lower bound of a fault that is an exit: [`WRITE_ONCE`] on a bare vCPU, with userfaultfd's
/// feature SIGBUS. `KVM_RUN` then fails with EFAULT, without an address and without a signal. The
/// guest goes from page to page, so this knows the page. The install is that of [`touch`].
fn touch_without_signals(pages: u64) -> Duration {
    let ram = memory(DATA.0 + pages);
    ram.allocate().unwrap();
    write_tables(&ram);
    ram.try_write(CODE, &WRITE_ONCE).unwrap();
    let vm = Kvm::new().unwrap().create_vm().unwrap();
    let region = kvm_userspace_memory_region {
        memory_size: ram.pages() * PAGE_SIZE,
        userspace_addr: ram.guest_hva(RamPage(0)).0,
        ..Default::default()
    };
    // SAFETY: `ram` outlives the VM, and its bytes are reached by pointers only.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    let mut vcpu = vm.create_vcpu(0).unwrap();
    // 64-bit mode in ring 3 over flat tables, as `start`.
    let mut sregs = vcpu.get_sregs().unwrap();
    (sregs.cr0, sregs.cr3, sregs.cr4, sregs.efer) = (0x8001_0033, 0x1000, 1 << 5, 0xd00);
    let segment = |selector, code: bool| kvm_segment {
        limit: u32::MAX,
        selector,
        type_: if code { 11 } else { 3 },
        present: 1,
        dpl: 3,
        s: 1,
        l: u8::from(code),
        db: u8::from(!code),
        g: 1,
        ..Default::default()
    };
    let data = segment(0x2b, false);
    (sregs.cs, sregs.ds, sregs.es, sregs.ss) = (segment(0x33, true), data, data, data);
    (sregs.idt.limit, sregs.gdt.limit) = (0, 0);
    vcpu.set_sregs(&sregs).unwrap();
    let registers = kvm_regs {
        rip: CODE.byte_offset(),
        rsp: 0xf000,
        rdi: DATA.byte_offset(),
        rsi: ram.pages() * PAGE_SIZE,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&registers).unwrap();
    let features = Features::SIGBUS | Features::MINOR_SHMEM | Features::MISSING_SHMEM;
    let uffd = Userfaultfd::open(features).unwrap();
    let missing = PageBitmap::new(ram.pages() as usize);
    missing.set_range(DATA.index()..ram.pages() as usize);
    let mode = RegisterMode::MISSING | RegisterMode::MINOR;
    // SAFETY: only the guest touches this mapping, and nothing holds a reference to it.
    unsafe { uffd.register(ram.guest_hva(DATA), pages * PAGE_SIZE, mode) }.unwrap();
    let begin = cpu_time();
    for page in DATA.0..ram.pages() {
        match vcpu.run() {
            Err(e) if e.errno() == libc::EFAULT => {}
            other => panic!("{other:?} on the first touch of page {page}"),
        }
        let page = RamPage(page);
        let at = ram.guest_hva(page);
        uffd.continue_range(at, PAGE_SIZE, Wake::Now).unwrap();
        missing.clear(page);
    }
    let exit = vcpu.run();
    assert!(matches!(exit, Ok(VcpuExit::MmioWrite(..))), "{exit:?}");
    cpu_time() - begin
}

#[test]
#[ignore = "measures: the cost of the engine's primitives"]
fn poison_beside_exits_without_signals() {
    if no_kvm() {
        return;
    }
    const PAGES: u64 = 8192;
    const ROUNDS: usize = 9;
    let (mut floors, mut poisons, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let floor = touch_without_signals(PAGES).as_secs_f64() * 1e6 / PAGES as f64;
        let Some((_, poison, _)) = touch(Some(Delivery::Poison), PAGES) else {
            skip("poison", "this host has no poison markers");
            return;
        };
        let poison = poison.as_secs_f64() * 1e6 / PAGES as f64;
        floors.push(floor);
        poisons.push(poison);
        ratios.push(poison / floor);
    }
    let median = |mut of: Vec<f64>| {
        of.sort_unstable_by(f64::total_cmp);
        of[ROUNDS / 2]
    };
    println!(
        "CPU time of the vCPU's thread, us a fault: poison {:.2}, exits without signals {:.2}, ratio {:.3}",
        median(poisons),
        median(floors),
        median(ratios)
    );
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
