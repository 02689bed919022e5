//! The measuring kit: figures, verdicts, random numbers and cache lines.

mod cache_line;
mod figure;
mod random;
mod verdict;

pub(crate) use cache_line::CacheLine;
pub(crate) use figure::{Figure, Samples};
pub(crate) use random::Random;
pub(crate) use verdict::Verdict;
