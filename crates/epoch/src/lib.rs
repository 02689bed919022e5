//! Epochs: when may memory be freed that a reader may still see?
//!
//! **Guarantee.** A reader that holds a [`Guard`] may use whatever it reached through shared pointers while it
//! held it: what a writer unlinks and then puts into a [`Limbo`] comes out only after every guard has gone that
//! existed when it was unlinked (a *grace period*). Readers are wait-free: taking a guard is one exchange, or one store in a
//! domain with a barrier, dropping it one store, and neither looks at anything another reader writes.
//!
//! **Mechanism.** Epoch-based reclamation (K. Fraser, *Practical lock-freedom*, 2004). A [`Domain`] counts
//! epochs. A guard announces the epoch it was taken in, in a cache line of the reader's own. The epoch moves on
//! only when every announced epoch is the current one; what was unlinked in epoch `e` is freed in `e + 2`. The
//! orderings are argued in `domain.rs` and modelled with loom in `tests/loom.rs`.
//!
//! **Barrier.** A guard needs a full memory barrier, which takes longer than all else it does. A domain that has a [`Barrier`] for all threads
//! at once ([`Domain::with_barrier`]; `membarrier(2)` in a Linux process) spares its readers theirs while nobody frees
//! or excludes often. `mode.rs` argues it, and `tests/tso.rs` runs the code on a model of processors with store buffers.
//!
//! **Exclusion.** The same announcement can keep exclusive work out ([`Reader::share`], [`Domain::exclude`]): a
//! readers/writer lock whose readers write nothing that another reader writes. `exclusion.rs` argues it, and
//! `tests/loom_exclusion.rs` models it.
//!
//! A reader that keeps a guard for long does no harm but one: nothing that is retired meanwhile is freed.
//!
//! **Neighbours.** None below. `pageferry-memslot` frees replaced slots and tree nodes by it. This crate must not
//! know what is freed, nor who waits for it; it allocates one record a reader. It blocks only where a caller hands it
//! something to do while it waits.
//!
//! ```
//! use pageferry_epoch::{Domain, Limbo};
//!
//! let domain = Domain::new();
//! let mut reader = domain.register();
//! let mut limbo = Limbo::new();
//!
//! let guard = reader.pin();
//! limbo.retire(domain.stamp(), "a node that was just unlinked");
//! assert!(!domain.try_advance() || !domain.try_advance(), "the guard holds the epoch");
//! assert_eq!(limbo.next_expired(&domain), None);
//! drop(guard);
//! while !domain.try_advance() {}
//! domain.try_advance();
//! assert!(limbo.next_expired(&domain).is_some());
//! ```
#![no_std]

extern crate alloc;
#[cfg(pageferry_tso)]
extern crate std;

mod barrier;
mod domain;
mod exclusion;
mod limbo;
mod mode;
mod sync;
#[cfg(pageferry_tso)]
#[doc(hidden)]
#[expect(
    unsafe_code,
    reason = "stores wait in buffers that know words by address"
)]
pub mod tso;

pub use barrier::Barrier;
pub use domain::{Attempt, Domain, Epoch, Guard, Reader};
pub use exclusion::{Exclusive, Shared};
pub use limbo::Limbo;
