//! Memory maps of other public crates, next to the memory slots.
//!
//! The peers are vm-memory 0.18 as rust-vmm's VMMs use it, arc-swap over a sorted array, a
//! `BTreeMap` behind `RwLock`, and arc-swap over imbl's `OrdMap`. The floor of a look-up by guest
//! frame is a sorted array of keys that never changes. None of the peers has an index by host
//! address, because none of their structures accepts overlapping ranges. They scan.
//!
//! Look-ups are timed in batches, with keys that were drawn beforehand. Changes are timed in
//! batches of 16 while another thread looks up.

mod background;
mod host;
mod input;
mod measure;
mod operation;
mod run;
mod scheme;

use operation::Operation;
pub(crate) use run::{SlotFlags, slots};
