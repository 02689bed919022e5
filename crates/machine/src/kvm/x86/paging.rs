//! How vCPUs use guest memory other than by their own accesses: page tables, and pages KVM writes
//! for them.

use pageferry_addr::Gpa;

/// How a vCPU translates addresses, and whether it can ever change that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paging {
    pub(super) cr0: u64,
    pub(super) cr3: u64,
    pub(super) cr4: u64,
    pub(super) efer: u64,
    pub(super) cpl: u8,
    pub(super) idt_limit: u16,
}

/// How a vCPU uses guest memory other than by its own accesses.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// How it translates addresses.
    pub(super) paging: Paging,
    /// What KVM itself writes for it.
    pub(super) shared: Vec<Gpa>,
}
