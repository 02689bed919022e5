//! Other public crates, measured beside ours: memory maps beside `pageferry-memslot`, page tables
//! beside `pageferry-tdp`. The binary `pageferry-compare` prints the figures.
//!
//! **Guarantee.** All schemes get the same inputs in the same order and take turns in one run.
//! Every figure was measured by the run that reports it. Tests show that each scheme gives the
//! answers of a plain model.
//!
//! **Mechanism.** [`slots`] and [`tables`] each have their schemes behind one static trait. The
//! module `run` measures both: rounds, steps and schemes, in this nesting. A figure is the median
//! of its samples.
//!
//! **Neighbours.** Below: the memory slots, the page tables, the crates they are compared with, and
//! the measuring kit of `pageferry-bench`. Above: nothing but the binary. The library must not
//! print, and must not know flags.

mod clock;
mod report;
pub mod results;
mod run;
pub mod slots;
mod sync;
pub mod tables;

pub use report::{Figure, Operation, Report};
pub use run::RunError;
