//! The data that a VMM needs to start any of the programs: image, start states, control pages.

use crate::control::{
    FIRST, MAGIC, MASK, PAGES, PASS_LIMIT, PageBytes, REST, SHIFT, VCPU, set_word,
};
use crate::order::OrderParams;
use crate::tables;
use crate::{DOORBELL_GPA, Doorbell, GuestError, Isa, MemoryMap, ProgramKind};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use std::ops::Range;
use std::time::Duration;

/// The start state of a vCPU. Every other register keeps its value after the engine's reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Address of the first instruction (rip, pc).
    pub entry: u64,
    /// Top of the stack page (rsp, sp); 16-byte aligned.
    pub stack: u64,
    /// Arguments: the control page's address (rdi, a0) and the doorbell's (rsi, a1).
    pub args: [u64; 2],
    /// Address of the root page table (cr3); 0 for RV64, which has none.
    pub tables: Gpa,
}

/// Any of the programs, laid out in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    kind: ProgramKind,
    map: MemoryMap,
    code: Vec<u8>,
    ranges: Vec<Range<u64>>,
    pass_limit: u64,
    rest: Duration,
}

impl Program {
    /// `ranges` holds the pages that each vCPU visits.
    pub(crate) fn new(
        kind: ProgramKind,
        map: MemoryMap,
        code: Vec<u8>,
        ranges: Vec<Range<u64>>,
        pass_limit: u64,
    ) -> Self {
        assert!(code.len() as u64 <= PAGE_SIZE, "code of at most one page");
        assert_eq!(ranges.len(), map.vcpus() as usize, "one range per vCPU");
        Self {
            kind,
            map,
            code,
            ranges,
            pass_limit,
            rest: Duration::ZERO,
        }
    }

    /// As this program, with a rest after each page.
    pub(crate) fn with_rest(self, rest: Duration) -> Result<Self, GuestError> {
        Doorbell::rest(0, rest)?;
        Ok(Self { rest, ..self })
    }

    /// The kind of program.
    #[must_use]
    pub fn kind(&self) -> ProgramKind {
        self.kind
    }

    /// The instruction set.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.map.isa()
    }

    /// The plan of the program's memory.
    #[must_use]
    pub fn memory_map(&self) -> &MemoryMap {
        &self.map
    }

    /// The machine code.
    #[must_use]
    pub fn code(&self) -> &[u8] {
        &self.code
    }

    /// The bytes that the VMM writes into zeroed RAM before a vCPU starts. Every piece begins at a
    /// page boundary and lies below the hole. No two pieces share a page.
    #[must_use]
    pub fn image(&self) -> Vec<(Gpa, Vec<u8>)> {
        let mut pieces = self.constant_pages();
        for vcpu in 0..self.map.vcpus() {
            let gpa = MemoryMap::gpa_of(self.map.control_page(vcpu));
            pieces.push((gpa, self.control(vcpu).to_vec()));
        }
        pieces
    }

    /// The part of the image that no program changes: code and page tables.
    pub(crate) fn constant_pages(&self) -> Vec<(Gpa, Vec<u8>)> {
        let mut pieces = vec![(MemoryMap::gpa_of(self.map.code_page()), self.code.clone())];
        if self.isa() == Isa::X86_64 {
            let root = RamPage(self.map.table_pages().start);
            pieces.extend(tables::build(self.map.memory_bytes(), root));
        }
        pieces
    }

    /// A control page before the first instruction.
    pub(crate) fn control(&self, vcpu: u32) -> PageBytes {
        let range = &self.ranges[vcpu as usize];
        let pages = range.end - range.start;
        let order = OrderParams::new(pages);
        let rest = Doorbell::rest(vcpu, self.rest).expect("with_rest has checked it");
        let mut page = [0; PAGE_SIZE as usize];
        for (offset, value) in [
            (MAGIC, self.kind.magic()),
            (VCPU, vcpu.into()),
            (FIRST, range.start),
            (PAGES, pages),
            (MASK, order.mask),
            (SHIFT, order.shift.into()),
            (PASS_LIMIT, self.pass_limit),
            (REST, rest.into()),
        ] {
            set_word(&mut page, offset, value);
        }
        page
    }

    /// The start state of a vCPU.
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn start(&self, vcpu: u32) -> Start {
        let stack = MemoryMap::gpa_of(self.map.stack_page(vcpu)).0 + PAGE_SIZE;
        let tables = self.map.table_pages();
        Start {
            entry: MemoryMap::gpa_of(self.map.code_page()).0,
            stack,
            args: [
                MemoryMap::gpa_of(self.map.control_page(vcpu)).0,
                DOORBELL_GPA.0,
            ],
            tables: if tables.is_empty() {
                Gpa(0)
            } else {
                MemoryMap::gpa_of(RamPage(tables.start))
            },
        }
    }

    /// The control page of a vCPU; read it with [`crate::Control::parse`].
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn control_page(&self, vcpu: u32) -> RamPage {
        self.map.control_page(vcpu)
    }

    /// The pages that a vCPU visits, as RAM page indices. Empty for a [`crate::Spin`].
    ///
    /// # Panics
    /// When there is no such vCPU.
    #[must_use]
    pub fn visited(&self, vcpu: u32) -> Range<u64> {
        self.ranges[vcpu as usize].clone()
    }
}

/// Gives a program type the methods of its [`Program`] that every VMM calls.
macro_rules! forward_to_program {
    ($type:ty) => {
        impl $type {
            /// The part that all programs have in common.
            #[must_use]
            pub fn program(&self) -> &$crate::Program {
                &self.program
            }

            /// The plan of the program's memory.
            #[must_use]
            pub fn memory_map(&self) -> &$crate::MemoryMap {
                self.program.memory_map()
            }

            /// See [`Program::image`](crate::Program::image).
            #[must_use]
            pub fn image(&self) -> Vec<(pageferry_addr::Gpa, Vec<u8>)> {
                self.program.image()
            }

            /// See [`Program::start`](crate::Program::start).
            ///
            /// # Panics
            /// When there is no such vCPU.
            #[must_use]
            pub fn start(&self, vcpu: u32) -> $crate::Start {
                self.program.start(vcpu)
            }

            /// See [`Program::control_page`](crate::Program::control_page).
            ///
            /// # Panics
            /// When there is no such vCPU.
            #[must_use]
            pub fn control_page(&self, vcpu: u32) -> pageferry_addr::RamPage {
                self.program.control_page(vcpu)
            }
        }
    };
}
pub(crate) use forward_to_program;
