//! An encoder of instructions, from the formats of the unprivileged manual ("Base Instruction
//! Formats"). It shares no code with the decoder. `hart_decode` checks it against encodings of
//! LLVM's assembler.

pub(crate) const X0: u32 = 0;
pub(crate) const RA: u32 = 1;
pub(crate) const T0: u32 = 5;
pub(crate) const T1: u32 = 6;
pub(crate) const T2: u32 = 7;
pub(crate) const A0: u32 = 10;
pub(crate) const A1: u32 = 11;
pub(crate) const A2: u32 = 12;
pub(crate) const A3: u32 = 13;

pub(crate) const fn r(opcode: u32, funct3: u32, funct7: u32, rd: u32, rs1: u32, rs2: u32) -> u32 {
    opcode | rd << 7 | funct3 << 12 | rs1 << 15 | rs2 << 20 | funct7 << 25
}

pub(crate) const fn i(opcode: u32, funct3: u32, rd: u32, rs1: u32, imm: i32) -> u32 {
    assert!(-2048 <= imm && imm < 2048);
    opcode | rd << 7 | funct3 << 12 | rs1 << 15 | (imm as u32) << 20
}

pub(crate) const fn s(funct3: u32, rs2: u32, rs1: u32, imm: i32) -> u32 {
    assert!(-2048 <= imm && imm < 2048);
    let imm = imm as u32;
    0x23 | (imm & 31) << 7 | funct3 << 12 | rs1 << 15 | rs2 << 20 | (imm >> 5) << 25
}

pub(crate) const fn b(funct3: u32, rs1: u32, rs2: u32, distance: i32) -> u32 {
    assert!(-4096 <= distance && distance < 4096 && distance % 2 == 0);
    let d = distance as u32;
    let low = (d >> 11 & 1) | (d & 0x1e);
    let high = (d >> 12 & 1) << 6 | (d >> 5 & 63);
    0x63 | low << 7 | funct3 << 12 | rs1 << 15 | rs2 << 20 | high << 25
}

pub(crate) const fn u(opcode: u32, rd: u32, imm: u32) -> u32 {
    assert!(imm < 1 << 20);
    opcode | rd << 7 | imm << 12
}

pub(crate) const fn jal(rd: u32, distance: i32) -> u32 {
    assert!(-(1 << 20) <= distance && distance < 1 << 20 && distance % 2 == 0);
    let d = distance as u32;
    let imm = (d >> 20 & 1) << 19 | (d >> 1 & 0x3ff) << 9 | (d >> 11 & 1) << 8 | (d >> 12 & 0xff);
    0x6f | rd << 7 | imm << 12
}

macro_rules! formats {
    ($($name:ident($($arg:ident: $ty:ty),*) = $body:expr;)*) => {
        $(pub(crate) const fn $name($($arg: $ty),*) -> u32 { $body })*
    };
}

formats! {
    lui(rd: u32, imm: u32) = u(0x37, rd, imm);
    auipc(rd: u32, imm: u32) = u(0x17, rd, imm);
    jalr(rd: u32, rs1: u32, imm: i32) = i(0x67, 0, rd, rs1, imm);
    beq(a: u32, c: u32, d: i32) = b(0, a, c, d);
    bne(a: u32, c: u32, d: i32) = b(1, a, c, d);
    blt(a: u32, c: u32, d: i32) = b(4, a, c, d);
    bge(a: u32, c: u32, d: i32) = b(5, a, c, d);
    bltu(a: u32, c: u32, d: i32) = b(6, a, c, d);
    bgeu(a: u32, c: u32, d: i32) = b(7, a, c, d);
    lb(rd: u32, rs1: u32, imm: i32) = i(0x03, 0, rd, rs1, imm);
    lh(rd: u32, rs1: u32, imm: i32) = i(0x03, 1, rd, rs1, imm);
    lw(rd: u32, rs1: u32, imm: i32) = i(0x03, 2, rd, rs1, imm);
    ld(rd: u32, rs1: u32, imm: i32) = i(0x03, 3, rd, rs1, imm);
    lbu(rd: u32, rs1: u32, imm: i32) = i(0x03, 4, rd, rs1, imm);
    lhu(rd: u32, rs1: u32, imm: i32) = i(0x03, 5, rd, rs1, imm);
    lwu(rd: u32, rs1: u32, imm: i32) = i(0x03, 6, rd, rs1, imm);
    sb(rs2: u32, rs1: u32, imm: i32) = s(0, rs2, rs1, imm);
    sh(rs2: u32, rs1: u32, imm: i32) = s(1, rs2, rs1, imm);
    sw(rs2: u32, rs1: u32, imm: i32) = s(2, rs2, rs1, imm);
    sd(rs2: u32, rs1: u32, imm: i32) = s(3, rs2, rs1, imm);
    addi(rd: u32, rs1: u32, imm: i32) = i(0x13, 0, rd, rs1, imm);
    slti(rd: u32, rs1: u32, imm: i32) = i(0x13, 2, rd, rs1, imm);
    sltiu(rd: u32, rs1: u32, imm: i32) = i(0x13, 3, rd, rs1, imm);
    xori(rd: u32, rs1: u32, imm: i32) = i(0x13, 4, rd, rs1, imm);
    ori(rd: u32, rs1: u32, imm: i32) = i(0x13, 6, rd, rs1, imm);
    andi(rd: u32, rs1: u32, imm: i32) = i(0x13, 7, rd, rs1, imm);
    slli(rd: u32, rs1: u32, amount: i32) = i(0x13, 1, rd, rs1, amount);
    srli(rd: u32, rs1: u32, amount: i32) = i(0x13, 5, rd, rs1, amount);
    srai(rd: u32, rs1: u32, amount: i32) = i(0x13, 5, rd, rs1, amount | 0x400);
    addiw(rd: u32, rs1: u32, imm: i32) = i(0x1b, 0, rd, rs1, imm);
    slliw(rd: u32, rs1: u32, amount: i32) = i(0x1b, 1, rd, rs1, amount);
    srliw(rd: u32, rs1: u32, amount: i32) = i(0x1b, 5, rd, rs1, amount);
    sraiw(rd: u32, rs1: u32, amount: i32) = i(0x1b, 5, rd, rs1, amount | 0x400);
    add(rd: u32, a: u32, c: u32) = r(0x33, 0, 0, rd, a, c);
    sub(rd: u32, a: u32, c: u32) = r(0x33, 0, 0x20, rd, a, c);
    sll(rd: u32, a: u32, c: u32) = r(0x33, 1, 0, rd, a, c);
    slt(rd: u32, a: u32, c: u32) = r(0x33, 2, 0, rd, a, c);
    sltu(rd: u32, a: u32, c: u32) = r(0x33, 3, 0, rd, a, c);
    xor(rd: u32, a: u32, c: u32) = r(0x33, 4, 0, rd, a, c);
    srl(rd: u32, a: u32, c: u32) = r(0x33, 5, 0, rd, a, c);
    sra(rd: u32, a: u32, c: u32) = r(0x33, 5, 0x20, rd, a, c);
    or(rd: u32, a: u32, c: u32) = r(0x33, 6, 0, rd, a, c);
    and(rd: u32, a: u32, c: u32) = r(0x33, 7, 0, rd, a, c);
    addw(rd: u32, a: u32, c: u32) = r(0x3b, 0, 0, rd, a, c);
    subw(rd: u32, a: u32, c: u32) = r(0x3b, 0, 0x20, rd, a, c);
    sllw(rd: u32, a: u32, c: u32) = r(0x3b, 1, 0, rd, a, c);
    srlw(rd: u32, a: u32, c: u32) = r(0x3b, 5, 0, rd, a, c);
    sraw(rd: u32, a: u32, c: u32) = r(0x3b, 5, 0x20, rd, a, c);
    mul(rd: u32, a: u32, c: u32) = r(0x33, 0, 1, rd, a, c);
    mulh(rd: u32, a: u32, c: u32) = r(0x33, 1, 1, rd, a, c);
    mulhsu(rd: u32, a: u32, c: u32) = r(0x33, 2, 1, rd, a, c);
    mulhu(rd: u32, a: u32, c: u32) = r(0x33, 3, 1, rd, a, c);
    div(rd: u32, a: u32, c: u32) = r(0x33, 4, 1, rd, a, c);
    divu(rd: u32, a: u32, c: u32) = r(0x33, 5, 1, rd, a, c);
    rem(rd: u32, a: u32, c: u32) = r(0x33, 6, 1, rd, a, c);
    remu(rd: u32, a: u32, c: u32) = r(0x33, 7, 1, rd, a, c);
    mulw(rd: u32, a: u32, c: u32) = r(0x3b, 0, 1, rd, a, c);
    divw(rd: u32, a: u32, c: u32) = r(0x3b, 4, 1, rd, a, c);
    divuw(rd: u32, a: u32, c: u32) = r(0x3b, 5, 1, rd, a, c);
    remw(rd: u32, a: u32, c: u32) = r(0x3b, 6, 1, rd, a, c);
    remuw(rd: u32, a: u32, c: u32) = r(0x3b, 7, 1, rd, a, c);
    csrrw(rd: u32, csr: u32, rs1: u32) = 0x1073 | rd << 7 | rs1 << 15 | csr << 20;
    csrrs(rd: u32, csr: u32, rs1: u32) = 0x2073 | rd << 7 | rs1 << 15 | csr << 20;
    csrrc(rd: u32, csr: u32, rs1: u32) = 0x3073 | rd << 7 | rs1 << 15 | csr << 20;
    csrrwi(rd: u32, csr: u32, imm: u32) = 0x5073 | rd << 7 | imm << 15 | csr << 20;
    csrrsi(rd: u32, csr: u32, imm: u32) = 0x6073 | rd << 7 | imm << 15 | csr << 20;
    csrrci(rd: u32, csr: u32, imm: u32) = 0x7073 | rd << 7 | imm << 15 | csr << 20;
    fence(pred: u32, succ: u32) = 0x0f | succ << 20 | pred << 24;
    sfence_vma(rs1: u32, rs2: u32) = r(0x73, 0, 0x09, 0, rs1, rs2);
}

pub(crate) const FENCE_I: u32 = 0x100f;
pub(crate) const FENCE_TSO: u32 = 0x8330_000f;
pub(crate) const ECALL: u32 = 0x73;
pub(crate) const EBREAK: u32 = 0x10_0073;
pub(crate) const SRET: u32 = 0x1020_0073;
pub(crate) const WFI: u32 = 0x1050_0073;

/// `funct3` of the A extension's word and doubleword forms.
pub(crate) const W: u32 = 2;
pub(crate) const D: u32 = 3;

/// An instruction of the A extension, with `aq` and `rl` clear. `funct5` and `width` are those of
/// the manual's tables.
pub(crate) const fn atomic(funct5: u32, width: u32, rd: u32, rs1: u32, rs2: u32) -> u32 {
    r(0x2f, width, funct5 << 2, rd, rs1, rs2)
}

pub(crate) const LR: u32 = 0b00010;
pub(crate) const SC: u32 = 0b00011;
pub(crate) const AMOSWAP: u32 = 0b00001;
pub(crate) const AMOADD: u32 = 0b00000;
pub(crate) const AMOXOR: u32 = 0b00100;
pub(crate) const AMOAND: u32 = 0b01100;
pub(crate) const AMOOR: u32 = 0b01000;
pub(crate) const AMOMIN: u32 = 0b10000;
pub(crate) const AMOMAX: u32 = 0b10100;
pub(crate) const AMOMINU: u32 = 0b11000;
pub(crate) const AMOMAXU: u32 = 0b11100;
