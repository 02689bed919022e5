//! Each fault delivery brings each page exactly once, whole, whichever way the racing paths
//! interleave.

use crate::place::placing;
use crate::support::{
    DATA, Watchdog, machine, machine_on, machine_with, no_kvm, rung, start, word,
};
use pageferry_addr::{PAGE_SIZE, PageSize, RamPage};
use pageferry_machine::{
    Access, ArmOptions, Backing, Delivery, Exit, FaultEvents, GuestRam, Machine, MachineError,
    Vcpu, kvm,
};
use pageferry_testkit::{LIMIT, Random, Stop, rotating_seeds, skip};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const PAGE: usize = PAGE_SIZE as usize;
/// This engine's deliveries.
const DELIVERIES: [Delivery; 4] = [
    Delivery::Userfault,
    Delivery::Poison,
    Delivery::Minor,
    Delivery::Missing,
];

/// rdi: first byte, rsi: first byte behind. Each page must hold its own address in its first and in
/// its last word. The address is then written to the second. Stores 1 to the doorbell at the end,
/// or the address of a wrong page.
///
/// ```text
/// l: mov rax,[rdi]; cmp rax,rdi; jne bad; mov rax,[rdi+0xff8]; cmp rax,rdi; jne bad
/// mov [rdi+8],rax; add rdi,0x1000; cmp rdi,rsi; jb l
/// mov ebx,0xd0000000; mov eax,1; mov [rbx],rax; jmp .
/// bad: mov ebx,0xd0000000; mov [rbx],rdi; jmp .
/// ```
pub(crate) const CHECK: [u8; 61] = [
    0x48, 0x8b, 0x07, 0x48, 0x39, 0xf8, 0x75, 0x2b, 0x48, 0x8b, 0x87, 0xf8, 0x0f, 0, 0, 0x48, 0x39,
    0xf8, 0x75, 0x1f, 0x48, 0x89, 0x47, 0x08, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7,
    0x72, 0xdc, 0xbb, 0, 0, 0, 0xd0, 0xb8, 1, 0, 0, 0, 0x48, 0x89, 0x03, 0xeb, 0xfe, 0xbb, 0, 0, 0,
    0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];

/// The same for pages that are all zero: xor rdx,rdx; .. cmp rax,rdx compares the words.
const CHECK_ZERO: [u8; 64] = [
    0x48, 0x31, 0xd2, 0x48, 0x8b, 0x07, 0x48, 0x39, 0xd0, 0x75, 0x2b, 0x48, 0x8b, 0x87, 0xf8, 0x0f,
    0, 0, 0x48, 0x39, 0xd0, 0x75, 0x1f, 0x48, 0x89, 0x7f, 0x08, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0,
    0x48, 0x39, 0xf7, 0x72, 0xdc, 0xbb, 0, 0, 0, 0xd0, 0xb8, 1, 0, 0, 0, 0x48, 0x89, 0x03, 0xeb,
    0xfe, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];

/// Whether this host lacks a delivery; prints the reason if so.
pub(crate) fn no_delivery(machine: &dyn Machine, delivery: Delivery) -> bool {
    // UFFDIO_POISON came with Linux 6.6. On an older kernel, only a run that requires "poison"
    // fails without it.
    let resource = match delivery {
        Delivery::Poison if linux() < (6, 6) => "poison",
        // No released kernel has it.
        Delivery::Userfault => "kvm-userfault",
        _ => "uffd",
    };
    !machine.deliveries().contains(&delivery)
        && skip(
            resource,
            format!("no fault delivery '{delivery}' on this host"),
        )
}

/// Arms a machine. Returns its missing pages, of which there are none yet, and its events.
pub(crate) fn armed(
    machine: &dyn Machine,
    delivery: Delivery,
) -> (Arc<PageBitmap>, Box<dyn FaultEvents>) {
    let (missing, mut streams) = armed_by(machine, delivery.into());
    assert_eq!(streams.len(), 1);
    (missing, streams.remove(0))
}

/// [`armed`], with any number of streams of events.
fn armed_by(
    machine: &dyn Machine,
    options: ArmOptions,
) -> (Arc<PageBitmap>, Vec<Box<dyn FaultEvents>>) {
    let missing = Arc::new(PageBitmap::new(machine.ram().pages() as usize));
    let streams = machine.arm_userfault(Arc::clone(&missing), options);
    (missing, streams.unwrap())
}

/// The version of the running kernel.
fn linux() -> (u32, u32) {
    let name = rustix::system::uname();
    let release = name.release().to_string_lossy();
    let mut numbers = release
        .split(['.', '-'])
        .map_while(|part| part.parse().ok());
    let version = numbers.next().zip(numbers.next());
    version.unwrap_or_else(|| panic!("'{release}' does not begin with a version"))
}

pub(crate) fn bytes_of(page: RamPage) -> [u8; PAGE] {
    let mut bytes = [0; PAGE];
    bytes[..8].copy_from_slice(&page.byte_offset().to_le_bytes());
    bytes[PAGE - 8..].copy_from_slice(&page.byte_offset().to_le_bytes());
    bytes
}

/// The source of the pages.
pub(crate) struct Source {
    machine: Arc<dyn Machine>,
    missing: Arc<PageBitmap>,
    /// Pages that a thread is bringing or has brought.
    claimed: PageBitmap,
    /// The contents of the first pages: tables and code, and more where a test says so.
    low: Vec<[u8; PAGE]>,
    faults: AtomicUsize,
    events: AtomicUsize,
}

/// The contents of the first `count` pages.
pub(crate) fn pages_of(ram: &GuestRam, count: u64) -> Vec<[u8; PAGE]> {
    let mut pages = vec![[0; PAGE]; count as usize];
    for (index, bytes) in pages.iter_mut().enumerate() {
        placing(ram).read(RamPage(index as u64), bytes);
    }
    pages
}

impl Source {
    /// The first pages are as in `low`, all others as in [`bytes_of`].
    pub(crate) fn new(
        machine: Arc<dyn Machine>,
        missing: Arc<PageBitmap>,
        low: Vec<[u8; PAGE]>,
    ) -> Self {
        Self {
            machine,
            claimed: PageBitmap::new(missing.pages()),
            missing,
            low,
            faults: AtomicUsize::new(0),
            events: AtomicUsize::new(0),
        }
    }

    fn bytes(&self, page: RamPage) -> [u8; PAGE] {
        self.low
            .get(page.index())
            .copied()
            .unwrap_or_else(|| bytes_of(page))
    }

    /// Brings a page if no other thread does, and waits until it is there.
    pub(crate) fn bring(&self, page: RamPage) {
        if !self.claimed.set(page) {
            pageferry_testkit::wait_until("a page that another thread brings", || {
                !self.missing.test(page)
            });
            return;
        }
        if self.machine.receives_in_place() {
            placing(self.machine.ram()).write(page, &self.bytes(page));
            self.machine.install(page, 1).unwrap();
        } else {
            self.machine.install_copy(page, &self.bytes(page)).unwrap();
        }
        self.missing.clear(page);
    }

    /// The hook's answer to a fault.
    pub(crate) fn fault(&self, page: RamPage) {
        if self.missing.test(page) {
            self.bring(page);
        } else {
            self.machine.install(page, 1).unwrap();
        }
    }

    pub(crate) fn serve(&self, mut events: Box<dyn FaultEvents>, stop: &Stop) {
        while !stop.is_stopped() {
            match events.next().unwrap() {
                Some(event) => {
                    self.events.fetch_add(1, Ordering::Relaxed);
                    self.fault(event.page);
                }
                None => {
                    let fd = events.fd();
                    let mut polls = [rustix::event::PollFd::new(
                        &fd,
                        rustix::event::PollFlags::IN,
                    )];
                    let limit = rustix::time::Timespec {
                        tv_sec: 0,
                        tv_nsec: 2_000_000,
                    };
                    // A signal counts as a time-out.
                    let _ = rustix::event::poll(&mut polls, Some(&limit));
                }
            }
        }
    }

    /// Runs a vCPU until it stores to the doorbell.
    fn drive(&self, vcpu: &mut dyn Vcpu) -> u64 {
        let watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
        loop {
            match vcpu.run().unwrap() {
                Exit::MemoryFault { page, .. } => {
                    self.faults.fetch_add(1, Ordering::Relaxed);
                    self.fault(page);
                }
                Exit::Kicked => assert!(
                    !watchdog.fired(),
                    "the guest did not finish within {LIMIT:?}"
                ),
                exit => return rung(exit),
            }
        }
    }
}

/// The activities beside the guest.
#[derive(Clone, Copy, Default)]
struct Beside {
    /// A thread brings pages in another order.
    push: bool,
    /// A thread drops pages from the guest's mapping, as reclaim does.
    drop: bool,
    /// A thread kicks the vCPUs.
    kick: bool,
    /// The guest's page tables and code are missing too.
    tables: bool,
    /// The host has made the memory of huge pages.
    huge: bool,
    /// Both vCPUs check all pages.
    overlap: bool,
    /// KVM has interrupt controllers. It may then leave a fault to a worker, and halt the vCPU.
    irqchip: bool,
    /// The numbers of userfaultfds and of readers of each, if not one.
    streams: Option<(u32, u32)>,
    /// The memory is private.
    private: bool,
}

/// Two vCPUs check `each` pages apiece that are missing at first. Every third page behind them is
/// present from the start. Returns the numbers of exits and events.
fn demand(delivery: Delivery, each: u64, beside: Beside) -> Option<(usize, usize)> {
    let pages = DATA.0 + 2 * each;
    let irqchip = if beside.irqchip {
        kvm::Irqchip::Kernel
    } else {
        kvm::Irqchip::None
    };
    let mut new = if beside.private {
        machine_on(Backing::Anonymous, 2, pages)
    } else {
        machine_with(2, pages, irqchip)
    };
    if no_delivery(new.machine.as_ref(), delivery) {
        return None;
    }
    let ram = Arc::clone(new.machine.ram());
    let (userfaultfds, readers) = beside.streams.unwrap_or((1, 1));
    let options = ArmOptions {
        userfaultfds,
        readers,
        ..delivery.into()
    };
    let (missing, streams) = armed_by(new.machine.as_ref(), options);
    assert_eq!(streams.len() as u32, userfaultfds * readers);
    assert_eq!(
        new.machine.receives_in_place(),
        delivery != Delivery::Missing
    );
    let own = |index: usize| {
        let first = DATA.0 + index as u64 * each;
        let own = if beside.overlap {
            [DATA.0, pages]
        } else {
            [first, first + each]
        };
        own.map(|page| page * PAGE_SIZE)
    };
    for (index, vcpu) in new.vcpus.iter_mut().enumerate() {
        start(&ram, vcpu.as_mut(), index as u64, &CHECK, own(index));
    }
    for page in DATA.0..pages {
        // The state after pre-copy: a stale page where one is missing, the right one elsewhere.
        if page % 3 == 0 {
            placing(&ram).write(RamPage(page), &bytes_of(RamPage(page)));
        } else {
            placing(&ram).write(RamPage(page), &[0x5a; PAGE]);
            missing.set(RamPage(page));
        }
    }
    if beside.huge && !collapse(&ram) {
        return None;
    }
    let low = pages_of(&ram, DATA.0);
    if beside.tables {
        for page in (0..DATA.0).map(RamPage) {
            placing(&ram).write(page, &[0x5a; PAGE]);
            missing.set(page);
        }
    }
    let expected = missing.count();
    new.machine.begin_postcopy().unwrap();
    let source = Source::new(Arc::clone(&new.machine), missing, low);
    let stop = Stop::new();
    let kickers: Vec<_> = new.vcpus.iter().map(|vcpu| vcpu.kicker()).collect();
    std::thread::scope(|scope| {
        let (source, stop, ram) = (&source, &stop, &ram);
        for events in streams {
            scope.spawn(move || source.serve(events, stop));
        }
        scope.spawn(move || {
            source
                .machine
                .assist_postcopy(&|| stop.is_stopped(), &|table| source.bring(table))
                .unwrap();
        });
        if beside.push {
            scope.spawn(move || {
                let mut random = Random::new(1);
                while let Some(any) = source.missing.next_set(0) {
                    let from = any + random.below(pages - any as u64) as usize;
                    let page = source.missing.next_set(from).unwrap_or(any);
                    source.bring(RamPage(page as u64));
                }
            });
        }
        if beside.drop {
            scope.spawn(move || {
                let mut random = Random::new(2);
                while !stop.is_stopped() {
                    // Also the guest's tables and code, which KVM reads for it.
                    drop_mapping(ram, random.below(pages));
                }
            });
        }
        if beside.kick {
            scope.spawn(move || {
                while !stop.is_stopped() {
                    kickers.iter().for_each(|kicker| kicker.kick());
                    std::thread::sleep(Duration::from_micros(200));
                }
            });
        }
        let vcpus: Vec<_> = new
            .vcpus
            .iter_mut()
            .map(|vcpu| scope.spawn(move || source.drive(vcpu.as_mut())))
            .collect();
        let rang: Vec<_> = vcpus.into_iter().map(|thread| thread.join()).collect();
        stop.stop();
        for rang in rang {
            let rang = rang.unwrap();
            assert_eq!(rang, 1, "the guest found a wrong page at {rang:#x}");
        }
    });
    if beside.tables {
        // The guest does not touch all of these.
        (0..DATA.0).map(RamPage).for_each(|page| source.fault(page));
    }
    // All were touched, so all are present. None overwrote the guest's write.
    assert_eq!(source.missing.count(), 0);
    for page in (DATA.0..pages).map(RamPage) {
        assert_eq!(
            word(&ram, page, 1),
            page.byte_offset(),
            "{page:?} lost the guest's write"
        );
    }
    new.machine.disarm_userfault().unwrap();
    // Again, without any delivery: no marker may stay for good.
    for (index, vcpu) in new.vcpus.iter_mut().enumerate() {
        start(&ram, vcpu.as_mut(), index as u64, &CHECK, own(index));
        // A kick may be pending. No other exit than the store to the doorbell may come.
        let rang = source.drive(vcpu.as_mut());
        assert_eq!(rang, 1, "a wrong page at {rang:#x} afterwards");
    }
    let (exits, events) = (source.faults.into_inner(), source.events.into_inner());
    println!("{delivery}: {expected} pages missing, {exits} exits, {events} events");
    Some((exits, events))
}

/// Makes the whole 2 MiB ranges of a memory huge pages. Returns `false` if this host makes none.
/// The kernel fills no holes under a userfaultfd, so this allocates first.
#[expect(unsafe_code, reason = "madvise on guest memory")]
fn collapse(ram: &GuestRam) -> bool {
    ram.allocate().unwrap();
    let large = PageSize::Size2M.pages();
    let bytes = (ram.pages() / large * large * PAGE_SIZE) as usize;
    let at = ram.alias_hva(RamPage(0)).0 as *mut libc::c_void;
    let mut error = std::io::Error::other("not tried");
    // Other cores may hold pages that were just written.
    for _ in 0..100 {
        // SAFETY: the range lies in the VMM's mapping, and collapsing changes no byte.
        if unsafe { libc::madvise(at, bytes, libc::MADV_COLLAPSE) } == 0 {
            return true;
        }
        error = std::io::Error::last_os_error();
        std::thread::sleep(Duration::from_millis(1));
    }
    let why = format!("this host makes no huge pages of shared memory: {error}");
    skip("thp", why);
    false
}

/// Takes a page out of the guest's mapping. Its bytes stay in the page cache.
#[expect(unsafe_code, reason = "madvise on guest memory")]
pub(crate) fn drop_mapping(ram: &GuestRam, page: u64) {
    let hva = ram.guest_hva(RamPage(page)).0;
    // SAFETY: the page lies in the guest's mapping, which is shared and keeps its bytes in the
    // memfd.
    unsafe { rustix::mm::madvise(hva as *mut _, PAGE, rustix::mm::Advice::LinuxDontNeed) }.unwrap();
}

/// Lets the kernel touch pages of the guest's mapping. Fails at a marker.
#[expect(unsafe_code, reason = "madvise on guest memory")]
fn touch(ram: &GuestRam, pages: std::ops::Range<RamPage>) -> rustix::io::Result<()> {
    let hva = ram.guest_hva(pages.start).0;
    let bytes = (pages.end.0 - pages.start.0) * PAGE_SIZE;
    let touch = rustix::mm::Advice::LinuxPopulateRead;
    // SAFETY: the range lies in the guest's mapping, and populating changes no byte.
    unsafe { rustix::mm::madvise(hva as *mut _, bytes as usize, touch) }
}

#[test]
fn minor_faults_bring_every_page() {
    if no_kvm() {
        return;
    }
    if let Some((exits, events)) = demand(Delivery::Minor, 600, Beside::default()) {
        assert_eq!(exits, 0);
        assert!(events >= 1200, "each first touch gives an event");
    }
}

#[test]
fn missing_faults_bring_every_page_of_private_memory() {
    if no_kvm() {
        return;
    }
    let beside = Beside {
        push: true,
        kick: true,
        overlap: true,
        private: true,
        ..Beside::default()
    };
    for beside in [
        beside,
        Beside {
            push: false,
            tables: true,
            ..beside
        },
        // The missing pages are parts of huge pages, and each userfaultfd has one of these.
        Beside {
            huge: true,
            streams: Some((2, 2)),
            ..beside
        },
    ] {
        demand(Delivery::Missing, 500, beside);
    }
}

#[test]
fn missing_faults_bring_every_page() {
    if no_kvm() {
        return;
    }
    if let Some((exits, events)) = demand(Delivery::Missing, 600, Beside::default()) {
        assert_eq!(exits, 0);
        assert!(events >= 800);
    }
}

#[test]
fn poison_exits_bring_every_page() {
    if no_kvm() {
        return;
    }
    if let Some((exits, _)) = demand(Delivery::Poison, 600, Beside::default()) {
        assert!(
            exits > 400,
            "only {exits} of 800 missing pages came as exits"
        );
    }
}

#[test]
fn exits_of_kvm_userfault_bring_every_page() {
    if no_kvm() {
        return;
    }
    if let Some((exits, _)) = demand(Delivery::Userfault, 600, Beside::default()) {
        assert!(
            exits >= 800,
            "only {exits} of 800 missing pages came as exits"
        );
    }
}

/// [`demand`] by every delivery.
fn by_every_delivery(each: u64, beside: Beside) {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        demand(delivery, each, beside);
    }
}

#[test]
fn a_background_push_races_every_delivery() {
    let beside = Beside {
        push: true,
        ..Beside::default()
    };
    by_every_delivery(3000, beside);
}

#[test]
fn kvms_interrupt_controllers_change_nothing() {
    for busy in [false, true] {
        let beside = Beside {
            push: busy,
            drop: busy,
            kick: busy,
            tables: true,
            irqchip: true,
            ..Beside::default()
        };
        by_every_delivery(600, beside);
    }
}

#[test]
fn several_userfaultfds_and_readers_change_nothing() {
    for case in rotating_seeds("PAGEFERRY_USERFAULTFDS", 3, 6) {
        let busy = case >= 3;
        let beside = Beside {
            streams: Some([(3, 2), (2, 1), (1, 3)][case as usize % 3]),
            push: busy,
            drop: busy,
            kick: busy,
            overlap: busy,
            tables: true,
            ..Beside::default()
        };
        by_every_delivery(800, beside);
    }
}

/// After the installation the guest touches the pages without any fault.
#[test]
fn one_installation_spans_the_ranges_of_several_userfaultfds() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        for holes in [false, true] {
            let pages = 3 * PageSize::Size2M.pages();
            let mut new = machine(1, pages);
            if no_delivery(new.machine.as_ref(), delivery) {
                continue;
            }
            let ram = Arc::clone(new.machine.ram());
            let options = ArmOptions {
                userfaultfds: 3,
                ..delivery.into()
            };
            let (missing, mut streams) = armed_by(new.machine.as_ref(), options);
            // From the first range into the last.
            let run = RamPage(500)..RamPage(1100);
            let code: &[u8] = if holes { &CHECK_ZERO } else { &CHECK };
            let args = [run.start.byte_offset(), run.end.byte_offset()];
            start(&ram, new.vcpus[0].as_mut(), 0, code, args);
            missing.set_range(run.start.index()..run.end.index());
            new.machine.begin_postcopy().unwrap();
            new.machine.assist_postcopy(&|| false, &|_| {}).unwrap();
            for page in (run.start.0..run.end.0).map(RamPage).filter(|_| !holes) {
                if new.machine.receives_in_place() {
                    placing(&ram).write(page, &bytes_of(page));
                } else {
                    new.machine.install_copy(page, &bytes_of(page)).unwrap();
                }
            }
            new.machine
                .install(run.start, run.end.0 - run.start.0)
                .unwrap();
            missing.clear_range(run.start.index()..run.end.index());
            new.machine.install(RamPage(0), DATA.0).unwrap();
            let low = pages_of(&ram, DATA.0);
            let source = Source::new(Arc::clone(&new.machine), missing, low);
            let rang = source.drive(new.vcpus[0].as_mut());
            assert_eq!(rang, 1, "{delivery}: a wrong page at {rang:#x}");
            assert_eq!(source.faults.into_inner(), 0, "{delivery}: exits");
            for events in &mut streams {
                assert_eq!(events.next().unwrap(), None, "{delivery}");
            }
            new.machine.disarm_userfault().unwrap();
        }
    }
}

#[test]
fn more_userfaultfds_than_ranges_and_no_readers_are_refused() {
    if no_kvm() {
        return;
    }
    let vm = machine(1, 1025).machine;
    let missing = Arc::new(PageBitmap::new(1025));
    let refused = |userfaultfds, readers| {
        let options = ArmOptions {
            userfaultfds,
            readers,
            ..ArmOptions::from(None)
        };
        let refused = vm.arm_userfault(Arc::clone(&missing), options).map(drop);
        refused.unwrap_err().to_string()
    };
    let counts =
        "expected 1 to 3 (each serves whole host pages, at least 2 MiB, and 64 is the limit)";
    for wrong in [0, 4] {
        let said = refused(wrong, 1);
        assert_eq!(
            said,
            format!("cannot serve this RAM by {wrong} userfaultfds: {counts}")
        );
    }
    for wrong in [0, ArmOptions::MAX_READERS + 1] {
        let said = refused(1, wrong);
        let right = "expected 1 to 1024";
        assert_eq!(
            said,
            format!("cannot read a userfaultfd's events with {wrong} readers: {right}")
        );
    }
    assert!(vm.delivery().is_none(), "nothing is armed");
}

#[test]
fn shared_memory_of_huge_pages_changes_nothing() {
    let beside = Beside {
        huge: true,
        push: true,
        ..Beside::default()
    };
    by_every_delivery(1500, beside);
}

/// While something holds a huge page, the kernel does not split it. It then writes zeros instead of
/// making a hole, and a guest would find these zeros.
#[test]
#[expect(unsafe_code, reason = "a pipe that holds a page")]
fn a_hole_that_is_none_is_noticed() {
    if no_kvm() {
        return;
    }
    let mut new = machine(1, 2 * PageSize::Size2M.pages());
    if no_delivery(new.machine.as_ref(), Delivery::Missing) {
        return;
    }
    let ram = Arc::clone(new.machine.ram());
    start(&ram, new.vcpus[0].as_mut(), 0, &CHECK, [0, 0]);
    if !collapse(&ram) {
        return;
    }
    let (missing, _events) = armed(new.machine.as_ref(), Delivery::Missing);
    missing.set(RamPage(600));
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    // SAFETY: the page lies in the VMM's mapping, which outlives the pipe. The pipe only reads it.
    let bytes = unsafe {
        let page = std::slice::from_raw_parts(placing(&ram).alias(RamPage(700), 1), PAGE);
        let whole = rustix::pipe::IoSliceRaw::from_slice(page);
        rustix::pipe::vmsplice(&writer, &[whole], rustix::pipe::SpliceFlags::empty())
    };
    assert_eq!(bytes, Ok(PAGE));
    let refused = new.machine.begin_postcopy().unwrap_err().to_string();
    assert!(refused.contains("huge pages"), "{refused}");
    drop((reader, writer));
    new.machine.begin_postcopy().unwrap();
    assert_eq!(
        ram.next_allocated(RamPage(600), 1).unwrap().unwrap().start,
        601
    );
}

#[test]
fn pages_dropped_from_the_mapping_at_any_moment_come_back() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        for case in rotating_seeds("PAGEFERRY_DROPS", 3, 6) {
            let beside = Beside {
                push: case >= 3,
                drop: true,
                kick: true,
                ..Beside::default()
            };
            demand(delivery, [1500, 300, 40][case as usize % 3], beside);
        }
    }
}

/// `PAGEFERRY_RACED_PAGES` sets the number of pages.
#[test]
#[ignore = "takes a minute; .ci/slow runs it"]
fn two_vcpus_and_an_installer_race_for_each_of_a_million_pages() {
    const EACH: u64 = 4000;
    if no_kvm() {
        return;
    }
    let wanted = std::env::var("PAGEFERRY_RACED_PAGES").map_or(1_000_000, |pages| {
        pages.parse().expect("PAGEFERRY_RACED_PAGES is a number")
    });
    let mut raced = 0;
    while raced < wanted {
        // Two thirds of the pages of a round are missing.
        for (drop, kick) in [(false, false), (true, false), (false, true), (true, true)] {
            let beside = Beside {
                push: true,
                overlap: true,
                drop,
                kick,
                ..Beside::default()
            };
            if demand(Delivery::Poison, EACH, beside).is_none() {
                return;
            }
            raced += EACH * 4 / 3;
        }
    }
}

#[test]
fn even_the_guests_page_tables_may_be_missing() {
    for push in [false, true] {
        let beside = Beside {
            tables: true,
            push,
            ..Beside::default()
        };
        by_every_delivery(1500, beside);
    }
}

#[test]
fn a_marker_set_on_a_page_that_is_here_is_in_nobodys_way() {
    if no_kvm() {
        return;
    }
    for disarm in [false, true] {
        let mut new = machine(1, DATA.0 + 2);
        let vm = Arc::clone(&new.machine);
        if no_delivery(vm.as_ref(), Delivery::Poison) {
            return;
        }
        let ram = Arc::clone(vm.ram());
        let (missing, events) = armed(new.machine.as_ref(), Delivery::Poison);
        start(
            &ram,
            new.vcpus[0].as_mut(),
            0,
            &CHECK,
            [DATA.0, DATA.0 + 2].map(|page| page * PAGE_SIZE),
        );
        missing.set_range(DATA.index()..DATA.index() + 2);
        vm.begin_postcopy().unwrap();
        // Installed, its mapping dropped, marked. Only then its bit is cleared.
        for page in [DATA, RamPage(DATA.0 + 1)] {
            placing(&ram).write(page, &bytes_of(page));
            vm.install(page, 1).unwrap();
            drop_mapping(&ram, page.0);
        }
        vm.assist_postcopy(&|| false, &|_| {}).unwrap();
        missing.clear_range(DATA.index()..DATA.index() + 2);
        if disarm {
            assert!(
                touch(&ram, DATA..RamPage(DATA.0 + 2)).is_err(),
                "nothing was marked"
            );
            vm.disarm_userfault().unwrap();
            touch(&ram, RamPage(0)..RamPage(ram.pages())).expect("no marker outlives its delivery");
        }
        let source = Source::new(Arc::clone(&vm), missing, pages_of(&ram, DATA.0));
        let stop = Stop::new();
        std::thread::scope(|scope| {
            let _stop = stop.on_drop();
            scope.spawn(|| source.serve(events, &stop));
            let rang = source.drive(new.vcpus[0].as_mut());
            assert_eq!(rang, 1, "a wrong page at {rang:#x}");
        });
        let exits = source.faults.into_inner();
        assert_eq!(exits, if disarm { 0 } else { 2 }, "disarmed: {disarm}");
    }
}

#[test]
fn holes_are_zero_pages_under_every_delivery() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        let pages = DATA.0 + 300;
        let mut new = machine(1, pages);
        if no_delivery(new.machine.as_ref(), delivery) {
            continue;
        }
        let ram = Arc::clone(new.machine.ram());
        let (missing, events) = armed(new.machine.as_ref(), delivery);
        start(
            &ram,
            new.vcpus[0].as_mut(),
            0,
            &CHECK_ZERO,
            [DATA.byte_offset(), pages * PAGE_SIZE],
        );
        // Half of the pages are missing and arrive as zero, in one run. The others are holes from
        // the start.
        missing.set_range(DATA.index()..DATA.index() + 150);
        new.machine.begin_postcopy().unwrap();
        new.machine.install(RamPage(DATA.0 + 10), 100).unwrap();
        missing.clear_range(DATA.index() + 10..DATA.index() + 110);
        let source = Source::new(
            Arc::clone(&new.machine),
            Arc::clone(&missing),
            pages_of(&ram, DATA.0),
        );
        new.machine.assist_postcopy(&|| false, &|_| {}).unwrap();
        for page in missing.snapshot().iter().enumerate().flat_map(|(w, bits)| {
            (0..64)
                .filter(move |b| bits >> b & 1 == 1)
                .map(move |b| w as u64 * 64 + b)
        }) {
            new.machine.install(RamPage(page), 1).unwrap();
            new.machine.install(RamPage(page), 1).unwrap();
            missing.clear(RamPage(page));
        }
        let stop = Stop::new();
        std::thread::scope(|scope| {
            let _stop = stop.on_drop();
            scope.spawn(|| source.serve(events, &stop));
            let rang = source.drive(new.vcpus[0].as_mut());
            assert_eq!(
                rang, 1,
                "{delivery}: the guest found a wrong page at {rang:#x}"
            );
        });
        new.machine.disarm_userfault().unwrap();
    }
}

#[test]
fn calls_in_the_wrong_order_are_refused() {
    if no_kvm() {
        return;
    }
    let mut new = machine(1, 64);
    let vm = Arc::clone(&new.machine);
    let wrong = |result: Result<(), MachineError>| {
        assert!(
            matches!(result, Err(MachineError::WrongState(_))),
            "{result:?}"
        );
    };
    wrong(vm.begin_postcopy());
    wrong(vm.assist_postcopy(&|| false, &|_| {}));
    wrong(vm.disarm_userfault());
    wrong(vm.install_copy(RamPage(0), &[0; PAGE]));
    wrong(vm.install(RamPage(60), 5));
    let missing = Arc::new(PageBitmap::new(64));
    assert!(matches!(
        vm.arm_userfault(Arc::clone(&missing), Delivery::Exit.into()),
        Err(MachineError::NoDelivery(Delivery::Exit))
    ));
    if no_delivery(vm.as_ref(), Delivery::Minor) {
        return;
    }
    wrong(
        vm.arm_userfault(Arc::new(PageBitmap::new(63)), Delivery::Minor.into())
            .map(drop),
    );
    missing.set(RamPage(7));
    let events = vm
        .arm_userfault(Arc::clone(&missing), Delivery::Minor.into())
        .unwrap();
    assert_eq!(events.len(), 1);
    wrong(
        vm.arm_userfault(Arc::clone(&missing), Delivery::Minor.into())
            .map(drop),
    );
    wrong(vm.install_copy(RamPage(7), &[0; PAGE]));
    wrong(vm.disarm_userfault());
    missing.clear(RamPage(7));
    vm.disarm_userfault().unwrap();
    vm.install(RamPage(7), 1).unwrap();
    // A machine that has run is not armed.
    new = machine(1, 64);
    let ram = Arc::clone(new.machine.ram());
    start(&ram, new.vcpus[0].as_mut(), 0, &[0xeb, 0xfe], [0, 0]);
    new.vcpus[0].kicker().kick();
    assert_eq!(new.vcpus[0].run().unwrap(), Exit::Kicked);
    wrong(
        new.machine
            .arm_userfault(missing, Delivery::Minor.into())
            .map(drop),
    );
}

/// rdi: a page in RAM. mov esi,0xd0000000; movsq (reads MMIO, writes RAM); mov rax,[rdi-8];
/// mov ebx,0xd0000000; mov [rbx],rax; jmp .
const MOVE_FROM_MMIO: [u8; 21] = [
    0xbe, 0, 0, 0, 0xd0, 0x48, 0xa5, 0x48, 0x8b, 0x47, 0xf8, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x03,
    0xeb, 0xfe,
];

#[test]
fn an_emulated_access_to_a_marked_page_waits_for_it_and_is_carried_out() {
    if no_kvm() {
        return;
    }
    for delivery in [Delivery::Userfault, Delivery::Poison, Delivery::Minor] {
        let mut new = machine(1, 64);
        if no_delivery(new.machine.as_ref(), delivery) {
            continue;
        }
        let ram = Arc::clone(new.machine.ram());
        let (missing, events) = armed(new.machine.as_ref(), delivery);
        start(
            &ram,
            new.vcpus[0].as_mut(),
            0,
            &MOVE_FROM_MMIO,
            [DATA.byte_offset() + 64, 0],
        );
        missing.set(DATA);
        new.machine.begin_postcopy().unwrap();
        new.machine.assist_postcopy(&|| false, &|_| {}).unwrap();
        let source = Source::new(Arc::clone(&new.machine), missing, pages_of(&ram, DATA.0));
        let stop = Stop::new();
        std::thread::scope(|scope| {
            let _stop = stop.on_drop();
            scope.spawn(|| source.serve(events, &stop));
            let vcpu = new.vcpus[0].as_mut();
            let watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
            let mut emulated = false;
            let rang = loop {
                match vcpu.run().unwrap() {
                    Exit::MemoryFault { page, access } => {
                        emulated |= access == Access::Write;
                        source.fault(page);
                    }
                    Exit::MmioRead { .. } => {}
                    Exit::Kicked => assert!(!watchdog.fired(), "{delivery}: stuck"),
                    exit => break rung(exit),
                }
            };
            assert_eq!(
                emulated,
                delivery == Delivery::Poison,
                "{delivery}: KVM itself met the page"
            );
            assert_eq!(
                rang,
                u64::MAX,
                "{delivery}: what was read outside RAM is ones"
            );
        });
        assert_eq!(word(&ram, DATA, 8), u64::MAX);
        assert_eq!(
            word(&ram, DATA, 0),
            DATA.byte_offset(),
            "the rest of the page has arrived"
        );
    }
}
