//! Entries of the format, put into tables by hand. The processor's MMU obeys them, and reports
//! through them.

use super::code::{Routine, callee};
use super::hand::{HandTables, plain};
use super::layout::{DATA_PFN, GIB_PFN};
use super::vcpu::{Command, Outcome, PageFault, Vcpu};
use super::vm::Vm;
use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{Access, EntryLayout, Format, Leaf, Meaning, MemoryType, Npt4, Writes};
use std::sync::atomic::Ordering;

const USER: u64 = PageFault::USER;
const PRESENT: u64 = PageFault::PRESENT;

fn leaves(pfn: u64) -> impl Iterator<Item = Leaf> {
    let memory = [
        MemoryType::WriteBack,
        MemoryType::WriteCombining,
        MemoryType::Device,
    ];
    let writes = [
        Writes::HostForbids,
        Writes::MmuForbids,
        Writes::Allowed,
        Writes::AllowedLoggedByFault,
    ];
    (0..16_u32).flat_map(move |bits| {
        let bit = move |position: u32| bits >> position & 1 != 0;
        memory.into_iter().flat_map(move |memory| {
            writes.into_iter().map(move |writes| Leaf {
                pfn: Pfn(pfn),
                access: Access {
                    write: bit(0),
                    execute: bit(1),
                },
                memory,
                accessed: bit(2),
                dirty: bit(3),
                writes,
            })
        })
    })
}

/// Lets the guest try `routine` at `gva`. Returns the error code of the fault there, if there was
/// one.
fn attempt(vcpu: &mut Vcpu, tables: &mut HandTables, routine: Routine, gva: u64) -> Option<u64> {
    match vcpu.run(Command::at(routine, gva), tables) {
        Outcome::Done(_) => None,
        Outcome::Faulted(fault) => {
            assert_eq!(fault.gva, gva, "{routine:?}");
            Some(fault.error)
        }
    }
}

#[test]
fn every_leaf_lets_through_what_the_format_says_and_no_more() {
    let Some(vm) = Vm::new() else { return };
    let mut vcpu = vm.vcpu(0);
    let mut tables = HandTables::new(&vm);
    let mut tried = 0;
    for level in vm.host.leaf_levels() {
        let pfn = [DATA_PFN, DATA_PFN, GIB_PFN][level as usize - 1];
        // In a large page, an address that needs the bits of all levels below.
        let inside = [0, 0x15_5000, 0x1555_5000][level as usize - 1];
        let page = (pfn << 12) + inside;
        vm.ram.write(page + 0x800, callee());
        for (number, leaf) in leaves(pfn).enumerate() {
            let number = number as u64;
            let frames = Npt4::frames_per_entry(level);
            // An unused entry for each, so that the TLB has no effect.
            let first = Gfn((u64::from(level) << 27) + number * frames);
            let entry = Npt4::leaf(leaf, level);
            let Some(Meaning::Leaf(said)) = Npt4::decode(entry, level) else {
                panic!("{leaf:?} has no meaning");
            };
            let gva = first.gpa().0 + inside;
            let context = format!("{said:?} at level {level}");
            tables.set(first, level, entry);
            vm.ram.word(page).store(0x1234, Ordering::Relaxed);

            // A denied store leaves no trace.
            let stored = attempt(&mut vcpu, &mut tables, Routine::Store, gva);
            let expected = (!said.access.write).then_some(USER | PRESENT | PageFault::WRITE);
            assert_eq!(stored, expected, "{context}");
            assert_eq!(Npt4::allows(entry, Access::READ_WRITE), stored.is_none());
            let word = if stored.is_some() { 0x1234 } else { gva };
            assert_eq!(vm.ram.word(page).load(Ordering::Relaxed), word, "{context}");
            let after = tables.get(first, level);
            if stored.is_some() {
                assert_eq!(after | Npt4::ACCESSED, entry | Npt4::ACCESSED, "{context}");
            } else {
                assert_eq!(after, entry | Npt4::ACCESSED | Npt4::DIRTY, "{context}");
            }

            let loaded = vcpu.run(Command::at(Routine::Load, gva), &mut tables);
            assert_eq!(loaded, Outcome::Done(word), "{context}");

            let called = attempt(&mut vcpu, &mut tables, Routine::Call, gva + 0x800);
            let expected = (!said.access.execute).then_some(USER | PRESENT | PageFault::FETCH);
            assert_eq!(called, expected, "{context}");
            assert_eq!(Npt4::allows(entry, Access::READ_EXECUTE), called.is_none());

            // Only the bits that the hardware reports may have changed.
            let dirty = said.dirty || stored.is_none();
            let expected = Leaf {
                accessed: true,
                dirty,
                ..said
            };
            let after = Npt4::decode(tables.get(first, level), level);
            assert_eq!(after, Some(Meaning::Leaf(expected)), "{context}");
            tried += 1;
        }
    }
    println!("{tried} leaves, each stored to, loaded from and called");
}

#[test]
fn a_load_sets_the_accessed_bit_and_no_other() {
    let Some(vm) = Vm::new() else { return };
    let mut vcpu = vm.vcpu(0);
    let mut tables = HandTables::new(&vm);
    for level in vm.host.leaf_levels() {
        let gfn = Gfn(u64::from(level) << 27);
        let entry = Npt4::leaf(
            plain([DATA_PFN, DATA_PFN, GIB_PFN][level as usize - 1]),
            level,
        );
        assert!(!Npt4::is_accessed(entry) && !Npt4::is_dirty(entry));
        tables.set(gfn, level, entry);
        vcpu.complete(Command::at(Routine::Load, gfn.gpa().0), &mut tables);
        assert_eq!(tables.get(gfn, level), entry | Npt4::ACCESSED);
        // Links are made accessed, so that the hardware never writes to them.
        for above in level + 1..=Npt4::LEVELS {
            let link = tables.get(gfn, above);
            assert_eq!(link, Npt4::table(Npt4::table_pfn(link)), "level {above}");
        }
    }
}

#[test]
fn values_that_translate_nothing_stop_every_access_at_every_level() {
    let Some(vm) = Vm::new() else { return };
    let mut vcpu = vm.vcpu(0);
    let mut tables = HandTables::new(&vm);
    let all = u64::MAX;
    for level in 1..=4 {
        let values = [
            Npt4::NON_PRESENT,
            Npt4::FROZEN,
            Npt4::mmio(Gfn(0), 0),
            Npt4::mmio(Gfn((1 << 36) - 1), all),
            Npt4::mmio(Gfn(0x5_5555_5555), 0x2aaa),
        ];
        for (number, value) in (0..).zip(values) {
            // Below 47 bits of address, and different at every level.
            let gfn = Gfn((u64::from(level) * 8 + number) << 27);
            tables.set(gfn, level, value);
            let routines = [(Routine::Load, 0), (Routine::Store, PageFault::WRITE)];
            for (routine, error) in routines
                .into_iter()
                .chain([(Routine::Call, PageFault::FETCH)])
            {
                let fault = attempt(&mut vcpu, &mut tables, routine, gfn.gpa().0);
                let context = format!("{routine:?} through {value:#x} at level {level}");
                assert_eq!(fault, Some(USER | error), "{context}");
            }
            assert_eq!(tables.get(gfn, level), value, "nobody wrote to it");
        }
    }
}

/// The symptom in the other tests if the format set a reserved bit.
#[test]
fn reserved_bits_are_found_out() {
    let Some(vm) = Vm::new() else { return };
    let mut vcpu = vm.vcpu(0);
    let mut tables = HandTables::new(&vm);
    let good = Npt4::leaf(plain(DATA_PFN), 2);
    let cases = [
        (2, good | 1 << 13, "an odd frame of a 2 MiB leaf"),
        (4, Npt4::table(Pfn(DATA_PFN)) | 1 << 7, "a leaf of level 4"),
        (
            1,
            Npt4::leaf(plain(1 << 39), 1),
            "a frame past 51 bits of address",
        ),
    ];
    for (number, (level, entry, what)) in (1..).zip(cases) {
        let gfn = Gfn(number << 27);
        tables.set(gfn, level, entry);
        let fault = attempt(&mut vcpu, &mut tables, Routine::Load, gfn.gpa().0);
        // Processors report such an entry as present. QEMU's does not.
        let fault = fault.map(|error| error | PRESENT);
        assert_eq!(fault, Some(USER | PRESENT | PageFault::RESERVED), "{what}");
    }
}

#[test]
fn each_bit_of_the_frame_number_picks_as_the_format_says() {
    let Some(vm) = Vm::new() else { return };
    let mut vcpu = vm.vcpu(0);
    let mut tables = HandTables::new(&vm);
    // User addresses have 47 bits. The pinned pages use bit 46.
    for bit in 0..34_u64 {
        let pfn = DATA_PFN + bit;
        vm.ram.word(pfn << 12).store(1000 + bit, Ordering::Relaxed);
        tables.set(Gfn(1 << bit), 1, Npt4::leaf(plain(pfn), 1));
    }
    for bit in 0..34 {
        let gva = 4096 << bit;
        let found = vcpu.complete(Command::at(Routine::Load, gva), &mut tables);
        assert_eq!(found, 1000 + bit, "{gva:#x}");
    }
}

#[test]
fn the_parts_of_a_split_leaf_translate_as_the_whole() {
    let Some(vm) = Vm::new() else { return };
    let mut vcpu = vm.vcpu(0);
    let mut tables = HandTables::new(&vm);
    for level in vm.host.leaf_levels().filter(|&level| level > 1) {
        let pfn = [DATA_PFN, GIB_PFN][level as usize - 2];
        let whole = Npt4::leaf(plain(pfn), level);
        let part = Npt4::frames_per_entry(level - 1);
        let first = u64::from(level) << 27;
        for child in 0..512 {
            let at = pfn + child as u64 * part;
            vm.ram.word(at << 12).store(at, Ordering::Relaxed);
            let entry = Npt4::split(whole, level, child);
            tables.set(Gfn(first + child as u64 * part), level - 1, entry);
        }
        for child in 0..512 {
            let gva = (first + child * part) << 12;
            let found = vcpu.complete(Command::at(Routine::Load, gva), &mut tables);
            assert_eq!(found, pfn + child * part, "part {child} at level {level}");
        }
        // And back: the whole at another place, with the state of its parts.
        let parts = (0..512).map(|child| tables.get(Gfn(first + child * part), level - 1));
        let parts: Vec<_> = parts.collect();
        let joined = Npt4::join(parts, level - 1).expect("the parts of one leaf");
        assert_eq!(joined, whole | Npt4::ACCESSED);
        let other = Gfn(first + (1 << 25));
        tables.set(other, level, joined);
        let last = Gfn(other.0 + 511 * part).gpa().0;
        let found = vcpu.complete(Command::at(Routine::Load, last), &mut tables);
        assert_eq!(found, pfn + 511 * part);
    }
}
