//! Tables of the x86-64 format, walked by a real MMU.
//!
//! A guest on `/dev/kvm` runs in ring 3 on page tables that this crate wrote. A guest-virtual
//! address is the crate's guest frame, and a guest-physical address is the crate's host frame.
//! Ordinary user-mode tables make the same demands on entries as the second stage: user access on
//! every level, permissions, accessed and dirty bits. So the format is the same. Each page fault
//! reaches the test through a small ring-0 stub. The test answers it by the crate's own fault path.
//!
//! - `entries`: entries made by [`Npt4`](pageferry_tdp::format::Npt4) alone, put into tables by
//!   hand;
//! - `paging`, `permissions`, `reported`: a whole [`Mmu`](pageferry_tdp::Mmu) with its tables in
//!   guest memory, one subject at a time;
//! - `live`: the tables change while a guest writes through them; `shared`: two vCPUs, and threads
//!   that race.
//!
//! The harness:
//!
//! | file | purpose |
//! |---|---|
//! | `host` | the abilities of KVM here |
//! | `ram` | the guest's memory |
//! | `layout` | the places of everything in that memory |
//! | `code` | the guest's code |
//! | `vm`, `vcpu` | run the code |
//! | `kick`, `flush` | reach the TLBs |
//! | `hand` | makes tables by hand |
//! | `tables` | gives the crate memory for its tables |
//! | `slot` | the memory behind guest frames |
//! | `space` | answers faults |
//!
//! Without EPT or NPT, KVM's shadow MMU walks our tables as the processor would: permissions,
//! reserved bits, accessed and dirty bits by compare-exchange. The processor then runs on the
//! shadows. Every test prints which of the two walked.

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
