//! The timer (`stimecmp`) and the states of a hart.

use crate::support::hart::{CODE, DATA, Machine, asm::*};
use pageferry_hypervisor::hart::{HartExit, Interrupt, Mode, NO_DEADLINE, RunState};

const SIE: u32 = 0x104;
const SIP: u32 = 0x144;
const STIMECMP: u32 = 0x14d;
const TIME: u32 = 0xc01;
const STIE: u64 = 1 << 5;
const UXL: u64 = 2 << 32;
const STATUS_SIE: u64 = 1 << 1;
/// The cause of the timer's interrupt.
const TIMER: u64 = 1 << 63 | 5;

/// A machine that executes `code` with the timer's interrupt enabled. Its handler is a loop.
fn machine(code: &[u32], mode: Mode, sstatus: u64) -> Machine {
    let mut machine = Machine::new(code);
    machine.ram().code(DATA, &[addi(A3, A3, 1), jal(X0, -4)]);
    let mut state = machine.hart.state();
    state.mode = mode;
    state.sstatus = UXL | sstatus;
    state.sie = STIE;
    state.stvec = DATA;
    machine.hart.set_state(&state).unwrap();
    machine
}

fn step_all(machine: &mut Machine, count: u64) {
    (0..count).for_each(|_| machine.step());
}

#[test]
fn stip_shows_whether_time_has_reached_stimecmp() {
    let code = [
        csrrw(X0, STIMECMP, A1),
        csrrs(A0, SIP, X0),
        csrrs(A2, STIMECMP, X0),
    ];
    for (now, deadline, pending) in [
        (99, 100, 0),
        (100, 100, STIE),
        (101, 100, STIE),
        (5, 0, STIE),
        (u64::MAX, NO_DEADLINE, 0),
    ] {
        let mut machine = Machine::new(&code);
        machine.bus.now = now;
        machine.hart.set_x(11, deadline);
        step_all(&mut machine, 3);
        assert_eq!(machine.hart.x(10), pending, "{now} {deadline}");
        assert_eq!(machine.hart.x(12), deadline);
        assert_eq!(machine.hart.timer(), deadline);
    }
    // A later time ends the interrupt. The guest cannot clear STIP otherwise.
    let mut machine = Machine::new(&[
        csrrs(A0, SIP, X0),
        csrrw(X0, SIP, X0),
        csrrs(A1, SIP, X0),
        csrrw(X0, STIMECMP, A3),
        csrrs(A2, SIP, X0),
    ]);
    machine.bus.now = 100;
    machine.hart.set_x(13, 200);
    machine.hart.set_timer(100);
    step_all(&mut machine, 5);
    let x = |register| machine.hart.x(register);
    assert_eq!((x(10), x(11), x(12)), (STIE, STIE, 0));
    // The state has the timer beside the pending interrupts, so a moved hart can end it too.
    machine.hart.set_timer(100);
    assert_eq!(machine.run(0), HartExit::Budget);
    assert_eq!(machine.hart.state().sip, 0);
    assert_eq!(machine.hart.state().stimecmp, 100);
}

#[test]
fn a_timer_interrupts_a_loop_and_the_clock_is_rarely_read() {
    for (mode, sstatus, taken) in [
        (Mode::Supervisor, STATUS_SIE, true),
        (Mode::Supervisor, 0, false),
        (Mode::User, 0, true),
        (Mode::User, STATUS_SIE, true),
    ] {
        // A loop inside a page, and one that crosses pages.
        for code in [[jal(X0, 0), 0], [jal(X0, 0x1000), 0]] {
            let mut machine = machine(&code, mode, sstatus);
            machine.ram().code(CODE + 0x1000, &[jal(X0, -0x1000)]);
            machine.bus.tick = 1;
            machine.hart.set_timer(20);
            assert_eq!(machine.run(1_000_000), HartExit::Budget);
            assert!(machine.bus.looks <= 62, "{} looks", machine.bus.looks);
            let state = machine.hart.state();
            assert_eq!(state.scause == TIMER, taken, "{mode:?} {sstatus:#x}");
            if taken {
                assert_eq!(machine.bus.now, 20, "at the first look that is late enough");
                assert_eq!(state.mode, Mode::Supervisor);
            }
        }
    }
}

#[test]
fn without_a_timer_the_clock_is_not_read() {
    let mut machine = machine(&[jal(X0, 0)], Mode::Supervisor, STATUS_SIE);
    assert_eq!(machine.run(1_000_000), HartExit::Budget);
    assert_eq!(machine.bus.looks, 0);
}

/// A guest that reads the time sees no time after its deadline without the interrupt.
#[test]
fn reading_the_time_notices_the_deadline() {
    let code = [csrrs(A0, TIME, X0), jal(X0, -4)];
    let mut machine = machine(&code, Mode::Supervisor, STATUS_SIE);
    machine.bus.tick = 1;
    machine.hart.set_timer(50);
    assert_eq!(machine.run(200), HartExit::Budget);
    assert_eq!(machine.hart.x(10), 50);
    assert_eq!(machine.hart.state().scause, TIMER);
}

#[test]
fn setting_a_timer_that_is_due_interrupts_at_once() {
    let code = [csrrw(X0, STIMECMP, A1), addi(A0, A0, 1)];
    let mut machine = machine(&code, Mode::Supervisor, STATUS_SIE);
    machine.bus.now = 100;
    machine.hart.set_x(11, 100);
    assert_eq!(machine.run(2), HartExit::Budget);
    let state = machine.hart.state();
    assert_eq!((state.scause, state.sepc), (TIMER, CODE + 4));
    assert_eq!((state.x[10], state.x[13]), (0, 1));
}

#[test]
fn stimecmp_belongs_to_supervisor_mode() {
    for instruction in [csrrs(A0, STIMECMP, X0), csrrw(X0, STIMECMP, A0)] {
        let mut machine = machine(&[instruction], Mode::User, 0);
        assert_eq!(machine.trap(), (2, instruction.into()));
    }
}

#[test]
fn wfi_ends_at_a_deadline_that_has_passed() {
    for (sie, halts) in [(STIE, false), (0, true)] {
        let mut machine = machine(&[WFI, csrrw(X0, SIE, A0)], Mode::Supervisor, 0);
        let mut state = machine.hart.state();
        state.sie = sie;
        machine.hart.set_state(&state).unwrap();
        machine.hart.set_timer(10);
        assert_eq!(machine.hart.wakes_at(), (!halts).then_some(10));
        machine.bus.now = 10;
        let exit = machine.run(1);
        assert_eq!(exit == HartExit::Halted, halts, "{exit:?}");
    }
}

#[test]
fn a_stopped_hart_executes_nothing() {
    let mut machine = machine(&[addi(A0, A0, 1)], Mode::Supervisor, STATUS_SIE);
    machine.hart.set_run_state(RunState::Stopped);
    machine.hart.set_interrupt(Interrupt::Timer, true);
    machine.hart.set_timer(5);
    assert_eq!(machine.hart.wakes_at(), None);
    for _ in 0..2 {
        assert_eq!(machine.run(10), HartExit::Halted);
        assert_eq!(machine.hart.instret(), 0);
        assert_eq!(machine.hart.state().run_state, RunState::Stopped);
    }
    machine.hart.set_interrupt(Interrupt::Timer, false);
    machine.hart.set_timer(NO_DEADLINE);
    machine.hart.set_run_state(RunState::Started);
    machine.step();
    assert_eq!(machine.hart.x(10), 1);
}

#[test]
fn an_enabled_interrupt_ends_a_suspension() {
    for (interrupt, ends) in [(Interrupt::Timer, true), (Interrupt::Software, false)] {
        let mut machine = machine(&[addi(A0, A0, 1)], Mode::Supervisor, 0);
        machine.hart.set_run_state(RunState::Suspended);
        assert_eq!(machine.run(1), HartExit::Halted);
        machine.hart.set_interrupt(interrupt, true);
        let exit = machine.run(1);
        assert_eq!(exit == HartExit::Budget, ends);
        let state = machine.hart.state();
        assert_eq!(state.run_state == RunState::Started, ends);
        assert_eq!(state.x[10], u64::from(ends));
    }
    // The timer does too.
    let mut machine = machine(&[addi(A0, A0, 1)], Mode::Supervisor, 0);
    machine.hart.set_run_state(RunState::Suspended);
    machine.hart.set_timer(5);
    assert_eq!(machine.run(1), HartExit::Halted);
    machine.bus.now = 5;
    machine.step();
}
