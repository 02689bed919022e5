//! The loop of Linux's first process, in a bare guest: the same instructions without an operating
//! system and without page tables.

use super::go_on;
use crate::BenchError;
use crate::vm::Vm;
use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};
use pageferry_addr::Gpa;
use pageferry_hypervisor::hart::TIMEBASE_HZ;
use pageferry_machine::{Engine, MachineSpec, StartMode, StartState};
use std::time::{Duration, Instant};

/// The instructions of a round.
pub(super) const INSTRUCTIONS: u64 = 13;
/// The rounds: `LOOP_ROUNDS` of `init.c`.
pub(super) const ROUNDS: u64 = 20_000_000;
/// The first random number.
const SEED: u64 = 88_172_645_463_325_252;
/// Guest memory, in bytes.
const MEMORY: u64 = 4 << 20;
/// Guest-physical addresses, counted from the start of RAM: the code, the words that the loop
/// writes, and its results.
const CODE: u64 = 0x1000;
const TABLE: u64 = 0x2000;
const RESULTS: u64 = 0x3000;
/// The words that the loop writes.
const WORDS: usize = 256;
/// SBI's extension for the end of a guest.
const SRST: i64 = 0x5352_5354;

/// The nanoseconds of a bare loop, and its result.
pub(super) struct BareLoop {
    pub(super) ns: u64,
    pub(super) result: u64,
}

/// Runs the loop on one vCPU of the soft engine.
pub(super) fn measure_bare(rounds: u64) -> Result<BareLoop, BenchError> {
    let vm = Vm::create(Engine::Soft, MachineSpec::new(1, MEMORY), None)?;
    let ram = vm.machine.ram();
    let start = ram.layout().regions()[0].gfn.gpa().0;
    ram.try_write(Gpa(start + CODE), &code(start, rounds))?;
    let state = StartState {
        entry: start + CODE,
        stack: 0,
        args: [0; 2],
        tables: Gpa(0),
        mode: StartMode::User,
    };
    vm.threads.with_vcpus(|vcpu| vcpu.set_start(&state))?;
    vm.threads.resume();
    let deadline = Instant::now() + super::LIMIT;
    while vm.reset().is_none() {
        if let Some(why) = vm.threads.failures().first() {
            return Err(BenchError::Stopped(why.to_string()));
        }
        go_on(deadline, "the loop in a bare guest")?;
        std::thread::sleep(Duration::from_millis(2));
    }
    let word = |at: u64| -> Result<u64, BenchError> {
        let mut bytes = [0; 8];
        ram.try_read(Gpa(start + at), &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let mut result = word(RESULTS + 8)?;
    for at in (TABLE..).step_by(8).take(WORDS) {
        result = result.wrapping_add(word(at)?);
    }
    Ok(BareLoop {
        ns: word(RESULTS)? * (1_000_000_000 / TIMEBASE_HZ),
        result,
    })
}

fn code(ram: u64, rounds: u64) -> Vec<u8> {
    let mut ops = VecAssembler::<RiscvRelocation>::new((ram + CODE) as usize);
    dynasm!(ops
        ; .arch riscv64i
        ; .feature zicsr
        ; li t0, SEED as i64
        ; li t1, rounds as i64
        ; li t2, (ram + TABLE) as i64
        ; csrr s0, 0xc01 // time
        ;round:
        ; slli a0, t0, 13
        ; xor t0, t0, a0
        ; srli a0, t0, 7
        ; xor t0, t0, a0
        ; slli a0, t0, 17
        ; xor t0, t0, a0
        ; andi a0, t0, 0x7f8
        ; add a0, a0, t2
        ; ld a1, [a0, 0]
        ; add a1, a1, t0
        ; sd a1, [a0, 0]
        ; addi t1, t1, -1
        ; bnez t1, <round
        ; csrr s1, 0xc01
        ; sub s1, s1, s0
        ; li t2, (ram + RESULTS) as i64
        ; sd s1, [t2, 0]
        ; sd t0, [t2, 8]
        ; li a7, SRST
        ; li a6, 0
        ; li a0, 0
        ; li a1, 0
        ; ecall
    );
    ops.finalize()
        .expect("every label of fixed code is defined")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the loop of `init.c` returns.
    fn expected(rounds: u64) -> u64 {
        let (mut x, mut table) = (SEED, [0_u64; WORDS]);
        for _ in 0..rounds {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let word = &mut table[(x & 0x7f8) as usize / 8];
            *word = word.wrapping_add(x);
        }
        table.into_iter().fold(x, u64::wrapping_add)
    }

    #[test]
    fn the_bare_loop_computes_what_the_first_process_does() {
        let bare = measure_bare(1000).expect("soft runs everywhere");
        assert_eq!(bare.result, expected(1000));
        assert!(bare.ns > 0);
    }
}
