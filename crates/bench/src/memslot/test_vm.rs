//! A VM of one scheme with all its slots. Its vCPU has its own thread.

use super::host::SlotMemory;
use super::program;
use super::split::Split;
use crate::BenchError;
use pageferry_addr::{Gpa, PAGE_SIZE};
use pageferry_hypervisor::{
    Exit, HostMemory, KickHandle, Memslots, Region, SlotFlags, VcpuCore, Vm, VmConfig,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time limit for each step of a guest.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

/// The number of pages of [`SlotMemory`] before the test's memory: slot 0, with the programs.
const PROGRAM_PAGES: u64 = 1;
/// The offset of each program in slot 0, which is at guest address 0.
const AT: [u64; 3] = [0, 0x400, 0x800];

/// The program that a guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// [`program::halves`].
    Halves,
    /// [`program::writer`].
    Writer,
    /// [`program::sweep`].
    Sweep,
}

/// A program with its arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) program: Program,
    pub(super) first: Gpa,
    pub(super) middle: Gpa,
    pub(super) end: Gpa,
    pub(super) stride: u64,
}

/// The result of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// The value of a1.
    pub(super) answer: u64,
    /// The lowest and the highest address of stores that hit no slot.
    pub(super) astray: Option<(Gpa, Gpa)>,
}

/// Host memory for the programs and `pages` pages of a test.
pub(super) fn host(pages: u64) -> Result<Arc<SlotMemory>, BenchError> {
    SlotMemory::new(PROGRAM_PAGES + pages)
}

/// A VM with its slots and its vCPU.
pub(super) struct TestVm<M: Memslots> {
    pub(super) vm: Vm<M>,
    pub(super) split: Split,
    pub(super) host: Arc<SlotMemory>,
    /// The time to create the test's slots.
    pub(super) setup: Duration,
    vcpu: VcpuThread,
}

impl<M: Memslots> TestVm<M> {
    /// Creates the VM, its vCPU and its slots. Only the test's slots are timed.
    pub(super) fn new(host: &Arc<SlotMemory>, split: Split) -> Result<Self, BenchError> {
        let vm = Vm::<M>::with_memslots(VmConfig::default());
        let memory = Arc::clone(host) as Arc<dyn HostMemory>;
        let region = |slot, gpa, page, pages| Region {
            slot,
            flags: SlotFlags::EMPTY,
            gpa,
            size: pages * PAGE_SIZE,
            hva: host.hva(page),
            memory: Some(Arc::clone(&memory)),
            userfault: None,
        };
        let programs = [program::halves(), program::writer(), program::sweep()];
        for (at, code) in AT.into_iter().zip(&programs) {
            assert!(
                code.len() * 4 <= 0x400,
                "a program is longer than its place"
            );
            host.write_code(at, code);
        }
        vm.set_user_memory_region2(region(0, Gpa(0), 0, PROGRAM_PAGES))?;
        let vcpu = vm.create_vcpu(0)?;
        let began = Instant::now();
        for index in 0..split.slots {
            let first = split.first(index);
            let (gpa, pages) = (Split::gpa(first), split.pages_of(index));
            vm.set_user_memory_region2(region(id(index), gpa, PROGRAM_PAGES + first, pages))?;
        }
        let setup = began.elapsed();
        Ok(Self {
            vm,
            split,
            host: Arc::clone(host),
            setup,
            vcpu: VcpuThread::start(vcpu)?,
        })
    }

    /// The doubleword at `offset` of a page of the test's memory.
    pub(super) fn word(&self, page: u64, offset: u64) -> &std::sync::atomic::AtomicU64 {
        self.host.word(PROGRAM_PAGES + page, offset)
    }

    /// Moves the `index`th slot to another guest address.
    pub(super) fn move_slot(&self, index: u32, gpa: Gpa) -> Result<(), BenchError> {
        self.vm.set_user_memory_region2(Region {
            slot: id(index),
            flags: SlotFlags::EMPTY,
            gpa,
            size: self.split.pages_of(index) * PAGE_SIZE,
            hva: self.host.hva(PROGRAM_PAGES + self.split.first(index)),
            memory: Some(Arc::clone(&self.host) as Arc<dyn HostMemory>),
            userfault: None,
        })?;
        Ok(())
    }

    /// Unmaps `pages` pages of the test's memory from `first`, slot by slot.
    pub(super) fn unmap(&self, first: u64, pages: u64) {
        for (first, pages) in self.split.pieces(first, pages) {
            let first = PROGRAM_PAGES + first;
            self.vm
                .invalidate_hva(self.host.hva(first)..self.host.hva(first + pages));
        }
    }

    /// Starts the guest.
    pub(super) fn start(&self, start: Start) -> Result<(), BenchError> {
        for word in [program::EXIT, program::SYNC, program::PASSES] {
            self.word(0, word).store(0, Ordering::Relaxed);
        }
        self.vcpu.program(start)
    }

    /// Lets the guest do its next part, and waits until it has.
    pub(super) fn synchronise(&self) -> Result<(), BenchError> {
        let word = self.word(0, program::SYNC);
        word.store(1, Ordering::Release);
        wait_for(|| word.load(Ordering::Acquire) == 0)
    }

    /// Waits until the guest's writer has done `more` further passes.
    pub(super) fn wait_passes(&self, more: u64) -> Result<(), BenchError> {
        let word = self.word(0, program::PASSES);
        let goal = word.load(Ordering::Acquire) + more;
        wait_for(|| word.load(Ordering::Acquire) >= goal)
    }

    /// Waits until the guest has ended.
    pub(super) fn ended(&self) -> Result<Ended, BenchError> {
        self.vcpu.ended()
    }

    /// Ends the guest, and waits until it has ended.
    pub(super) fn end(&self) -> Result<Ended, BenchError> {
        self.word(0, program::EXIT).store(1, Ordering::Release);
        self.ended()
    }
}

/// The id of the `index`th slot of a test's memory.
pub(super) fn id(index: u32) -> u16 {
    u16::try_from(index + 1).expect("a VM has at most 32 764 slots")
}

/// Waits for `done`: spins briefly, then yields.
fn wait_for(done: impl Fn() -> bool) -> Result<(), BenchError> {
    for _ in 0..64 {
        if done() {
            return Ok(());
        }
        std::hint::spin_loop();
    }
    let deadline = Instant::now() + LIMIT;
    while !done() {
        if Instant::now() > deadline {
            return Err(late());
        }
        std::thread::yield_now();
    }
    Ok(())
}

fn late() -> BenchError {
    BenchError::Busy(format!(
        "the guest did not do its part within {} s",
        LIMIT.as_secs()
    ))
}

/// The vCPU's thread. It sleeps between programs.
struct VcpuThread {
    starts: Option<mpsc::Sender<Start>>,
    ends: mpsc::Receiver<Result<Ended, String>>,
    kick: KickHandle,
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl VcpuThread {
    fn start<M: Memslots>(mut vcpu: VcpuCore<M>) -> Result<Self, BenchError> {
        let (starts, to_start) = mpsc::channel();
        let (ending, ends) = mpsc::channel();
        let (kick, stop) = (vcpu.kick_handle(), Arc::new(AtomicBool::new(false)));
        let stopped = Arc::clone(&stop);
        let handle = std::thread::Builder::new()
            .name("memslot-vcpu".into())
            .spawn(move || {
                for start in to_start {
                    if ending.send(run(&mut vcpu, &start, &stopped)).is_err() {
                        return;
                    }
                }
            })
            .map_err(|source| BenchError::Os {
                what: "cannot start a vCPU's thread",
                source,
            })?;
        Ok(Self {
            starts: Some(starts),
            ends,
            kick,
            stop,
            handle: Some(handle),
        })
    }

    fn program(&self, start: Start) -> Result<(), BenchError> {
        let sent = self.starts.as_ref().map(|starts| starts.send(start));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(BenchError::Hypervisor("the vCPU's thread has ended".into())),
        }
    }

    fn ended(&self) -> Result<Ended, BenchError> {
        let end = self.ends.recv_timeout(LIMIT).map_err(|_| late())?;
        end.map_err(BenchError::Hypervisor)
    }
}

impl Drop for VcpuThread {
    fn drop(&mut self) {
        self.starts = None;
        self.stop.store(true, Ordering::Release);
        self.kick.kick();
        if let Some(handle) = self.handle.take() {
            // The panic hook has already printed a panic of that thread.
            let _ = handle.join();
        }
    }
}

/// Runs one program to its end.
fn run<M: Memslots>(
    vcpu: &mut VcpuCore<M>,
    start: &Start,
    stop: &AtomicBool,
) -> Result<Ended, String> {
    let hart = vcpu.hart_mut();
    hart.set_pc(AT[start.program as usize])
        .map_err(|e| e.to_string())?;
    let arguments = [Split::gpa(0), start.first, start.middle, start.end];
    for (register, argument) in
        (10..).zip(arguments.map(|gpa| gpa.0).into_iter().chain([start.stride]))
    {
        hart.set_x(register, argument);
    }
    let mut astray = None;
    loop {
        match vcpu.run() {
            Exit::Ecall { args } => {
                return Ok(Ended {
                    answer: args[1],
                    astray,
                });
            }
            Exit::Halted | Exit::Kicked if stop.load(Ordering::Acquire) => {
                return Err("the guest was stopped".into());
            }
            Exit::Halted => std::thread::yield_now(),
            Exit::Kicked => {}
            Exit::MmioWrite {
                gpa,
                size: 8,
                value,
            } if value == program::VALUE_1 => {
                let (low, high) = astray.unwrap_or((gpa, gpa));
                astray = Some((low.min(gpa), high.max(gpa)));
            }
            other => return Err(format!("unexpected exit of the guest: {other:?}")),
        }
    }
}
