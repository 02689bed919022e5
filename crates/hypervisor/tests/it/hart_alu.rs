//! Integer computation: OP, OP-IMM, their 32-bit forms, LUI, AUIPC and the M extension.
//!
//! The tables hold values computed by hand from the manual's definitions. The property tests
//! compare with formulas that share no code with the interpreter. Those for M use 128-bit integers.

use crate::support::hart::{CODE, Machine, alu, alu_imm, asm::*};
use proptest::prelude::*;

const MIN: u64 = i64::MIN as u64;
const MAX: u64 = i64::MAX as u64;
const MINUS_1: u64 = u64::MAX;
const MIN_W: u64 = i32::MIN as i64 as u64;

type Reg = fn(u32, u32, u32) -> u32;

#[test]
fn register_forms() {
    let table: &[(&str, Reg, u64, u64, u64)] = &[
        ("add wraps", add, MAX, 1, MIN),
        ("add wraps to 0", add, MINUS_1, 1, 0),
        ("sub", sub, 0, 1, MINUS_1),
        ("sub wraps", sub, MIN, 1, MAX),
        ("sll by 63", sll, 3, 63, MIN),
        ("sll uses six bits of the amount", sll, 1, 64 + 4, 16),
        ("srl by 63", srl, MIN, 63, 1),
        ("srl uses six bits", srl, 16, MINUS_1 << 6 | 4, 1),
        ("sra keeps the sign", sra, MIN, 63, MINUS_1),
        ("sra of a positive", sra, MAX, 62, 1),
        ("sra uses six bits", sra, MIN, 65, 0xc000_0000_0000_0000),
        ("slt is signed", slt, MINUS_1, 0, 1),
        ("slt of equals", slt, 5, 5, 0),
        ("slt extremes", slt, MAX, MIN, 0),
        ("sltu is unsigned", sltu, MINUS_1, 0, 0),
        ("sltu", sltu, 0, MINUS_1, 1),
        ("xor", xor, 0xff00, 0x0ff0, 0xf0f0),
        ("or", or, 0xff00, 0x0ff0, 0xfff0),
        ("and", and, 0xff00, 0x0ff0, 0x0f00),
        ("addw sign-extends", addw, 0x7fff_ffff, 1, MIN_W),
        (
            "addw drops the upper halves",
            addw,
            0xdead_0000_0000_0001,
            0xbeef_0000_0000_0002,
            3,
        ),
        ("subw", subw, 0, 1, MINUS_1),
        ("subw wraps", subw, MIN_W, 1, 0x7fff_ffff),
        ("sllw into the sign", sllw, 1, 31, MIN_W),
        ("sllw uses five bits", sllw, 1, 32 + 3, 8),
        ("sllw drops bits above the word", sllw, 0x8000_0001, 1, 2),
        (
            "srlw ignores the upper half",
            srlw,
            0xffff_ffff_8000_0000,
            31,
            1,
        ),
        ("srlw by 0 sign-extends", srlw, 0x8000_0000, 0, MIN_W),
        ("srlw uses five bits", srlw, 0x100, 32 + 4, 0x10),
        ("sraw takes the word's sign", sraw, 0x8000_0000, 31, MINUS_1),
        (
            "sraw of a positive word",
            sraw,
            0xffff_ffff_7fff_ffff,
            30,
            1,
        ),
        (
            "sraw uses five bits",
            sraw,
            0x8000_0000,
            33,
            0xffff_ffff_c000_0000,
        ),
    ];
    for &(name, instruction, a, b, expected) in table {
        let got = alu(instruction, a, b);
        assert_eq!(got, expected, "{name}: {got:#x}, expected {expected:#x}");
    }
}

#[test]
fn immediate_forms() {
    let table: &[(&str, u32, u64, u64)] = &[
        ("addi sign-extends", addi(A0, A1, -1), 0, MINUS_1),
        ("addi smallest", addi(A0, A1, -2048), 2048, 0),
        ("addi largest", addi(A0, A1, 2047), MAX, MIN + 2046),
        ("slti", slti(A0, A1, -1), MIN, 1),
        ("slti of equals", slti(A0, A1, -1), MINUS_1, 0),
        (
            "sltiu compares with the sign-extended immediate",
            sltiu(A0, A1, -1),
            MINUS_1 - 1,
            1,
        ),
        ("sltiu 1 is seqz", sltiu(A0, A1, 1), 0, 1),
        ("sltiu 1 is seqz, no", sltiu(A0, A1, 1), 7, 0),
        ("xori -1 is not", xori(A0, A1, -1), 0x5555, !0x5555),
        (
            "ori sign-extends",
            ori(A0, A1, -2048),
            1,
            0xffff_ffff_ffff_f801,
        ),
        (
            "andi sign-extends",
            andi(A0, A1, -16),
            MINUS_1,
            0xffff_ffff_ffff_fff0,
        ),
        ("slli 63", slli(A0, A1, 63), 1, MIN),
        (
            "slli 32",
            slli(A0, A1, 32),
            0xffff_ffff,
            0xffff_ffff_0000_0000,
        ),
        ("srli 63", srli(A0, A1, 63), MIN, 1),
        ("srai 63", srai(A0, A1, 63), MIN, MINUS_1),
        ("srai 32", srai(A0, A1, 32), MIN, 0xffff_ffff_8000_0000),
        ("addiw 0 is sext.w", addiw(A0, A1, 0), 0x1_8000_0000, MIN_W),
        ("addiw wraps", addiw(A0, A1, 1), 0x7fff_ffff, MIN_W),
        ("addiw negative", addiw(A0, A1, -1), 0, MINUS_1),
        ("slliw", slliw(A0, A1, 31), 1, MIN_W),
        ("slliw drops", slliw(A0, A1, 1), 0x8000_0000, 0),
        ("srliw", srliw(A0, A1, 31), 0xffff_ffff_8000_0000, 1),
        ("srliw 0", srliw(A0, A1, 0), 0xffff_ffff, MINUS_1),
        ("sraiw", sraiw(A0, A1, 31), 0x8000_0000, MINUS_1),
        (
            "sraiw of a positive word",
            sraiw(A0, A1, 4),
            0xf_7000_0000,
            0x0700_0000,
        ),
        ("lui", lui(A0, 0x12345), 0, 0x1234_5000),
        ("lui sign-extends", lui(A0, 0x80000), 0, MIN_W),
        ("auipc", auipc(A0, 1), 0, CODE + 0x1000),
        ("auipc sign-extends", auipc(A0, 0xfffff), 0, CODE - 0x1000),
    ];
    for &(name, instruction, a, expected) in table {
        let got = alu_imm(instruction, a);
        assert_eq!(got, expected, "{name}: {got:#x}, expected {expected:#x}");
    }
}

/// The cases include the manual's table "Semantics for division by zero and division overflow".
#[test]
fn multiplication_and_division() {
    let table: &[(&str, Reg, u64, u64, u64)] = &[
        ("mul, the low half", mul, MINUS_1, MINUS_1, 1),
        ("mul overflow", mul, 1 << 63, 2, 0),
        ("mulh of negatives", mulh, MINUS_1, MINUS_1, 0),
        ("mulh of extremes", mulh, MIN, MIN, 1 << 62),
        ("mulh mixed", mulh, MIN, MAX, 0xc000_0000_0000_0000),
        ("mulhu of extremes", mulhu, MINUS_1, MINUS_1, MINUS_1 - 1),
        (
            "mulhsu, signed by unsigned",
            mulhsu,
            MINUS_1,
            MINUS_1,
            MINUS_1,
        ),
        (
            "mulhsu, the first is the signed one",
            mulhsu,
            MIN,
            2,
            MINUS_1,
        ),
        ("mulhsu, the second is not", mulhsu, 2, MIN, 1),
        ("mulw sign-extends", mulw, 0x10000, 0x8000, MIN_W),
        (
            "mulw ignores upper halves",
            mulw,
            0xffff_0000_0000_0003,
            0x1234_0000_0000_0005,
            15,
        ),
        (
            "div rounds to zero",
            div,
            (-7_i64) as u64,
            2,
            (-3_i64) as u64,
        ),
        ("div by zero", div, 42, 0, MINUS_1),
        (
            "div of a negative by zero",
            div,
            (-42_i64) as u64,
            0,
            MINUS_1,
        ),
        ("div overflow", div, MIN, MINUS_1, MIN),
        ("divu by zero", divu, 42, 0, u64::MAX),
        ("divu is unsigned", divu, MIN, MINUS_1, 0),
        ("divu", divu, MINUS_1, 2, MAX),
        (
            "rem has the dividend's sign",
            rem,
            (-7_i64) as u64,
            2,
            MINUS_1,
        ),
        (
            "rem of a positive by a negative",
            rem,
            7,
            (-2_i64) as u64,
            1,
        ),
        ("rem by zero", rem, (-42_i64) as u64, 0, (-42_i64) as u64),
        ("rem overflow", rem, MIN, MINUS_1, 0),
        ("remu by zero", remu, MINUS_1, 0, MINUS_1),
        ("remu is unsigned", remu, MINUS_1, 16, 15),
        ("divw by zero", divw, 42, 0xffff_ffff_0000_0000, MINUS_1),
        ("divw overflow", divw, MIN_W, MINUS_1, MIN_W),
        (
            "divw overflow by words alone",
            divw,
            0x8000_0000,
            0xffff_ffff,
            MIN_W,
        ),
        ("divw rounds to zero", divw, 0xffff_fff9, 2, (-3_i64) as u64),
        ("divuw by zero", divuw, 42, 0, MINUS_1),
        (
            "divuw sign-extends its result",
            divuw,
            0xffff_ffff,
            1,
            MINUS_1,
        ),
        ("divuw is unsigned", divuw, 0x8000_0000, 2, 0x4000_0000),
        (
            "remw by zero sign-extends the dividend",
            remw,
            0x8000_0000,
            0,
            MIN_W,
        ),
        ("remw overflow", remw, MIN_W, MINUS_1, 0),
        (
            "remw has the dividend's sign",
            remw,
            0xffff_fff9,
            2,
            MINUS_1,
        ),
        (
            "remuw by zero sign-extends the dividend",
            remuw,
            0x8000_0000,
            0,
            MIN_W,
        ),
        (
            "remuw sign-extends its result",
            remuw,
            0xffff_fffe,
            0xffff_ffff,
            MINUS_1 - 1,
        ),
    ];
    for &(name, instruction, a, b, expected) in table {
        let got = alu(instruction, a, b);
        assert_eq!(got, expected, "{name}: {got:#x}, expected {expected:#x}");
    }
}

#[test]
fn x0_reads_zero_and_takes_no_writes() {
    let mut machine = Machine::new(&[
        addi(X0, A1, 5),
        lui(X0, 1),
        auipc(X0, 1),
        mul(X0, A1, A1),
        csrrs(X0, 0xc02, X0),
        add(A0, X0, X0),
        jal(X0, 4),
        addi(A2, X0, 3),
    ]);
    machine.hart.set_x(11, 7);
    machine.hart.set_x(0, 9);
    machine.hart.set_x(10, 1);
    for _ in 0..8 {
        machine.step();
        assert_eq!(machine.hart.x(0), 0);
    }
    assert_eq!((machine.hart.x(10), machine.hart.x(12)), (0, 3));
}

/// Source and destination may be the same register, in every operand.
#[test]
fn operands_are_read_before_the_result_is_written() {
    let mut machine = Machine::new(&[
        sub(A0, A0, A1),
        sub(A1, A0, A1),
        add(A1, A1, A1),
        div(A0, A0, A0),
    ]);
    machine.hart.set_x(10, 10);
    machine.hart.set_x(11, 3);
    for expected in [(7, 3), (7, 4), (7, 8), (1, 8)] {
        machine.step();
        assert_eq!((machine.hart.x(10), machine.hart.x(11)), expected);
    }
}

/// Boundary values of carries, signs and widths, and any others.
fn value() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        any::<i32>().prop_map(|v| i64::from(v) as u64),
        (-4_i64..4).prop_map(|v| v as u64),
        (0_u32..64, -2_i64..3).prop_map(|(bit, off)| (1_u64 << bit).wrapping_add(off as u64)),
    ]
}

fn low_word(value: i128) -> u64 {
    i64::from(value as u32 as i32) as u64
}

/// Quotient and remainder by the manual's table, in integers that hold every case.
fn divide(a: i128, b: i128, all_ones: i128) -> (i128, i128) {
    match b {
        0 => (all_ones, a),
        b => (a / b, a % b),
    }
}

proptest! {
    #[test]
    fn op_forms_match_their_formulas(a in value(), b in value()) {
        let (s, t) = (a as i64, b as i64);
        let (wide_s, wide_t) = (i128::from(s), i128::from(t));
        let six = b % 64;
        let five = b % 32;
        let word_a = a as u32;
        let cases: &[(&str, Reg, u64)] = &[
            ("add", add, (wide_s + wide_t) as u64),
            ("sub", sub, (wide_s - wide_t) as u64),
            ("sll", sll, (u128::from(a) << six) as u64),
            ("srl", srl, a / 2_u64.pow(six as u32)),
            ("sra", sra, wide_s.div_euclid(1 << six) as u64),
            ("slt", slt, if s < t { 1 } else { 0 }),
            ("sltu", sltu, if a < b { 1 } else { 0 }),
            ("xor", xor, (a | b) - (a & b)),
            ("or", or, !(!a & !b)),
            ("and", and, !(!a | !b)),
            ("addw", addw, low_word(wide_s + wide_t)),
            ("subw", subw, low_word(wide_s - wide_t)),
            ("sllw", sllw, low_word(i128::from(word_a) << five)),
            ("srlw", srlw, low_word(i128::from(word_a >> five))),
            ("sraw", sraw, low_word(i128::from(word_a as i32).div_euclid(1 << five))),
        ];
        for &(name, instruction, expected) in cases {
            prop_assert_eq!(alu(instruction, a, b), expected, "{} {:#x} {:#x}", name, a, b);
        }
    }

    #[test]
    fn op_imm_forms_match_their_formulas(a in value(), imm in -2048_i32..2048, shift in 0_i32..64) {
        let s = i128::from(a as i64);
        let i = i128::from(imm);
        let b = imm as i64 as u64;
        let word_a = a as u32;
        let five = shift % 32;
        let cases = [
            ("addi", addi(A0, A1, imm), (s + i) as u64),
            ("slti", slti(A0, A1, imm), if s < i { 1 } else { 0 }),
            ("sltiu", sltiu(A0, A1, imm), if a < b { 1 } else { 0 }),
            ("xori", xori(A0, A1, imm), (a | b) - (a & b)),
            ("ori", ori(A0, A1, imm), !(!a & !b)),
            ("andi", andi(A0, A1, imm), !(!a | !b)),
            ("slli", slli(A0, A1, shift), (u128::from(a) << shift) as u64),
            ("srli", srli(A0, A1, shift), a / 2_u64.pow(shift as u32)),
            ("srai", srai(A0, A1, shift), s.div_euclid(1 << shift) as u64),
            ("addiw", addiw(A0, A1, imm), low_word(s + i)),
            ("slliw", slliw(A0, A1, five), low_word(i128::from(word_a) << five)),
            ("srliw", srliw(A0, A1, five), low_word(i128::from(word_a >> five))),
            ("sraiw", sraiw(A0, A1, five), low_word(i128::from(word_a as i32).div_euclid(1 << five))),
        ];
        for (name, instruction, expected) in cases {
            prop_assert_eq!(alu_imm(instruction, a), expected, "{} {:#x} {}", name, a, imm);
        }
    }

    #[test]
    fn m_forms_match_128_bit_arithmetic(a in value(), b in value()) {
        let (s, t) = (i128::from(a as i64), i128::from(b as i64));
        let (u, v) = (u128::from(a), u128::from(b));
        let (sw, tw) = (i128::from(a as i32), i128::from(b as i32));
        let (uw, vw) = (i128::from(a as u32), i128::from(b as u32));
        let signed = divide(s, t, -1);
        let unsigned = divide(u as i128, v as i128, -1);
        let signed_w = divide(sw, tw, -1);
        let unsigned_w = divide(uw, vw, -1);
        let cases: &[(&str, Reg, u64)] = &[
            ("mul", mul, (u.wrapping_mul(v)) as u64),
            ("mulh", mulh, ((s * t) >> 64) as u64),
            ("mulhsu", mulhsu, ((s * v as i128) >> 64) as u64),
            ("mulhu", mulhu, ((u * v) >> 64) as u64),
            ("div", div, signed.0 as u64),
            ("divu", divu, unsigned.0 as u64),
            ("rem", rem, signed.1 as u64),
            ("remu", remu, unsigned.1 as u64),
            ("mulw", mulw, low_word(sw * tw)),
            ("divw", divw, low_word(signed_w.0)),
            ("divuw", divuw, low_word(unsigned_w.0)),
            ("remw", remw, low_word(signed_w.1)),
            ("remuw", remuw, low_word(unsigned_w.1)),
        ];
        for &(name, instruction, expected) in cases {
            prop_assert_eq!(alu(instruction, a, b), expected, "{} {:#x} {:#x}", name, a, b);
        }
    }
}
