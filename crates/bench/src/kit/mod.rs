//! The measuring kit: figures, verdicts, random numbers, cache lines, charts, and HTML pages.
//!
//! It is compiled with every set of features. `pageferry` draws its reports with it, and
//! `pageferry-compare` judges figures with it. It knows nothing of virtual machines.

mod cache_line;
pub mod charts;
mod figure;
mod file;
mod page;
mod random;
mod verdict;

pub use cache_line::CacheLine;
pub use figure::{Figure, Samples};
pub use file::replace_file;
pub use page::{escape, page, scrolling};
pub use random::Random;
pub use verdict::Verdict;
