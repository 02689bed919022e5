//! Other public crates' memory maps, measured beside the memslots.
//!
//! **Guarantee.** All schemes hold the same slots, are asked for the same keys in the same order and take
//! turns in one run; every figure was measured by the run that reports it. Each scheme's answers are those
//! of a plain scan, which the tests show.
//!
//! **Mechanism.** A [`Layout`] gives the slots, [`scheme`] the maps behind one static trait, and [`run`] goes
//! through numbers of slots, rounds, operations and schemes, in this nesting. Look-ups are timed in batches of
//! some milliseconds with keys drawn beforehand; changes in batches of 16 while another thread looks up. A
//! figure is the median of its samples.
//!
//! **Neighbours.** Below: the memslots, and the crates they are compared with, which no other room needs for
//! this. Above: the command line. It must not print, and must not know flags.
//!
//! What is compared: vm-memory 0.18 as rust-vmm's VMMs use it, arc-swap over a sorted array, a `BTreeMap`
//! behind `RwLock`, arc-swap over imbl's `OrdMap`; and, as the floor of a look-up by guest frame, a sorted
//! array of keys that cannot be changed. None of the peers has an index by host address, because none of
//! their structures takes overlapping ranges; they scan.

mod bounds;
mod clock;
mod company;
mod host;
mod layout;
mod operation;
mod random;
mod report;
mod run;
pub mod scheme;
mod subject;
mod sync;
pub mod tables;
mod verdict;

pub use layout::{Layout, PlainSlot};
pub use operation::Operation;
pub use random::Random;
pub use report::{Figure, Report};
pub use run::{Config, RunError, run};
pub use verdict::Verdict;
