//! A VM of one scheme, all its slots set up, with its vCPU on a thread of its own.

use super::host::Host;
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

/// The longest a guest may take for anything.
pub(super) const LIMIT: Duration = Duration::from_secs(20);

/// Pages of [`Host`] before the test's memory: slot 0, with the programs.
const PROGRAM_PAGES: u64 = 1;
/// Where each program begins in slot 0, which is at guest address 0.
const AT: [u64; 3] = [0, 0x400, 0x800];

/// What a guest is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// [`program::halves`].
    Halves,
    /// [`program::writer`].
    Writer,
    /// [`program::sweep`].
    Sweep,
}

/// A program with its area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Start {
    pub(super) program: Program,
    pub(super) first: Gpa,
    pub(super) middle: Gpa,
    pub(super) end: Gpa,
    pub(super) stride: u64,
}

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ended {
    /// a1.
    pub(super) answer: u64,
    /// Lowest and highest address of stores where no slot was.
    pub(super) astray: Option<(Gpa, Gpa)>,
}

/// Host memory that has room for the program and `pages` pages of a test.
pub(super) fn host(pages: u64) -> Result<Arc<Host>, BenchError> {
    Host::new(PROGRAM_PAGES + pages)
}

/// The VM.
pub(super) struct TestVm<M: Memslots> {
    pub(super) vm: Vm<M>,
    pub(super) split: Split,
    pub(super) host: Arc<Host>,
    /// How long the creation of the test's slots took.
    pub(super) setup: Duration,
    vcpu: Thread,
}

impl<M: Memslots> TestVm<M> {
    /// Creates the VM, its vCPU and its slots; only the test's slots are timed.
    pub(super) fn new(host: &Arc<Host>, split: Split) -> Result<Self, BenchError> {
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
            for (index, pair) in code.chunks(2).enumerate() {
                let high = pair.get(1).copied().unwrap_or(0);
                let word = u64::from(pair[0]) | u64::from(high) << 32;
                host.word(0, at + 8 * index as u64)
                    .store(word, Ordering::Relaxed);
            }
        }
        vm.set_user_memory_region2(region(0, Gpa(0), 0, PROGRAM_PAGES))
            .map_err(refused)?;
        let vcpu = vm.create_vcpu(0).map_err(refused)?;
        let began = Instant::now();
        for index in 0..split.slots {
            let first = split.first(index);
            let (gpa, pages) = (Split::gpa(first), split.pages_of(index));
            vm.set_user_memory_region2(region(id(index), gpa, PROGRAM_PAGES + first, pages))
                .map_err(refused)?;
        }
        let setup = began.elapsed();
        Ok(Self {
            vm,
            split,
            host: Arc::clone(host),
            setup,
            vcpu: Thread::start(vcpu)?,
        })
    }

    /// The doubleword at `offset` of a page of the test's memory.
    pub(super) fn word(&self, page: u64, offset: u64) -> &std::sync::atomic::AtomicU64 {
        self.host.word(PROGRAM_PAGES + page, offset)
    }

    /// Moves the `index`th slot to another guest address.
    pub(super) fn move_slot(&self, index: u32, gpa: Gpa) -> Result<(), BenchError> {
        self.vm
            .set_user_memory_region2(Region {
                slot: id(index),
                flags: SlotFlags::EMPTY,
                gpa,
                size: self.split.pages_of(index) * PAGE_SIZE,
                hva: self.host.hva(PROGRAM_PAGES + self.split.first(index)),
                memory: Some(Arc::clone(&self.host) as Arc<dyn HostMemory>),
                userfault: None,
            })
            .map_err(refused)
    }

    /// Unmaps pages of the test's memory, slot by slot.
    pub(super) fn unmap(&self, first: u64, pages: u64) {
        for (first, pages) in self.split.pieces(first, pages) {
            let first = PROGRAM_PAGES + first;
            self.vm
                .invalidate_hva(self.host.hva(first)..self.host.hva(first + pages));
        }
    }

    /// Lets the guest begin.
    pub(super) fn start(&self, start: Start) -> Result<(), BenchError> {
        for word in [program::EXIT, program::SYNC, program::PASSES] {
            self.word(0, word).store(0, Ordering::Relaxed);
        }
        self.vcpu.program(start)
    }

    /// Asks the guest to do its part and waits until it has.
    pub(super) fn synchronise(&self) -> Result<(), BenchError> {
        let word = self.word(0, program::SYNC);
        word.store(1, Ordering::Release);
        wait_for(|| word.load(Ordering::Acquire) == 0)
    }

    /// Waits until the writer has done `more` passes from here.
    pub(super) fn wait_passes(&self, more: u64) -> Result<(), BenchError> {
        let word = self.word(0, program::PASSES);
        let goal = word.load(Ordering::Acquire) + more;
        wait_for(|| word.load(Ordering::Acquire) >= goal)
    }

    /// Waits until the guest has ended by itself.
    pub(super) fn ended(&self) -> Result<Ended, BenchError> {
        self.vcpu.ended()
    }

    /// Tells the guest to end and waits until it has.
    pub(super) fn end(&self) -> Result<Ended, BenchError> {
        self.word(0, program::EXIT).store(1, Ordering::Release);
        self.ended()
    }
}

/// The id of the `index`th slot of a test's memory.
pub(super) fn id(index: u32) -> u16 {
    u16::try_from(index + 1).expect("a VM has at most 32 764 slots")
}

fn refused(error: pageferry_hypervisor::VmError) -> BenchError {
    BenchError::Memslot(format!("the hypervisor refused a call: {error}"))
}

/// Spins a little, then yields, until `done`.
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

/// The vCPU's thread: sleeps between programs.
struct Thread {
    starts: Option<mpsc::Sender<Start>>,
    ends: mpsc::Receiver<Result<Ended, String>>,
    kick: KickHandle,
    stop: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
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
            _ => Err(BenchError::Memslot("the vCPU's thread has ended".into())),
        }
    }

    fn ended(&self) -> Result<Ended, BenchError> {
        let end = self.ends.recv_timeout(LIMIT).map_err(|_| late())?;
        end.map_err(BenchError::Memslot)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.starts = None;
        self.stop.store(true, Ordering::Release);
        self.kick.kick();
        if let Some(handle) = self.handle.take() {
            // A panic of that thread was printed by itself.
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
