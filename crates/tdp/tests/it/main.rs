//! All tests of the crate except its models, in one binary, so that it links once.
//!
//! - [`formats`]: entries against the manuals; [`ring`]: dirty rings.
//! - [`mmu`]: the calls of an [`Mmu`](pageferry_tdp::Mmu), on one thread; [`races`]: the same at
//!   chosen moments of another thread's work.
//! - [`stress`]: many threads on a modelled machine ([`guest`]).
//! - [`real_mmu`]: tables of the x86-64 format under a real MMU, by KVM.
#![cfg(not(any(loom, shuttle)))]

mod allocator;
mod formats;
mod frozen;
mod guest;
mod invalidations;
mod local_flush;
mod memory;
mod mmu;
mod panics;
mod platform;
mod races;
#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri)))]
mod real_mmu;
mod ring;
mod roots;
mod stress;
