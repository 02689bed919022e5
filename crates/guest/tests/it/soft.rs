//! A small VM on Pageferry's own hypervisor.
#![expect(unsafe_code, reason = "declares what memory slots point at")]

use crate::memory::Memory;
use crate::suite::{Stop, TestVm};
use pageferry_addr::{Gpa, Hva, RamPage};
use pageferry_guest::{DOORBELL_GPA, Doorbell, HOLE_END, HOLE_START, Isa, PageBytes, Program};
use pageferry_hypervisor::{Exit, HostMemory, Region, SlotFlags, VcpuCore, VmConfig};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

struct Ram {
    memory: Memory,
    bytes: u64,
}

// SAFETY: 1. mapped, readable and writable until drop; 2. it came from mmap; 3. accessed by
// volatile only.
unsafe impl HostMemory for Ram {
    fn hva_range(&self) -> Range<Hva> {
        let start = self.memory.address();
        Hva(start)..Hva(start + self.bytes)
    }
}

/// A VM with a program loaded.
pub(crate) struct Vm {
    vcpus: Vec<VcpuCore>,
    ram: Arc<Ram>,
}

impl TestVm for Vm {
    const ISA: Isa = Isa::Rv64;

    fn boot(program: &Program) -> Self {
        assert_eq!(program.isa(), Isa::Rv64);
        let vm = pageferry_hypervisor::Vm::new(VmConfig::default());
        let bytes = program.memory_map().memory_bytes();
        let ram = Arc::new(Ram {
            memory: Memory::new(bytes),
            bytes,
        });
        let low = bytes.min(HOLE_START);
        for (slot, gpa, offset, size) in [(0, 0, 0, low), (1, HOLE_END, low, bytes - low)] {
            if size != 0 {
                vm.set_user_memory_region2(Region {
                    slot,
                    flags: SlotFlags::EMPTY,
                    gpa: Gpa(gpa),
                    size,
                    hva: Hva(ram.memory.address() + offset),
                    memory: Some(ram.clone()),
                    userfault: None,
                })
                .unwrap();
            }
        }
        for (gpa, bytes) in program.image() {
            let mut page = [0; 4096];
            page[..bytes.len()].copy_from_slice(&bytes);
            ram.memory.write(RamPage(gpa.gfn().0), &page);
        }
        let vcpus = (0..program.memory_map().vcpus())
            .map(|id| {
                let mut vcpu = vm.create_vcpu(id).unwrap();
                let start = program.start(id);
                let hart = vcpu.hart_mut();
                hart.set_pc(start.entry).unwrap();
                hart.set_x(2, start.stack);
                hart.set_x(10, start.args[0]);
                hart.set_x(11, start.args[1]);
                vcpu
            })
            .collect();
        Self { vcpus, ram }
    }

    fn read(&self, page: RamPage) -> PageBytes {
        self.ram.memory.read(page)
    }

    fn write(&mut self, page: RamPage, bytes: &PageBytes) {
        self.ram.memory.write(page, bytes);
    }

    fn run(&mut self, limit: Duration) -> Vec<Stop> {
        let end = Instant::now() + limit;
        let over = &AtomicBool::new(false);
        std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .vcpus
                .iter_mut()
                .map(|vcpu| (vcpu.kick_handle(), scope.spawn(|| run_vcpu(vcpu, over))))
                .collect();
            while Instant::now() < end && threads.iter().any(|(_, thread)| !thread.is_finished()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            over.store(true, Ordering::Relaxed);
            threads
                .into_iter()
                .map(|(kick, thread)| {
                    kick.kick();
                    thread.join().unwrap()
                })
                .collect()
        })
    }
}

fn run_vcpu(vcpu: &mut VcpuCore, over: &AtomicBool) -> Stop {
    loop {
        match vcpu.run() {
            Exit::Kicked if over.load(Ordering::Relaxed) => return Stop::Kicked,
            // Left over from the run before: that kick came after this vCPU had stored to the
            // doorbell.
            Exit::Kicked => {}
            Exit::MmioWrite { gpa, size, value } => {
                assert_eq!((gpa, size), (DOORBELL_GPA, 4));
                return Stop::Doorbell(Doorbell::parse(value as u32).unwrap());
            }
            exit => panic!("exit {exit:?}"),
        }
    }
}
