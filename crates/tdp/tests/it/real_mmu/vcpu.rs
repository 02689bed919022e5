//! A vCPU that executes commands in ring 3, and reports its page faults.

use super::code::{self, FAULT_PORT, OTHER_PORT, Routine, command, report};
use super::flush::Presence;
use super::kick::own_thread;
use super::layout::{
    CODE_RING3, DATA_RING3, DOORBELL_GVA, GDT_GVA, GDT_LIMIT, IDT_GVA, IDT_LIMIT, PINNED_GVA, Seat,
    TSS_LIMIT,
};
use super::vm::Vm;
use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::{VcpuExit, VcpuFd};
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::Access;
use pageferry_testkit::LIMIT;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A command for the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) routine: Routine,
    /// Guest-virtual addresses, `stride` bytes apart.
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) stride: u64,
    pub(crate) value: u64,
}

impl Command {
    /// `routine` at one address.
    pub(crate) const fn at(routine: Routine, gva: u64) -> Self {
        Self {
            routine,
            start: gva,
            end: gva + 1,
            stride: 8,
            value: 0,
        }
    }

    /// `routine` at the first word of each of `pages` pages from `gva` on.
    pub(crate) const fn pages(routine: Routine, gva: u64, pages: u64) -> Self {
        Self {
            routine,
            start: gva,
            end: gva + pages * 4096,
            stride: 4096,
            value: 0,
        }
    }

    /// The same with a value.
    pub(crate) const fn with(self, value: u64) -> Self {
        Self { value, ..self }
    }
}

/// A page fault, as the processor reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageFault {
    pub(crate) gva: u64,
    /// The error code, a combination of the constants here.
    pub(crate) error: u64,
}

impl PageFault {
    /// The page is mapped, but its permissions forbid the access.
    pub(crate) const PRESENT: u64 = 1 << 0;
    /// A store.
    pub(crate) const WRITE: u64 = 1 << 1;
    /// By ring 3.
    pub(crate) const USER: u64 = 1 << 2;
    /// An entry has a reserved bit set.
    pub(crate) const RESERVED: u64 = 1 << 3;
    /// An instruction fetch.
    pub(crate) const FETCH: u64 = 1 << 4;

    /// The attempted access.
    pub(crate) const fn access(self) -> Access {
        Access {
            write: self.error & Self::WRITE != 0,
            execute: self.error & Self::FETCH != 0,
        }
    }

    /// Its address.
    pub(crate) const fn gfn(self) -> Gfn {
        Gfn(self.gva >> 12)
    }
}

/// The answer to a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Retry the access.
    Retry,
    /// Give the command up.
    Abandon,
}

/// The end of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It returned the routine's result.
    Done(u64),
    /// It was given up at this fault.
    Faulted(PageFault),
}

/// The tables that a vCPU runs on.
pub(crate) trait Space {
    /// The frame of the root. All [pinned](super::layout::pinned) pages are mapped under it.
    fn root(&mut self) -> Pfn;
    /// Handles a page fault. The vCPU is out of the guest.
    fn fault(&mut self, fault: PageFault) -> Answer;
}

/// A vCPU.
pub(crate) struct Vcpu {
    fd: VcpuFd,
    seat: Seat,
    vm: Arc<Vm>,
    presence: Arc<Presence>,
    /// Bit 3 of CR3 at the last load (the caching of the root).
    cr3_bit: u64,
}

enum Event {
    Rung(u64),
    Fault(PageFault),
}

impl Vcpu {
    pub(crate) fn new(vm: Arc<Vm>, number: u64) -> Self {
        let fd = vm.fd.create_vcpu(number).expect("a vCPU");
        fd.set_cpuid2(&vm.host.cpuid).expect("CPUID");
        let seat = Seat(number);
        let presence = Arc::new(Presence::default());
        vm.flushes.register(Arc::clone(&presence));
        let vcpu = Self {
            fd,
            seat,
            vm,
            presence,
            cr3_bit: 0,
        };
        vcpu.start();
        vcpu
    }

    /// Ring 3, 64-bit mode, no interrupts, no SMEP, no SMAP. Source: AMD64 APM volume 2, 3.1
    /// "System-Control Registers".
    fn start(&self) {
        const CR0: u64 = 1 | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 16 | 1 << 31; // PE MP ET NE WP PG
        const CR4: u64 = 1 << 5; // PAE
        const EFER: u64 = 1 << 8 | 1 << 10 | 1 << 11; // LME LMA NXE
        let segment = |selector: u16, code: bool| kvm_segment {
            limit: 0xffff_ffff,
            selector,
            type_: if code { 11 } else { 3 },
            present: 1,
            dpl: 3,
            s: 1,
            l: u8::from(code),
            db: u8::from(!code),
            g: 1,
            ..Default::default()
        };
        let mut sregs = self.fd.get_sregs().expect("registers");
        (sregs.cr0, sregs.cr4, sregs.efer) = (CR0, CR4, EFER);
        sregs.cs = segment(CODE_RING3, true);
        let data = segment(DATA_RING3, false);
        (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
        (sregs.idt.base, sregs.idt.limit) = (IDT_GVA, IDT_LIMIT);
        (sregs.gdt.base, sregs.gdt.limit) = (GDT_GVA, GDT_LIMIT);
        sregs.tr = kvm_segment {
            base: self.seat.tss_gva(),
            limit: TSS_LIMIT,
            selector: self.seat.tss_selector(),
            type_: 11,
            present: 1,
            ..Default::default()
        };
        self.fd.set_sregs(&sregs).expect("registers");
        let regs = kvm_regs {
            rip: code::next_gva(),
            rbp: PINNED_GVA + self.seat.command(),
            r15: DOORBELL_GVA,
            rflags: 2,
            ..Default::default()
        };
        self.fd.set_regs(&regs).expect("registers");
    }

    /// The state that the flushing thread reads.
    pub(crate) fn presence(&self) -> &Presence {
        &self.presence
    }

    /// Makes the program execute `command` on the tables of `space`.
    ///
    /// # Panics
    /// If the guest does anything else than fault and finish, or takes too long.
    pub(crate) fn run(&mut self, command: Command, space: &mut impl Space) -> Outcome {
        assert!(
            command.end <= 1 << 46,
            "{command:x?} is not below the pinned pages"
        );
        let set = |word: u64, value: u64| {
            let at = self.vm.ram.word(self.seat.command() + word);
            at.store(value, Ordering::Relaxed);
        };
        set(command::ROUTINE, command.routine.gva());
        set(command::START, command.start);
        set(command::END, command.end);
        set(command::STRIDE, command.stride);
        set(command::VALUE, command.value);
        set(command::STACK, PINNED_GVA + self.seat.stack_end());
        let mut abandoned = None;
        loop {
            match self.until_event(space) {
                Event::Rung(value) => {
                    return abandoned.map_or(Outcome::Done(value), Outcome::Faulted);
                }
                Event::Fault(fault) => match space.fault(fault) {
                    Answer::Retry => {}
                    Answer::Abandon => {
                        abandoned = Some(fault);
                        let resume = self.vm.ram.word(self.seat.report() + report::RESUME);
                        resume.store(code::top_gva(), Ordering::Relaxed);
                    }
                },
            }
        }
    }

    /// Does [`run`](Self::run) for a command that must not be given up. Returns the routine's
    /// result.
    pub(crate) fn complete(&mut self, command: Command, space: &mut impl Space) -> u64 {
        match self.run(command, space) {
            Outcome::Done(value) => value,
            Outcome::Faulted(fault) => panic!("{command:x?} was given up at {fault:x?}"),
        }
    }

    fn until_event(&mut self, space: &mut impl Space) -> Event {
        let end = Instant::now() + LIMIT / 2;
        loop {
            assert!(Instant::now() < end, "the guest gets nowhere");
            if let Err(number) = self.presence.try_enter(&self.vm.flushes, own_thread()) {
                self.load_cr3(space.root());
                self.presence.carried_out(number);
                continue;
            }
            let exit = self.fd.run();
            self.presence.leave();
            match exit {
                Ok(VcpuExit::IoOut(FAULT_PORT, _)) => {
                    let word = |word| {
                        let at = self.vm.ram.word(self.seat.report() + word);
                        at.load(Ordering::Relaxed)
                    };
                    let fault = PageFault {
                        gva: word(report::CR2),
                        error: word(report::ERROR),
                    };
                    let pinned = fault.gva.wrapping_sub(PINNED_GVA) < 1 << 32;
                    assert!(
                        !pinned,
                        "{fault:x?} by {:#x}: a pinned page",
                        word(report::RIP)
                    );
                    return Event::Fault(fault);
                }
                Ok(VcpuExit::MmioWrite(_, data)) => {
                    let value = data.try_into().expect("the doorbell takes eight bytes");
                    return Event::Rung(u64::from_le_bytes(value));
                }
                Ok(VcpuExit::Intr) => {}
                Err(why) if matches!(why.errno(), libc::EINTR | libc::EAGAIN) => {}
                other => {
                    let other = match other {
                        Ok(VcpuExit::IoOut(OTHER_PORT, _)) => "an exception".to_owned(),
                        other => format!("{other:?}"),
                    };
                    panic!("{other}: {:x?}", self.fd.get_regs());
                }
            }
        }
    }

    /// Loads CR3 with bit 3 inverted since the last time. KVM takes that as a change and flushes.
    fn load_cr3(&mut self, root: Pfn) {
        self.cr3_bit ^= 1 << 3;
        let mut sregs = self.fd.get_sregs().expect("registers");
        sregs.cr3 = root.0 << 12 | self.cr3_bit;
        self.fd.set_sregs(&sregs).expect("CR3");
    }
}
