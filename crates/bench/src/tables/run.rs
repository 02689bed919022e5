//! A run: every step and every scheme, round by round.

use super::Operation;
use super::allocator;
use super::measure::{Input, OneThread, TwoThreads};
#[cfg(target_pointer_width = "64")]
use super::scheme::Aarch64Paging;
use super::scheme::Scheme;
use super::scheme::{
    CompareExchange, EpochPinned, Komora, Locked, PlainStores, ReadLocked, TABLE_PAGES, Tdp,
};
#[cfg(target_arch = "x86_64")]
use super::scheme::{Multiarch, OffsetTable};
use crate::args::Common;
use crate::row::{Bound, Row};
use crate::schemes::{Aim, Subjects, measure};
use crate::{BenchError, note};

/// Measures all schemes.
///
/// In each round, the schemes take turns step by step, so that a disturbance of the machine affects
/// all of them.
///
/// # Errors
/// If a scheme gives a wrong answer.
pub(crate) fn tables(common: &Common) -> Result<Vec<Row>, BenchError> {
    // Short chunks give two threads a chance to run at once on a busy machine.
    let (pages, chunk, pair_chunk) = match common.quick {
        true => (1 << 15, 1 << 13, 1 << 12),
        false => (1 << 18, 1 << 16, 1 << 13),
    };
    run(pages, chunk, pair_chunk, common.rounds(9, 5))
}

/// Maps `pages` pages per thread in chunks, which are timed one by one. With two threads the chunks
/// have `pair_chunk` pages. All are multiples of [`TABLE_PAGES`].
pub(super) fn run(
    pages: u64,
    chunk: u64,
    pair_chunk: u64,
    rounds: u32,
) -> Result<Vec<Row>, BenchError> {
    let input = Input::new(pages, chunk, pair_chunk);
    // Twice the tables of two threads, because some tables wait for a grace period.
    allocator::keep_heap();
    allocator::fill((4 * pages / TABLE_PAGES) as usize + 64);
    let figures = measure(&input, &mut subjects(), None, 0..=rounds, note)?;
    let note = format!(
        "a page of 4 KiB, {pages} pages per thread; with two threads, each thread's own time, and \
         tables of one writer are behind a mutex"
    );
    let mut rows = figures.rows(&note);
    rows.extend(figures.judge(Tdp::NAME, AIMS, &note));
    Ok(rows)
}

/// Our aims.
const AIMS: [Aim<Operation>; 12] = {
    use Bound::AtMost;
    use Operation::{
        Find, FindRandom, MapOverlapping, MapPage, MapPartitioned, MapRange, ProtectRange,
        UnmapRange,
    };
    [
        Aim::of(MapPage, AtMost(25.0)),
        Aim::of(MapOverlapping, AtMost(60.0)),
        Aim::of(Find, AtMost(8.0)),
        Aim::of(FindRandom, AtMost(8.0)),
        Aim::of(ProtectRange, AtMost(8.0)),
        Aim::of(UnmapRange, AtMost(8.0)),
        Aim::beside(MapPartitioned, 1.3, Tdp::NAME, MapPage),
        Aim::beside(MapRange, 2.0, CompareExchange::NAME, MapRange),
        Aim::beside(ProtectRange, 2.0, CompareExchange::NAME, ProtectRange),
        Aim::beside(UnmapRange, 2.0, CompareExchange::NAME, UnmapRange),
        Aim::beside(MapPartitioned, 1.0, Komora::NAME, MapPartitioned),
        Aim::beside(MapOverlapping, 1.0, Komora::NAME, MapOverlapping),
    ]
};

/// All schemes, in the order of the rows.
fn subjects() -> Subjects<Input> {
    vec![
        OneThread::<PlainStores>::boxed(),
        TwoThreads::<CompareExchange>::boxed(),
        TwoThreads::<EpochPinned>::boxed(),
        TwoThreads::<ReadLocked>::boxed(),
        TwoThreads::<Tdp>::boxed(),
        TwoThreads::<Komora>::boxed(),
        #[cfg(target_arch = "x86_64")]
        TwoThreads::<Locked<OffsetTable>>::boxed(),
        #[cfg(target_arch = "x86_64")]
        TwoThreads::<Locked<Multiarch>>::boxed(),
        #[cfg(target_pointer_width = "64")]
        TwoThreads::<Locked<Aarch64Paging>>::boxed(),
    ]
}
