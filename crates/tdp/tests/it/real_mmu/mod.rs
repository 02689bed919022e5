//! Tables of the x86-64 format, walked by a real MMU.
//!
//! A guest on `/dev/kvm` runs in ring 3 on page tables that this crate wrote: a guest-virtual
//! address is the crate's guest frame, a guest-physical one the crate's host frame. What the second
//! stage demands of entries (user access on every level, permissions, accessed and dirty bits)
//! ordinary tables of user mode demand as well, so the format is the same. Each page fault goes
//! through a small ring-0 stub to the test, which answers it by the crate's own fault path.
//!
//! - `entries`: entries made by [`Npt4`](pageferry_tdp::format::Npt4) alone, put into tables by
//!   hand;
//! - `paging`, `permissions`, `reported`: a whole [`Mmu`](pageferry_tdp::Mmu), its tables in guest
//!   memory, one thing at a time;
//! - `live`: the tables change while a guest writes through them; `shared`: two vCPUs, and threads
//!   that race.
//!
//! The harness: `host` what KVM is here, `ram` the guest's memory, `layout` where everything is in
//! it, `code` what the guest executes, `vm` and `vcpu` run it, `kick` and `flush` reach the TLBs,
//! `hand` makes tables by hand; `tables` gives the crate memory for its tables, `slot` says what is
//! behind guest frames, `space` answers faults.
//!
//! Where KVM does not use EPT or NPT itself, the walk of our tables is done by KVM's shadow MMU, as
//! the processor would do it (permissions, reserved bits, accessed and dirty bits by
//! compare-exchange), and the processor runs on the shadows. Every test says on which of the two it
//! ran.

mod code;
mod entries;
mod flush;
mod hand;
mod host;
mod kick;
mod layout;
mod live;
mod paging;
mod permissions;
mod ram;
mod reported;
mod shared;
mod slot;
mod space;
mod tables;
mod vcpu;
mod vm;
