//! A machine that fails in post-copy: the VM pauses with a reason, and never counts as complete.

use crate::alone::{LeakCheck, runs_in_child};
use crate::support::{LIMIT, WorkloadVm, address_of, kvm_deliveries, kvm_usable, listen};
use pageferry_addr::RamPage;
use pageferry_machine::{
    ArmOptions, Collapsed, Delivery, DeliveryInUse, Engine, FaultEvents, GuestRam, Machine,
    MachineError, MachineKind,
};
use pageferry_migration::{
    DestinationConfig, DestinationVm, Route, RunningVm, SourceConfig, SourceSession, SourceVm,
    Switch, Unobserved, migrate,
};
use pageferry_userfault::PageBitmap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The failure of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The `n`th installation of pages fails, from 1.
    Install(u32),
    /// The userfaultfd is closed at the `n`th.
    Close(u32),
    /// The host lacks memory for these installations.
    NoMemory {
        /// The first.
        from: u32,
        /// The first that has memory again.
        to: u32,
    },
}

/// A machine that fails once.
pub(crate) struct Failing {
    machine: Arc<dyn Machine>,
    fault: Fault,
    installs: AtomicU32,
    /// The userfaultfd, or -1.
    uffd: AtomicI32,
}

impl Failing {
    pub(crate) fn new(machine: Arc<dyn Machine>, fault: Fault) -> Self {
        Self {
            machine,
            fault,
            installs: AtomicU32::new(0),
            uffd: AtomicI32::new(-1),
        }
    }

    fn may_install(&self) -> Result<(), MachineError> {
        let this = self.installs.fetch_add(1, Ordering::Relaxed) + 1;
        match self.fault {
            Fault::Install(n) if this == n => Err(MachineError::os(
                "cannot install a page",
                std::io::Error::other("the test says so"),
            )),
            Fault::NoMemory { from, to } if (from..to).contains(&this) => Err(MachineError::os(
                "cannot install a page",
                std::io::Error::from_raw_os_error(libc::ENOMEM),
            )),
            Fault::Close(n) if this == n => {
                close_for_good(self.uffd.load(Ordering::Relaxed));
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Puts `/dev/null` in the place of a descriptor, so that its number stays taken.
#[expect(unsafe_code, reason = "takes a descriptor away from its owner")]
fn close_for_good(fd: RawFd) {
    let null = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: the owner of `fd` may use and close it as before. It finds another file there.
    assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), fd) }, fd);
}

impl Machine for Failing {
    fn kind(&self) -> MachineKind<'_> {
        self.machine.kind()
    }

    fn ram(&self) -> &Arc<GuestRam> {
        self.machine.ram()
    }

    fn set_dirty_log(&self, on: bool) -> Result<(), MachineError> {
        self.machine.set_dirty_log(on)
    }

    fn harvest_dirty(&self, dirty: &PageBitmap, rearm: bool) -> Result<usize, MachineError> {
        self.machine.harvest_dirty(dirty, rearm)
    }

    fn deliveries(&self) -> Vec<Delivery> {
        self.machine.deliveries()
    }

    fn delivery(&self) -> Option<DeliveryInUse> {
        self.machine.delivery()
    }

    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        let events = self.machine.arm_userfault(missing, options)?;
        let uffd = events.first().map_or(-1, |events| events.fd().as_raw_fd());
        self.uffd.store(uffd, Ordering::Relaxed);
        Ok(events)
    }

    fn receives_in_place(&self) -> bool {
        self.machine.receives_in_place()
    }

    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.may_install()?;
        self.machine.install(first, pages)
    }

    fn install_copy(&self, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        self.may_install()?;
        self.machine.install_copy(page, bytes)
    }

    fn begin_postcopy(&self) -> Result<(), MachineError> {
        self.machine.begin_postcopy()
    }

    fn assist_postcopy(
        &self,
        stop: &dyn Fn() -> bool,
        want: &dyn Fn(RamPage),
    ) -> Result<(), MachineError> {
        self.machine.assist_postcopy(stop, want)
    }

    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.machine.disarm_userfault()
    }

    fn collapse(&self, first: RamPage) -> Collapsed {
        self.machine.collapse(first)
    }

    fn host_large_bytes(&self) -> Result<u64, MachineError> {
        self.machine.host_large_bytes()
    }

    fn engine_large_bytes(&self) -> Option<u64> {
        self.machine.engine_large_bytes()
    }

    fn abandon(&self) {
        self.machine.abandon();
    }
}

/// Moves a VM to a machine that fails. Checks that both copies are paused and stay so.
fn fails(engine: Engine, delivery: Option<Delivery>, fault: Fault, reasons: &[&str]) {
    let _leaks = LeakCheck::start();
    let name = format!("{engine}, {delivery:?}, {fault:?}");
    let source = WorkloadVm::booted(engine, 2, 16 << 20);
    source.wait_progress(2 * source.workload.memory_map().share_pages());
    let destination = listen(DestinationConfig {
        delivery,
        ..DestinationConfig::default()
    });
    let config = SourceConfig {
        settings: Switch::AfterPasses(0).into(),
        // A push could bring every page before enough of them are requested.
        push_after: Duration::MAX,
        ..SourceConfig::default()
    };
    let arrived = OnceLock::new();
    let session = SourceSession::new().unwrap();
    let (sent, received) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let deadline = Instant::now() + LIMIT;
            let late = || Instant::now() > deadline;
            let incoming = destination.accept(&late).unwrap();
            let offer = incoming.offer().clone();
            let vm =
                arrived.get_or_init(|| WorkloadVm::empty(engine, offer.vcpus, offer.memory_bytes));
            let machine: Arc<dyn Machine> = Arc::new(Failing::new(Arc::clone(&vm.machine), fault));
            let failing = RunningVm {
                machine: &machine,
                vcpus: &vm.threads,
                devices: vm.running().devices,
            };
            let received = incoming.receive(&failing, &vm.resolver, &late, &Unobserved);
            // The source does not know that there is nobody left to reach.
            session.give_up();
            received
        });
        let route = Route::To(address_of(&destination));
        let running = source.running();
        let sent = migrate(&running, &route, b"", &config, &session, &Unobserved);
        (sent, receiver.join().unwrap())
    });
    let Err(failure) = received else {
        panic!("{name}: every page arrived");
    };
    let said = failure.to_string();
    assert!(
        reasons.iter().any(|why| said.contains(why)),
        "{name}: {said}"
    );
    let sent = sent.unwrap_err();
    println!("{name}: {said}");
    let DestinationVm::PausedIncomplete { missing, asleep } = failure.vm else {
        panic!("{name}: no page is due before the VM runs here: {said}");
    };
    let vm = arrived.get().unwrap();
    assert!(missing > 0, "{name}");
    // A vCPU that sleeps inside KVM is not called paused.
    assert_eq!(asleep == 0, vm.threads.is_paused(), "{name}");
    assert_eq!(
        asleep == 0,
        said.contains("the VM is paused here"),
        "{name}: {said}"
    );
    assert!(asleep == 0 || engine == Engine::Kvm, "{name}");
    assert_eq!(sent.vm, SourceVm::GivenUp, "{name}");
    assert!(source.threads.is_paused(), "{name}");
}

#[test]
fn an_installation_that_fails_pauses_the_vm() {
    if runs_in_child() {
        return;
    }
    let why = ["cannot install a page: the test says so"];
    for n in [1, 2, 20] {
        fails(Engine::Soft, None, Fault::Install(n), &why);
    }
}

#[test]
fn an_installation_that_fails_pauses_a_kvm_vm_by_every_delivery() {
    if runs_in_child() {
        return;
    }
    let name = "an_installation_that_fails_pauses_a_kvm_vm_by_every_delivery";
    if !kvm_usable(name) {
        return;
    }
    let why = ["cannot install a page: the test says so"];
    for delivery in kvm_deliveries(name) {
        fails(Engine::Kvm, Some(delivery), Fault::Install(20), &why);
    }
    // The first page may be a page table, on which a vCPU sleeps inside KVM.
    fails(Engine::Kvm, None, Fault::Install(1), &why);
}

/// From then on the kernel delivers no fault, so the guest may see pages that have not come. It is
/// stopped, and the copy never counts.
#[test]
fn a_userfaultfd_that_is_closed_pauses_a_kvm_vm_by_every_delivery() {
    if runs_in_child() {
        return;
    }
    let name = "a_userfaultfd_that_is_closed_pauses_a_kvm_vm_by_every_delivery";
    if !kvm_usable(name) {
        return;
    }
    for delivery in kvm_deliveries(name) {
        let why = ["userfaultfd", "page", "ENOTTY"];
        fails(Engine::Kvm, Some(delivery), Fault::Close(20), &why);
    }
}
