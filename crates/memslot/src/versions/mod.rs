//! The first form of this crate: immutable versions. Until its last user has gone.
mod last_used;
mod request;
mod set;
mod slot;
mod table;
pub use crate::{SlotError, SlotFlags};
pub use last_used::LastUsed;
pub use request::{Change, Limits, Request};
pub use set::SlotSet;
pub use slot::Slot;
pub use table::SlotTable;
