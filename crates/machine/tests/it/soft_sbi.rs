//! A guest with an operating system's needs: harts that start each other, interrupts, a console, an
//! end, and devices that answer loads.

use crate::start::start_at;
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{
    Access, DOORBELL_GPA, Engine, Exit, Kicker, MachineSpec, NewMachine, Reset, ResetKind, Vcpu,
    VcpuState, create,
};
use pageferry_testkit::rv64::{
    A0, A1, A2, A6, A7, DBCN, ECALL, HSM, IPI, SRST, WFI, ZERO, add, addi, and, bne, call, csrs,
    ld, li, sd, slli,
};
use pageferry_testkit::{LIMIT, Stop};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

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
    start_at(&mut *new.vcpus[0], 0);
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
    assert_eq!(pending(&states[0]), 2, "sip.SSIP");
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

/// A suspend of the hart that resumes at `entry`. The type needs 32 bits: 1 << 31, by li and slli.
fn suspend_without_state(entry: u32) -> Vec<u32> {
    let kind = [li(A0, 1 << 30).to_vec(), vec![slli(A0, A0, 1)]].concat();
    let others = [li(A1, entry), li(A2, 0), li(A6, 3), li(A7, HSM)].concat();
    [kind, others, vec![ECALL]].concat()
}

#[test]
fn a_suspended_hart_goes_on_after_an_interrupt() {
    let enable = [li(A2, 2).to_vec(), vec![csrs(0x104, A2)]].concat();
    for (suspend, rung) in [(call(HSM, 3, &[0]), 5), (suspend_without_state(0x1000), 6)] {
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
    vcpu.complete_read(0x1234_5678_9abc_def0);
    assert_eq!(vcpu.run().unwrap(), rang(0x1234_5678_9abc_def0));
    assert_eq!(vcpu.run().unwrap(), read);
    assert_eq!(vcpu.run().unwrap(), rang(u64::MAX), "without an answer");
}

/// An interrupt that is sent to a hart while its start waits for its thread.
#[test]
fn an_interrupt_before_the_first_instruction_stays_pending() {
    let program = [call(HSM, 0, &[1, 0x1000, 5]), call(IPI, 0, &[2, 0]), end()];
    let mut new = machine(2, &[&program, &[doorbell(3)]]);
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    let state = new.vcpus[1].save().unwrap();
    assert_eq!(pending(&state), 2, "sip.SSIP of a hart that has just begun");
    assert_eq!(next(&mut new.vcpus[1]), rang(3));
    assert_eq!(pending(&new.vcpus[1].save().unwrap()), 2, "nobody took it");
}

/// The saved `sip`.
fn pending(state: &VcpuState) -> u64 {
    u64::from_le_bytes(*state.0[296..].first_chunk().unwrap())
}

/// Hart 1 suspends, and hart 0 interrupts it at any point of the suspend. Each interrupt wakes it
/// once, for each kind of suspend.
#[test]
fn no_interrupt_beside_a_suspend_is_lost() {
    const ROUNDS: u32 = 3000;
    const WOKEN: u32 = 0x4000;
    let (rounds, sent, woken, place, spins) = (20, 21, 22, 23, 24);
    // csrrc zero, sip, a2: lowers SSIP.
    let lower = |rs: u32| 0x1440_3073 | rs << 15;
    for suspend in [call(HSM, 3, &[0]), suspend_without_state(0x1000)] {
        // It waits until hart 1 has woken as often as it was interrupted, then for 0 to 255 turns,
        // and sends the next one.
        let turn = [
            vec![ld(woken, place), bne(woken, sent, -4), addi(sent, sent, 1)],
            li(spins, 255).to_vec(),
            vec![and(spins, spins, sent), addi(spins, spins, 1)],
            vec![addi(spins, spins, -1), bne(spins, ZERO, -4)],
            call(IPI, 0, &[2, 0]),
        ]
        .concat();
        let back = bne(sent, rounds, -4 * turn.len() as i32);
        let first = [
            [li(rounds, ROUNDS), li(place, WOKEN)].concat(),
            call(HSM, 0, &[1, 0x1000, 0]),
            turn,
            vec![back],
            end(),
        ];
        // It begins here at each wake-up: lowers SSIP, counts the wake-up in memory, suspends. The
        // start counts as well, from -1.
        let count = vec![ld(woken, place), addi(woken, woken, 1), sd(woken, place)];
        let second = [
            [li(A2, 2), li(place, WOKEN)].concat(),
            vec![csrs(0x104, A2), lower(A2)],
            count,
            suspend,
            // A retentive suspend goes on here.
            vec![bne(place, ZERO, 0)],
        ];
        let mut second = second.concat();
        let end = second.len() - 1;
        second[end] = bne(place, ZERO, -4 * end as i32);
        let mut new = machine(2, &[&first, &[second]]);
        let ram = Arc::clone(new.machine.ram());
        ram.try_write(Gpa(WOKEN.into()), &u64::MAX.to_le_bytes())
            .unwrap();
        let mut harts = new.vcpus.drain(..);
        let (mut first, mut second) = (harts.next().unwrap(), harts.next().unwrap());
        let kickers = [first.kicker(), second.kicker()];
        let (done, deadline) = (Stop::new(), Instant::now() + LIMIT);
        thread::scope(|scope| {
            let other = scope.spawn(|| {
                while !done.is_stopped() {
                    assert_eq!(second.run().unwrap(), Exit::Kicked);
                }
            });
            let watch = scope.spawn(|| {
                while !done.is_stopped() && Instant::now() < deadline {
                    thread::sleep(Duration::from_millis(1));
                }
                kickers.iter().for_each(|kicker| kicker.kick());
            });
            let exit = first.run().unwrap();
            done.stop();
            watch.join().unwrap();
            kickers[1].kick();
            other.join().unwrap();
            let mut woken = [0; 8];
            ram.try_read(Gpa(WOKEN.into()), &mut woken).unwrap();
            let woken = u64::from_le_bytes(woken);
            assert_eq!(exit, ENDED, "hart 1 woke {woken} times of {ROUNDS}");
        });
    }
}

/// A call for the status of hart 1, whose answer goes to page `page`.
fn tell_status(page: u32) -> Vec<u32> {
    let store = vec![li(A2, page << 12)[0], sd(A1, A2)];
    [call(HSM, 2, &[1]), store].concat()
}

/// Asks for the status of hart 1 until it is `status`.
fn await_status(status: u32) -> Vec<u32> {
    let ask = [call(HSM, 2, &[1]), li(A2, status).to_vec()].concat();
    let back = bne(A1, A2, -4 * ask.len() as i32);
    [ask, vec![back]].concat()
}

/// The exit of a vCPU. A kick ends a run that takes too long.
fn bounded(vcpu: &mut Box<dyn Vcpu>) -> Exit {
    let (kicker, done) = (vcpu.kicker(), Stop::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            let deadline = Instant::now() + LIMIT;
            while !done.is_stopped() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(1));
            }
            if !done.is_stopped() {
                kicker.kick();
            }
        });
        let exit = vcpu.run().unwrap();
        done.stop();
        exit
    })
}

/// Kicks a vCPU when dropped, also during a panic.
struct KickOnDrop(Arc<dyn Kicker>);

impl Drop for KickOnDrop {
    fn drop(&mut self) {
        self.0.kick();
    }
}

/// Runs `vcpu` on a thread until `during` has returned.
fn beside<R>(vcpu: &mut Box<dyn Vcpu>, during: impl FnOnce() -> R) -> R {
    let kick = KickOnDrop(vcpu.kicker());
    thread::scope(|scope| {
        let run = scope.spawn(|| vcpu.run().unwrap());
        let kick = kick;
        let result = during();
        drop(kick);
        assert_eq!(run.join().unwrap(), Exit::Kicked);
        result
    })
}

/// SBI 2.0, chapter 9: a suspended hart is RESUME_PENDING as soon as an interrupt resumes it, and
/// STARTED when it executes. It need not leave the guest for that.
#[test]
fn a_hart_that_resumes_is_not_called_suspended() {
    const STARTED: u32 = 0;
    const SUSPENDED: u32 = 4;
    const RESUME_PENDING: u32 = 6;
    let spin = vec![bne(A7, ZERO, 0)];
    for suspend in [call(HSM, 3, &[0]), suspend_without_state(0x2000)] {
        for resumes in [true, false] {
            let software = li(A2, u32::from(resumes) << 1).to_vec();
            let second = [
                software,
                vec![csrs(0x104, A2)],
                suspend.clone(),
                spin.clone(),
            ];
            let first = [
                call(HSM, 0, &[1, 0x1000, 0]),
                await_status(SUSPENDED),
                doorbell(0),
                call(IPI, 0, &[2, 0]),
                tell_status(4),
                doorbell(1),
                tell_status(5),
                doorbell(2),
                await_status(STARTED),
                end(),
            ];
            // A hart that resumes at an address has its id in a0, so it spins too.
            let resumed = [vec![bne(A0, ZERO, 0)]];
            let mut new = machine(2, &[&first, &second, &resumed]);
            let ram = Arc::clone(new.machine.ram());
            let told = |page| {
                let mut bytes = [0; 8];
                ram.try_read(RamPage(page), &mut bytes).unwrap();
                u64::from_le_bytes(bytes) as u32
            };
            let mut second = new.vcpus.pop().unwrap();
            let first = &mut new.vcpus[0];
            beside(&mut second, || assert_eq!(bounded(first), rang(0)));
            // Hart 1 is parked: its thread takes no interrupt.
            assert_eq!(bounded(first), rang(1));
            let expected = if resumes { RESUME_PENDING } else { SUSPENDED };
            assert_eq!(told(4), expected);
            // The interrupt is a part of the state.
            let state = second.save().unwrap();
            second.restore(&state).unwrap();
            assert_eq!(bounded(first), rang(2));
            assert_eq!(told(5), expected);
            if resumes {
                beside(&mut second, || assert_eq!(bounded(first), ENDED));
            }
        }
    }
}

/// The timer of a suspended hart resumes it as an interrupt of another hart does.
#[test]
fn a_hart_whose_timer_is_due_is_not_called_suspended() {
    const DEADLINE: u32 = i32::MAX as u32;
    const TIME: u32 = 0x5449_4d45;
    for (enabled, status) in [(1 << 5, 6_u8), (1 << 1, 4)] {
        let second = [
            [li(A2, enabled).to_vec(), vec![csrs(0x104, A2)]].concat(),
            call(TIME, 0, &[DEADLINE]),
            call(HSM, 3, &[0]),
            vec![bne(A7, ZERO, 0)],
        ];
        let first = [
            call(HSM, 0, &[1, 0x1000, 0]),
            await_status(4),
            doorbell(0),
            tell_status(4),
            doorbell(1),
            await_status(0),
            end(),
        ];
        let mut new = machine(2, &[&first, &second]);
        let mut second = new.vcpus.pop().unwrap();
        let first = &mut new.vcpus[0];
        beside(&mut second, || assert_eq!(bounded(first), rang(0)));
        // The clock goes on to the deadline, and hart 1 is parked.
        let mut state = first.save().unwrap();
        state.0[360..368].copy_from_slice(&u64::from(DEADLINE).to_le_bytes());
        first.restore(&state).unwrap();
        assert_eq!(bounded(first), rang(1));
        let mut told = [0; 8];
        new.machine.ram().try_read(RamPage(4), &mut told).unwrap();
        assert_eq!(told, [status, 0, 0, 0, 0, 0, 0, 0]);
        if status == 6 {
            beside(&mut second, || assert_eq!(bounded(first), ENDED));
        }
    }
}

/// A start that its hart has not carried out is no part of another state.
#[test]
fn a_restored_state_replaces_a_start_under_way() {
    let run_state = |state: &VcpuState| state.0[384];
    let mut new = machine(2, &[&[call(HSM, 0, &[1, 0x1000, 5]), end()]]);
    let stopped = new.vcpus[1].save().unwrap();
    assert_eq!(run_state(&stopped), 1);
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    new.vcpus[1].restore(&stopped).unwrap();
    let state = new.vcpus[1].save().unwrap();
    assert_eq!(run_state(&state), 1, "the restored hart is stopped");
}

/// A call whose ECALL is the last instruction of the address space, so that the next one is at 0. A
/// reset steps back, so that the hart makes the call again.
#[test]
fn a_call_at_the_end_of_the_address_space_is_a_call() {
    // Sv39 with the root in page 16. It maps the first GiB at its own addresses, and page 1 at the
    // last address.
    let (satp, root) = (20, 21);
    let code = [
        [li(satp, 1), li(root, 16)].concat(),
        vec![slli(satp, satp, 31), slli(satp, satp, 32)],
        // csrrw zero, satp, x20, which is or'ed with the root's page.
        vec![add(satp, satp, root), 0x1800_1073 | satp << 15],
        [li(A0, 0), li(A1, 0), li(A6, 0), li(A7, SRST)].concat(),
        // jalr zero, -4(zero)
        vec![0xffc0_0067],
    ];
    let mut new = machine(1, &[&code]);
    let ram = new.machine.ram();
    let leaf = |page: u64| page << 10 | 0xcf;
    let table = |page: u64| page << 10 | 1;
    for (page, index, entry) in [
        (16, 0, leaf(0)),
        (16, 511, table(17)),
        (17, 511, table(18)),
        (18, 511, leaf(1)),
    ] {
        ram.try_write((RamPage(page), index * 8), &entry.to_le_bytes())
            .unwrap();
    }
    ram.try_write((RamPage(1), PAGE_SIZE - 4), &ECALL.to_le_bytes())
        .unwrap();
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED);
    assert_eq!(new.vcpus[0].run().unwrap(), ENDED, "it repeats the call");
}
