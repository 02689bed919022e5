//! Snapshots at other hosts, as sources of the pager.
//!
//! **Guarantee.** A page has the bytes of the snapshot that was opened, or its read fails: nothing
//! that is short, late, replaced or lost becomes memory. A read ends in a bounded time.
//!
//! **Mechanism.** Each kind of place has a [`Store`](crate::Store): [`peer`] is another Pageferry,
//! over mutual TLS, and [`ObjectStores`] opens objects by their addresses. [`Cache`] stands before
//! slow sources: it joins reads, and keeps blocks in memory and on disk. The features `peers` and
//! `object-store` bring them. Without these only the cache is compiled.
//!
//! **Neighbours.** Below: `source`, and the crate `transport`. The rest of the pager knows neither
//! networks nor credentials, and these stores know no VMs.

pub mod cache;
#[cfg(feature = "object-store")]
mod object;
#[cfg(feature = "peers")]
pub mod peer;
#[cfg(feature = "object-store")]
mod reasons;

pub use cache::Cache;
#[cfg(feature = "object-store")]
pub use object::{ObjectStores, Patience};
