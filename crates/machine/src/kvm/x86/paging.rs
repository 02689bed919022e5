//! Use of guest memory beside the vCPUs' own accesses: page tables, and pages that KVM writes for
//! them.

use pageferry_addr::Gpa;

/// A vCPU's address translation, and whether the guest can ever change it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Paging {
    pub(super) cr0: u64,
    pub(super) cr3: u64,
    pub(super) cr4: u64,
    pub(super) efer: u64,
    pub(super) cpl: u8,
    pub(super) idt_limit: u16,
}

/// A vCPU's use of guest memory beside its own accesses.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// Its address translation.
    pub(super) paging: Paging,
    /// The addresses that KVM itself writes for it.
    pub(super) shared: Vec<Gpa>,
}
