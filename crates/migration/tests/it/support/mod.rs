//! A VM with the demo's workload, moved between two halves of one test process.

use pageferry_addr::{Gpa, RamPage};
use pageferry_guest::{Control, Isa, Workload};
use pageferry_machine::{
    Access, Delivery, Engine, GuestRam, HookVerdict, Kicker, Machine, MachineError, MachineSpec,
    StartState, VcpuHooks, VcpuThreads,
};
use pageferry_migration::address::Address;
use pageferry_migration::channel::Listener;
use pageferry_migration::{
    DestinationConfig, DestinationFailure, DestinationReport, Incoming, Resolver, RunningVm,
    SourceConfig, SourceFailure, SourceReport, Unobserved, migrate,
};
pub(crate) use pageferry_testkit::LIMIT;
use pageferry_testkit::skip;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Whether a test that needs KVM can run. A test that cannot says so, and fails where it must run.
pub(crate) fn kvm_usable(test: &str) -> bool {
    let missing = pageferry_machine::kvm::probe_vm().err();
    !missing.is_some_and(|why| skip("kvm", format_args!("{test}: {why}")))
}

pub(crate) struct Hooks {
    resolver: Arc<Resolver>,
    pub(crate) doorbells: AtomicU64,
}

impl VcpuHooks for Hooks {
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict {
        self.resolver.memory_fault(vcpu, page, access, kicker)
    }
    fn mmio_write(&self, _: u32, _: Gpa, _: u64) -> HookVerdict {
        self.doorbells.fetch_add(1, Ordering::SeqCst);
        HookVerdict::Resume
    }
    fn failed(&self, vcpu: u32, error: &MachineError) {
        eprintln!("vCPU {vcpu}: {error}");
    }
    fn pausing(&self) {
        self.resolver.pausing();
    }
}

pub(crate) struct Vm {
    pub(crate) machine: Arc<dyn Machine>,
    pub(crate) threads: VcpuThreads,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) resolver: Arc<Resolver>,
    pub(crate) workload: Workload,
}

impl Vm {
    /// A VM whose memory is empty and whose vCPUs are not started.
    pub(crate) fn empty(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        let new = pageferry_machine::create(
            engine,
            MachineSpec {
                vcpus,
                memory_bytes,
            },
        )
        .unwrap();
        let resolver = Resolver::new();
        let hooks = Arc::new(Hooks {
            resolver: Arc::clone(&resolver),
            doorbells: AtomicU64::new(0),
        });
        let isa = match engine {
            Engine::Kvm => Isa::X86_64,
            Engine::Soft => Isa::Rv64,
        };
        Self {
            machine: new.machine,
            threads: VcpuThreads::start(new.vcpus, Arc::clone(&hooks) as Arc<dyn VcpuHooks>)
                .unwrap(),
            hooks,
            resolver,
            workload: Workload::new(isa, vcpus, memory_bytes).unwrap(),
        }
    }

    /// A VM that runs the workload.
    pub(crate) fn running(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        let vm = Self::empty(engine, vcpus, memory_bytes);
        for (gpa, bytes) in vm.workload.image() {
            let page = vm.ram().layout().page_of(gpa.gfn()).unwrap();
            vm.ram().write_at(page, gpa.page_offset(), &bytes);
        }
        vm.threads
            .with_vcpus(|vcpu| {
                let start = vm.workload.start(vcpu.id());
                vcpu.set_start(&StartState {
                    entry: start.entry,
                    stack: start.stack,
                    args: start.args,
                    tables: start.tables,
                })
            })
            .unwrap();
        vm.threads.resume();
        vm
    }

    pub(crate) fn ram(&self) -> &GuestRam {
        self.machine.ram()
    }

    pub(crate) fn as_running(&self) -> RunningVm<'_> {
        RunningVm {
            machine: &self.machine,
            threads: &self.threads,
        }
    }

    pub(crate) fn control(&self, vcpu: u32) -> Control {
        let mut page = [0; 4096];
        self.ram().read(self.workload.control_page(vcpu), &mut page);
        Control::parse(&page).unwrap()
    }

    pub(crate) fn done(&self, vcpu: u32) -> u64 {
        self.control(vcpu).done
    }

    /// Waits until every vCPU has done this many more pages.
    pub(crate) fn wait_progress(&self, pages: u64) {
        let vcpus = self.workload.layout().vcpus();
        let goals: Vec<u64> = (0..vcpus).map(|v| self.done(v) + pages).collect();
        let deadline = Instant::now() + LIMIT;
        for (vcpu, goal) in goals.into_iter().enumerate() {
            while self.done(vcpu as u32) < goal {
                assert!(
                    self.threads.failures().is_empty(),
                    "{:?}",
                    self.threads.failures()
                );
                assert!(Instant::now() < deadline, "vCPU {vcpu} stands still");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Pauses and checks every page; panics with what is wrong.
    pub(crate) fn verify(&self) {
        self.threads.pause(LIMIT).unwrap();
        let verdict = self
            .workload
            .verify(
                &mut |page, into: &mut [u8; 4096]| -> Result<(), MachineError> {
                    self.ram().read(page, into);
                    Ok(())
                },
            )
            .unwrap();
        assert!(verdict.host_holds(), "{verdict:?}");
        assert!(verdict.guest_holds(), "{verdict:?}");
        assert_eq!(self.hooks.doorbells.load(Ordering::SeqCst), 0);
        assert!(
            self.threads.failures().is_empty(),
            "{:?}",
            self.threads.failures()
        );
    }
}

/// An address of this test's own.
pub(crate) fn tcp() -> Listener {
    Listener::bind(&Address::Tcp {
        host: "127.0.0.1".into(),
        port: 0,
    })
    .unwrap()
}

pub(crate) struct Moved {
    pub(crate) source: Vm,
    pub(crate) destination: Vm,
    pub(crate) sent: Result<SourceReport, SourceFailure>,
    pub(crate) received: Result<DestinationReport, DestinationFailure>,
}

/// Receives one VM.
pub(crate) fn receive(
    listener: &Listener,
    delivery: Option<Delivery>,
    allocate: bool,
) -> (Vm, Result<DestinationReport, DestinationFailure>) {
    let config = DestinationConfig {
        delivery,
        allocate,
        ..DestinationConfig::default()
    };
    let deadline = Instant::now() + LIMIT;
    let late = || Instant::now() > deadline;
    let incoming = Incoming::accept(listener, config, &late, &mut |stranger| {
        eprintln!("{stranger:?}");
    })
    .unwrap();
    let offer = incoming.offer().clone();
    let vm = Vm::empty(offer.engine, offer.vcpus, offer.memory_bytes);
    let received = incoming.receive(&vm.as_running(), &vm.resolver, &late, &Unobserved);
    (vm, received)
}

/// Moves `source` to a fresh VM.
pub(crate) fn move_vm(
    source: Vm,
    config: &SourceConfig,
    delivery: Option<Delivery>,
    allocate: bool,
) -> Moved {
    let listener = tcp();
    let to = listener.local_addr().clone();
    let (sent, (destination, received)) = std::thread::scope(|scope| {
        let receiver = scope.spawn(|| receive(&listener, delivery, allocate));
        let cancel = AtomicBool::new(false);
        let sent = migrate(
            &source.as_running(),
            &to,
            b"test",
            config,
            &cancel,
            &Unobserved,
        );
        (sent, receiver.join().unwrap())
    });
    Moved {
        source,
        destination,
        sent,
        received,
    }
}

/// Starts a migration to an address where the test itself plays the destination.
pub(crate) fn migrate_to(
    vm: &Vm,
    to: &Address,
    config: &SourceConfig,
) -> Result<SourceReport, SourceFailure> {
    migrate(
        &vm.as_running(),
        to,
        b"test",
        config,
        &AtomicBool::new(false),
        &Unobserved,
    )
}
