//! Threads that make all calls to one MMU at once, on real tables, for `PAGEFERRY_STRESS_SECONDS`
//! (2 by default).
//!
//! Under ThreadSanitizer, for a minute (`rustup component add --toolchain nightly rust-src` once):
//!
//! ```sh
//! PAGEFERRY_STRESS_SECONDS=60 RUSTFLAGS="-Zsanitizer=thread --cfg pageferry_tsan" \
//!     cargo +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu \
//!     -p pageferry-tdp --test it stress
//! ```
//!
//! `pageferry_tsan` makes epochs acquire where they fence, as ThreadSanitizer does not understand
//! fences. Freed tables return to the allocator at once. The host copies a page that moves by plain
//! loads, so a store that is not ordered before the copy is a data race. If tables are freed after
//! the flush without a grace period, ThreadSanitizer reports races between `free` and walks within
//! ten seconds.

use crate::guest::{Length, Machine, Role};
use pageferry_tdp::format::{Arm64Ipa40, Ept4, Ept4NoAd, Format, Sv48x4Svade};
use pageferry_testkit::stress_time;
use std::time::Duration;

/// Four pieces of 2 MiB.
const PAGES: u64 = 2048;

fn run<F: Format>(share: u32, roles: &[Role]) {
    let length = Length::Time(stress_time(Duration::from_secs(2)) / share);
    Machine::<F>::run(3, PAGES, roles, false, length);
}

/// One after the other, since each uses all processors.
#[test]
fn everything_at_once() {
    let logged = [
        Role::Notifier,
        Role::Logger,
        Role::Ager,
        Role::Zapper,
        Role::Destroyer,
    ];
    run::<Ept4>(6, &logged);
    run::<Ept4NoAd>(6, &logged);
    run::<Sv48x4Svade>(6, &logged);
    run::<Arm64Ipa40<true>>(6, &logged);
    let resized = [
        Role::Notifier,
        Role::Resizer,
        Role::Resizer,
        Role::Zapper,
        Role::Destroyer,
    ];
    run::<Ept4>(6, &resized);
    let logged_lazily = [Role::LazyLogger, Role::Splitter, Role::Ager, Role::Notifier];
    run::<Arm64Ipa40<false>>(6, &logged_lazily);
}
