//! How are snapshots read from other hosts?
//!
//! **Guarantee.** A byte that a source here returns is the byte that the other host has. A file
//! that changes there is an error, and so is a connection that is lost: never zeros, and never a
//! wait without a limit.
//!
//! **Mechanism.** Each module has a [`Store`](pageferry_pager::Store) for one kind of place.
//! [`peer`] is another Pageferry, over mutual TLS.
//!
//! **Neighbours.** Below: `pager`, whose restores read from these stores, and `tls`. Above: the
//! command line. This crate must not know VMs.

pub mod peer;

/// Runs the examples of the README.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
