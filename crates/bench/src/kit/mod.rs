//! The measuring kit: samples, random numbers, cache lines, and threads that meet.

mod cache_line;
mod figure;
mod meeting;
mod random;
mod ticket;

pub(crate) use cache_line::CacheLine;
pub(crate) use figure::Samples;
pub(crate) use meeting::Meeting;
pub(crate) use random::{Random, shuffle, unit};
pub(crate) use ticket::TicketLock;
