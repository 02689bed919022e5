//! The control page: here a vCPU's program publishes its progress and the errors it found.
//!
//! Offsets are bytes from the start of the page. Every field is a little-endian `u64`. The offsets
//! are the same for both instruction sets and for all programs. A field that a program does not use
//! stays zero.

use crate::address_space::{MAX_MEMORY_BYTES, MAX_VCPUS};
use crate::{ErrorKind, GuestError};
use pageferry_addr::{PAGE_SIZE, RamPage};

/// One page of bytes.
pub type PageBytes = [u8; PAGE_SIZE as usize];

/// Offset of the magic number, which names the program ([`ProgramKind::magic`]). Constant.
pub const MAGIC: usize = 0x00;
/// Offset of the vCPU's index. Constant.
pub const VCPU: usize = 0x08;
/// Offset of the RAM page index of the first page the program visits. Constant.
pub const FIRST: usize = 0x10;
/// Offset of the number of pages the program visits. Constant.
pub const PAGES: usize = 0x18;
/// Offset of the order generator's mask. Constant.
pub const MASK: usize = 0x20;
/// Offset of the order generator's output shift. Constant.
pub const SHIFT: usize = 0x28;
/// Offset of the number of passes after which the program ends; 0 means no end. Constant.
pub const PASS_LIMIT: usize = 0x30;
/// Offset of the value that a workload stores to the doorbell after each page; 0 means no store.
/// Constant.
pub const REST: usize = 0x38;
/// Offset of the current pass, from 1; 0 before the first instruction.
pub const PASS: usize = 0x40;
/// Offset of the order generator's state: the page chosen last. A hint for an observer.
pub const STATE: usize = 0x48;
/// Offset of the page being rewritten, as its RAM page index plus 1; 0 means none.
pub const IN_PROGRESS: usize = 0x50;
/// Offset of the number of pages done since the start, over all passes. Never decreases.
pub const DONE: usize = 0x58;
/// Offset of the wrapping sum of all words that a reading toucher has loaded.
pub const SUM: usize = 0x60;
/// Offset of the number of errors found.
pub const ERRORS: usize = 0x80;
/// Offset of the first error's kind ([`ErrorKind::code`]). This field and those below are valid if
/// there are errors.
pub const ERROR_KIND: usize = 0x88;
/// Offset of the first error's RAM page index.
pub const ERROR_PAGE: usize = 0x90;
/// Offset of the expected word in the first error's page.
pub const ERROR_EXPECTED: usize = 0x98;
/// Offset of the word found in its place.
pub const ERROR_FOUND: usize = 0xa0;
/// Offset of the pass that found the first error.
pub const ERROR_PASS: usize = 0xa8;

/// The program that a control page belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProgramKind {
    /// [`crate::Workload`].
    Workload,
    /// [`crate::Toucher`].
    Toucher,
    /// [`crate::Spin`].
    Spin,
}

impl ProgramKind {
    /// All kinds.
    pub const ALL: [Self; 3] = [Self::Workload, Self::Toucher, Self::Spin];

    /// The first word of the program's control pages: eight letters.
    #[must_use]
    pub const fn magic(self) -> u64 {
        u64::from_le_bytes(match self {
            Self::Workload => *b"PFwork01",
            Self::Toucher => *b"PFtouch1",
            Self::Spin => *b"PFspin01",
        })
    }
}

/// The first error that a guest found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestReport {
    /// The kind of error.
    pub kind: ErrorKind,
    /// The page.
    pub page: RamPage,
    /// The expected word; [`ErrorKind`] names the word.
    pub expected: u64,
    /// The word found.
    pub found: u64,
    /// The pass that found the error.
    pub pass: u64,
}

/// A control page, read and checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control {
    /// The program.
    pub program: ProgramKind,
    /// The vCPU's index.
    pub vcpu: u32,
    /// The first page the program visits.
    pub first: RamPage,
    /// The number of pages that the program visits.
    pub pages: u64,
    /// The current pass, from 1; 0 before the first instruction.
    pub pass: u64,
    /// The order generator's state.
    pub state: u64,
    /// The page being rewritten.
    pub in_progress: Option<RamPage>,
    /// The number of pages (of a [`crate::Spin`]: rounds) done since the start, over all passes.
    pub done: u64,
    /// The wrapping sum of all words loaded.
    pub sum: u64,
    /// The number of errors that the guest has found.
    pub errors: u64,
    /// The first error.
    pub first_error: Option<GuestReport>,
}

impl Control {
    /// Reads a control page. Every value is checked against the values that a program can write.
    ///
    /// # Errors
    /// When the magic number belongs to no program, or a field is out of its range.
    pub fn parse(page: &PageBytes) -> Result<Self, GuestError> {
        let magic = word(page, MAGIC);
        let program = ProgramKind::ALL
            .into_iter()
            .find(|kind| kind.magic() == magic)
            .ok_or(GuestError::ControlMagic { found: magic })?;
        let bounded = |field, offset, limit| match word(page, offset) {
            value if value < limit => Ok(value),
            value => Err(GuestError::ControlField { field, value }),
        };
        let ram_pages = MAX_MEMORY_BYTES / PAGE_SIZE;
        let errors = word(page, ERRORS);
        let first_error = if errors == 0 {
            None
        } else {
            let code = word(page, ERROR_KIND);
            Some(GuestReport {
                kind: ErrorKind::from_code(code).ok_or(GuestError::ControlField {
                    field: "error kind",
                    value: code,
                })?,
                page: RamPage(bounded("error page", ERROR_PAGE, ram_pages)?),
                expected: word(page, ERROR_EXPECTED),
                found: word(page, ERROR_FOUND),
                pass: word(page, ERROR_PASS),
            })
        };
        Ok(Self {
            program,
            vcpu: bounded("vcpu", VCPU, u64::from(MAX_VCPUS))? as u32,
            first: RamPage(bounded("first", FIRST, ram_pages)?),
            pages: bounded("pages", PAGES, ram_pages + 1)?,
            pass: word(page, PASS),
            state: bounded("state", STATE, ram_pages)?,
            in_progress: bounded("in progress", IN_PROGRESS, ram_pages + 1)?
                .checked_sub(1)
                .map(RamPage),
            done: word(page, DONE),
            sum: word(page, SUM),
            errors,
            first_error,
        })
    }
}

/// The word at byte offset `offset`.
pub(crate) fn word(page: &PageBytes, offset: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&page[offset..offset + 8]);
    u64::from_le_bytes(bytes)
}

/// Replaces the word at byte offset `offset`.
pub(crate) fn set_word(page: &mut PageBytes, offset: usize, value: u64) {
    page[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> PageBytes {
        let mut page = [0; 4096];
        set_word(&mut page, MAGIC, ProgramKind::Workload.magic());
        set_word(&mut page, VCPU, 3);
        set_word(&mut page, FIRST, 100);
        set_word(&mut page, PAGES, 50);
        set_word(&mut page, IN_PROGRESS, 121);
        set_word(&mut page, DONE, 77);
        page
    }

    #[test]
    fn fields_are_read_from_their_offsets() {
        let control = Control::parse(&sample()).unwrap();
        assert_eq!(
            (control.vcpu, control.first, control.pages),
            (3, RamPage(100), 50)
        );
        assert_eq!(
            (control.in_progress, control.done),
            (Some(RamPage(120)), 77)
        );
        assert_eq!(control.first_error, None);
    }

    #[test]
    fn foreign_bytes_are_refused_with_the_value() {
        assert_eq!(
            Control::parse(&[0; 4096]),
            Err(GuestError::ControlMagic { found: 0 })
        );
        for (field, offset, value) in [
            ("vcpu", VCPU, 1024),
            ("first", FIRST, 1 << 30),
            ("pages", PAGES, (1 << 30) + 1),
            ("state", STATE, u64::MAX),
            ("in progress", IN_PROGRESS, (1 << 30) + 1),
        ] {
            let mut page = sample();
            set_word(&mut page, offset, value);
            assert_eq!(
                Control::parse(&page),
                Err(GuestError::ControlField { field, value })
            );
        }
        let mut page = sample();
        set_word(&mut page, ERRORS, 1);
        let refused = GuestError::ControlField {
            field: "error kind",
            value: 0,
        };
        assert_eq!(Control::parse(&page), Err(refused));
    }

    proptest! {
        #[test]
        fn any_bytes_give_an_answer(mut bytes in proptest::collection::vec(any::<u8>(), 4096), good in any::<bool>()) {
            if good {
                bytes[..8].copy_from_slice(&ProgramKind::Spin.magic().to_le_bytes());
            }
            let page: PageBytes = bytes.try_into().unwrap();
            if let Ok(control) = Control::parse(&page) {
                prop_assert!(control.vcpu < MAX_VCPUS);
            }
        }
    }
}
