//! Programs that run inside test and demo virtual machines: machine code, without an operating
//! system.
//!
//! Each program exists for both instruction sets (x86-64, RV64IMA), behind one interface.
//!
//! **Guarantee.** The programs of both instruction sets compute the same bytes, those of [`model`].
//! A guest that runs the [`Workload`] detects a lost, stale, torn or foreign page ([`ErrorKind`])
//! at its next visit to that page. [`Workload::verify`] compares all RAM of a paused VM with the
//! progress of its vCPUs, and finds every byte that differs.
//!
//! **Mechanism.** [`MemoryMap`] plans the memory: code, page tables, one control page per vCPU, and
//! data pages in equal shares. The code is assembled at run time, on any host. Every vCPU publishes
//! its progress in its control page. To report an event, it stores to the *doorbell*, an address
//! without memory.
//!
//! **Neighbours.** Only `addr` is below. Above are the engines' tests, the demo and the benchmarks.
//! This crate knows no machines, hypervisors or migration. It gives bytes, addresses and start
//! values, and reads the bytes of pages.
//!
//! # Use
//!
//! 1. Plan a program: [`Workload::new`], [`Toucher::new`] or [`Spin::new`]. [`Program`] is their
//!    common part.
//! 2. Give a VM zeroed RAM from guest-physical address 0. [`MemoryMap`] moves the part above 3 GiB
//!    up to 4 GiB. No memory slot may cover [`DOORBELL_GPA`]. Write the pieces of
//!    [`Program::image`] into RAM.
//! 3. Give each vCPU its [`Program::start`] values.
//!    - On x86-64, start in 64-bit mode, ring 3, flat segments: CR0 = PG, NE, ET, PE; CR4 = PAE;
//!      EFER = LMA, LME; CS long, DPL 3; CR3 = [`Start::tables`].
//!    - On RV64, start in VS-mode with `vsatp` = 0.
//!    - The programs use no interrupts, segment tables or traps. A fault in the program is a triple
//!      fault.
//! 4. Run. Parse a 32-bit store to the doorbell with [`Doorbell::parse`], then enter the guest
//!    again.
//! 5. Read [`Program::control_page`] with [`Control::parse`] at any time. Call [`Workload::verify`]
//!    while no vCPU runs.
//!
//! # The workload
//!
//! Each vCPU visits all pages of its share, pass after pass, without end. The [`Order`] is a
//! permutation of them, a different one in each pass. At a visit in pass *p* the vCPU
//! 1. checks that the page is whole, its own, and of sequence *p* - 1 (all zero in the first pass),
//!    and reports an error otherwise,
//! 2. rewrites all 512 words with sequence *p* ([`model`] has the page's format),
//! 3. compares the count in its control page with the count in its registers, since a control page
//!    can be lost or stale like any other page, and adds one.
//!
//! # The control page
//!
//! Little-endian 64-bit words at these offsets; the rest of the page stays zero. *Constant* words
//! are part of the image. The offsets are constants of [`control`].
//!
//! | offset | word | workload | toucher | spinner |
//! |---|---|---|---|---|
//! | `0x00` | magic | `PFwork01` | `PFtouch1` | `PFspin01` |
//! | `0x08` | vCPU index | constant | constant | constant |
//! | `0x10` | first page visited, as RAM page index | constant | constant | 0 |
//! | `0x18` | number of pages visited | constant | constant | 0 |
//! | `0x20` | order generator's mask | constant | constant | 0 |
//! | `0x28` | order generator's output shift | constant | constant | 1 |
//! | `0x30` | passes until the end, 0: none | 0 | constant | 0 |
//! | `0x40` | pass under way, from 1; 0 before the start | yes | yes | 0 |
//! | `0x48` | order generator's state: the page chosen last | yes | yes | 0 |
//! | `0x50` | page in progress, as RAM page index + 1; 0: none | yes | 0 | 0 |
//! | `0x58` | pages done since the start | yes | yes | rounds |
//! | `0x60` | wrapping sum of the words loaded | 0 | if it reads | 0 |
//! | `0x80` | errors found | yes | 0 | 0 |
//! | `0x88` | first error: kind (1 lost, 2 torn, 3 foreign, 4 stale) | yes | 0 | 0 |
//! | `0x90` | first error: RAM page index | yes | 0 | 0 |
//! | `0x98` | first error: word expected | yes | 0 | 0 |
//! | `0xa0` | first error: word found | yes | 0 | 0 |
//! | `0xa8` | first error: pass in which it was found | yes | 0 | 0 |
//!
//! The workload stores in this order: page in progress, the page's words in ascending order, pages
//! done, no page in progress. So at any instruction *pages done* gives the exact sequence number of
//! every page, with at most one exception per vCPU. The exception is the next page in the order,
//! and only while the control page names it. It is a prefix of its new and a suffix of its old
//! contents.

mod address_space;
mod code;
pub mod control;
mod error;
mod event;
mod isa;
mod memory_map;
pub mod model;
mod order;
mod params;
mod program;
mod spin;
mod tables;
mod touch;
mod toucher;
pub mod verify;
mod workload;

pub use address_space::{DOORBELL_GPA, HOLE_END, HOLE_START, MAX_MEMORY_BYTES, MAX_VCPUS};
pub use control::{Control, GuestReport, PageBytes, ProgramKind};
pub use error::GuestError;
pub use event::{Doorbell, ErrorKind, Event};
pub use isa::Isa;
pub use memory_map::MemoryMap;
pub use order::Order;
pub use program::{Program, Start};
pub use spin::Spin;
pub use touch::{Touch, TouchAccess, TouchOrder};
pub use toucher::Toucher;
pub use verify::{GuestFinding, PageError, PageUse, Verdict};
pub use workload::Workload;
