//! Other public crates, measured next to ours: memory maps next to `pageferry-memslot`, page tables
//! next to `pageferry-tdp`. The binary `pageferry-compare` prints the figures.
//!
//! **Guarantee.** All schemes get the same inputs in the same order and take turns in one run.
//! Every figure was measured by the run that reports it. Tests show that each scheme gives the
//! answers of a plain model.
//!
//! **Mechanism.** In [`slots`] and in [`tables`], all schemes implement one trait, which is
//! dispatched statically. The module `run` measures both, round by round, step by step, scheme by
//! scheme. A figure is the median of its samples. A *floor* is a scheme that does only the least
//! work that any scheme must do: a lower bound.
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
