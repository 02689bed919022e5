//! Snapshots at other hosts, as sources of the page server.
//!
//! **Guarantee.** A page has the bytes of the snapshot that was opened, or its read fails: nothing
//! that is short, late, replaced or lost becomes memory. A read ends in a bounded time.
//!
//! **Mechanism.** Each kind of place has a [`Store`](pageferry_pager::Store): [`peer`] is another
//! Pageferry, over mutual TLS, and [`ObjectStores`] opens objects by their addresses. [`Cache`]
//! stands before slow sources: it joins reads, and keeps blocks in memory and on disk.
//!
//! **Neighbours.** Below: `pager`, whose restores read from these stores, and `transport`. Above:
//! the command line. The pager knows neither networks nor credentials, and this crate knows no VMs.

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

/// Locks a mutex whose data are whole after each statement.
fn locked<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Runs the examples of the README.
#[cfg(all(doctest, feature = "peers"))]
#[doc = include_str!("../README.md")]
mod readme {}
