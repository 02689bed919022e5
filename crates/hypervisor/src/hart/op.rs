//! A decoded instruction.

/// The register that takes writes to `x0`. No instruction can read it.
pub(super) const SINK: u8 = 32;

/// One decoded instruction, 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(8))]
pub(super) struct Op {
    pub(super) kind: Kind,
    /// Destination register; [`SINK`] for `x0`.
    pub(super) rd: u8,
    pub(super) rs1: u8,
    pub(super) rs2: u8,
    /// The immediate, sign-extended. For branches and JAL: the distance in instructions. For some
    /// kinds (see [`Kind`]): the instruction itself.
    pub(super) imm: i32,
}

const _: () = assert!(size_of::<Op>() == 8);

impl Op {
    /// An operation with no fields but its kind and the instruction's 32 bits.
    pub(super) const fn raw(kind: Kind, raw: u32) -> Self {
        Self {
            kind,
            rd: SINK,
            rs1: 0,
            rs2: 0,
            imm: raw as i32,
        }
    }

    /// The instruction's 32 bits, for the kinds that keep them.
    pub(super) const fn instruction(self) -> u32 {
        self.imm as u32
    }
}

/// The kind of an instruction. Its values are dense, because the interpreter jumps by them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    /// Not decoded yet; `imm` is the instruction.
    Undecoded,
    Lui,
    Auipc,
    Jal,
    Jalr,
    Beq,
    Bne,
    Blt,
    Bge,
    Bltu,
    Bgeu,
    Lb,
    Lh,
    Lw,
    Ld,
    Lbu,
    Lhu,
    Lwu,
    Sb,
    Sh,
    Sw,
    Sd,
    Addi,
    Slti,
    Sltiu,
    Xori,
    Ori,
    Andi,
    Slli,
    Srli,
    Srai,
    Addiw,
    Slliw,
    Srliw,
    Sraiw,
    Add,
    Sub,
    Sll,
    Slt,
    Sltu,
    Xor,
    Srl,
    Sra,
    Or,
    And,
    Addw,
    Subw,
    Sllw,
    Srlw,
    Sraw,
    Mul,
    Mulh,
    Mulhsu,
    Mulhu,
    Div,
    Divu,
    Rem,
    Remu,
    Mulw,
    Divw,
    Divuw,
    Remw,
    Remuw,
    // The kinds below are rare and leave the interpreter's loop.
    /// `imm` is the instruction.
    Illegal,
    /// JAL or a branch to an address that is not a multiple of 4; `imm` is the instruction.
    OddJump,
    /// `imm` is the instruction.
    Fence,
    FenceI,
    /// LR, SC or AMO on words; `imm` is the instruction.
    AtomicW,
    /// LR, SC or AMO on doublewords; `imm` is the instruction.
    AtomicD,
    /// Any CSR instruction; `imm` is the instruction.
    Csr,
    Ecall,
    Ebreak,
    /// `imm` is the instruction.
    Sret,
    /// `imm` is the instruction.
    Wfi,
    /// `imm` is the instruction.
    SfenceVma,
}
