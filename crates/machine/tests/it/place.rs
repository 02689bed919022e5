#![expect(unsafe_code, reason = "places pages, as a migration does")]
//! The privileged way to a machine's memory, for tests that act as a migration.

use pageferry_machine::{GuestRam, UncheckedRam};

/// The bytes of `ram` without regard to missing pages.
pub(crate) fn placing(ram: &GuestRam) -> UncheckedRam<'_> {
    // SAFETY: these tests access memory by volatile words only, so no access disturbs another. A
    // page that a test places twice, or reads too early, has wrong bytes, and the test fails.
    unsafe { ram.unchecked() }
}
