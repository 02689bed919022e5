//! The engine takes the signals of poison markers, and leaves every other SIGBUS to the program.

use crate::kvm_userfault::{CHECK, Source, armed, no_delivery, pages_of};
use crate::support::{DATA, machine, no_kvm, rung, runs_in_child, start};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{Delivery, Exit, Vcpu};
use pageferry_testkit::{Stop, wait_until};
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

const CHILD: &str = "PAGEFERRY_TEST_SIGBUS_CHILD";

#[test]
fn a_bus_error_that_is_not_the_guests_still_ends_the_process() {
    if no_kvm() {
        return;
    }
    let status = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "kvm_signals::child_that_dies_of_a_bus_error",
            "--ignored",
        ])
        .env(CHILD, "1")
        .output()
        .unwrap()
        .status;
    assert_eq!(status.signal(), Some(libc::SIGBUS), "{status}");
}

#[test]
#[ignore = "the other test runs it in a process of its own"]
fn child_that_dies_of_a_bus_error() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let _machine = machine(1, 64);
    touch_beyond_the_end_of_a_file();
}

/// The signals that the handlers got: bus errors of markers, of this program, and sent ones.
#[derive(Debug)]
struct Got([AtomicUsize; 3]);

impl Got {
    const fn nothing() -> Self {
        Self([const { AtomicUsize::new(0) }; 3])
    }

    fn counts(&self) -> [usize; 3] {
        self.0.each_ref().map(|count| count.load(Ordering::SeqCst))
    }
}

static BEFORE: Got = Got::nothing();
static AFTER: Got = Got::nothing();

#[expect(
    unsafe_code,
    reason = "reads a siginfo and maps a page in a signal handler"
)]
fn note(got: &Got, info: *mut libc::siginfo_t) {
    // SAFETY: the kernel passes a valid siginfo.
    let info = unsafe { &*info };
    let kind = match info.si_code {
        libc::BUS_MCEERR_AR => 0,
        libc::BUS_ADRERR => {
            // SAFETY: (1) SIGBUS has an address. (2) The page is the one that this test maps beyond
            // the end of a file. In its place comes a page that can be read.
            unsafe {
                rustix::mm::mmap_anonymous(
                    info.si_addr(),
                    PAGE_SIZE as usize,
                    rustix::mm::ProtFlags::READ,
                    rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::FIXED,
                )
            }
            .unwrap();
            1
        }
        _ => 2,
    };
    got.0[kind].fetch_add(1, Ordering::SeqCst);
}

extern "C" fn before(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    note(&BEFORE, info);
}

extern "C" fn after(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    note(&AFTER, info);
}

type Handler = extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void);

#[expect(unsafe_code, reason = "sets a signal handler")]
fn set(handler: Handler) {
    // SAFETY: sigaction consists of integers and pointers, for which zero is a value. The handlers
    // make system calls and atomic accesses only, both async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO;
        let result = libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
        assert_eq!(result, 0);
    }
}

#[expect(unsafe_code, reason = "a mapping beyond the end of its file")]
fn touch_beyond_the_end_of_a_file() {
    let fd = rustix::fs::memfd_create("empty", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    // SAFETY: (1) a plain system call. It ends a process whose handler swallows the bus error and
    // so repeats the read for ever. (2) A new mapping at an address that the kernel chooses. It is
    // read through a raw pointer, and this test is about the bus error of that read.
    unsafe {
        libc::alarm(60);
        let map = rustix::mm::mmap(
            std::ptr::null_mut(),
            4096,
            rustix::mm::ProtFlags::READ,
            rustix::mm::MapFlags::SHARED,
            &fd,
            0,
        )
        .unwrap();
        map.cast::<u8>().read_volatile();
    }
}

/// Runs the guest on until it rings. At each exit, this program has a bus error of its own. Returns
/// the number of exits.
fn drive(vcpu: &mut dyn Vcpu, source: &Source, most: usize) -> usize {
    for exits in 0..most {
        match vcpu.run().unwrap() {
            Exit::MemoryFault { page, .. } => {
                source.fault(page);
                touch_beyond_the_end_of_a_file();
            }
            exit => {
                assert_eq!(rung(exit), 1);
                return exits;
            }
        }
    }
    most
}

#[test]
#[expect(unsafe_code, reason = "signals to a thread of this process")]
fn the_programs_handlers_see_every_bus_error_but_those_of_markers() {
    const PAGES: u64 = 64;
    if no_kvm() || no_delivery(machine(1, 64).machine.as_ref(), Delivery::Poison) {
        return;
    }
    if runs_in_child() {
        return;
    }
    set(before);
    let mut new = machine(1, DATA.0 + PAGES);
    let (missing, _events) = armed(new.machine.as_ref(), Delivery::Poison);
    let data = [DATA.0, DATA.0 + PAGES].map(|page| page * PAGE_SIZE);
    start(new.machine.ram(), new.vcpus[0].as_mut(), 0, &CHECK, data);
    (DATA.0..DATA.0 + PAGES).for_each(|page| {
        missing.set(RamPage(page));
    });
    let low = pages_of(new.machine.ram(), DATA.0);
    // The tables are present but not mapped, and would send events.
    new.machine.begin_postcopy().unwrap();
    new.machine.assist_postcopy(&|| false, &|_| {}).unwrap();
    new.machine.install(RamPage(0), DATA.0).unwrap();
    let source = Source::new(std::sync::Arc::clone(&new.machine), missing, low);
    let vcpu = new.vcpus[0].as_mut();

    let half = PAGES as usize / 2;
    assert_eq!(drive(vcpu, &source, half), half);
    assert_eq!(BEFORE.counts(), [0, half, 0]);
    set(after);
    assert_eq!(drive(vcpu, &source, usize::MAX), half);
    assert_eq!(
        (BEFORE.counts(), AFTER.counts()),
        ([0, half, 0], [0, half, 0])
    );

    // The guest now spins. Signals from outside find the vCPU inside KVM_RUN.
    let (kicker, stop) = (vcpu.kicker(), Stop::new());
    let thread = rustix::thread::gettid().as_raw_nonzero().get();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for wanted in 1..=20 {
                std::thread::sleep(std::time::Duration::from_millis(1));
                // SAFETY: a plain system call; the thread runs the vCPU until this one has ended.
                unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, libc::SIGBUS) };
                wait_until("the handler", || AFTER.counts()[2] == wanted);
            }
            stop.stop();
            kicker.kick();
        });
        while !stop.is_stopped() {
            assert!(matches!(vcpu.run().unwrap(), Exit::Kicked));
        }
    });
    assert_eq!(AFTER.counts(), [0, half, 20]);
}
