//! The measuring kit: samples, random numbers and cache lines.

mod cache_line;
mod figure;
mod random;

pub(crate) use cache_line::CacheLine;
pub(crate) use figure::Samples;
pub(crate) use random::Random;
