//! CSRs, traps, interrupts, VU-mode, and moving the state.

use crate::support::hart::{CODE, DATA, Machine, asm::*};
use pageferry_hypervisor::hart::{HartExit, HartState, Interrupt, Mode, RunState, StateError};

const SSTATUS: u32 = 0x100;
const SIE: u32 = 0x104;
const STVEC: u32 = 0x105;
const SCOUNTEREN: u32 = 0x106;
const SENVCFG: u32 = 0x10a;
const SSCRATCH: u32 = 0x140;
const SEPC: u32 = 0x141;
const SCAUSE: u32 = 0x142;
const STVAL: u32 = 0x143;
const SIP: u32 = 0x144;
const SATP: u32 = 0x180;
const CYCLE: u32 = 0xc00;
const TIME: u32 = 0xc01;
const INSTRET: u32 = 0xc02;

const UXL: u64 = 2 << 32;
const STATUS_SIE: u64 = 1 << 1;
const STATUS_SPIE: u64 = 1 << 5;
const STATUS_SPP: u64 = 1 << 8;
const STATUS_SUM: u64 = 1 << 18;
const STATUS_MXR: u64 = 1 << 19;

fn change(machine: &mut Machine, change: impl FnOnce(&mut HartState)) {
    let mut state = machine.hart.state();
    change(&mut state);
    machine.hart.set_state(&state).unwrap();
}

/// Writes `value` to `csr` and reads it back.
fn write_read(csr: u32, value: u64) -> u64 {
    let mut machine = Machine::new(&[csrrw(X0, csr, A1), csrrs(A0, csr, X0)]);
    machine.hart.set_x(11, value);
    machine.step();
    machine.step();
    machine.hart.x(10)
}

#[test]
fn csrs_hold_what_they_implement() {
    let table = [
        (
            "sstatus",
            SSTATUS,
            u64::MAX,
            UXL | STATUS_SIE | STATUS_SPIE | STATUS_SPP | STATUS_SUM | STATUS_MXR,
        ),
        ("sstatus", SSTATUS, 0, UXL),
        ("sie", SIE, u64::MAX, 0x222),
        ("sip: only SSIP is writable", SIP, u64::MAX, 0x002),
        ("stvec direct", STVEC, 0x8000_1000, 0x8000_1000),
        ("stvec vectored", STVEC, 0x8000_1001, 0x8000_1001),
        ("stvec reserved mode", STVEC, u64::MAX, u64::MAX - 2),
        ("scounteren", SCOUNTEREN, u64::MAX, 7),
        ("senvcfg", SENVCFG, u64::MAX, 0),
        ("sscratch", SSCRATCH, u64::MAX, u64::MAX),
        ("sepc", SEPC, u64::MAX, u64::MAX - 3),
        ("scause", SCAUSE, 1 << 63 | 5, 1 << 63 | 5),
        ("stval", STVAL, u64::MAX, u64::MAX),
        ("satp: Sv39", SATP, 8 << 60 | 0x1234, 8 << 60 | 0x1234),
        ("satp: Sv48", SATP, 9 << 60 | 0x1234, 9 << 60 | 0x1234),
        ("satp: Sv57 is refused", SATP, 10 << 60 | 0x1234, 0),
        ("satp: Bare has no fields", SATP, 0x1234, 0),
        (
            "satp: 9 bits of ASID, 44 of PPN",
            SATP,
            9 << 60 | u64::MAX >> 4,
            9 << 60 | u64::MAX >> 11,
        ),
    ];
    for (name, csr, value, expected) in table {
        let got = write_read(csr, value);
        assert_eq!(got, expected, "{name}: {got:#x}");
    }
}

/// Zicsr's table of the conditions for reading and writing a CSR.
#[test]
fn csr_instructions() {
    let table = [
        (csrrw(A0, SSCRATCH, A1), 0xf0, 0x3c, 0x3c),
        (csrrs(A0, SSCRATCH, A1), 0xf0, 0x3c, 0xfc),
        (csrrc(A0, SSCRATCH, A1), 0xf0, 0x3c, 0xc0),
        (csrrs(A0, SSCRATCH, X0), 0xf0, 0x3c, 0xf0),
        (csrrc(A0, SSCRATCH, X0), 0xf0, 0x3c, 0xf0),
        (csrrw(A0, SSCRATCH, X0), 0xf0, 0x3c, 0),
        (csrrwi(A0, SSCRATCH, 31), 0xf0, 0, 31),
        (csrrwi(A0, SSCRATCH, 0), 0xf0, 0, 0),
        (csrrsi(A0, SSCRATCH, 5), 0xf0, 0, 0xf5),
        (csrrci(A0, SSCRATCH, 16), 0xf0, 0, 0xe0),
    ];
    for (instruction, old, operand, new) in table {
        let mut machine = Machine::new(&[instruction]);
        machine.hart.set_x(11, operand);
        change(&mut machine, |state| state.sscratch = old);
        machine.step();
        assert_eq!(
            (machine.hart.x(10), machine.hart.state().sscratch),
            (old, new),
            "{instruction:#x}"
        );
    }
    // The instruction reads its operand before it writes the destination.
    let mut machine = Machine::new(&[csrrw(A0, SSCRATCH, A0)]);
    machine.hart.set_x(10, 7);
    change(&mut machine, |state| state.sscratch = 9);
    machine.step();
    assert_eq!((machine.hart.x(10), machine.hart.state().sscratch), (9, 7));
}

#[test]
fn absent_and_read_only_csrs_are_illegal() {
    for instruction in [
        csrrw(A0, CYCLE, A1),
        csrrw(X0, INSTRET, X0),
        csrrs(A0, TIME, A1),
        csrrsi(A0, CYCLE, 1),
        csrrci(A0, CYCLE, 1),
        csrrs(A0, 0x001, X0), // fflags: no F
        csrrs(A0, 0xc03, X0), // hpmcounter3
        csrrs(A0, 0xc80, X0), // cycleh: RV32 only
        csrrs(A0, 0x10c, X0), // sstateen0: no Ssstateen
        csrrs(A0, 0x200, X0), // vsstatus
        csrrs(A0, 0x600, X0), // hstatus
        csrrs(A0, 0x300, X0), // mstatus
        csrrs(A0, 0xf14, X0), // mhartid
        csrrs(A0, 0x7a0, X0), // tselect
        csrrs(A0, 0x8ff, X0), // custom
    ] {
        let mut machine = Machine::new(&[instruction]);
        assert_eq!(machine.trap(), (2, instruction.into()), "{instruction:#x}");
    }
    // The set and clear forms with a zero operand only read, so they may name a read-only CSR.
    for instruction in [
        csrrs(A0, CYCLE, X0),
        csrrc(A0, TIME, X0),
        csrrsi(A0, INSTRET, 0),
        csrrci(A0, CYCLE, 0),
    ] {
        Machine::new(&[instruction]).step();
    }
}

#[test]
fn counters() {
    let mut machine = Machine::new(&[
        addi(X0, X0, 0),
        csrrs(A0, INSTRET, X0),
        csrrs(A1, CYCLE, X0),
        csrrs(A2, TIME, X0),
        jal(X0, 8),
        0,
        csrrs(A3, INSTRET, X0),
    ]);
    machine.bus.now = 0x1234_5678_9abc;
    assert_eq!(machine.run(6), HartExit::Budget);
    // The counter does not include the read itself.
    assert_eq!(
        (machine.hart.x(10), machine.hart.x(11), machine.hart.x(13)),
        (1, 2, 5)
    );
    assert_eq!(machine.hart.x(12), 0x1234_5678_9abc);
}

#[test]
fn exceptions_go_to_stvec() {
    for (instruction, address, cause, stval) in [
        (0xffff_ffff, 0, 2, 0xffff_ffff),
        (EBREAK, 0, 3, CODE),
        (atomic(LR, D, A0, A1, 0), DATA + 4, 4, DATA + 4),
        (atomic(AMOADD, W, A0, A1, A2), DATA + 2, 6, DATA + 2),
    ] {
        for vectored in [0, 1] {
            let mut machine = Machine::new(&[instruction]);
            machine.hart.set_x(11, address);
            // Exceptions go to the base in both modes.
            change(&mut machine, |state| {
                state.stvec = (DATA + 0x100) | vectored;
                state.sstatus = UXL | STATUS_SIE | STATUS_MXR;
            });
            assert_eq!(machine.trap(), (cause, stval));
            let state = machine.hart.state();
            assert_eq!(state.pc, DATA + 0x100);
            assert_eq!(state.sstatus, UXL | STATUS_SPIE | STATUS_SPP | STATUS_MXR);
        }
    }
}

#[test]
fn sret_goes_back() {
    for (before, after, mode) in [
        (
            STATUS_SPP | STATUS_SPIE,
            STATUS_SPIE | STATUS_SIE,
            Mode::Supervisor,
        ),
        (STATUS_SPP, STATUS_SPIE, Mode::Supervisor),
        (STATUS_SPP | STATUS_SIE, STATUS_SPIE, Mode::Supervisor),
        (STATUS_SPIE, STATUS_SPIE | STATUS_SIE, Mode::User),
        (STATUS_MXR, STATUS_MXR | STATUS_SPIE, Mode::User),
    ] {
        let mut machine = Machine::new(&[SRET]);
        change(&mut machine, |state| {
            state.sstatus = UXL | before;
            state.sepc = DATA;
        });
        machine.step();
        let state = machine.hart.state();
        assert_eq!(
            (state.pc, state.sstatus, state.mode),
            (DATA, UXL | after, mode)
        );
    }
}

#[test]
fn user_mode_has_no_supervisor_instructions() {
    for instruction in [
        SRET,
        WFI,
        sfence_vma(0, 0),
        csrrs(A0, SSTATUS, X0),
        csrrw(X0, SSCRATCH, A0),
        csrrs(A0, SATP, X0),
        csrrs(A0, CYCLE, X0),
        csrrs(A0, TIME, X0),
        csrrs(A0, INSTRET, X0),
    ] {
        let mut machine = Machine::new(&[instruction]);
        change(&mut machine, |state| {
            state.mode = Mode::User;
            state.stvec = DATA;
            state.sstatus = UXL | STATUS_SIE;
        });
        assert_eq!(machine.trap(), (2, instruction.into()), "{instruction:#x}");
        let state = machine.hart.state();
        assert_eq!(
            (state.mode, state.sstatus),
            (Mode::Supervisor, UXL | STATUS_SPIE)
        );
    }
    let mut machine = Machine::new(&[ECALL]);
    change(&mut machine, |state| state.mode = Mode::User);
    assert_eq!(machine.trap(), (8, 0));
}

#[test]
fn scounteren_opens_counters_to_user_mode() {
    for (bit, csr) in [(0, CYCLE), (1, TIME), (2, INSTRET)] {
        for other in [CYCLE, TIME, INSTRET] {
            let mut machine = Machine::new(&[csrrs(A0, other, X0)]);
            change(&mut machine, |state| {
                state.mode = Mode::User;
                state.scounteren = 1 << bit;
            });
            if csr == other {
                machine.step();
            } else {
                assert_eq!(machine.trap(), (2, csrrs(A0, other, X0).into()));
            }
        }
    }
}

#[test]
fn interrupts_are_taken_when_enabled_in_the_manuals_order() {
    let all = [Interrupt::Software, Interrupt::Timer, Interrupt::External];
    // Pending interrupts as bits of sip, and the taken interrupt.
    for (pending, code) in [
        (0x002, 1),
        (0x020, 5),
        (0x200, 9),
        (0x022, 1),
        (0x220, 9),
        (0x222, 9),
    ] {
        for (vectored, handler) in [(0, DATA), (1, DATA + 4 * code)] {
            let mut machine = Machine::new(&[addi(A0, A0, 1)]);
            machine.ram().code(handler, &[addi(A1, A1, 1)]);
            change(&mut machine, |state| {
                state.stvec = DATA | vectored;
                state.sie = 0x222;
                state.sstatus = UXL | STATUS_SIE;
            });
            for interrupt in all {
                machine
                    .hart
                    .set_interrupt(interrupt, pending >> interrupt as u32 & 1 != 0);
            }
            machine.step();
            let state = machine.hart.state();
            assert_eq!(
                (state.scause, state.sepc, state.stval),
                (1 << 63 | code, CODE, 0)
            );
            assert_eq!((state.x[10], state.x[11], state.pc), (0, 1, handler + 4));
            assert_eq!(state.sstatus, UXL | STATUS_SPIE | STATUS_SPP);
        }
    }
}

#[test]
fn interrupts_that_are_not_enabled_wait() {
    for (sstatus, sie, mode, taken) in [
        (0, 0x222, Mode::Supervisor, false),
        (STATUS_SIE, 0x202, Mode::Supervisor, false),
        (STATUS_SIE, 0x020, Mode::Supervisor, true),
        (0, 0x020, Mode::User, true),
        (0, 0x202, Mode::User, false),
    ] {
        let mut machine = Machine::new(&[addi(A0, A0, 1)]);
        machine.ram().code(DATA, &[addi(A1, A1, 1)]);
        change(&mut machine, |state| {
            state.stvec = DATA;
            state.sstatus = UXL | sstatus;
            state.sie = sie;
            state.mode = mode;
        });
        machine.hart.set_interrupt(Interrupt::Timer, true);
        machine.step();
        assert_eq!(
            (machine.hart.x(10), machine.hart.x(11)),
            if taken { (0, 1) } else { (1, 0) }
        );
    }
}

/// The guest enables an interrupt in every possible way.
#[test]
fn an_interrupt_is_taken_right_behind_the_instruction_that_enables_it() {
    for (instruction, after) in [
        (csrrsi(X0, SSTATUS, 2), CODE + 4),
        (csrrs(X0, SIE, A1), CODE + 4),
        (csrrsi(X0, SIP, 2), CODE + 4),
        (SRET, CODE + 8),
    ] {
        let mut machine = Machine::new(&[instruction, addi(A0, A0, 1), addi(A0, A0, 1)]);
        machine.ram().code(DATA, &[addi(A2, A2, 1)]);
        machine.hart.set_x(11, 2);
        change(&mut machine, |state| {
            state.stvec = DATA;
            state.sepc = CODE + 8;
            (state.sstatus, state.sie, state.sip) = match instruction {
                SRET => (UXL | STATUS_SPP | STATUS_SPIE, 2, 2),
                i if i == csrrsi(X0, SSTATUS, 2) => (UXL, 2, 2),
                i if i == csrrs(X0, SIE, A1) => (UXL | STATUS_SIE, 0, 2),
                _ => (UXL | STATUS_SIE, 2, 0),
            };
        });
        assert_eq!(machine.run(2), HartExit::Budget);
        let state = machine.hart.state();
        assert_eq!(
            (state.scause, state.sepc),
            (1 << 63 | 1, after),
            "{instruction:#x}"
        );
        assert_eq!((state.x[10], state.x[12], state.instret), (0, 1, 2));
    }
}

/// WFI wakes for an enabled pending interrupt even if the hart does not take it.
#[test]
fn wfi_does_not_halt_with_an_interrupt_pending() {
    let mut machine = Machine::new(&[WFI, WFI]);
    change(&mut machine, |state| state.sie = 0x20);
    machine.hart.set_interrupt(Interrupt::Timer, true);
    machine.step();
    machine.hart.set_interrupt(Interrupt::Timer, false);
    assert_eq!(machine.run(1), HartExit::Halted);
}

fn odd_state() -> HartState {
    HartState {
        x: core::array::from_fn(|i| i as u64 * 0x0123_4567_89ab),
        pc: DATA + 4,
        mode: Mode::User,
        sstatus: UXL | STATUS_SPIE | STATUS_MXR,
        sie: 0x202,
        sip: 0x20,
        stvec: DATA | 1,
        scounteren: 5,
        sscratch: 1,
        sepc: 8,
        scause: 1 << 63 | 3,
        stval: u64::MAX,
        satp: 9 << 60 | 0x1ff << 44 | 0x1234,
        stimecmp: 1 << 40,
        run_state: RunState::Started,
        instret: u64::MAX - 1,
    }
}

#[test]
fn the_whole_state_moves() {
    let mut machine = Machine::new(&[]);
    machine.hart.set_state(&odd_state()).unwrap();
    assert_eq!(machine.hart.state(), odd_state());
    // The original hart and the moved one continue in the same way.
    let code = [
        mul(A0, A0, A1),
        atomic(AMOADD, D, A1, A2, A0),
        csrrs(A0, INSTRET, X0),
        jal(X0, -12),
    ];
    let mut moved = Machine::new(&code);
    let mut stayed = Machine::new(&code);
    for machine in [&mut moved, &mut stayed] {
        change(machine, |state| {
            *state = HartState {
                pc: CODE,
                mode: Mode::Supervisor,
                ..odd_state()
            };
            state.x[12] = DATA;
        });
        machine.run(1001);
    }
    let state = moved.hart.state();
    let mut fresh = Machine::new(&code);
    for page in 0..16 {
        let at = CODE + page * 0x1000;
        fresh.ram().fill(at, &moved.ram().bytes(at, 0x1000));
    }
    fresh.hart.set_state(&state).unwrap();
    fresh.run(999);
    stayed.run(999);
    assert_eq!(fresh.hart.state(), stayed.hart.state());
}

#[test]
fn a_state_no_hart_can_be_in_is_refused() {
    let refused = |change: fn(&mut HartState)| {
        let mut state = odd_state();
        change(&mut state);
        let mut machine = Machine::new(&[]);
        let before = machine.hart.state();
        let error = machine.hart.set_state(&state).unwrap_err();
        assert_eq!(machine.hart.state(), before, "unchanged");
        error
    };
    let csr = |name, value, bad| StateError::Csr { name, value, bad };
    assert_eq!(refused(|s| s.x[0] = 1), StateError::X0(1));
    assert_eq!(refused(|s| s.pc = 2), StateError::Pc(2));
    assert_eq!(refused(|s| s.sstatus = 0), csr("sstatus", 0, UXL));
    assert_eq!(
        refused(|s| s.sstatus = UXL | 1 << 17),
        csr("sstatus", UXL | 1 << 17, 1 << 17)
    );
    assert_eq!(refused(|s| s.sie = 3), csr("sie", 3, 1));
    assert_eq!(refused(|s| s.sip = 1 << 13), csr("sip", 1 << 13, 1 << 13));
    assert_eq!(refused(|s| s.stvec = 2), csr("stvec", 2, 2));
    assert_eq!(refused(|s| s.scounteren = 8), csr("scounteren", 8, 8));
    assert_eq!(refused(|s| s.sepc = 6), csr("sepc", 6, 2));
    for satp in [1, 10 << 60, 15 << 60, 8 << 60 | 1 << 53] {
        let mut state = odd_state();
        state.satp = satp;
        assert_eq!(state.validate(), Err(StateError::Satp(satp)));
    }
    assert_eq!(
        refused(|s| s.sepc = 6).to_string(),
        "sepc cannot hold 0x6: the bits 0x2 are wrong"
    );
    let mut machine = Machine::new(&[]);
    assert_eq!(machine.hart.set_pc(7), Err(StateError::Pc(7)));
    assert_eq!(machine.hart.pc(), CODE);
}
