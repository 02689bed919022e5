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
use crate::note;
use crate::row::{Bound, Row};
use crate::schemes::{Aim, Figures, Rounds, RunError, Subjects, measure};

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Pages of 4 KiB per thread: a multiple of both chunks, at most [`Self::MOST_PAGES`].
    pub(crate) pages: u64,
    /// Pages per chunk with one thread: a multiple of 512. A chunk is timed as a whole.
    pub(crate) chunk: u64,
    /// Pages per chunk with two threads: a multiple of 512. The threads start each chunk together.
    /// Short chunks give them a chance to run at once on a busy machine.
    pub(crate) pair_chunk: u64,
    /// The number of rounds, at least 1. Figures are medians over the rounds. One more round comes
    /// first and does not count.
    pub(crate) rounds: u32,
}

impl Config {
    /// The largest number of pages per thread: 8 GiB, which need 16 MiB of 4 KiB tables.
    pub(crate) const MOST_PAGES: u64 = 1 << 21;

    /// 128 MiB per thread, 5 rounds, a second or two: a check that everything works. Its figures
    /// are noisier.
    #[must_use]
    pub(crate) fn quick() -> Self {
        Self {
            pages: 1 << 15,
            chunk: 1 << 13,
            pair_chunk: 1 << 12,
            rounds: 5,
        }
    }
}

impl Default for Config {
    /// 1 GiB per thread, 9 rounds.
    fn default() -> Self {
        Self {
            pages: 1 << 18,
            chunk: 1 << 16,
            pair_chunk: 1 << 13,
            rounds: 9,
        }
    }
}

/// Measures all schemes.
///
/// In each round, the schemes take turns step by step, so that a disturbance of the machine affects
/// all of them.
///
/// # Errors
/// If `config` cannot be measured, or a scheme gives a wrong answer.
pub(crate) fn run(config: &Config) -> Result<Vec<Row>, RunError> {
    let &Config {
        pages,
        chunk,
        pair_chunk,
        rounds,
    } = config;
    let whole =
        |chunk: u64| chunk > 0 && chunk.is_multiple_of(TABLE_PAGES) && pages.is_multiple_of(chunk);
    if !whole(chunk)
        || !whole(pair_chunk)
        || pages == 0
        || pages > Config::MOST_PAGES
        || rounds == 0
    {
        return Err(RunError::Pages {
            pages,
            chunk,
            pair_chunk,
            rounds,
        });
    }
    let input = Input::new(pages, chunk, pair_chunk);
    // Twice the tables of two threads, because some tables wait for a grace period.
    allocator::keep_heap();
    allocator::fill((4 * pages / TABLE_PAGES) as usize + 64);
    let rounds = Rounds {
        counted: rounds,
        warm_up: true,
    };
    let figures = measure(&input, &mut subjects(), None, rounds, note)?;
    let note = format!(
        "a page of 4 KiB, {pages} pages per thread; with two threads, each thread's own time, and \
         tables of one writer are behind a mutex"
    );
    let mut rows = figures.rows(&note);
    rows.extend(figures.judge(Tdp::NAME, None, AIMS, &note));
    rows.extend(beside_ostd(&figures, &note));
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

/// Our figures of two threads next to those of ostd, which are of another run: 2026-11, on a
/// virtual machine with 2 cores.
fn beside_ostd(figures: &Figures<Operation>, note: &str) -> Vec<Row> {
    let elsewhere = [
        (Operation::MapPartitioned, 26.0),
        (Operation::MapOverlapping, 206.0),
    ];
    let rows = elsewhere.into_iter().filter_map(|(operation, ns)| {
        let row = figures.find(Tdp::NAME, operation, None)?.row(note);
        let row = row.against("asterinas ostd, elsewhere", ns);
        Some(row.aiming_at(Bound::RatioAtMost(1.0)))
    });
    rows.collect()
}

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
