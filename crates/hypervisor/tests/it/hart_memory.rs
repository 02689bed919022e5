//! Loads and stores: widths and extension, misaligned and split accesses, missing memory, MMIO.

use crate::support::hart::{CODE, DATA, Machine, Page, RAM, asm::*};
use pageferry_hypervisor::hart::{Access, HartExit, MemoryFault};
use proptest::prelude::*;

const BYTES: [u8; 16] = [
    0x80, 0x01, 0xff, 0x7f, 0x01, 0x02, 0x03, 0x84, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xf0,
];

fn load(instruction: u32, address: u64) -> u64 {
    let mut machine = Machine::new(&[instruction]);
    machine.ram().fill(DATA, &BYTES);
    machine.hart.set_x(11, address);
    machine.step();
    machine.hart.x(10)
}

#[test]
fn loads_extend_as_they_say() {
    let table = [
        ("lb negative", lb(A0, A1, 0), 0xffff_ffff_ffff_ff80),
        ("lb positive", lb(A0, A1, 1), 1),
        ("lbu", lbu(A0, A1, 0), 0x80),
        ("lh", lh(A0, A1, 0), 0x0180),
        ("lh negative", lh(A0, A1, 6), 0xffff_ffff_ffff_8403),
        ("lhu", lhu(A0, A1, 6), 0x8403),
        ("lw positive", lw(A0, A1, 0), 0x7fff_0180),
        ("lw negative", lw(A0, A1, 4), 0xffff_ffff_8403_0201),
        ("lwu", lwu(A0, A1, 4), 0x8403_0201),
        ("ld", ld(A0, A1, 8), 0xf070_6050_4030_2010),
        ("ld again", ld(A0, A1, 0), 0x8403_0201_7fff_0180),
    ];
    for (name, instruction, expected) in table {
        let got = load(instruction, DATA);
        assert_eq!(got, expected, "{name}: {got:#x}");
    }
    assert_eq!(
        load(lw(A0, A1, -2048), DATA + 2048),
        0x7fff_0180,
        "a negative offset"
    );
    assert_eq!(
        load(lb(A0, A1, 2047), DATA - 2047),
        0xffff_ffff_ffff_ff80,
        "the largest offset"
    );
}

#[test]
fn stores_write_their_width_and_no_more() {
    for (instruction, width) in [
        (sb(A0, A1, 8), 1),
        (sh(A0, A1, 8), 2),
        (sw(A0, A1, 8), 4),
        (sd(A0, A1, 8), 8),
    ] {
        let mut machine = Machine::new(&[instruction]);
        machine.ram().fill(DATA, &[0xee; 24]);
        machine.hart.set_x(10, 0x8877_6655_4433_2211);
        machine.hart.set_x(11, DATA);
        machine.step();
        let mut expected = [0xee; 24];
        expected[8..8 + width].copy_from_slice(&0x8877_6655_4433_2211_u64.to_le_bytes()[..width]);
        assert_eq!(machine.ram().bytes(DATA, 24), expected, "width {width}");
    }
}

/// Encodes a load or store from register, base register and offset.
type Encode = fn(u32, u32, i32) -> u32;

/// Loads and stores of each width, with the width. Loads also have whether they sign-extend.
const LOADS: [(Encode, u64, bool); 7] = [
    (lb, 1, true),
    (lh, 2, true),
    (lw, 4, true),
    (ld, 8, true),
    (lbu, 1, false),
    (lhu, 2, false),
    (lwu, 4, false),
];
const STORES: [(Encode, u64); 4] = [(sb, 1), (sh, 2), (sw, 4), (sd, 8)];

proptest! {
    /// A load sees the bytes in memory, at every alignment and over page edges.
    #[test]
    fn loads_see_bytes(offset in 0xff0_u64..0x1008, bytes in any::<[u8; 32]>(), which in 0..7_usize) {
        let (instruction, width, signed) = LOADS[which];
        let mut machine = Machine::new(&[instruction(A0, A1, 0)]);
        machine.ram().fill(DATA + 0xff0, &bytes);
        machine.hart.set_x(11, DATA + offset);
        machine.step();
        let at = (offset - 0xff0) as usize;
        let negative = signed && bytes[at + width as usize - 1] >= 0x80;
        let mut expected = [if negative { 0xff } else { 0 }; 8];
        expected[..width as usize].copy_from_slice(&bytes[at..at + width as usize]);
        prop_assert_eq!(machine.hart.x(10), u64::from_le_bytes(expected));
    }

    #[test]
    fn stores_put_bytes(offset in 0xff0_u64..0x1008, value in any::<u64>(), which in 0..4_usize) {
        let (instruction, width) = STORES[which];
        let mut machine = Machine::new(&[instruction(A0, A1, 0)]);
        machine.ram().fill(DATA + 0xff0, &[0xee; 32]);
        machine.hart.set_x(10, value);
        machine.hart.set_x(11, DATA + offset);
        machine.step();
        let at = (offset - 0xff0) as usize;
        let mut expected = [0xee; 32];
        expected[at..at + width as usize].copy_from_slice(&value.to_le_bytes()[..width as usize]);
        prop_assert_eq!(machine.ram().bytes(DATA + 0xff0, 32), expected);
    }
}

const SECOND: u64 = DATA + 0x1000;

fn fault_at(gpa: u64, access: Access) -> HartExit {
    HartExit::MemoryFault {
        fault: MemoryFault {
            gpa,
            size: 4096,
            flags: 7,
        },
        access,
    }
}

#[test]
fn a_missing_page_leaves_the_guest_and_the_access_is_repeated() {
    for (instruction, access) in [
        (ld(A0, A1, 0), Access::Load),
        (sd(A0, A1, 0), Access::Store),
        (atomic(AMOADD, D, A0, A1, A2), Access::Store),
        (atomic(LR, D, A0, A1, 0), Access::Load),
    ] {
        let mut machine = Machine::new(&[instruction]);
        machine.ram().set_page(DATA, Page::Missing);
        machine.ram().set(DATA + 8, 0x1234_u64);
        machine.hart.set_x(11, DATA + 8);
        let before = machine.hart.state();
        for _ in 0..3 {
            assert_eq!(machine.run(10), fault_at(DATA, access));
            assert_eq!(machine.hart.state(), before, "nothing happened");
        }
        machine.ram().set_page(DATA, Page::Present);
        machine.step();
        if access == Access::Load {
            assert_eq!(machine.hart.x(10), 0x1234);
        }
    }
}

#[test]
fn a_fetch_from_a_missing_page_leaves_the_guest() {
    let mut machine = Machine::new(&[]);
    machine
        .ram()
        .code(CODE + 0xffc, &[addi(A0, A0, 1), addi(A0, A0, 2)]);
    machine.ram().set_page(CODE + 0x1000, Page::Missing);
    machine.hart.set_pc(CODE + 0xffc).unwrap();
    assert_eq!(machine.run(10), fault_at(CODE + 0x1000, Access::Fetch));
    assert_eq!(
        (machine.hart.pc(), machine.hart.instret()),
        (CODE + 0x1000, 1)
    );
    machine.ram().set_page(CODE + 0x1000, Page::Present);
    machine.step();
    assert_eq!(machine.hart.x(10), 3);
}

/// Both pages must be present before the store writes the first byte.
#[test]
fn a_store_over_a_page_edge_writes_all_or_nothing() {
    for (instruction, width) in STORES.into_iter().skip(1) {
        for before_edge in 1..width {
            for missing in [DATA, SECOND] {
                let mut machine = Machine::new(&[instruction(A0, A1, 0)]);
                machine.ram().fill(SECOND - 8, &[0xee; 16]);
                machine.hart.set_x(10, 0x8877_6655_4433_2211);
                machine.hart.set_x(11, SECOND - before_edge);
                machine.ram().set_page(missing, Page::Missing);
                assert_eq!(machine.run(1), fault_at(missing, Access::Store));
                assert_eq!(machine.ram().bytes(SECOND - 8, 16), [0xee; 16]);
                assert_eq!((machine.hart.pc(), machine.hart.instret()), (CODE, 0));

                machine.ram().set_page(missing, Page::Present);
                machine.step();
                let at = (8 - before_edge) as usize;
                let mut expected = [0xee; 16];
                expected[at..at + width as usize]
                    .copy_from_slice(&0x8877_6655_4433_2211_u64.to_le_bytes()[..width as usize]);
                assert_eq!(machine.ram().bytes(SECOND - 8, 16), expected);
            }
        }
    }
}

#[test]
fn a_load_over_a_page_edge_needs_both_pages() {
    for missing in [DATA, SECOND] {
        let mut machine = Machine::new(&[ld(A0, A1, 0)]);
        machine.ram().fill(SECOND - 8, &BYTES);
        machine.hart.set_x(10, 99);
        machine.hart.set_x(11, SECOND - 3);
        machine.ram().set_page(missing, Page::Missing);
        assert_eq!(machine.run(1), fault_at(missing, Access::Load));
        assert_eq!(machine.hart.x(10), 99);
        machine.ram().set_page(missing, Page::Present);
        machine.step();
        assert_eq!(machine.hart.x(10).to_le_bytes(), BYTES[5..13]);
    }
}

#[test]
fn a_refused_page_is_an_access_fault_of_the_guest() {
    const LOAD: u64 = 5;
    const STORE: u64 = 7;
    for (instruction, address, expected) in [
        (lw(A0, A1, 4), DATA, (LOAD, DATA + 4)),
        (sw(A0, A1, 4), DATA, (STORE, DATA + 4)),
        (atomic(LR, W, A0, A1, 0), DATA, (LOAD, DATA)),
        (atomic(AMOOR, W, A0, A1, A2), DATA, (STORE, DATA)),
        // stval is the address of the refused part of a split access.
        (ld(A0, A1, 0), DATA - 3, (LOAD, DATA)),
        (sd(A0, A1, 0), DATA - 3, (STORE, DATA)),
        (sd(A0, A1, 0), DATA + 0xffe, (STORE, DATA + 0xffe)),
    ] {
        let mut machine = Machine::new(&[instruction]);
        machine.ram().set_page(DATA, Page::Refused);
        machine.ram().fill(DATA - 8, &[0xee; 8]);
        machine.hart.set_x(11, address);
        assert_eq!(machine.trap(), expected, "{instruction:#x}");
        assert_eq!(machine.ram().bytes(DATA - 8, 8), [0xee; 8]);
    }
    let mut machine = Machine::new(&[]);
    machine.ram().set_page(DATA, Page::Refused);
    machine.hart.set_pc(DATA + 8).unwrap();
    assert_eq!(machine.trap(), (1, DATA + 8), "an instruction access fault");
}

const DEVICE: u64 = 0x1000_0000;

#[test]
fn mmio_stores_carry_their_value_and_complete() {
    for (instruction, width) in STORES {
        let mut machine = Machine::new(&[instruction(A0, A1, 8), addi(A2, X0, 1)]);
        machine.hart.set_x(10, 0x8877_6655_4433_2211);
        machine.hart.set_x(11, DEVICE);
        let value = 0x8877_6655_4433_2211 & (u64::MAX >> (64 - 8 * width));
        let size = width as u8;
        assert_eq!(
            machine.run(10),
            HartExit::MmioStore {
                gpa: DEVICE + 8,
                size,
                value
            }
        );
        assert_eq!((machine.hart.pc(), machine.hart.instret()), (CODE + 4, 1));
        machine.step();
        assert_eq!(machine.hart.x(12), 1);
    }
}

#[test]
fn mmio_loads_give_all_ones_or_what_the_vmm_says() {
    for (instruction, width, signed) in LOADS {
        let mask = u64::MAX >> (64 - 8 * width);
        let mut machine = Machine::new(&[instruction(A0, A1, 0)]);
        machine.hart.set_x(11, DEVICE);
        assert_eq!(
            machine.run(10),
            HartExit::MmioLoad {
                gpa: DEVICE,
                size: width as u8
            }
        );
        assert_eq!((machine.hart.pc(), machine.hart.instret()), (CODE + 4, 1));
        assert_eq!(machine.hart.x(10), if signed { u64::MAX } else { mask });
        machine.hart.complete_mmio_load(0x7182_8384_8586_8788);
        let low = 0x7182_8384_8586_8788 & mask;
        let expected = if signed && width < 8 {
            low | !mask
        } else {
            low
        };
        assert_eq!(machine.hart.x(10), expected, "width {width}");
        // The load is complete: a second value has no effect.
        machine.hart.complete_mmio_load(1);
        assert_eq!(machine.hart.x(10), expected);
    }
}

#[test]
fn an_mmio_load_is_not_completed_after_the_next_entry() {
    let mut machine = Machine::new(&[lw(A0, A1, 0), addi(A0, X0, 5)]);
    machine.hart.set_x(11, DEVICE);
    assert_eq!(
        machine.run(10),
        HartExit::MmioLoad {
            gpa: DEVICE,
            size: 4
        }
    );
    machine.step();
    machine.hart.complete_mmio_load(77);
    assert_eq!(machine.hart.x(10), 5);
}

#[test]
fn an_mmio_load_to_x0_leaves_x0() {
    let mut machine = Machine::new(&[lw(X0, A1, 0)]);
    machine.hart.set_x(11, DEVICE);
    assert_eq!(
        machine.run(1),
        HartExit::MmioLoad {
            gpa: DEVICE,
            size: 4
        }
    );
    machine.hart.complete_mmio_load(77);
    assert_eq!(machine.hart.x(0), 0);
}

/// Devices see only whole, aligned accesses.
#[test]
fn misaligned_accesses_atomics_and_fetches_in_mmio_are_access_faults() {
    let end = RAM + 16 * 0x1000;
    for (instruction, address, expected) in [
        (lw(A0, A1, 0), DEVICE + 1, (5, DEVICE + 1)),
        (sw(A0, A1, 0), DEVICE + 1, (7, DEVICE + 1)),
        (atomic(LR, W, A0, A1, 0), DEVICE, (5, DEVICE)),
        (atomic(AMOSWAP, D, A0, A1, A2), DEVICE, (7, DEVICE)),
        // From RAM into MMIO, and from MMIO into RAM.
        (ld(A0, A1, 0), end - 4, (5, end)),
        (sd(A0, A1, 0), end - 4, (7, end)),
        (sd(A0, A1, 0), RAM - 1, (7, RAM - 1)),
    ] {
        let mut machine = Machine::new(&[instruction]);
        machine.hart.set_x(11, address);
        assert_eq!(machine.trap(), expected, "{instruction:#x}");
        assert_eq!(machine.ram().bytes(end - 8, 8), [0; 8]);
    }
    let mut machine = Machine::new(&[]);
    machine.hart.set_pc(DEVICE).unwrap();
    assert_eq!(machine.trap(), (1, DEVICE));
}

#[test]
fn addresses_wrap_around() {
    // RAM - 2^64 + offset, through a negative offset from 0.
    let mut machine = Machine::new(&[ld(A0, A1, -8), lw(A0, A1, 8)]);
    assert_eq!(
        machine.run(1),
        HartExit::MmioLoad {
            gpa: u64::MAX - 7,
            size: 8
        }
    );
    machine.hart.set_x(11, u64::MAX - 3);
    assert_eq!(machine.run(1), HartExit::MmioLoad { gpa: 4, size: 4 });
}

/// The bus may make the hart leave at any access.
#[test]
fn a_request_by_the_bus_repeats_the_access() {
    for (misses, instruction) in [(0, sd(A0, A1, 0)), (1, sd(A0, A1, 0)), (1, ld(A2, A1, 0))] {
        let mut machine = Machine::new(&[addi(A3, X0, 1), instruction]);
        machine.step();
        machine.ram().fill(SECOND - 8, &[0xee; 16]);
        machine.hart.set_x(11, SECOND - 4);
        machine.bus.flush();
        machine.bus.request_after = Some(misses);
        let before = machine.hart.state();
        assert_eq!(machine.run(1), HartExit::Requested);
        assert_eq!(machine.hart.state(), before);
        assert_eq!(machine.ram().bytes(SECOND - 8, 16), [0xee; 16]);
        machine.step();
    }
}
