//! Snapshots against plain files: packing, diffs, unpacking, damage, and bounds.

mod bases;
mod bounds;
mod damage;
mod format;
mod kinds;
mod model;
mod refusals;
mod sparse;
mod states;
mod support;
