//! The decoder: from an instruction's 32 bits to an [`Op`].
//!
//! Source: The RISC-V Instruction Set Manual, volume I, "RV32/64G Instruction Set Listings", and
//! volume II for the SYSTEM opcode. An encoding that RV64IMA_Zicsr_Zifencei does not define becomes
//! [`Kind::Illegal`].

use super::op::{Kind, Op, SINK};

const fn rd(raw: u32) -> u8 {
    let rd = (raw >> 7 & 31) as u8;
    if rd == 0 { SINK } else { rd }
}

const fn rs1(raw: u32) -> u8 {
    (raw >> 15 & 31) as u8
}

const fn rs2(raw: u32) -> u8 {
    (raw >> 20 & 31) as u8
}

pub(super) const fn funct3(raw: u32) -> u32 {
    raw >> 12 & 7
}

const fn funct7(raw: u32) -> u32 {
    raw >> 25
}

const fn imm_i(raw: u32) -> i32 {
    raw as i32 >> 20
}

const fn imm_s(raw: u32) -> i32 {
    sign_from_bit_31(raw, 25, 5) | (raw >> 7 & 31) as i32
}

/// The byte distance of a branch: imm[12|10:5] in bits 31:25, imm[4:1|11] in bits 11:7.
pub(super) const fn imm_b(raw: u32) -> i32 {
    let bit_11 = (raw >> 7 & 1) << 11;
    let bits_10_5 = (raw >> 25 & 63) << 5;
    let bits_4_1 = (raw >> 8 & 15) << 1;
    sign_from_bit_31(raw, 31, 12) | (bit_11 | bits_10_5 | bits_4_1) as i32
}

/// The byte distance of JAL: imm[20|10:1|11|19:12] in bits 31:12.
pub(super) const fn imm_j(raw: u32) -> i32 {
    let bits_19_12 = (raw >> 12 & 255) << 12;
    let bit_11 = (raw >> 20 & 1) << 11;
    let bits_10_1 = (raw >> 21 & 1023) << 1;
    sign_from_bit_31(raw, 31, 20) | (bits_19_12 | bit_11 | bits_10_1) as i32
}

/// The bits from `low` up, sign-extended and shifted to start at bit `to`.
const fn sign_from_bit_31(raw: u32, low: u32, to: u32) -> i32 {
    (raw as i32 >> low) << to
}

/// Decodes one instruction.
pub(super) fn decode(raw: u32) -> Op {
    let op = |kind, imm| Op {
        kind,
        rd: rd(raw),
        rs1: rs1(raw),
        rs2: rs2(raw),
        imm,
    };
    let fields = |kind| op(kind, raw as i32);
    let illegal = Op::raw(Kind::Illegal, raw);
    match raw & 0x7f {
        0x37 => op(Kind::Lui, (raw & 0xffff_f000) as i32),
        0x17 => op(Kind::Auipc, (raw & 0xffff_f000) as i32),
        0x6f => match imm_j(raw) {
            imm if imm & 3 != 0 => fields(Kind::OddJump),
            imm => op(Kind::Jal, imm >> 2),
        },
        0x67 if funct3(raw) == 0 => op(Kind::Jalr, imm_i(raw)),
        0x63 => match (branch(raw), imm_b(raw)) {
            (None, _) => illegal,
            (Some(_), imm) if imm & 3 != 0 => fields(Kind::OddJump),
            (Some(kind), imm) => op(kind, imm >> 2),
        },
        0x03 => load(raw).map_or(illegal, |kind| op(kind, imm_i(raw))),
        0x23 => store(raw).map_or(illegal, |kind| op(kind, imm_s(raw))),
        0x13 => op_imm(raw).map_or(illegal, |(kind, imm)| op(kind, imm)),
        0x1b => op_imm_32(raw).map_or(illegal, |(kind, imm)| op(kind, imm)),
        0x33 => op_reg(raw).map_or(illegal, |kind| op(kind, 0)),
        0x3b => op_reg_32(raw).map_or(illegal, |kind| op(kind, 0)),
        // The manual requires that reserved fields of FENCE and FENCE.I are ignored.
        0x0f if funct3(raw) == 0 => fields(Kind::Fence),
        0x0f if funct3(raw) == 1 => fields(Kind::FenceI),
        0x2f => atomic(raw).map_or(illegal, fields),
        0x73 => system(raw).map_or(illegal, fields),
        _ => illegal,
    }
}

fn branch(raw: u32) -> Option<Kind> {
    Some(match funct3(raw) {
        0 => Kind::Beq,
        1 => Kind::Bne,
        4 => Kind::Blt,
        5 => Kind::Bge,
        6 => Kind::Bltu,
        7 => Kind::Bgeu,
        _ => return None,
    })
}

fn load(raw: u32) -> Option<Kind> {
    Some(match funct3(raw) {
        0 => Kind::Lb,
        1 => Kind::Lh,
        2 => Kind::Lw,
        3 => Kind::Ld,
        4 => Kind::Lbu,
        5 => Kind::Lhu,
        6 => Kind::Lwu,
        _ => return None,
    })
}

fn store(raw: u32) -> Option<Kind> {
    Some(match funct3(raw) {
        0 => Kind::Sb,
        1 => Kind::Sh,
        2 => Kind::Sw,
        3 => Kind::Sd,
        _ => return None,
    })
}

fn op_imm(raw: u32) -> Option<(Kind, i32)> {
    let shamt = (raw >> 20 & 63) as i32;
    Some(match (funct3(raw), raw >> 26) {
        (0, _) => (Kind::Addi, imm_i(raw)),
        (1, 0) => (Kind::Slli, shamt),
        (2, _) => (Kind::Slti, imm_i(raw)),
        (3, _) => (Kind::Sltiu, imm_i(raw)),
        (4, _) => (Kind::Xori, imm_i(raw)),
        (5, 0) => (Kind::Srli, shamt),
        (5, 0x10) => (Kind::Srai, shamt),
        (6, _) => (Kind::Ori, imm_i(raw)),
        (7, _) => (Kind::Andi, imm_i(raw)),
        _ => return None,
    })
}

fn op_imm_32(raw: u32) -> Option<(Kind, i32)> {
    let shamt = i32::from(rs2(raw));
    Some(match (funct3(raw), funct7(raw)) {
        (0, _) => (Kind::Addiw, imm_i(raw)),
        (1, 0) => (Kind::Slliw, shamt),
        (5, 0) => (Kind::Srliw, shamt),
        (5, 0x20) => (Kind::Sraiw, shamt),
        _ => return None,
    })
}

fn op_reg(raw: u32) -> Option<Kind> {
    Some(match (funct7(raw), funct3(raw)) {
        (0, 0) => Kind::Add,
        (0, 1) => Kind::Sll,
        (0, 2) => Kind::Slt,
        (0, 3) => Kind::Sltu,
        (0, 4) => Kind::Xor,
        (0, 5) => Kind::Srl,
        (0, 6) => Kind::Or,
        (0, 7) => Kind::And,
        (0x20, 0) => Kind::Sub,
        (0x20, 5) => Kind::Sra,
        (1, 0) => Kind::Mul,
        (1, 1) => Kind::Mulh,
        (1, 2) => Kind::Mulhsu,
        (1, 3) => Kind::Mulhu,
        (1, 4) => Kind::Div,
        (1, 5) => Kind::Divu,
        (1, 6) => Kind::Rem,
        (1, 7) => Kind::Remu,
        _ => return None,
    })
}

fn op_reg_32(raw: u32) -> Option<Kind> {
    Some(match (funct7(raw), funct3(raw)) {
        (0, 0) => Kind::Addw,
        (0, 1) => Kind::Sllw,
        (0, 5) => Kind::Srlw,
        (0x20, 0) => Kind::Subw,
        (0x20, 5) => Kind::Sraw,
        (1, 0) => Kind::Mulw,
        (1, 4) => Kind::Divw,
        (1, 5) => Kind::Divuw,
        (1, 6) => Kind::Remw,
        (1, 7) => Kind::Remuw,
        _ => return None,
    })
}

/// The `funct5` field of the A extension's instructions.
pub(super) mod funct5 {
    pub(crate) const ADD: u32 = 0x00;
    pub(crate) const SWAP: u32 = 0x01;
    pub(crate) const LR: u32 = 0x02;
    pub(crate) const SC: u32 = 0x03;
    pub(crate) const XOR: u32 = 0x04;
    pub(crate) const OR: u32 = 0x08;
    pub(crate) const AND: u32 = 0x0c;
    pub(crate) const MIN: u32 = 0x10;
    pub(crate) const MAX: u32 = 0x14;
    pub(crate) const MINU: u32 = 0x18;
    pub(crate) const MAXU: u32 = 0x1c;
}

fn atomic(raw: u32) -> Option<Kind> {
    use funct5::{ADD, AND, LR, MAX, MAXU, MIN, MINU, OR, SC, SWAP, XOR};
    match raw >> 27 {
        LR if rs2(raw) != 0 => return None,
        LR | SC | SWAP | ADD | XOR | AND | OR | MIN | MAX | MINU | MAXU => {}
        _ => return None,
    }
    match funct3(raw) {
        2 => Some(Kind::AtomicW),
        3 => Some(Kind::AtomicD),
        _ => None,
    }
}

fn system(raw: u32) -> Option<Kind> {
    match (funct3(raw), raw) {
        (0, 0x0000_0073) => Some(Kind::Ecall),
        (0, 0x0010_0073) => Some(Kind::Ebreak),
        (0, 0x1020_0073) => Some(Kind::Sret),
        (0, 0x1050_0073) => Some(Kind::Wfi),
        (0, _) if funct7(raw) == 0x09 && raw >> 7 & 31 == 0 => Some(Kind::SfenceVma),
        (1..=3 | 5..=7, _) => Some(Kind::Csr),
        _ => None,
    }
}
