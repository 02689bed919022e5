//! A small RV64IM interpreter, written from the ISA manual (volume I, chapters 2, 4 and 13),
//! independent of the hypervisor's. It runs the programs' code and counts instructions.

use pageferry_guest::{DOORBELL_GPA, HOLE_END, HOLE_START, PageBytes, Program};

/// The reason why it stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// A 32-bit store to the doorbell. The next instruction is the one after.
    Doorbell(u32),
    /// A store to the watched address is done.
    Watched,
    /// It ran the allowed number of instructions.
    Budget,
}

/// A hart with its memory indexed by RAM page.
pub(crate) struct Hart {
    pub x: [u64; 32],
    pub pc: u64,
    pub retired: u64,
    /// Stop after a store to this address.
    pub watch: Option<u64>,
}

fn ram_offset(address: u64) -> usize {
    assert!(
        !(HOLE_START..HOLE_END).contains(&address),
        "access to the hole at {address:#x}"
    );
    (if address < HOLE_START {
        address
    } else {
        address - (HOLE_END - HOLE_START)
    }) as usize
}

impl Hart {
    pub(crate) fn new(program: &Program, vcpu: u32) -> Self {
        let start = program.start(vcpu);
        let mut x = [0; 32];
        (x[2], x[10], x[11]) = (start.stack, start.args[0], start.args[1]);
        Self {
            x,
            pc: start.entry,
            retired: 0,
            watch: None,
        }
    }

    pub(crate) fn run(&mut self, ram: &mut [PageBytes], budget: u64) -> Stop {
        for _ in 0..budget {
            let at = ram_offset(self.pc);
            let bytes = ram[at / 4096][at % 4096..at % 4096 + 4].try_into().unwrap();
            if let Some(stop) = self.step(u32::from_le_bytes(bytes), ram) {
                return stop;
            }
        }
        Stop::Budget
    }

    fn step(&mut self, code: u32, ram: &mut [PageBytes]) -> Option<Stop> {
        let signed = code as i32;
        let (rd, rs1, rs2) = (code >> 7 & 31, code >> 15 & 31, code >> 20 & 31);
        let (a, b) = (self.x[rs1 as usize], self.x[rs2 as usize]);
        let funct3 = code >> 12 & 7;
        let imm_i = i64::from(signed >> 20) as u64;
        let imm_s = i64::from(signed >> 25 << 5 | rd as i32) as u64;
        let imm_b = i64::from(
            (signed >> 31 << 12)
                | ((code >> 7 & 1) << 11 | (code >> 25 & 63) << 5 | (code >> 8 & 15) << 1) as i32,
        ) as u64;
        let imm_j = i64::from(
            (signed >> 31 << 20)
                | (code & 0xf_f000 | (code >> 20 & 1) << 11 | (code >> 21 & 1023) << 1) as i32,
        ) as u64;
        let mut next = self.pc.wrapping_add(4);
        let mut stop = None;
        let shamt = code >> 20 & 63;
        let result = match (code & 0x7f, funct3) {
            (0x37, _) => Some(i64::from((code & 0xffff_f000) as i32) as u64),
            (0x6f, _) => {
                let link = next;
                next = self.pc.wrapping_add(imm_j);
                Some(link)
            }
            (0x63, _) => {
                let taken = match funct3 {
                    0 => a == b,
                    1 => a != b,
                    6 => a < b,
                    7 => a >= b,
                    _ => panic!("branch {code:#010x}"),
                };
                if taken {
                    next = self.pc.wrapping_add(imm_b);
                }
                None
            }
            (0x03, 3) => {
                let at = ram_offset(a.wrapping_add(imm_i));
                Some(u64::from_le_bytes(
                    ram[at / 4096][at % 4096..at % 4096 + 8].try_into().unwrap(),
                ))
            }
            (0x23, 2 | 3) => {
                let address = a.wrapping_add(imm_s);
                if address == DOORBELL_GPA.0 {
                    assert_eq!(funct3, 2, "the doorbell takes 32 bits");
                    stop = Some(Stop::Doorbell(b as u32));
                } else {
                    let at = ram_offset(address);
                    let length = 1 << funct3;
                    ram[at / 4096][at % 4096..at % 4096 + length]
                        .copy_from_slice(&b.to_le_bytes()[..length]);
                    if self.watch == Some(address) {
                        stop = Some(Stop::Watched);
                    }
                }
                None
            }
            (0x13, 0) => Some(a.wrapping_add(imm_i)),
            (0x13, 1) => Some(a << shamt),
            (0x13, 5) if code >> 26 == 0 => Some(a >> shamt),
            (0x13, 6) => Some(a | imm_i),
            (0x13, 7) => Some(a & imm_i),
            (0x1b, 0) => Some(i64::from(a.wrapping_add(imm_i) as i32) as u64),
            (0x33, _) => Some(match (code >> 25, funct3) {
                (0, 0) => a.wrapping_add(b),
                (0, 4) => a ^ b,
                (0, 5) => a >> (b & 63),
                (0, 6) => a | b,
                (0, 7) => a & b,
                (1, 0) => a.wrapping_mul(b),
                _ => panic!("operation {code:#010x}"),
            }),
            _ => panic!("instruction {code:#010x} at {:#x}", self.pc),
        };
        if let Some(result) = result
            && rd != 0
        {
            self.x[rd as usize] = result;
        }
        self.pc = next;
        self.retired += 1;
        stop
    }
}

/// RAM with the program's image in it.
pub(crate) fn boot(program: &Program) -> Vec<PageBytes> {
    let mut ram = vec![[0; 4096]; program.memory_map().ram_pages() as usize];
    load(program, &mut ram);
    ram
}

/// Puts the program's image into zeroed RAM.
pub(crate) fn load(program: &Program, ram: &mut [PageBytes]) {
    for (gpa, bytes) in program.image() {
        ram[ram_offset(gpa.0) / 4096][..bytes.len()].copy_from_slice(&bytes);
    }
}
