//! Flat x86-64 page tables: every address is mapped to itself.
//!
//! All leaves are 2 MiB large, writable and open to ring 3. Their accessed and dirty bits are set
//! from the start, so the CPU never writes to a table, and a table page keeps the bytes of the
//! image. RAM and the 2 MiB around the doorbell are mapped, nothing else. Entry format: Intel SDM
//! volume 3, section 5.5.

use crate::address_space::{DOORBELL_GPA, HOLE_END, HOLE_START, gpa_of};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};

const PRESENT_WRITABLE_USER: u64 = 0b111;
const ACCESSED: u64 = 1 << 5;
const DIRTY: u64 = 1 << 6;
const PAGE_2M: u64 = 1 << 7;
/// Entries per table.
const ENTRIES: u64 = 512;
const GIB: u64 = 1 << 30;
const DOORBELL_GIB: u64 = DOORBELL_GPA.0 / GIB;

/// Guest-physical ranges of RAM, as pairs of start and end.
fn ram_ranges(memory_bytes: u64) -> [(u64, u64); 2] {
    let high = memory_bytes.saturating_sub(HOLE_START);
    [
        (0, memory_bytes.min(HOLE_START)),
        (HOLE_END, HOLE_END + high),
    ]
}

/// The GiBs that have a page directory, ascending.
fn mapped_gibs(memory_bytes: u64) -> Vec<u64> {
    let [low, high] = ram_ranges(memory_bytes);
    let mut gibs: Vec<u64> = (0..low.1.div_ceil(GIB)).collect();
    gibs.push(DOORBELL_GIB);
    gibs.extend(high.0 / GIB..high.1.div_ceil(GIB));
    gibs
}

/// The number of table pages for `memory_bytes` bytes of RAM.
pub(crate) fn count(memory_bytes: u64) -> u64 {
    let gibs = mapped_gibs(memory_bytes);
    let pointer_tables = gibs.last().map_or(0, |gib| gib / ENTRIES + 1);
    1 + pointer_tables + gibs.len() as u64
}

/// The tables of `memory_bytes` bytes of RAM, one page each. The first is the root, at `root`.
pub(crate) fn build(memory_bytes: u64, root: RamPage) -> Vec<(Gpa, Vec<u8>)> {
    let gibs = mapped_gibs(memory_bytes);
    let gpa = |table: usize| gpa_of(RamPage(root.0 + table as u64)).0;
    let mut tables = vec![[0_u64; ENTRIES as usize]; count(memory_bytes) as usize];
    let link = PRESENT_WRITABLE_USER | ACCESSED;
    let leaf = PRESENT_WRITABLE_USER | ACCESSED | DIRTY | PAGE_2M;

    let directories = tables.len() - gibs.len();
    for (nth, &gib) in gibs.iter().enumerate() {
        let pointer_table = 1 + (gib / ENTRIES) as usize;
        tables[0][(gib / ENTRIES) as usize] = gpa(pointer_table) | link;
        tables[pointer_table][(gib % ENTRIES) as usize] = gpa(directories + nth) | link;
        for slot in 0..ENTRIES {
            let address = gib * GIB + slot * (GIB / ENTRIES);
            let is_ram = ram_ranges(memory_bytes)
                .iter()
                .any(|&(start, end)| (start..end).contains(&address));
            let is_doorbell = address == DOORBELL_GPA.0 & !(GIB / ENTRIES - 1);
            if is_ram || is_doorbell {
                tables[directories + nth][slot as usize] = address | leaf;
            }
        }
    }
    tables
        .iter()
        .enumerate()
        .map(|(nth, table)| {
            let bytes: Vec<u8> = table.iter().flat_map(|entry| entry.to_le_bytes()).collect();
            assert_eq!(bytes.len() as u64, PAGE_SIZE);
            (Gpa(gpa(nth)), bytes)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    /// Walks the tables as the CPU does.
    fn translate(tables: &HashMap<u64, Vec<u8>>, root: u64, address: u64) -> Option<u64> {
        let mut table = root;
        for (level, shift) in [(4, 39), (3, 30), (2, 21)] {
            let slot = (address >> shift & 511) as usize * 8;
            let entry = u64::from_le_bytes(tables[&table][slot..slot + 8].try_into().unwrap());
            if entry & 1 == 0 {
                return None;
            }
            assert_eq!(entry & 0x27, 0x27, "present, writable, user, accessed");
            if level == 2 {
                assert_eq!(entry & 0xc0, 0xc0, "2 MiB, dirty");
            }
            table = entry & 0x000f_ffff_ffff_f000;
        }
        Some(table | address & 0x1f_ffff)
    }

    #[test]
    fn ram_and_the_doorbell_are_mapped_to_themselves_and_nothing_else_is() {
        for memory in [1 << 21, 5 << 20, 3 << 30, (3 << 30) + 4096, 600 << 30] {
            let root_page = RamPage(4);
            let root = gpa_of(root_page).0;
            let tables: HashMap<u64, Vec<u8>> = build(memory, root_page)
                .into_iter()
                .map(|(gpa, bytes)| (gpa.0, bytes))
                .collect();
            assert_eq!(tables.len() as u64, count(memory));
            let last = gpa_of(RamPage(memory / PAGE_SIZE - 1)).0;
            for address in [0, 4096, memory.min(HOLE_START) - 1, last, DOORBELL_GPA.0] {
                assert_eq!(
                    translate(&tables, root, address),
                    Some(address),
                    "{memory:#x}"
                );
            }
            let end = (last | 0x1f_ffff) + 1;
            for address in [HOLE_START, HOLE_END - 1] {
                assert_eq!(translate(&tables, root, address), None);
            }
            if end != HOLE_START {
                assert_eq!(translate(&tables, root, end), None, "{memory:#x}");
            }
        }
    }
}
