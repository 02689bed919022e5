//! A whole run: every step, every scheme, round by round.

use super::Operation;
use super::pool;
use super::report::{Figure, Report};
#[cfg(target_pointer_width = "64")]
use super::scheme::Aarch64Paging;
use super::scheme::{
    CompareExchange, EpochPinned, Komora, Locked, PlainStores, ReadLocked, TABLE_PAGES, Tdp,
};
#[cfg(target_arch = "x86_64")]
use super::scheme::{Multiarch, OffsetTable};
use super::stage::{Both, Single, Stage, Step, Subject};
use std::collections::BTreeMap;
use std::time::Instant;

/// What to measure and how often.
#[derive(Clone, Debug)]
pub struct Config {
    /// Pages of 4 KiB that each thread has: a multiple of both chunks, at most [`Self::MOST_PAGES`].
    pub pages: u64,
    /// Pages that are timed together with one thread: a multiple of 512.
    pub chunk: u64,
    /// The same with two threads. They begin each chunk together, and on a busy machine short ones come to be done
    /// by both at once.
    pub pair_chunk: u64,
    /// How often everything is measured; figures are medians over the rounds. At least one. One more round is not counted.
    pub rounds: u32,
}

impl Config {
    /// The most pages a thread can have: 8 GiB, for which tables of 4 KiB need 16 MiB.
    pub const MOST_PAGES: u64 = 1 << 21;

    /// A second or two, to see that everything works; its figures are noisier, and of 128 MiB a thread.
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

/// Why there is no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// No rounds, or pages that are no multiple of chunks, or too many.
    #[error(
        "cannot measure {pages} pages in chunks of {chunk} and {pair_chunk}, {rounds} times: chunks are multiples of \
         {TABLE_PAGES} pages, pages of both chunks, {most} at most, and once is the least",
        most = Config::MOST_PAGES
    )]
    Config {
        /// Pages a thread.
        pages: u64,
        /// Pages a chunk.
        chunk: u64,
        /// Pages a chunk of two threads.
        pair_chunk: u64,
        /// Rounds.
        rounds: u32,
    },
    /// A scheme did not find what it had mapped, or found what it had unmapped.
    #[error("{scheme} translated a page wrongly")]
    Wrong {
        /// Which one.
        scheme: &'static str,
    },
}

/// Measures all schemes and says how it goes on through `progress`.
///
/// Inside a round, the schemes take turns step by step, so that a disturbance of the machine meets all of them.
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
        return Err(RunError::Config {
            pages,
            chunk,
            pair_chunk,
            rounds,
        });
    }
    let start = Instant::now();
    let stage = Stage::new(pages, chunk, pair_chunk);
    // Twice what two threads' tables need: some wait for a grace period.
    pool::keep_heap();
    pool::fill((4 * pages / TABLE_PAGES) as usize + 64);
    let subjects = subjects();
    let mut samples = vec![BTreeMap::<Operation, Vec<_>>::new(); subjects.len()];
    for round in 0..=rounds {
        progress(&match round {
            0 => "warming up".to_owned(),
            _ => format!("round {round} of {rounds}"),
        });
        for step in Step::ALL {
            for (subject, samples) in subjects.iter().zip(&mut samples) {
                let measured = subject.measure(step, &stage, &mut |sample| {
                    if round > 0 {
                        samples.entry(sample.operation).or_default().push(sample);
                    }
                });
                measured.map_err(|_| RunError::Wrong {
                    scheme: subject.name(),
                })?;
            }
        }
    }
    let mut figures = Vec::new();
    for (subject, samples) in subjects.iter().zip(samples) {
        for (operation, samples) in samples {
            figures.extend(Figure::of(operation, subject.name(), &samples));
        }
    }
    Ok(Report::new(figures, pages, start.elapsed()))
}

/// All schemes, in the order of a table's rows.
fn subjects() -> Vec<Box<dyn Subject>> {
    vec![
        Single::<PlainStores>::boxed(),
        Both::<CompareExchange>::boxed(),
        Both::<EpochPinned>::boxed(),
        Both::<ReadLocked>::boxed(),
        Both::<Tdp>::boxed(),
        Both::<Komora>::boxed(),
        #[cfg(target_arch = "x86_64")]
        Both::<Locked<OffsetTable>>::boxed(),
        #[cfg(target_arch = "x86_64")]
        Both::<Locked<Multiarch>>::boxed(),
        #[cfg(target_pointer_width = "64")]
        Both::<Locked<Aarch64Paging>>::boxed(),
    ]
}
