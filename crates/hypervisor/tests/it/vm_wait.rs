//! WFI in a VM: it waits for the timer, and ends for kicks and for interrupts of other threads.

use crate::support::vm::{HostRam, asm::*, vcpu, vm};
use pageferry_hypervisor::hart::{Interrupt, NO_DEADLINE, RunState, TIMEBASE_HZ};
use pageferry_hypervisor::{Exit, VcpuCore, Vm};
use std::thread;
use std::time::{Duration, Instant};

const UXL: u64 = 2 << 32;
const STATUS_SIE: u64 = 1 << 1;
const ALL: u64 = 0x222;
const HANDLER: u64 = 0x800;
const FAR: u64 = 1 << 60;

/// A vCPU whose program is a WFI. Its interrupt handler is another one, with the timer off.
fn waiting() -> (Vm, VcpuCore) {
    let ram = HostRam::new(1);
    ram.code(0, &[WFI, addi(A0, A0, 1), WFI]);
    ram.code(HANDLER, &[csrrw(X0, 0x14d, A1), csrrw(X0, 0x104, X0), WFI]);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut state = vcpu.state();
    state.stvec = HANDLER;
    state.sstatus = UXL | STATUS_SIE;
    state.sie = ALL;
    state.x[11] = NO_DEADLINE;
    vcpu.set_state(&state).unwrap();
    (vm, vcpu)
}

const MILLISECOND: u64 = TIMEBASE_HZ / 1000;

#[test]
fn wfi_waits_for_the_timer() {
    let (vm, mut vcpu) = waiting();
    let deadline = vm.time() + 30 * MILLISECOND;
    vcpu.hart_mut().set_timer(deadline);
    assert_eq!(vcpu.run(), Exit::Halted, "in the handler");
    assert!(vm.time() >= deadline);
    let state = vcpu.state();
    assert_eq!((state.scause, state.sepc), (1 << 63 | 5, 4));
    assert_eq!(state.x[10], 0);
}

#[test]
fn without_a_timer_wfi_is_an_exit() {
    let (_vm, mut vcpu) = waiting();
    assert_eq!(vcpu.run(), Exit::Halted);
    assert_eq!((vcpu.hart().pc(), vcpu.hart().wakes_at()), (4, None));
}

#[test]
fn a_clock_that_is_set_forward_ends_a_wait() {
    let (vm, mut vcpu) = waiting();
    vcpu.hart_mut().set_timer(FAR);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            vm.advance_time(FAR);
        });
        assert_eq!(vcpu.run(), Exit::Halted);
    });
    assert_eq!(vcpu.state().scause, 1 << 63 | 5);
}

#[test]
fn a_kick_ends_a_wait() {
    let (_vm, mut vcpu) = waiting();
    vcpu.hart_mut().set_timer(FAR);
    let kick = vcpu.kick_handle();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(20));
            kick.kick();
        });
        assert_eq!(vcpu.run(), Exit::Kicked);
    });
    assert_eq!(vcpu.hart().pc(), 4, "behind the WFI");
    assert_eq!(vcpu.hart().timer(), FAR);
}

#[test]
fn an_interrupt_of_another_thread_ends_a_wait() {
    for (interrupt, cause) in [
        (Interrupt::Software, 1),
        (Interrupt::Timer, 5),
        (Interrupt::External, 9),
    ] {
        let (_vm, mut vcpu) = waiting();
        vcpu.hart_mut().set_timer(FAR);
        let handle = vcpu.kick_handle();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(10));
                handle.raise(interrupt);
            });
            assert_eq!(vcpu.run(), Exit::Halted);
        });
        assert_eq!(vcpu.state().scause, 1 << 63 | cause);
    }
}

/// Many short waits, each ended by another thread at a moment of its own.
#[test]
fn no_wake_up_is_lost() {
    let ram = HostRam::new(1);
    // Waits, and exits after each interrupt.
    ram.code(0, &[WFI, csrrci(X0, 0x144, 2), ECALL, jal(X0, -12)]);
    let vm = vm(&ram);
    let mut vcpu = vcpu(&vm, 0, 0);
    let mut state = vcpu.state();
    state.sie = ALL;
    state.stimecmp = FAR;
    vcpu.set_state(&state).unwrap();
    let handle = vcpu.kick_handle();
    let begin = Instant::now();
    thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::channel();
        scope.spawn(move || {
            for round in receive {
                (0..round % 1000_u32).for_each(|_| std::hint::spin_loop());
                handle.raise(Interrupt::Software);
            }
        });
        for round in 0..2000 {
            send.send(round).unwrap();
            assert!(matches!(vcpu.run(), Exit::Ecall { .. }));
        }
    });
    // A lost one would wait for the deadline.
    assert!(begin.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_wait_is_bounded() {
    let (_vm, mut vcpu) = waiting();
    vcpu.hart_mut().set_run_state(RunState::Stopped);
    assert_eq!(vcpu.run(), Exit::Halted);
    let begin = Instant::now();
    vcpu.wait(Duration::from_millis(15));
    assert!(begin.elapsed() >= Duration::from_millis(15));
    vcpu.kick_handle().kick();
    vcpu.wait(Duration::MAX);
    assert_eq!(vcpu.run(), Exit::Kicked);
}

/// A vCPU that is saved before its next entry must not lose the interrupt.
#[test]
fn a_raised_interrupt_is_part_of_the_state() {
    let (_vm, vcpu) = waiting();
    assert_eq!(vcpu.state().sip, 0);
    vcpu.kick_handle().raise(Interrupt::Software);
    assert_eq!(vcpu.state().sip, 1 << 1);
}

/// The last change counts, also of several before the vCPU's next entry.
#[test]
fn a_lowered_interrupt_is_pending_no_more() {
    let (_vm, mut vcpu) = waiting();
    let handle = vcpu.kick_handle();
    handle.raise(Interrupt::External);
    handle.raise(Interrupt::Software);
    handle.set(Interrupt::External, false);
    assert_eq!(vcpu.state().sip, 1 << 1);
    handle.set(Interrupt::External, true);
    assert_eq!(vcpu.state().sip, 1 << 9 | 1 << 1);
    // The vCPU takes both.
    handle.kick();
    assert_eq!(vcpu.run(), Exit::Kicked);
    assert_eq!(vcpu.hart().state().sip, 1 << 9 | 1 << 1);
    handle.set(Interrupt::External, false);
    assert_eq!(vcpu.state().sip, 1 << 1);
    handle.kick();
    assert_eq!(vcpu.run(), Exit::Kicked);
    assert_eq!(vcpu.hart().state().sip, 1 << 1);
}

#[test]
fn a_wake_up_ends_a_wait_and_is_no_exit() {
    let (_vm, mut vcpu) = waiting();
    vcpu.hart_mut().set_run_state(RunState::Stopped);
    vcpu.kick_handle().wake();
    vcpu.wait(Duration::MAX);
    assert_eq!(vcpu.run(), Exit::Halted);
}
