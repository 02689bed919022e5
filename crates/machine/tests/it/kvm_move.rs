//! A vCPU moves to another VM in the middle of a loop, and continues there.

use crate::support::{DATA, Watchdog, machine, no_kvm, run, rung, start, word};
use pageferry_addr::PAGE_SIZE;
use pageferry_machine::{DOORBELL_GPA, Exit, GuestRam, MachineError, NewMachine, Vcpu, VcpuState};
use std::time::Duration;

/// rdi: four words to add; rsi: the number of additions. Adds them in ymm0, counts in rax, stores
/// ymm0 behind the words, stores rax to the doorbell.
///
/// ```text
/// vmovdqu ymm1,[rdi]; vpxor ymm0,ymm0,ymm0; xor eax,eax
/// l: vpaddq ymm0,ymm0,ymm1; inc rax; cmp rax,rsi; jb l
/// vmovdqu [rdi+0x20],ymm0; mov ebx,0xd0000000; mov [rbx],rax; jmp .
/// ```
const SUM_AVX2: [u8; 37] = [
    0xc5, 0xfe, 0x6f, 0x0f, 0xc5, 0xfd, 0xef, 0xc0, 0x31, 0xc0, 0xc5, 0xfd, 0xd4, 0xc1, 0x48, 0xff,
    0xc0, 0x48, 0x39, 0xf0, 0x72, 0xf4, 0xc5, 0xfe, 0x7f, 0x47, 0x20, 0xbb, 0, 0, 0, 0xd0, 0x48,
    0x89, 0x03, 0xeb, 0xfe,
];

/// The same with xmm0 and xmm1: movdqu, pxor, paddq.
const SUM_SSE2: [u8; 37] = [
    0xf3, 0x0f, 0x6f, 0x0f, 0x66, 0x0f, 0xef, 0xc0, 0x31, 0xc0, 0x66, 0x0f, 0xd4, 0xc1, 0x48, 0xff,
    0xc0, 0x48, 0x39, 0xf0, 0x72, 0xf4, 0xf3, 0x0f, 0x7f, 0x47, 0x20, 0xbb, 0, 0, 0, 0xd0, 0x48,
    0x89, 0x03, 0xeb, 0xfe,
];

fn copy_memory(from: &GuestRam, to: &GuestRam) {
    let mut page = [0; PAGE_SIZE as usize];
    for index in (0..from.pages()).map(pageferry_addr::RamPage) {
        from.try_read(index, &mut page).unwrap();
        to.try_write(index, &page).unwrap();
    }
}

/// A new machine with the memory of `old`, its vCPU in `state`.
fn moved(old: &GuestRam, state: &VcpuState) -> NewMachine {
    let mut new = machine(1, old.pages());
    copy_memory(old, new.machine.ram());
    new.vcpus[0].restore(state).unwrap();
    new
}

fn sum(code: &[u8], lanes: usize) {
    // On a fast host, or one that delays the kicks, the loop must be longer.
    let mut times = 10_000_000;
    while sum_moved(code, lanes, times) < 5 {
        times *= 4;
        assert!(times < 1 << 38, "the vCPU is never moved in its loop");
    }
}

/// Adds `times` times, and moves all the while. Returns the number of moves.
fn sum_moved(code: &[u8], lanes: usize, times: u64) -> u32 {
    let words = [3u64, u64::MAX / 7, 0x8000_0000_0000_0001, 11];
    let mut now = machine(1, 32);
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    now.machine.ram().try_write(DATA, &bytes).unwrap();
    start(
        now.machine.ram(),
        now.vcpus[0].as_mut(),
        0,
        code,
        [DATA.byte_offset(), times],
    );
    let mut moves = 0;
    let rang = loop {
        // Each machine's vCPU runs on a separate thread, as in a real move.
        let (exit, state) = std::thread::scope(|scope| {
            let vcpu = &mut now.vcpus[0];
            scope
                .spawn(move || {
                    let kicker = vcpu.kicker();
                    let kick = std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(3));
                        kicker.kick();
                    });
                    let exit = run(vcpu.as_mut());
                    kick.join().unwrap();
                    (exit, vcpu.save().unwrap())
                })
                .join()
                .unwrap()
        });
        if exit != Exit::Kicked {
            break rung(exit);
        }
        now = moved(now.machine.ram(), &state);
        moves += 1;
    };
    assert_eq!(rang, times);
    for (lane, value) in words.iter().take(lanes).enumerate() {
        assert_eq!(
            word(now.machine.ram(), DATA, 4 + lane),
            value.wrapping_mul(times),
            "lane {lane}"
        );
    }
    moves
}

#[test]
fn registers_and_vectors_survive_many_moves() {
    if no_kvm() {
        return;
    }
    sum(&SUM_SSE2, 2);
    if std::arch::is_x86_feature_detected!("avx2") {
        sum(&SUM_AVX2, 4);
    }
}

/// mov ebx, 0xd0000000; l: inc rdi; mov [rbx], rdi; mov eax, [rbx+8]; jmp l
const RING_AND_READ: [u8; 16] = [
    0xbb, 0, 0, 0, 0xd0, 0x48, 0xff, 0xc7, 0x48, 0x89, 0x3b, 0x8b, 0x43, 0x08, 0xeb, 0xf5,
];

#[test]
fn an_access_outside_ram_is_completed_before_the_state_is_taken() {
    if no_kvm() {
        return;
    }
    let mut now = machine(1, 32);
    start(
        now.machine.ram(),
        now.vcpus[0].as_mut(),
        0,
        &RING_AND_READ,
        [0, 0],
    );
    for round in 1..=20 {
        // Each instruction is carried out exactly once, although the state moves between any two.
        assert_eq!(rung(run(now.vcpus[0].as_mut())), round);
        let state = now.vcpus[0].save().unwrap();
        now = moved(now.machine.ram(), &state);
        let read = run(now.vcpus[0].as_mut());
        assert_eq!(
            read,
            Exit::MmioRead {
                gpa: pageferry_addr::Gpa(DOORBELL_GPA.0 + 8),
                size: 4
            }
        );
        let state = now.vcpus[0].save().unwrap();
        now = moved(now.machine.ram(), &state);
    }
}

/// movdqu xmm0, [rdi]; mov ebx, 0xd0000000; movdqu [rbx], xmm0; mov [rbx], rsi; jmp .
const STORE_SIXTEEN: [u8; 18] = [
    0xf3, 0x0f, 0x6f, 0x07, 0xbb, 0, 0, 0, 0xd0, 0xf3, 0x0f, 0x7f, 0x03, 0x48, 0x89, 0x33, 0xeb,
    0xfe,
];

#[test]
fn the_second_half_of_an_access_that_the_first_machine_did_not_see_moves_too() {
    if no_kvm() {
        return;
    }
    let mut now = machine(1, 32);
    let bytes: Vec<u8> = [0x1111u64, 0x2222]
        .iter()
        .flat_map(|w| w.to_le_bytes())
        .collect();
    now.machine.ram().try_write(DATA, &bytes).unwrap();
    start(
        now.machine.ram(),
        now.vcpus[0].as_mut(),
        0,
        &STORE_SIXTEEN,
        [DATA.byte_offset(), 0x3333],
    );
    assert_eq!(rung(run(now.vcpus[0].as_mut())), 0x1111);
    let state = now.vcpus[0].save().unwrap();
    let kicker = now.vcpus[0].kicker();
    assert!(!kicker.is_kicked());
    now = moved(now.machine.ram(), &state);
    let second = Exit::MmioWrite {
        gpa: pageferry_addr::Gpa(DOORBELL_GPA.0 + 8),
        value: 0x2222,
        size: 8,
    };
    assert_eq!(run(now.vcpus[0].as_mut()), second);
    assert_eq!(rung(run(now.vcpus[0].as_mut())), 0x3333);
}

#[test]
fn a_kick_outlives_saving() {
    if no_kvm() {
        return;
    }
    let mut now = machine(1, 32);
    start(
        now.machine.ram(),
        now.vcpus[0].as_mut(),
        0,
        &RING_AND_READ,
        [0, 0],
    );
    assert_eq!(rung(run(now.vcpus[0].as_mut())), 1);
    let vcpu: &mut dyn Vcpu = now.vcpus[0].as_mut();
    vcpu.kicker().kick();
    vcpu.save().unwrap();
    assert!(vcpu.kicker().is_kicked());
    let watchdog = Watchdog::new(vcpu.kicker(), pageferry_testkit::LIMIT);
    assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
    assert!(!watchdog.fired());
}

#[test]
fn bytes_that_are_no_state_leave_an_error() {
    if no_kvm() {
        return;
    }
    let mut new = machine(1, 32);
    for bytes in [vec![], b"PFKV".to_vec(), vec![0; 100_000]] {
        let state = VcpuState(bytes);
        for refused in [new.vcpus[0].check(&state), new.vcpus[0].restore(&state)] {
            assert!(matches!(refused, Err(MachineError::BadState(_))));
        }
    }
}
