//! Snapshots at other hosts, as sources of the page server.
//!
//! **Guarantee.** A page has the bytes of the snapshot that was opened, or its read fails: nothing
//! that is short, late or replaced becomes memory. A read ends in a bounded time.
//!
//! **Mechanism.** [`ObjectStores`] opens objects by their addresses. [`Cache`] stands before slow
//! sources: it joins reads, and keeps blocks in memory and on disk.
//!
//! **Neighbours.** Below: [`Source`](pageferry_pager::Source) and [`Store`](pageferry_pager::Store)
//! of `pager`. Above: the command line. The pager knows neither networks nor credentials.

pub mod cache;
#[cfg(feature = "object-store")]
mod object;

pub use cache::Cache;
#[cfg(feature = "object-store")]
pub use object::{ObjectStores, Patience};
