//! The decoder: defined, undefined and random encodings.
//!
//! The official riscv-tests need machine mode, so the test vectors are our own. One test checks the
//! encodings against an independent assembler.

use crate::support::hart::{Machine, asm::*};
use pageferry_hypervisor::hart::HartExit;
use proptest::prelude::*;

/// Assembly text, its encoding by LLVM 14 (`llvm-mc -triple=riscv64 -mattr=+m,+a -show-encoding`),
/// and its encoding by the tests' encoder.
#[rustfmt::skip]
const ENCODINGS: &[(&str, u32, u32)] = &[
    ("add x1,x2,x3", 0x0031_00b3, add(1, 2, 3)),
    ("sub x31,x30,x29", 0x41df_0fb3, sub(31, 30, 29)),
    ("sll x5,x6,x7", 0x0073_12b3, sll(5, 6, 7)),
    ("slt x5,x6,x7", 0x0073_22b3, slt(5, 6, 7)),
    ("sltu x5,x6,x7", 0x0073_32b3, sltu(5, 6, 7)),
    ("xor x5,x6,x7", 0x0073_42b3, xor(5, 6, 7)),
    ("srl x5,x6,x7", 0x0073_52b3, srl(5, 6, 7)),
    ("sra x5,x6,x7", 0x4073_52b3, sra(5, 6, 7)),
    ("or x5,x6,x7", 0x0073_62b3, or(5, 6, 7)),
    ("and x5,x6,x7", 0x0073_72b3, and(5, 6, 7)),
    ("addw x5,x6,x7", 0x0073_02bb, addw(5, 6, 7)),
    ("subw x5,x6,x7", 0x4073_02bb, subw(5, 6, 7)),
    ("sllw x5,x6,x7", 0x0073_12bb, sllw(5, 6, 7)),
    ("srlw x5,x6,x7", 0x0073_52bb, srlw(5, 6, 7)),
    ("sraw x5,x6,x7", 0x4073_52bb, sraw(5, 6, 7)),
    ("mul x5,x6,x7", 0x0273_02b3, mul(5, 6, 7)),
    ("mulh x5,x6,x7", 0x0273_12b3, mulh(5, 6, 7)),
    ("mulhsu x5,x6,x7", 0x0273_22b3, mulhsu(5, 6, 7)),
    ("mulhu x5,x6,x7", 0x0273_32b3, mulhu(5, 6, 7)),
    ("div x5,x6,x7", 0x0273_42b3, div(5, 6, 7)),
    ("divu x5,x6,x7", 0x0273_52b3, divu(5, 6, 7)),
    ("rem x5,x6,x7", 0x0273_62b3, rem(5, 6, 7)),
    ("remu x5,x6,x7", 0x0273_72b3, remu(5, 6, 7)),
    ("mulw x5,x6,x7", 0x0273_02bb, mulw(5, 6, 7)),
    ("divw x5,x6,x7", 0x0273_42bb, divw(5, 6, 7)),
    ("divuw x5,x6,x7", 0x0273_52bb, divuw(5, 6, 7)),
    ("remw x5,x6,x7", 0x0273_62bb, remw(5, 6, 7)),
    ("remuw x5,x6,x7", 0x0273_72bb, remuw(5, 6, 7)),
    ("addi x10,x11,-2048", 0x8005_8513, addi(10, 11, -2048)),
    ("slti x10,x11,2047", 0x7ff5_a513, slti(10, 11, 2047)),
    ("sltiu x10,x11,-1", 0xfff5_b513, sltiu(10, 11, -1)),
    ("xori x10,x11,-1", 0xfff5_c513, xori(10, 11, -1)),
    ("ori x10,x11,1365", 0x5555_e513, ori(10, 11, 1365)),
    ("andi x10,x11,-1366", 0xaaa5_f513, andi(10, 11, -1366)),
    ("slli x10,x11,63", 0x03f5_9513, slli(10, 11, 63)),
    ("srli x10,x11,63", 0x03f5_d513, srli(10, 11, 63)),
    ("srai x10,x11,63", 0x43f5_d513, srai(10, 11, 63)),
    ("addiw x10,x11,-7", 0xff95_851b, addiw(10, 11, -7)),
    ("slliw x10,x11,31", 0x01f5_951b, slliw(10, 11, 31)),
    ("srliw x10,x11,31", 0x01f5_d51b, srliw(10, 11, 31)),
    ("sraiw x10,x11,31", 0x41f5_d51b, sraiw(10, 11, 31)),
    ("lui x10,0xfffff", 0xffff_f537, lui(10, 0xfffff)),
    ("auipc x10,0x80001", 0x8000_1517, auipc(10, 0x80001)),
    ("jal x1,-1048576", 0x8000_00ef, jal(1, -1048576)),
    ("jal x0,1048574", 0x7fff_f06f, jal(0, 1048574)),
    ("jal x5,2730", 0x2ab0_02ef, jal(5, 2730)),
    ("jalr x1,-2048(x5)", 0x8002_80e7, jalr(1, 5, -2048)),
    ("beq x6,x7,-4096", 0x8073_0063, beq(6, 7, -4096)),
    ("bne x6,x7,4094", 0x7e73_1fe3, bne(6, 7, 4094)),
    ("blt x6,x7,1364", 0x5473_4a63, blt(6, 7, 1364)),
    ("bge x6,x7,-2732", 0xd473_5a63, bge(6, 7, -2732)),
    ("bltu x6,x7,2048", 0x0073_60e3, bltu(6, 7, 2048)),
    ("bgeu x6,x7,-2", 0xfe73_7fe3, bgeu(6, 7, -2)),
    ("lb x10,-1(x11)", 0xfff5_8503, lb(10, 11, -1)),
    ("lh x10,-2048(x11)", 0x8005_9503, lh(10, 11, -2048)),
    ("lw x10,2047(x11)", 0x7ff5_a503, lw(10, 11, 2047)),
    ("ld x10,8(x11)", 0x0085_b503, ld(10, 11, 8)),
    ("lbu x10,1(x11)", 0x0015_c503, lbu(10, 11, 1)),
    ("lhu x10,2(x11)", 0x0025_d503, lhu(10, 11, 2)),
    ("lwu x10,4(x11)", 0x0045_e503, lwu(10, 11, 4)),
    ("sb x10,-1(x11)", 0xfea5_8fa3, sb(10, 11, -1)),
    ("sh x10,-2048(x11)", 0x80a5_9023, sh(10, 11, -2048)),
    ("sw x10,2047(x11)", 0x7ea5_afa3, sw(10, 11, 2047)),
    ("sd x10,-1366(x11)", 0xaaa5_b523, sd(10, 11, -1366)),
    ("fence rw,w", 0x0310_000f, fence(3, 1)),
    ("fence iorw,iorw", 0x0ff0_000f, fence(15, 15)),
    ("fence r,rw", 0x0230_000f, fence(2, 3)),
    ("fence.tso", 0x8330_000f, FENCE_TSO),
    ("fence.i", 0x0000_100f, FENCE_I),
    ("ecall", 0x0000_0073, ECALL),
    ("ebreak", 0x0010_0073, EBREAK),
    ("sret", 0x1020_0073, SRET),
    ("wfi", 0x1050_0073, WFI),
    ("sfence.vma x5,x6", 0x1262_8073, sfence_vma(5, 6)),
    ("csrrw x5,0x140,x6", 0x1403_12f3, csrrw(5, 0x140, 6)),
    ("csrrs x5,0xc00,x6", 0xc003_22f3, csrrs(5, 0xc00, 6)),
    ("csrrc x5,0x100,x6", 0x1003_32f3, csrrc(5, 0x100, 6)),
    ("csrrwi x5,0x180,31", 0x180f_d2f3, csrrwi(5, 0x180, 31)),
    ("csrrsi x5,0x104,1", 0x1040_e2f3, csrrsi(5, 0x104, 1)),
    ("csrrci x5,0x144,17", 0x1448_f2f3, csrrci(5, 0x144, 17)),
    ("lr.w x5,(x6)", 0x1003_22af, atomic(LR, W, 5, 6, 0)),
    ("lr.d x5,(x6)", 0x1003_32af, atomic(LR, D, 5, 6, 0)),
    ("sc.w x5,x7,(x6)", 0x1873_22af, atomic(SC, W, 5, 6, 7)),
    ("sc.d x5,x7,(x6)", 0x1873_32af, atomic(SC, D, 5, 6, 7)),
    ("amoswap.w x5,x7,(x6)", 0x0873_22af, atomic(AMOSWAP, W, 5, 6, 7)),
    ("amoadd.w x5,x7,(x6)", 0x0073_22af, atomic(AMOADD, W, 5, 6, 7)),
    ("amoxor.w x5,x7,(x6)", 0x2073_22af, atomic(AMOXOR, W, 5, 6, 7)),
    ("amoand.w x5,x7,(x6)", 0x6073_22af, atomic(AMOAND, W, 5, 6, 7)),
    ("amoor.w x5,x7,(x6)", 0x4073_22af, atomic(AMOOR, W, 5, 6, 7)),
    ("amomin.w x5,x7,(x6)", 0x8073_22af, atomic(AMOMIN, W, 5, 6, 7)),
    ("amomax.w x5,x7,(x6)", 0xa073_22af, atomic(AMOMAX, W, 5, 6, 7)),
    ("amominu.w x5,x7,(x6)", 0xc073_22af, atomic(AMOMINU, W, 5, 6, 7)),
    ("amomaxu.w x5,x7,(x6)", 0xe073_22af, atomic(AMOMAXU, W, 5, 6, 7)),
    ("amoswap.d x5,x7,(x6)", 0x0873_32af, atomic(AMOSWAP, D, 5, 6, 7)),
    ("amoadd.d x5,x7,(x6)", 0x0073_32af, atomic(AMOADD, D, 5, 6, 7)),
    ("amoxor.d x5,x7,(x6)", 0x2073_32af, atomic(AMOXOR, D, 5, 6, 7)),
    ("amoand.d x5,x7,(x6)", 0x6073_32af, atomic(AMOAND, D, 5, 6, 7)),
    ("amoor.d x5,x7,(x6)", 0x4073_32af, atomic(AMOOR, D, 5, 6, 7)),
    ("amomin.d x5,x7,(x6)", 0x8073_32af, atomic(AMOMIN, D, 5, 6, 7)),
    ("amomax.d x5,x7,(x6)", 0xa073_32af, atomic(AMOMAX, D, 5, 6, 7)),
    ("amominu.d x5,x7,(x6)", 0xc073_32af, atomic(AMOMINU, D, 5, 6, 7)),
    ("amomaxu.d x5,x7,(x6)", 0xe073_32af, atomic(AMOMAXU, D, 5, 6, 7)),
];

#[test]
fn the_tests_encoder_agrees_with_llvm() {
    for &(text, llvm, ours) in ENCODINGS {
        assert_eq!(llvm, ours, "{text}: {llvm:#010x}, {ours:#010x}");
    }
}

/// The cause of the exception that `word` raises, if it raises one. Registers point to RAM.
fn cause(word: u32) -> Option<u64> {
    let mut machine = Machine::new(&[word]);
    for x in 1..32 {
        machine.hart.set_x(x, crate::support::hart::DATA + 0x1000);
    }
    let mut state = machine.hart.state();
    state.scause = u64::MAX;
    machine.hart.set_state(&state).unwrap();
    machine.run(1);
    let cause = machine.hart.state().scause;
    (cause != u64::MAX).then_some(cause)
}

#[test]
fn every_defined_encoding_is_legal() {
    for &(text, word, _) in ENCODINGS {
        let expected = match text {
            "ebreak" => Some(3),
            // Taken (all registers are equal), to an address that is not a multiple of 4.
            "jal x0,1048574" | "jal x5,2730" | "bgeu x6,x7,-2" => Some(0),
            // A write to a read-only CSR.
            "csrrs x5,0xc00,x6" => Some(2),
            _ => None,
        };
        assert_eq!(cause(word), expected, "{text}");
    }
}

#[test]
fn undefined_encodings_are_illegal_and_stval_holds_them() {
    let undefined = [
        0x0000_0000,                 // all zeros: defined illegal
        0xffff_ffff,                 // all ones: defined illegal
        0x0000_0001,                 // C extension: C.NOP
        0x0001_4505,                 // C extension: C.LI, something behind it
        0x0000_0007 | 3 << 12,       // FLD
        0x0000_0027 | 3 << 12,       // FSD
        0x0000_0053,                 // FADD.S
        0x0000_0043,                 // FMADD.S
        0x0000_0057,                 // OP-V
        0x0000_000b,                 // custom-0
        0x0000_002b,                 // custom-1
        0x0000_005b,                 // custom-2
        0x0000_007b,                 // custom-3
        0x0000_006b,                 // reserved
        0x0000_0077,                 // OP-VE
        lb(1, 2, 0) | 7 << 12,       // LDU does not exist
        sb(1, 2, 0) | 4 << 12,       // store with funct3 4
        sb(1, 2, 0) | 7 << 12,       //
        beq(1, 2, 8) | 2 << 12,      // branch with funct3 2
        beq(1, 2, 8) | 3 << 12,      //
        beq(1, 2, 6) | 2 << 12,      // the same with an odd target
        jalr(1, 2, 0) | 1 << 12,     // JALR with funct3 1
        fence(3, 3) | 2 << 12,       // CBO
        slli(1, 2, 1) | 1 << 26,     // shift with a seventh bit
        slli(1, 2, 1) | 0x400 << 20, // "SLAI"
        srli(1, 2, 1) | 1 << 31,     //
        srli(1, 2, 1) | 0x600 << 20, // RORI (Zbb)
        slliw(1, 2, 1) | 1 << 25,    // word shift by 32 or more
        srliw(1, 2, 1) | 1 << 25,    //
        sraiw(1, 2, 1) | 1 << 25,    //
        addiw(1, 2, 0) | 2 << 12,    // OP-IMM-32 with funct3 2
        addiw(1, 2, 0) | 7 << 12,    //
        add(1, 2, 3) | 0x10 << 25,   // SH?ADD (Zba)
        sll(1, 2, 3) | 0x20 << 25,   //
        and(1, 2, 3) | 0x20 << 25,   // ANDN (Zbb)
        add(1, 2, 3) | 0x02 << 25,   //
        addw(1, 2, 3) | 2 << 12,     //
        mulw(1, 2, 3) | 1 << 12,     // MULHW does not exist
        mulw(1, 2, 3) | 3 << 12,     //
        sraw(1, 2, 3) | 1 << 25,     //
        atomic(LR, W, 5, 6, 1),      // LR with rs2
        atomic(LR, D, 5, 6, 31),     //
        atomic(AMOADD, 0, 5, 6, 7),  // AMOADD.B (Zabha)
        atomic(AMOADD, 1, 5, 6, 7),  //
        atomic(AMOADD, 4, 5, 6, 7),  // AMOADD.Q
        atomic(0b00101, W, 5, 6, 7), // AMOCAS.W (Zacas)
        atomic(0b00111, D, 5, 6, 7), //
        atomic(0b11111, D, 5, 6, 7), //
        ECALL | 1 << 7,              // ECALL with rd
        EBREAK | 1 << 15,            // EBREAK with rs1
        SRET | 1 << 7,               //
        WFI | 1 << 15,               //
        0x3020_0073,                 // MRET
        0x0020_0073,                 // URET
        0x7020_0073,                 // MNRET
        0x00d0_0073,                 // WRS.NTO (Zawrs)
        sfence_vma(0, 0) | 1 << 7,   // SFENCE.VMA with rd
        0x1600_0073,                 // SINVAL.VMA (Svinval)
        0x2200_0073,                 // HFENCE.VVMA
        0x6200_0073,                 // HFENCE.GVMA
        0x6000_4073,                 // HLV.B
    ];
    for word in undefined {
        let mut machine = Machine::new(&[word]);
        let stval = if word & 3 == 3 { word } else { word & 0xffff };
        assert_eq!(machine.trap(), (2, u64::from(stval)), "{word:#010x}");
    }
}

/// The manual, 2.7: implementations ignore reserved fields of FENCE.
#[test]
fn reserved_fields_of_fences_are_ignored() {
    for word in [
        fence(15, 15) | 5 << 7 | 6 << 15,
        fence(15, 15) | 4 << 28,
        fence(0, 0),
        0x0100_000f, // PAUSE
        FENCE_I | 1 << 7 | 2 << 15 | 3 << 20,
        FENCE_TSO | 1 << 7,
    ] {
        assert_eq!(cause(word), None, "{word:#010x}");
    }
}

proptest! {
    /// For any bits, the hart executes one instruction or raises one exception. x0 stays 0.
    #[test]
    fn any_word_is_survived(words in prop::collection::vec(any::<u32>(), 1..64), seed in any::<[u64; 31]>()) {
        let mut machine = Machine::new(&words);
        for (x, value) in (1..).zip(seed) {
            machine.hart.set_x(x, value);
        }
        for _ in 0..64 {
            let before = machine.hart.state();
            let exit = machine.run(1);
            let after = machine.hart.state();
            prop_assert_eq!(after.x[0], 0);
            prop_assert_eq!(after.validate(), Ok(()));
            prop_assert!(after.instret - before.instret <= 1);
            match exit {
                HartExit::Budget | HartExit::Halted => {}
                HartExit::MmioLoad { .. } | HartExit::MmioStore { .. } => {
                    prop_assert_eq!(after.pc, before.pc + 4);
                }
                HartExit::Ecall { args } => prop_assert_eq!(&args[..], &before.x[10..18]),
                other => prop_assert!(false, "{:?}", other),
            }
        }
    }

    /// The same for defined instructions with varied fields.
    #[test]
    fn any_field_is_survived(
        words in prop::collection::vec((0..ENCODINGS.len(), any::<u32>()), 1..64),
        seed in any::<[u64; 31]>(),
    ) {
        // Keep opcode, funct3 and funct7.
        let words: Vec<u32> = words
            .into_iter()
            .map(|(i, bits)| ENCODINGS[i].1 & 0xfe00_707f | bits & !0xfe00_707f)
            .collect();
        let mut machine = Machine::new(&words);
        for (x, value) in (1..).zip(seed) {
            machine.hart.set_x(x, value);
        }
        for _ in 0..64 {
            machine.run(1);
            let after = machine.hart.state();
            prop_assert_eq!(after.x[0], 0);
            prop_assert_eq!(after.validate(), Ok(()));
        }
    }

    /// One run of some instructions and as many single steps have the same result.
    #[test]
    fn steps_add_up(
        words in prop::collection::vec((0..ENCODINGS.len(), any::<u32>()), 1..64),
        offset in 0_u64..0x1040,
        budget in 1_u64..300,
    ) {
        let words: Vec<u32> = words
            .into_iter()
            .map(|(i, bits)| ENCODINGS[i].1 & 0xfe00_707f | bits & !0xfe00_707f)
            .collect();
        let make = || {
            let mut machine = Machine::new(&[]);
            machine.ram().code(crate::support::hart::CODE + (offset & !3), &words);
            machine.hart.set_pc(crate::support::hart::CODE + (offset & !3)).unwrap();
            for x in 1..32 {
                machine.hart.set_x(x, crate::support::hart::DATA + 8 * u64::from(x));
            }
            machine
        };
        let (mut once, mut stepped) = (make(), make());
        let exit = once.run(budget);
        for step in 1..=budget {
            let stepped_exit = stepped.run(1);
            if stepped_exit != HartExit::Budget {
                prop_assert_eq!(exit, stepped_exit);
                break;
            }
            prop_assert!(step < budget || exit == HartExit::Budget);
        }
        prop_assert_eq!(once.hart.state(), stepped.hart.state());
    }
}
