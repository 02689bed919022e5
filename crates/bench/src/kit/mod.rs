//! The measuring kit: figures, verdicts, random numbers, charts, HTML pages and how they are
//! written.
//!
//! It is compiled with every set of features, because `pageferry` draws its reports with it and
//! `pageferry-compare` judges with it. It knows nothing of virtual machines.

pub mod charts;
mod figure;
mod file;
mod page;
mod random;
mod verdict;

pub use figure::{Figure, Samples};
pub use file::replace_file;
pub use page::{escape, page, scrolling};
pub use random::Random;
pub use verdict::Verdict;
