#![expect(
    unsafe_code,
    reason = "maps guest memory, hands it to KVM, and sends signals"
)]
//! The VMM of the example, and the move of its VM.

use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, kvm_regs, kvm_segment,
    kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_machine::kvm::KvmFaults;
use pageferry_machine::{
    AdoptedRegion, ArmOptions, Collapsed, Delivery, DeliveryInUse, FaultEvents, GuestRam, Machine,
    MachineError, MachineKind, PauseReport, VcpuState, Vcpus,
};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationReport, Listener, Resolver, Route, RunningVm,
    SourceConfig, SourceSession, Unobserved, migrate,
};
use pageferry_userfault::PageBitmap;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use std::os::unix::thread::JoinHandleExt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The program and its tables: 1 MiB at 0. The numbers: 16 MiB at 64 MiB.
const PLACES: [(u64, u64); 2] = [(0, 1 << 20), (64 << 20, 16 << 20)];
const PAGES: u64 = PLACES[1].1 / 4096;
const CODE: u64 = 0x5000;

/// r8: first byte, r9: first byte behind. Adds 1 to a number on each page, again and again.
///
/// ```text
/// l: mov rdi,r8; m: inc qword [rdi]; add rdi,0x1000; cmp rdi,r9; jb m; jmp l
/// ```
const PROGRAM: [u8; 20] = [
    0x4c, 0x89, 0xc7, 0x48, 0xff, 0x07, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x4c, 0x39, 0xcf, 0x72,
    0xf1, 0xeb, 0xec,
];

type Failure = Box<dyn std::error::Error>;

struct Vmm {
    vm: VmFd,
    ram: Arc<GuestRam>,
    faults: KvmFaults,
    wanted: AtomicBool,
    /// The vCPU's thread ends. No pause follows.
    over: AtomicBool,
    /// Locked while the vCPU is in the guest.
    vcpu: Mutex<VcpuFd>,
    thread: OnceLock<libc::pthread_t>,
}

fn os(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> MachineError {
    move |e| MachineError::os(what, std::io::Error::from_raw_os_error(e.errno()))
}

/// `faults` does all that concerns missing pages. The dirty log is the VMM's own.
impl Machine for Vmm {
    fn kind(&self) -> MachineKind<'_> {
        MachineKind::new("own-kvm", "x86_64", "own-kvm/1")
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
    fn set_dirty_log(&self, on: bool) -> Result<(), MachineError> {
        self.set_slots(if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 })?;
        self.ram.forget_writes();
        Ok(())
    }
    /// `KVM_GET_DIRTY_LOG` re-arms the log itself.
    fn harvest_dirty(&self, dirty: &PageBitmap, rearm: bool) -> Result<usize, MachineError> {
        let mut newly = self.ram.harvest_writes(dirty, rearm)?;
        for region in self.ram.layout().regions() {
            let log = (self.vm).get_dirty_log(region.slot, region.pages as usize * 4096);
            let log = log.map_err(os("cannot read the dirty log"))?;
            for (index, word) in region.words().zip(log) {
                newly += dirty.or_word(index, word).count_ones() as usize;
            }
        }
        Ok(newly)
    }
    fn deliveries(&self) -> Vec<Delivery> {
        self.faults.deliveries()
    }
    fn delivery(&self) -> Option<DeliveryInUse> {
        self.faults.delivery()
    }
    fn arm_userfault(
        &self,
        missing: Arc<PageBitmap>,
        options: ArmOptions,
    ) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
        self.faults.arm_userfault(&missing, &options)
    }
    fn receives_in_place(&self) -> bool {
        self.faults.receives_in_place()
    }
    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.faults.install(first, pages)
    }
    fn install_copy(&self, page: RamPage, bytes: &[u8]) -> Result<(), MachineError> {
        self.faults.install_copy(page, bytes)
    }
    fn begin_postcopy(&self) -> Result<(), MachineError> {
        self.faults.begin_postcopy()
    }
    fn disarm_userfault(&self) -> Result<(), MachineError> {
        self.faults.disarm_userfault()
    }
    fn collapse(&self, first: RamPage) -> Collapsed {
        self.faults.collapse(first)
    }
    fn host_large_bytes(&self) -> Result<u64, MachineError> {
        self.faults.host_large_bytes()
    }
    fn abandon(&self) {
        self.faults.abandon();
    }
}

/// The state of the vCPU is its general registers. The guest changes no others.
impl Vcpus for Vmm {
    fn count(&self) -> usize {
        1
    }
    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let was_running = self.wanted.swap(false, SeqCst);
        let began = Instant::now();
        // A signal that comes before the vCPU enters the guest has no effect: so more follow.
        while self.vcpu.try_lock().is_err() {
            if began.elapsed() > limit {
                let what = "leaving the guest";
                return Err(MachineError::Timeout { what, limit });
            }
            let thread = *self.thread.get().expect("it runs");
            // SAFETY: the thread ends after the last pause only, and the signal has a handler.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            std::thread::sleep(Duration::from_micros(100));
        }
        let now = Instant::now();
        Ok(PauseReport {
            first_stop: now,
            last_stop: now,
            was_running,
        })
    }
    fn resume(&self) {
        self.wanted.store(true, SeqCst);
    }
    fn inside(&self) -> usize {
        self.vcpu.try_lock().is_err().into()
    }
    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        let regs = self.vcpu.lock().unwrap().get_regs();
        let regs = regs.map_err(os("cannot read the registers"))?;
        let words = [regs.rdi, regs.r8, regs.r9, regs.rip, regs.rflags];
        Ok(vec![VcpuState(words.map(u64::to_le_bytes).concat())])
    }
    fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        let words: Vec<u64> = (states.iter().flat_map(|state| state.0.as_chunks().0))
            .map(|bytes| u64::from_le_bytes(*bytes))
            .collect();
        let [rdi, r8, r9, rip, rflags] = *words else {
            let why = format!("{} words, expected 5", words.len());
            return Err(MachineError::BadState(why));
        };
        let regs = kvm_regs {
            rdi,
            r8,
            r9,
            rip,
            rflags,
            ..Default::default()
        };
        let set = self.vcpu.lock().unwrap().set_regs(&regs);
        set.map_err(os("cannot set the registers"))
    }
}

impl Vmm {
    fn new() -> Result<Arc<Self>, Failure> {
        let kvm = Kvm::new()?;
        let vm = kvm.create_vm()?;
        vm.set_tss_address(0xfffb_d000)?;
        let memfd = memfd_create("own-kvm", MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memfd, PLACES.iter().map(|place| place.1).sum())?;
        let (mut regions, mut offset) = (Vec::new(), 0);
        for (start, bytes) in PLACES {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            let at = std::ptr::null_mut();
            // SAFETY: the kernel chooses an unused address.
            let at = unsafe { mmap(at, bytes as usize, access, MapFlags::SHARED, &memfd, offset) }?;
            let region = AdoptedRegion::new(Gpa(start), bytes, memfd.try_clone()?, offset);
            regions.push(region.mapped_at(Hva(at as u64)));
            offset += bytes;
        }
        // SAFETY: only the vCPU writes the memfd, and the mappings are never unmapped.
        let ram = Arc::new(unsafe { GuestRam::adopt(regions) }?);
        let vcpu = vm.create_vcpu(0)?;
        let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
        vcpu.set_cpuid2(&CpuId::from_entries(supported.as_slice()).unwrap())?;
        set_mode(&vcpu)?;
        let vmm = Arc::new(Self {
            vm,
            faults: KvmFaults::new(Arc::clone(&ram), 1),
            ram,
            wanted: false.into(),
            over: false.into(),
            vcpu: Mutex::new(vcpu),
            thread: OnceLock::new(),
        });
        vmm.set_slots(0)?;
        let of_thread = Arc::clone(&vmm);
        let thread = std::thread::spawn(move || of_thread.run());
        let _ = vmm.thread.set(thread.as_pthread_t());
        Ok(vmm)
    }

    /// The slots show the VMM's own mappings.
    fn set_slots(&self, flags: u32) -> Result<(), MachineError> {
        for region in self.ram.layout().regions() {
            let slot = kvm_userspace_memory_region {
                slot: region.slot,
                flags,
                guest_phys_addr: region.gfn.gpa().0,
                memory_size: region.pages * 4096,
                userspace_addr: self.ram.guest_hva(region.first).0,
            };
            // SAFETY: the mappings are never unmapped, and no Rust reference to them exists.
            unsafe { self.vm.set_user_memory_region(slot) }
                .map_err(os("KVM refuses a memory slot"))?;
        }
        Ok(())
    }

    /// The vCPU's thread. It knows nothing of missing pages: the vCPU sleeps in `KVM_RUN`.
    fn run(&self) {
        while !self.over.load(SeqCst) {
            let mut vcpu = self.vcpu.lock().unwrap();
            if !self.wanted.load(SeqCst) {
                drop(vcpu);
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            match vcpu.run() {
                Err(e) if e.errno() == libc::EINTR => {}
                other => panic!("the vCPU left the guest: {other:?}"),
            }
        }
    }

    /// Writes the program, and tables that map the first GiB at its own addresses.
    fn load(&self) -> Result<(), Failure> {
        let word = |at, value: u64| self.ram.try_write(Gpa(at), &value.to_le_bytes());
        // Present, writable, user, accessed and dirty; the last level also large.
        word(0x1000, 0x2067)?;
        word(0x2000, 0x3067)?;
        for index in 0..512 {
            word(0x3000 + index * 8, index << 21 | 0xe7)?;
        }
        self.ram.try_write(Gpa(CODE), &PROGRAM)?;
        let (first, bytes) = PLACES[1];
        let words = [first, first, first + bytes, CODE, 2];
        let state = VcpuState(words.map(u64::to_le_bytes).concat());
        Ok(Vcpus::restore(self, &[state])?)
    }

    /// The number on a page.
    fn number(&self, page: u64) -> Result<u64, Failure> {
        let mut bytes = [0; 8];
        let at = Gpa(PLACES[1].0 + page * 4096);
        self.ram.try_read(at, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

/// 64-bit mode in ring 3, without descriptor tables. Both ends set it.
fn set_mode(vcpu: &VcpuFd) -> Result<(), Failure> {
    let segment = |selector, type_, l| kvm_segment {
        limit: 0xffff_ffff,
        selector,
        type_,
        present: 1,
        dpl: 3,
        s: 1,
        l,
        db: 1 - l,
        g: 1,
        ..Default::default()
    };
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cr0, sregs.cr3, sregs.cr4) = (0x8001_0033, 0x1000, 1 << 5);
    sregs.efer = 0x500;
    (sregs.cs, sregs.ss) = (segment(0x33, 11, 1), segment(0x2b, 3, 0));
    (sregs.ds, sregs.es) = (sregs.ss, sregs.ss);
    (sregs.gdt.limit, sregs.idt.limit) = (0, 0);
    Ok(vcpu.set_sregs(&sregs)?)
}

/// Moves a running VM by this delivery, and checks what its guest has done.
fn move_vm(delivery: Option<Delivery>) -> Result<DestinationReport, Failure> {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: a handler that does nothing is safe at any time.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as libc::sighandler_t) };
    let (from, to) = (Vmm::new()?, Vmm::new()?);
    from.load()?;
    Vcpus::resume(&*from);
    std::thread::sleep(Duration::from_millis(100));
    let config = DestinationConfig {
        delivery,
        ..DestinationConfig::default()
    };
    let listener = Listener::bind(&"127.0.0.1:0".parse()?)?;
    let destination = Arc::new(Destination::listen(listener, config, |_| {})?);
    let address = destination.local_addrs()[0].clone();
    let session = SourceSession::new()?;
    let of_source = Arc::clone(&from);
    let source = std::thread::spawn(move || {
        let machine: Arc<dyn Machine> = Arc::clone(&of_source) as _;
        let vm = RunningVm {
            machine: &machine,
            vcpus: &*of_source,
            devices: &[],
        };
        let (route, config) = (Route::To(address), SourceConfig::default());
        migrate(&vm, &route, b"", &config, &session, &Unobserved).map(drop)
    });
    let machine: Arc<dyn Machine> = Arc::clone(&to) as _;
    let vm = RunningVm {
        machine: &machine,
        vcpus: &*to,
        devices: &[],
    };
    let began = Instant::now();
    let late = || began.elapsed() > Duration::from_secs(60);
    let incoming = destination.accept(&late)?;
    let report = incoming.receive(&vm, &Resolver::new(), &late, &Unobserved)?;
    source.join().expect("the source does not panic")?;
    let arrived = to.number(0)?;
    while to.number(0)? == arrived && !late() {
        std::thread::sleep(Duration::from_millis(10));
    }
    Vcpus::pause(&*to, Duration::from_secs(10))?;
    for vmm in [&from, &to] {
        vmm.over.store(true, SeqCst);
    }
    let (first, mut last) = (to.number(0)?, u64::MAX);
    for page in 0..PAGES {
        let number = to.number(page)?;
        assert!(
            number <= last && first - number <= 1,
            "page {page} has {number}"
        );
        last = number;
    }
    assert!(first > arrived, "the guest does not continue");
    println!(
        "{} pages were missing at the start, delivery {}; {first} rounds",
        report.missing_at_start, report.delivery.delivery
    );
    Ok(report)
}

/// Moves a VM by each delivery of this host that such a VMM can use.
pub(crate) fn run() -> Result<(), Failure> {
    let some = Vmm::new()?;
    some.over.store(true, SeqCst);
    for delivery in some.faults.deliveries() {
        move_vm(Some(delivery))?;
    }
    move_vm(None).map(drop)
}
