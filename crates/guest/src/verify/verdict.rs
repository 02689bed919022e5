//! What a verification says.

use crate::{ErrorKind, GuestReport};
use pageferry_addr::RamPage;

/// The most page errors a verdict describes; it counts all.
pub const MAX_ERRORS: usize = 64;

/// What a page is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// Code or page tables.
    Constant,
    /// The control page of this vCPU.
    Control(u32),
    /// In the share of this vCPU.
    Data(u32),
    /// Nothing: it stays zero.
    Unused,
}

/// A page that is not as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageError {
    /// Which page.
    pub page: RamPage,
    /// What it is for.
    pub page_use: PageUse,
    /// What is wrong with it. Of a control page, [`ErrorKind::Torn`] also means that its fields
    /// contradict each other; of other pages that are not data, it means other bytes than
    /// expected.
    pub kind: ErrorKind,
    /// For a data page, the sequence number it should have; otherwise 0.
    pub expected_sequence: u64,
    /// For a data page, the sequence number it has; otherwise 0.
    pub found_sequence: u64,
}

/// The first error a guest reported, and the vCPU that did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestFinding {
    /// The side that found it.
    pub vcpu: u32,
    /// What it found.
    pub report: GuestReport,
}

/// The outcome of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How many pages were compared; all of RAM, unless control pages could not be read.
    pub pages_checked: u64,
    /// The first [`MAX_ERRORS`] pages that are not as they should be.
    pub errors: Vec<PageError>,
    /// How many pages are not as they should be.
    pub error_count: u64,
    /// How many errors the vCPUs have found themselves, by their control pages.
    pub guest_errors: u64,
    /// The first error of the first vCPU that found any.
    pub first_guest_error: Option<GuestFinding>,
    /// How many pages the vCPUs have done, in all.
    pub pages_done: u64,
}

impl Verdict {
    /// Whether neither the host nor the guest has found an error.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.host_holds() && self.guest_holds()
    }

    /// Whether this verification found every page as it should be.
    #[must_use]
    pub fn host_holds(&self) -> bool {
        self.error_count == 0
    }

    /// Whether no vCPU has found an error in its own checks.
    #[must_use]
    pub fn guest_holds(&self) -> bool {
        self.guest_errors == 0
    }

    /// Counts an error, and keeps it if there is room.
    pub(super) fn error(&mut self, error: PageError) {
        self.error_count += 1;
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(error);
        }
    }
}
