//! Epochs: when may memory be freed that a reader may still see?
//!
//! **Guarantee.** A reader that holds a [`Guard`] may use everything that it reached through shared
//! pointers under that guard. A thing that a writer unlinks and then puts into a [`Limbo`] comes
//! out only after a *grace period*: when every guard has ended that existed when the thing was
//! unlinked. Readers are wait-free. Taking a guard is one exchange, or one store in a domain with a
//! barrier; dropping it is one store. Neither reads anything that another reader writes.
//!
//! **Mechanism.** Epoch-based reclamation (K. Fraser, *Practical lock-freedom*, 2004). A [`Domain`]
//! counts epochs. A guard announces the epoch in which it was taken, in a cache line of the
//! reader's own. The epoch moves on only when every announced epoch is the current one. A thing
//! that was unlinked in epoch `e` is freed in `e + 2`. The module `domain` has the proof of the
//! orderings, and models under loom check them.
//!
//! **Barrier.** A guard needs a full fence, which takes longer than the rest of its work. A
//! [`Barrier`] fences in all threads at once; in a Linux process it is `membarrier(2)`. In a domain
//! with a barrier ([`Domain::with_barrier`]) readers need no fence while nobody frees or excludes
//! often. That works on x86-64 only. Elsewhere readers always fence. The module `mode` has the
//! proof, and a model of processors with store buffers checks it.
//!
//! **Exclusion.** The same announcement can keep exclusive work out ([`Reader::share`],
//! [`Domain::exclude`]). This is a readers/writer lock whose readers write nothing that another
//! reader writes. The module `exclusion` has the proof, and models under loom check it.
//!
//! A long guard does one kind of harm: nothing that is retired meanwhile is freed.
//!
//! **Neighbours.** None below. `pageferry-memslot` frees replaced slots and tree nodes with it, and
//! `pageferry-tdp` page tables. This crate must not know which things are freed, nor which thread
//! frees them. It allocates each domain and one record per reader, and returns an error if the
//! allocator refuses ([`Domain::try_with_barrier`], [`TryArc::try_register`]). It blocks only in
//! calls that take a function to run while waiting.
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
mod try_arc;
#[cfg(pageferry_tso)]
#[doc(hidden)]
#[expect(
    unsafe_code,
    reason = "stores wait in buffers that know words by address"
)]
pub mod tso;

pub use barrier::Barrier;
pub use domain::{Domain, Epoch, Guard, OutOfMemory, Reader};
pub use exclusion::{Exclusive, Shared};
pub use limbo::Limbo;
pub use try_arc::TryArc;

/// The examples of the README are tests.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
