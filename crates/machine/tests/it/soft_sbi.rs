//! A guest with an operating system's needs: harts that start each other, interrupts, a console, an
//! end, and devices that answer loads.

use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{
    Access, DOORBELL_GPA, Engine, Exit, MachineSpec, NewMachine, Reset, ResetKind, StartState,
    Vcpu, VcpuState, create,
};
use pageferry_testkit::rv64::{
    A0, A1, A2, A6, A7, DBCN, ECALL, HSM, IPI, SRST, WFI, addi, call, csrs, ld, li, sd, slli,
};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// A machine with `programs`, one a page. The first hart starts at the first one.
fn machine(vcpus: u32, programs: &[&[Vec<u32>]]) -> NewMachine {
    let mut new = create(Engine::Soft, MachineSpec::new(vcpus, 1 << 20)).unwrap();
    for (page, program) in (0..).zip(programs) {
        let code: Vec<u8> = program
            .concat()
            .iter()
            .flat_map(|c| c.to_le_bytes())
            .collect();
        new.machine.ram().try_write(RamPage(page), &code).unwrap();
    }
    let start = StartState {
        entry: 0,
        stack: 0,
        args: [0; 2],
        tables: Gpa(0),
    };
    new.vcpus[0].set_start(&start).unwrap();
    new
}

fn end() -> Vec<u32> {
    call(SRST, 0, &[0, 0])
}

const ENDED: Exit = Exit::Reset(Reset {
    kind: ResetKind::Shutdown,
    failure: false,
});

fn doorbell(value: u32) -> Vec<u32> {
    let [a, b] = li(A1, (DOORBELL_GPA.0 >> 1) as u32);
    let [c, d] = li(A0, value);
    vec![a, b, slli(A1, A1, 1), c, d, sd(A0, A1)]
}

fn rang(value: u64) -> Exit {
    Exit::MmioWrite {
        gpa: DOORBELL_GPA,
        value,
        size: 8,
    }
}

fn console(new: &NewMachine) -> String {
    let console = new.machine.console().expect("soft machines have one");
    String::from_utf8(console.read(Duration::ZERO)).unwrap()
}

/// Runs the vCPU on, past kicks and memory faults that a thread brought.
fn next(vcpu: &mut Box<dyn Vcpu>) -> Exit {
    loop {
        match vcpu.run().unwrap() {
            Exit::Kicked => {}
            exit => return exit,
        }
    }
}

#[test]
fn a_hart_writes_to_the_console_and_ends_the_guest() {
    let hello = call(DBCN, 0, &[5, 0x3000, 0]);
    let mut new = machine(1, &[&[hello, call(DBCN, 2, &[0x21]), end()]]);
    new.machine
        .ram()
        .try_write(Gpa(0x3000), b"hello, all")
        .unwrap();
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    assert_eq!(console(&new), "hello!");
}

#[test]
fn a_hart_reads_the_console() {
    let read = call(DBCN, 1, &[100, 0x3000, 0]);
    let mut new = machine(1, &[&[read, doorbell(0), end()]]);
    assert_eq!(new.machine.console().unwrap().send(b"typed"), 5);
    assert_eq!(new.vcpus[0].run().unwrap(), rang(0));
    let mut bytes = [0; 6];
    new.machine.ram().try_read(Gpa(0x3000), &mut bytes).unwrap();
    assert_eq!(&bytes, b"typed\0");
}

/// Text that crosses a page is taken up to its end, and the guest calls again.
#[test]
fn a_console_takes_what_lies_in_one_page() {
    let hello = call(DBCN, 0, &[10, 0x3ffc, 0]);
    // sd a1, 0(a2) with the doorbell's address in a2: the number of bytes taken.
    let tell = [vec![li(A2, 0x2000)[0], sd(A1, A2)], doorbell(0)].concat();
    let mut new = machine(1, &[&[hello, tell]]);
    new.machine
        .ram()
        .try_write(Gpa(0x3ffc), b"0123456789")
        .unwrap();
    assert_eq!(new.vcpus[0].run().unwrap(), rang(0));
    let mut taken = [0; 8];
    new.machine.ram().try_read(Gpa(0x2000), &mut taken).unwrap();
    assert_eq!(
        (u64::from_le_bytes(taken), console(&new)),
        (4, "0123".into())
    );
}

#[test]
fn a_call_waits_for_its_missing_page() {
    for (function, access) in [(0, Access::Read), (1, Access::Write)] {
        let mut new = machine(1, &[&[call(DBCN, function, &[5, 0x3000, 0]), end()]]);
        new.machine.console().unwrap().send(b"typed");
        let missing = Arc::new(PageBitmap::new((1 << 20) / PAGE_SIZE as usize));
        missing.set(RamPage(3));
        new.machine
            .arm_userfault(Arc::clone(&missing), None.into())
            .unwrap();
        new.machine.begin_postcopy().unwrap();
        let fault = Exit::MemoryFault {
            page: RamPage(3),
            access,
        };
        assert_eq!(new.vcpus[0].run().unwrap(), fault);
        assert_eq!(new.vcpus[0].run().unwrap(), fault, "it repeats the call");
        let mut page = [0; 4096];
        page[..5].copy_from_slice(b"later");
        new.machine.install_copy(RamPage(3), &page).unwrap();
        missing.clear(RamPage(3));
        assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
        new.machine.ram().try_read(RamPage(3), &mut page).unwrap();
        let (said, there) = [("later", b"later"), ("", b"typed")][function as usize];
        assert_eq!((console(&new).as_str(), &page[..5]), (said, &there[..]));
    }
}

/// Hart 0 starts hart 1, which tells its id and argument. Both threads run at once.
#[test]
fn a_hart_starts_another() {
    let start = call(HSM, 0, &[1, 0x1000, 77]);
    // The program of hart 1 uses a0 and a1 as it got them: it stores both, then rings.
    let store = [li(A2, 0x2000)[0], sd(A0, A2), addi(A2, A2, 8), sd(A1, A2)];
    let mut new = machine(2, &[&[start, end()], &[store.to_vec(), doorbell(9)]]);
    let mut second = new.vcpus.pop().unwrap();
    let second = thread::spawn(move || next(&mut second));
    thread::sleep(Duration::from_millis(20));
    assert!(!second.is_finished(), "it is stopped");
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    assert_eq!(second.join().unwrap(), rang(9));
    let mut told = [0; 16];
    new.machine.ram().try_read(Gpa(0x2000), &mut told).unwrap();
    assert_eq!(u128::from_le_bytes(told), 77 << 64 | 1);
}

#[test]
fn a_hart_is_started_once_and_says_what_it_is() {
    let tell = |page: u32| {
        vec![
            li(A2, page << 12)[0],
            sd(A0, A2),
            addi(A2, A2, 8),
            sd(A1, A2),
        ]
    };
    let start = || call(HSM, 0, &[1, 0x1000, 0]);
    let status = || call(HSM, 2, &[1]);
    let program = [
        [status(), tell(2)],
        [start(), tell(3)],
        [status(), tell(4)],
        [start(), tell(5)],
    ];
    let mut program: Vec<Vec<u32>> = program.concat();
    program.push(end());
    let mut new = machine(2, &[&program, &[]]);
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    let pairs = [2, 3, 4, 5].map(|page| {
        let mut told = [0; 16];
        new.machine
            .ram()
            .try_read(RamPage(page), &mut told)
            .unwrap();
        let told = u128::from_le_bytes(told);
        (told as i64, (told >> 64) as i64)
    });
    assert_eq!(pairs, [(0, 1), (0, 0), (0, 2), (-6, 0)]);
}

/// A start, and an interrupt, that the other thread has not taken yet are part of its state.
#[test]
fn a_state_has_what_other_harts_have_sent() {
    let program = [call(HSM, 0, &[1, 0x1000, 5]), call(IPI, 0, &[1, 0]), end()];
    let ring = [doorbell(3)];
    let mut new = machine(2, &[&program, &ring]);
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    let states: Vec<VcpuState> = new.vcpus.iter_mut().map(|v| v.save().unwrap()).collect();
    let mut other = machine(2, &[&program, &ring]);
    for (vcpu, state) in other.vcpus.iter_mut().zip(&states) {
        vcpu.restore(state).unwrap();
    }
    assert_eq!(next(&mut other.vcpus[1]), rang(3));
    assert_eq!(
        u64::from_le_bytes(*states[0].0[296..].first_chunk().unwrap()),
        2,
        "sip.SSIP"
    );
}

#[test]
fn an_interrupt_of_another_hart_ends_a_wait() {
    let start = call(HSM, 0, &[1, 0x1000, 0]);
    let wait = [
        li(A2, 2).to_vec(),
        vec![csrs(0x104, A2)],
        doorbell(1),
        vec![WFI],
        doorbell(2),
    ];
    let mut new = machine(
        2,
        &[&[start, doorbell(0), call(IPI, 0, &[2, 0]), end()], &wait],
    );
    let mut second = new.vcpus.pop().unwrap();
    assert_eq!(new.vcpus[0].run().unwrap(), rang(0));
    assert_eq!(next(&mut second), rang(1));
    let second = thread::spawn(move || next(&mut second));
    thread::sleep(Duration::from_millis(20));
    assert!(!second.is_finished(), "it waits");
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    assert_eq!(second.join().unwrap(), rang(2));
}

/// A hart that is stopped, or waits, leaves for a kick.
#[test]
fn a_kick_ends_every_wait() {
    let mut new = machine(2, &[&[vec![WFI], end()]]);
    for vcpu in &mut new.vcpus {
        let kicker = vcpu.kicker();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(10));
                kicker.kick();
            });
            assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
        });
    }
}

#[test]
fn a_suspended_hart_goes_on_after_an_interrupt() {
    let enable = [li(A2, 2).to_vec(), vec![csrs(0x104, A2)]].concat();
    let lost = 0x8000_0000_u32;
    for (suspend, rung) in [
        (call(HSM, 3, &[0]), 5),
        // The type needs 32 bits: 1 << 31, by li and slli.
        (
            [
                li(A0, lost >> 1).to_vec(),
                vec![slli(A0, A0, 1)],
                li(A1, 0x1000).to_vec(),
                li(A2, 0).to_vec(),
                li(A6, 3).to_vec(),
                li(A7, HSM).to_vec(),
                vec![ECALL],
            ]
            .concat(),
            6,
        ),
    ] {
        let mut new = machine(
            1,
            &[&[enable.clone(), suspend, doorbell(5)], &[doorbell(6)]],
        );
        let mut vcpu = new.vcpus.remove(0);
        let kicker = vcpu.kicker();
        let state = {
            let waiting = thread::spawn(move || {
                let exit = vcpu.run().unwrap();
                (vcpu, exit)
            });
            thread::sleep(Duration::from_millis(20));
            assert!(!waiting.is_finished(), "it is suspended");
            kicker.kick();
            let (mut vcpu, exit) = waiting.join().unwrap();
            assert_eq!(exit, Exit::Kicked);
            let mut state = vcpu.save().unwrap();
            state.0[296] |= 2; // sip.SSIP
            state
        };
        let mut vcpu = new_machine_like(&new).vcpus.remove(0);
        vcpu.restore(&state).unwrap();
        assert_eq!(next(&mut vcpu), rang(rung));
    }
}

/// Another machine with the same memory.
fn new_machine_like(of: &NewMachine) -> NewMachine {
    let new = machine(1, &[]);
    let mut bytes = vec![0; 1 << 20];
    of.machine.ram().try_read(Gpa(0), &mut bytes).unwrap();
    new.machine.ram().try_write(Gpa(0), &bytes).unwrap();
    new
}

#[test]
fn a_load_from_a_device_gets_its_answer() {
    let [a, b] = li(A1, (DOORBELL_GPA.0 >> 1) as u32);
    let shift = slli(A1, A1, 1);
    let program = vec![a, b, shift, ld(A0, A1), sd(A0, A1), ld(A0, A1), sd(A0, A1)];
    let mut new = machine(1, &[&[program]]);
    let vcpu = &mut new.vcpus[0];
    let read = Exit::MmioRead {
        gpa: DOORBELL_GPA,
        size: 8,
    };
    assert_eq!(vcpu.run().unwrap(), read);
    vcpu.complete_mmio_read(0x1234_5678_9abc_def0);
    assert_eq!(vcpu.run().unwrap(), rang(0x1234_5678_9abc_def0));
    assert_eq!(vcpu.run().unwrap(), read);
    assert_eq!(vcpu.run().unwrap(), rang(u64::MAX), "without an answer");
}
