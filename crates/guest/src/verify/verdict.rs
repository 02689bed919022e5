//! The outcome of a verification.

use crate::{ErrorKind, GuestReport};
use pageferry_addr::RamPage;

/// The maximum number of page errors that a verdict describes. It counts all.
pub const MAX_ERRORS: usize = 64;

/// The use of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageUse {
    /// Code or page tables.
    Constant,
    /// The control page of this vCPU.
    Control(u32),
    /// A page in the share of this vCPU.
    Data(u32),
    /// None: the page stays zero.
    Unused,
}

/// A page with wrong contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageError {
    /// The page.
    pub page: RamPage,
    /// The use of the page.
    pub page_use: PageUse,
    /// The kind of error. In a control page, [`ErrorKind::Torn`] also means that fields contradict
    /// each other. In code, page tables and unused pages it means unexpected bytes.
    pub kind: ErrorKind,
    /// For a data page, the sequence number it should have; otherwise 0.
    pub expected_sequence: u64,
    /// For a data page, the sequence number it has; otherwise 0.
    pub found_sequence: u64,
}

/// The first error that a guest reported, and the vCPU that reported it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestFinding {
    /// The vCPU that found it.
    pub vcpu: u32,
    /// The error.
    pub report: GuestReport,
}

/// The outcome of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    /// The number of pages compared: all of RAM, unless control pages could not be read.
    pub pages_checked: u64,
    /// The first [`MAX_ERRORS`] pages with wrong contents.
    pub errors: Vec<PageError>,
    /// The number of pages with wrong contents.
    pub error_count: u64,
    /// The number of errors that the vCPUs found themselves, from their control pages.
    pub guest_errors: u64,
    /// The first error of the first vCPU that found any.
    pub first_guest_error: Option<GuestFinding>,
    /// The number of pages that all vCPUs have done.
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
