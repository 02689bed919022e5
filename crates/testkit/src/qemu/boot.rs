//! The memory of QEMU's guest: this project's program, and code that starts it on QEMU's machine.
//!
//! **Mechanism.** The program expects RAM at address 0, and QEMU's `virt` machine has it at 2 GiB.
//! So the harts run in supervisor mode behind page tables (Sv39, pages of 2 MiB) that map address 0
//! to the program's part of RAM. The program's last store goes to an address without a page, so
//! the hart traps and waits for ever. The program is the one that the soft engine runs.

use super::{Error, failed};
use dynasmrt::riscv::RiscvRelocation;
use dynasmrt::{DynasmApi, DynasmLabelApi, VecAssembler, dynasm};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_guest::{MemoryMap, PageBytes, Program, ProgramKind};
use std::fs::File;
use std::os::unix::fs::FileExt;

/// The start of RAM on QEMU's `virt` machine, where harts begin at reset.
const RAM: u64 = 0x8000_0000;
/// A page of the map from the program's addresses to RAM.
const LARGE: u64 = 2 << 20;
/// The offset in RAM of the program's memory. The code that starts it lies below.
const PROGRAM: u64 = LARGE;
/// The offset in RAM of the start values: two words for each hart.
const STARTS: u64 = 0x800;
/// The offset in RAM of the root page table. Those of the next level follow.
const TABLES: u64 = 0x1000;
/// The memory that one page table of the second level maps.
const GIB: u64 = 1 << 30;
/// The most memory of the program, in bytes: above, its addresses have a hole.
pub const MAX_MEMORY: u64 = 3 << 30;

/// A page-table entry of a page that may be read, written and executed: V, R, W, X, A and D.
const LEAF: u64 = 0xcf;
/// A page-table entry that points to a table: V.
const TABLE: u64 = 1;
/// satp's mode Sv39.
const SV39: u64 = 8 << 60;

/// The RAM of a machine for a program with `memory_bytes`. QEMU puts its device tree into the last
/// part.
pub(super) const fn ram_bytes(memory_bytes: u64) -> u64 {
    PROGRAM + memory_bytes + LARGE
}

/// Reads a page of the program's memory.
pub(super) fn read_page(file: &File, page: RamPage, bytes: &mut PageBytes) -> std::io::Result<()> {
    file.read_exact_at(bytes, PROGRAM + MemoryMap::gpa_of(page).0)
}

/// Writes the RAM that the machine starts with. The workload finds pages of zeros, as it expects.
/// Any other program finds none.
pub(super) fn write(file: &File, program: &Program) -> Result<(), Error> {
    let map = program.memory_map();
    let wrote = write_all(file, program, map.memory_bytes());
    wrote.map_err(|why| failed(format!("cannot write the guest's memory: {why}")))
}

fn write_all(file: &File, program: &Program, memory_bytes: u64) -> std::io::Result<()> {
    file.set_len(ram_bytes(memory_bytes))?;
    let filled = program.kind() != ProgramKind::Workload;
    for page in (0..memory_bytes / PAGE_SIZE).filter(|_| filled) {
        file.write_all_at(&filling(page), PROGRAM + page * PAGE_SIZE)?;
    }
    for (gpa, bytes) in program.image() {
        file.write_all_at(&bytes, PROGRAM + gpa.0)?;
    }
    file.write_all_at(&code(program), 0)?;
    let mut starts = Vec::new();
    for vcpu in 0..program.memory_map().vcpus() {
        let start = program.start(vcpu);
        starts.extend(start.args[0].to_le_bytes());
        starts.extend(start.stack.to_le_bytes());
    }
    file.write_all_at(&starts, STARTS)?;
    let entry = |address: u64, flags| ((address / PAGE_SIZE) << 10) | flags;
    for gib in 0..memory_bytes.div_ceil(GIB) {
        let table = TABLES + (1 + gib) * PAGE_SIZE;
        let root = entry(RAM + table, TABLE);
        file.write_all_at(&root.to_le_bytes(), TABLES + gib * 8)?;
        let pages = (memory_bytes - gib * GIB).min(GIB) / LARGE;
        let leaves: Vec<u8> = (0..pages)
            .flat_map(|page| entry(RAM + PROGRAM + gib * GIB + page * LARGE, LEAF).to_le_bytes())
            .collect();
        file.write_all_at(&leaves, table)?;
    }
    Ok(())
}

/// The bytes that fill a page before a guest runs: not all zero, and different for each page.
#[must_use]
pub fn filling(page: u64) -> PageBytes {
    let mut bytes = [0x5a; PAGE_SIZE as usize];
    bytes[8..16].copy_from_slice(&page.to_le_bytes());
    bytes
}

/// The code from which each hart begins, in machine mode.
fn code(program: &Program) -> Vec<u8> {
    let start = program.start(0);
    let satp = SV39 | ((RAM + TABLES) / PAGE_SIZE);
    let mut ops = VecAssembler::<RiscvRelocation>::new(RAM as usize);
    dynasm!(ops
        ; .arch riscv64i
        ; .feature zicsr
        ; li t1, (RAM + STARTS) as i64
        ; csrr t0, 0xf14 // mhartid
        ; slli t0, t0, 4
        ; add t1, t1, t0
        ; ld a0, [t1, 0]
        ; ld sp, [t1, 8]
        ; li a1, start.args[1] as i64
        // All of memory is open to supervisor mode: pmpaddr0, then pmpcfg0 (NAPOT, R, W, X).
        ; li.12 t0, -1
        ; csrw 0x3b0, t0
        ; li.12 t0, 0x1f
        ; csrw 0x3a0, t0
        ; li t0, satp as i64
        ; csrw 0x180, t0
        ; .u32 0x1200_0073 // sfence.vma
        // mstatus.MPP becomes supervisor mode.
        ; li t0, 0x1800
        ; csrc 0x300, t0
        ; li t0, 0x800
        ; csrs 0x300, t0
        ; li t0, start.entry as i64
        ; csrw 0x341, t0 // mepc
        ; auipc t0, 0
        ; addi t0, t0, 16
        ; csrw 0x305, t0 // mtvec: the wait below
        ; .u32 0x3020_0073 // mret
        ;park:
        ; .u32 0x1050_0073 // wfi
        ; j <park
    );
    let code = ops
        .finalize()
        .expect("every label of fixed code is defined");
    assert!(code.len() as u64 <= STARTS, "the start values follow");
    code
}
