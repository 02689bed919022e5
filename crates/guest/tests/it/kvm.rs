//! A small VM on `/dev/kvm` for the tests here: memory, vCPUs in ring 3, and kicks.
#![expect(
    unsafe_code,
    reason = "hands guest memory to KVM and sends signals to vCPU threads"
)]

use crate::memory::Memory;
use crate::suite::{Stop, TestVm};
use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_regs, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use pageferry_addr::RamPage;
use pageferry_guest::{DOORBELL_GPA, Doorbell, HOLE_END, HOLE_START, Isa, PageBytes, Program};
use pageferry_testkit::skip;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A VM with a program loaded. Between two calls of [`Vm::run`] no vCPU runs.
pub(crate) struct Vm {
    vcpus: Vec<VcpuFd>,
    _vm: VmFd,
    memory: Memory,
}

/// Whether this host has a KVM to test on; prints the reason if not.
pub(crate) fn usable() -> bool {
    match Kvm::new() {
        Ok(_) => true,
        Err(error) => !skip("kvm", format!("/dev/kvm cannot be opened: {error}")),
    }
}

extern "C" fn on_kick(_: libc::c_int) {}

impl TestVm for Vm {
    const ISA: Isa = Isa::X86_64;

    fn boot(program: &Program) -> Self {
        assert_eq!(program.isa(), Isa::X86_64);
        let kvm = Kvm::new().unwrap();
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(0xfffb_d000).unwrap();
        let bytes = program.memory_map().memory_bytes();
        let memory = Memory::new(bytes);
        let low = bytes.min(HOLE_START);
        for (slot, gpa, offset, size) in [(0, 0, 0, low), (1, HOLE_END, low, bytes - low)] {
            if size != 0 {
                let region = kvm_userspace_memory_region {
                    slot,
                    flags: 0,
                    guest_phys_addr: gpa,
                    memory_size: size,
                    userspace_addr: memory.address() + offset,
                };
                // SAFETY: the memory stays mapped until after the VM is dropped.
                unsafe { vm.set_user_memory_region(region) }.unwrap();
            }
        }
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).unwrap();
        let vcpus = (0..program.memory_map().vcpus())
            .map(|id| {
                let vcpu = vm.create_vcpu(id.into()).unwrap();
                vcpu.set_cpuid2(&cpuid).unwrap();
                let start = program.start(id);
                enter_ring3(&vcpu, start.tables.0);
                let registers = kvm_regs {
                    rip: start.entry,
                    rsp: start.stack,
                    rdi: start.args[0],
                    rsi: start.args[1],
                    rflags: 2,
                    ..Default::default()
                };
                vcpu.set_regs(&registers).unwrap();
                vcpu
            })
            .collect();
        let mut this = Self {
            vcpus,
            _vm: vm,
            memory,
        };
        for (gpa, bytes) in program.image() {
            let mut page = [0; 4096];
            page[..bytes.len()].copy_from_slice(&bytes);
            this.write(RamPage(gpa.gfn().0), &page);
        }
        this
    }

    fn read(&self, page: RamPage) -> PageBytes {
        self.memory.read(page)
    }

    fn write(&mut self, page: RamPage, bytes: &PageBytes) {
        self.memory.write(page, bytes);
    }

    fn run(&mut self, limit: Duration) -> Vec<Stop> {
        // SAFETY: all zero is a valid sigaction; the handler does nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_kick as extern "C" fn(libc::c_int) as usize;
            assert_eq!(
                libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()),
                0
            );
        }
        let end = Instant::now() + limit;
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .vcpus
                .iter_mut()
                .map(|vcpu| {
                    let (sender, receiver) = std::sync::mpsc::channel();
                    let thread = scope.spawn(move || {
                        // SAFETY: always succeeds.
                        sender.send(unsafe { libc::pthread_self() }).unwrap();
                        run_vcpu(vcpu, over)
                    });
                    (receiver.recv().unwrap(), thread)
                })
                .collect();
            while Instant::now() < end && threads.iter().any(|(_, thread)| !thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            over.store(true, Ordering::Relaxed);
            // A signal that arrives just before KVM_RUN is lost, so it is repeated until it takes
            // effect.
            while threads.iter().any(|(_, thread)| !thread.is_finished()) {
                for (id, thread) in &threads {
                    if !thread.is_finished() {
                        // SAFETY: the thread is not joined yet, so its id is valid.
                        unsafe { libc::pthread_kill(*id, libc::SIGUSR1) };
                    }
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            threads
                .into_iter()
                .map(|(_, thread)| thread.join().unwrap())
                .collect()
        })
    }
}

fn run_vcpu(vcpu: &mut VcpuFd, over: &AtomicBool) -> Stop {
    loop {
        if over.load(Ordering::Relaxed) {
            return Stop::Kicked;
        }
        match vcpu.run() {
            Ok(VcpuExit::MmioWrite(address, data)) => {
                assert_eq!(address, DOORBELL_GPA.0);
                let value = u32::from_le_bytes(data.try_into().unwrap());
                return Stop::Doorbell(Doorbell::parse(value).unwrap());
            }
            Ok(exit) => panic!("exit {exit:?}"),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => panic!("KVM_RUN: {error}"),
        }
    }
}

/// 64-bit mode in ring 3 with flat segments and the tables at `root`.
fn enter_ring3(vcpu: &VcpuFd, root: u64) {
    let code = kvm_segment {
        limit: u32::MAX,
        selector: 0x33,
        type_: 11,
        present: 1,
        dpl: 3,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: 0x2b,
        type_: 3,
        l: 0,
        db: 1,
        ..code
    };
    let mut special = vcpu.get_sregs().unwrap();
    (special.cs, special.ss, special.ds) = (code, data, data);
    (special.es, special.fs, special.gs) = (data, data, data);
    special.cr3 = root;
    special.cr4 = 1 << 5; // PAE
    special.cr0 = 0x8000_0031; // PG, NE, ET, PE
    special.efer = 0x500; // LMA, LME
    vcpu.set_sregs(&special).unwrap();
}
