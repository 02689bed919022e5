//! Which pages of a VM are not here yet, and how does one who touches such a page find out?
//!
//! **Guarantee.** A page is *missing* until its bytes are in their final place; whoever sees it present
//! sees its bytes. A page is requested at most once, however many touch it.
//!
//! **Mechanism.** [`PageBitmap`]: one bit a page in atomic words, cleared with release and tested with
//! acquire order. [`PageStates`]: missing, requested, present, in two of them. [`Waiters`]: who sleeps
//! until which page. The kernel's userfaultfd
//! ([`uffd`]), for those who touch guest memory without asking a bitmap.
//!
//! **Neighbours.** Below: `addr`. Above: `hypervisor` (tests the bitmap on its fault path) and `machine`.
//! It must not know what a vCPU is, nor where pages come from.

mod bitmap;
mod states;
mod sync;
pub mod uffd;
mod waiters;

pub use bitmap::PageBitmap;
pub use states::{Arrival, Claim, PageStates};
pub use waiters::Waiters;
