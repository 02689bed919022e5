//! A whole run: every step, every scheme, round by round.

use super::Report;
use super::allocator;
use super::measure::{Input, OneThread, TwoThreads};
#[cfg(target_pointer_width = "64")]
use super::scheme::Aarch64Paging;
use super::scheme::{
    CompareExchange, EpochPinned, Komora, Locked, PlainStores, ReadLocked, TABLE_PAGES, Tdp,
};
#[cfg(target_arch = "x86_64")]
use super::scheme::{Multiarch, OffsetTable};
use crate::run::{Rounds, RunError, Subjects, measure};
use std::time::Instant;

/// What to measure and how often.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pages of 4 KiB that each thread has: a multiple of both chunks, at most
    /// [`Self::MOST_PAGES`].
    pub pages: u64,
    /// Pages that are timed together with one thread: a multiple of 512.
    pub chunk: u64,
    /// The same with two threads. They begin each chunk together, and on a busy machine short ones
    /// come to be done by both at once.
    pub pair_chunk: u64,
    /// How often everything is measured; figures are medians over the rounds. At least one. One
    /// more round is not counted.
    pub rounds: u32,
}

impl Config {
    /// The most pages a thread can have: 8 GiB, for which tables of 4 KiB need 16 MiB.
    pub const MOST_PAGES: u64 = 1 << 21;

    /// A second or two, to see that everything works; its figures are noisier, and of 128 MiB a
    /// thread.
    #[must_use]
    pub fn quick() -> Self {
        Self {
            pages: 1 << 15,
            chunk: 1 << 13,
            pair_chunk: 1 << 12,
            rounds: 5,
        }
    }
}

impl Default for Config {
    /// A GiB a thread, nine times.
    fn default() -> Self {
        Self {
            pages: 1 << 18,
            chunk: 1 << 16,
            pair_chunk: 1 << 13,
            rounds: 9,
        }
    }
}

/// Measures all schemes and says how it goes on through `progress`.
///
/// Inside a round, the schemes take turns step by step, so that a disturbance of the machine meets
/// all of them.
///
/// # Errors
/// Where `config` asks for what cannot be measured, or a scheme gave a wrong answer.
pub fn run(config: &Config, progress: &mut dyn FnMut(&str)) -> Result<Report, RunError> {
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
    let start = Instant::now();
    let input = Input::new(pages, chunk, pair_chunk);
    // Twice what two threads' tables need: some wait for a grace period.
    allocator::keep_heap();
    allocator::fill((4 * pages / TABLE_PAGES) as usize + 64);
    let rounds = Rounds {
        counted: rounds,
        warm_up: true,
    };
    let figures = measure(&input, &mut subjects(), None, rounds, progress)?;
    Ok(Report::new(figures, pages, start.elapsed()))
}

/// All schemes, in the order of a table's rows.
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
