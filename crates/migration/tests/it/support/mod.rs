//! A VM with the demo's workload, and its migration between two halves of one test process.

use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_guest::{Control, Workload};
use pageferry_harness::{Vm, isa_of, verify};
use pageferry_machine::{
    AccessError, Backing, Delivery, Engine, GuestRam, Machine, MachineError, MachineSpec,
    NewMachine, RamRegion, kvm,
};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationFailure, DestinationReport, Kind, MigrationError,
    Resolver, Route, RunningVm, SourceConfig, SourceFailure, SourceReport, SourceSession,
    Unobserved, migrate,
};
pub(crate) use pageferry_testkit::LIMIT;
use pageferry_testkit::{rotation, sized, skip, wait_until};
use pageferry_transport::address::Address;
use pageferry_transport::channel::Listener;
use pageferry_transport::handshake::Stranger;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// Whether a test that needs KVM can run. A test that cannot says so, and fails where it must run.
pub(crate) fn kvm_usable(test: &str) -> bool {
    let missing = kvm::probe_vm().err();
    !missing.is_some_and(|why| skip("kvm", format_args!("{test}: {why}")))
}

/// Whether this host's KVM offers a fault delivery. Reports it as skipped if not.
pub(crate) fn kvm_offers(test: &str, delivery: Delivery) -> bool {
    // Asking makes a machine.
    static OFFERED: LazyLock<Vec<Delivery>> =
        LazyLock::new(|| pageferry_harness::deliveries_of(Engine::Kvm, Backing::Shmem));
    // No released kernel has KVM Userfault, so requiring "uffd" does not require it.
    let resource = match delivery {
        Delivery::Userfault => "kvm-userfault",
        other => other.name(),
    };
    let why = format_args!("{test}: this host does not offer fault delivery '{delivery}'");
    OFFERED.contains(&delivery) || !skip(resource, why)
}

/// One of the fault deliveries of KVM that this host offers, by rotation. The slow tests take all
/// of them. Reports those that the host lacks as skipped.
pub(crate) fn kvm_deliveries(test: &str) -> Vec<Delivery> {
    let mut all = Vec::from([
        Delivery::Userfault,
        Delivery::Minor,
        Delivery::Missing,
        Delivery::Poison,
    ]);
    all.retain(|delivery| kvm_offers(test, *delivery));
    let count = all.len() as u64;
    if count > 0 && sized(1, count) == 1 {
        // Another one in each test of a commit.
        let chosen = (rotation() + test.len() as u64) % count;
        all = Vec::from([all[chosen as usize]]);
    }
    all
}

/// A VM for the workload, and the resolver of its faults.
pub(crate) struct WorkloadVm {
    vm: Vm,
    pub(crate) resolver: Arc<Resolver>,
    pub(crate) workload: Workload,
}

impl Deref for WorkloadVm {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        &self.vm
    }
}

/// The engine of a machine.
pub(crate) fn engine_of(machine: &dyn Machine) -> Engine {
    machine.kind().engine.parse().unwrap()
}

/// The names of an engine's machines, as they travel.
pub(crate) fn kind_of(engine: Engine) -> Kind {
    let kind = engine.kind();
    Kind {
        engine: kind.engine.parse().unwrap(),
        isa: kind.isa.parse().unwrap(),
        state_format: kind.state_format.parse().unwrap(),
    }
}

impl WorkloadVm {
    /// A VM whose memory is empty and whose vCPUs are paused.
    pub(crate) fn empty(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        Self::empty_on(Backing::Shmem, engine, vcpus, memory_bytes)
    }

    /// [`Self::empty`], with memory of `backing`.
    pub(crate) fn empty_on(
        backing: Backing,
        engine: Engine,
        vcpus: u32,
        memory_bytes: u64,
    ) -> Self {
        let spec = MachineSpec {
            backing,
            ..MachineSpec::new(vcpus, memory_bytes)
        };
        Self::on(pageferry_machine::create(engine, spec).unwrap())
    }

    /// As [`Self::empty`], with this machine. The workload uses RAM up to its first hole.
    pub(crate) fn on(new: NewMachine) -> Self {
        let (isa, vcpus) = (isa_of(engine_of(&*new.machine)), new.vcpus.len() as u32);
        let regions = new.machine.ram().layout().regions();
        let adjoin = |pair: &[RamRegion]| pair[0].gfn.0 + pair[0].pages == pair[1].gfn.0;
        let low = regions.windows(2).take_while(|pair| adjoin(pair)).count();
        let bytes = regions[..=low].iter().map(|r| r.pages * PAGE_SIZE).sum();
        let resolver = Resolver::new();
        Self {
            vm: Vm::start(new, Some(Arc::clone(&resolver) as _)).unwrap(),
            resolver,
            workload: Workload::new(isa, vcpus, bytes)
                .and_then(|workload| workload.with_rest(Duration::from_millis(2)))
                .unwrap(),
        }
    }

    /// A VM that runs the workload.
    pub(crate) fn booted(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        Self::empty(engine, vcpus, memory_bytes).boot()
    }

    /// Runs the workload in an empty VM.
    pub(crate) fn boot(self) -> Self {
        self.load(self.workload.program()).unwrap();
        self.threads.resume();
        self
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        self.machine.ram()
    }

    pub(crate) fn is_missing(&self, page: RamPage) -> bool {
        self.ram().try_read(page, &mut [0]) == Err(AccessError::Missing(page))
    }

    pub(crate) fn control(&self, vcpu: u32) -> Control {
        self.vm.control(&self.workload, vcpu).unwrap()
    }

    pub(crate) fn done(&self, vcpu: u32) -> u64 {
        self.control(vcpu).done
    }

    /// Waits until every vCPU has done this many more pages. The guest rests at other times.
    pub(crate) fn wait_progress(&self, pages: u64) {
        self.vm.hurried(|| self.wait_pages(pages));
    }

    fn wait_pages(&self, pages: u64) {
        let vcpus = self.workload.memory_map().vcpus();
        let goals: Vec<u64> = (0..vcpus).map(|v| self.done(v) + pages).collect();
        for (vcpu, goal) in (0..vcpus).zip(goals) {
            wait_until(&format!("vCPU {vcpu} to do {pages} pages"), || {
                self.assert_no_failure("the guest runs");
                self.done(vcpu) >= goal
            });
        }
    }

    /// Checks that no vCPU has failed and that the guest has found no wrong page.
    pub(crate) fn assert_no_failure(&self, name: &str) {
        let failures = self.threads.failures();
        assert!(failures.is_empty(), "{name}: {failures:?}");
        assert_eq!(self.errors(), 0, "{name}: the guest found wrong pages");
    }

    /// Pauses the VM and checks every page.
    pub(crate) fn assert_verifies(&self) {
        self.threads.pause(LIMIT).unwrap();
        let verdict = verify(&*self.machine, &self.workload, &|| false).unwrap();
        assert!(verdict.host_holds(), "{verdict:?}");
        assert!(verdict.guest_holds(), "{verdict:?}");
        self.assert_no_failure("verified");
    }
}

/// A machine of KVM with interrupt controllers.
pub(crate) fn create_pc(spec: MachineSpec) -> Result<NewMachine, MachineError> {
    let options = kvm::KvmOptions {
        irqchip: kvm::Irqchip::Kernel,
        ..kvm::KvmOptions::default()
    };
    kvm::create_with(spec, options)
}

/// Listens on a free port.
pub(crate) fn tcp() -> Listener {
    Listener::bind(&Address::Tcp {
        host: "127.0.0.1".into(),
        port: 0,
    })
    .unwrap()
}

/// Listens on a unix socket.
pub(crate) fn unix() -> Listener {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("pageferry-it-{}-{number}", std::process::id());
    let address = Address::unix(&std::env::temp_dir().join(name)).unwrap();
    Listener::bind(&address).unwrap()
}

pub(crate) struct Moved {
    pub(crate) source: WorkloadVm,
    pub(crate) destination: WorkloadVm,
    pub(crate) sent: Result<SourceReport, SourceFailure>,
    pub(crate) received: Result<DestinationReport, DestinationFailure>,
}

/// A destination on a free loopback port.
pub(crate) fn listen(config: DestinationConfig) -> Arc<Destination> {
    listen_on(tcp(), config)
}

/// A destination on this listener.
pub(crate) fn listen_on(listener: Listener, config: DestinationConfig) -> Arc<Destination> {
    let stranger = |stranger: &Stranger| eprintln!("{stranger:?}");
    Arc::new(Destination::listen(listener, config, stranger).unwrap())
}

/// The address of a destination.
pub(crate) fn address_of(destination: &Destination) -> Address {
    destination.local_addrs().remove(0)
}

/// Receives one VM as `vm`, whose faults `resolver` resolves.
pub(crate) fn receive_as(
    vm: &RunningVm<'_>,
    resolver: &Arc<Resolver>,
    destination: &Arc<Destination>,
) -> Result<DestinationReport, DestinationFailure> {
    let until = Instant::now() + LIMIT;
    let late = || Instant::now() > until;
    let incoming = destination.accept(&late).unwrap();
    incoming.receive(vm, resolver, &late, &Unobserved)
}

/// Receives one VM, into memory of `backing`.
pub(crate) fn receive_on(
    backing: Backing,
    destination: &Arc<Destination>,
) -> (WorkloadVm, Result<DestinationReport, DestinationFailure>) {
    try_receive_on(backing, destination, &|| false).expect("a source comes")
}

/// Receives one VM, into memory of `backing`. Returns `None` if `stop` returned true first.
pub(crate) fn try_receive_on(
    backing: Backing,
    destination: &Arc<Destination>,
    stop: &dyn Fn() -> bool,
) -> Option<(WorkloadVm, Result<DestinationReport, DestinationFailure>)> {
    let deadline = Instant::now() + LIMIT;
    let late = || Instant::now() > deadline || stop();
    let incoming = loop {
        match destination.accept(&late) {
            Ok(incoming) => break incoming,
            Err(MigrationError::Cancelled) => return None,
            // A source that went away: another may come.
            Err(error) => eprintln!("no source: {error}"),
        }
    };
    let offer = incoming.offer().clone();
    let spec = MachineSpec {
        backing,
        ..MachineSpec::new(offer.vcpus, offer.memory_bytes)
    };
    let new = if offer.kind.state_format.as_str().starts_with("kvm-pc") {
        create_pc(spec)
    } else {
        pageferry_machine::create(offer.kind.engine.as_str().parse().unwrap(), spec)
    };
    let vm = WorkloadVm::on(new.unwrap());
    let received = incoming.receive(&vm.running(), &vm.resolver, &late, &Unobserved);
    Some((vm, received))
}

/// Moves `source` to a fresh VM.
pub(crate) fn move_vm(source: WorkloadVm, config: &SourceConfig, to: DestinationConfig) -> Moved {
    move_vm_to(Backing::Shmem, source, config, to)
}

/// Moves `source` to a fresh VM with memory of `backing`.
pub(crate) fn move_vm_to(
    backing: Backing,
    source: WorkloadVm,
    config: &SourceConfig,
    to: DestinationConfig,
) -> Moved {
    let listening = listen(to);
    let (sent, (destination, received)) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive_on(backing, &listening));
        let sent = migrate_to(&source, &address_of(&listening), config);
        (sent, receiver.join().unwrap())
    });
    Moved {
        source,
        destination,
        sent,
        received,
    }
}

/// Migrates `vm` to `to`, without a cancel.
pub(crate) fn migrate_to(
    vm: &WorkloadVm,
    to: &Address,
    config: &SourceConfig,
) -> Result<SourceReport, SourceFailure> {
    migrate_running(&vm.running(), to, config)
}

/// As [`migrate_to`], for any VM.
pub(crate) fn migrate_running(
    vm: &RunningVm<'_>,
    to: &Address,
    config: &SourceConfig,
) -> Result<SourceReport, SourceFailure> {
    let session = SourceSession::new().unwrap();
    let route = Route::To(to.clone());
    migrate(vm, &route, b"test", config, &session, &Unobserved)
}
