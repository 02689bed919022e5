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

pub(super) const CR0_PG: u64 = 1 << 31;
pub(super) const CR4_PAE: u64 = 1 << 5;
pub(super) const EFER_LMA: u64 = 1 << 10;

impl Paging {
    /// Whether CR3 points at tables of four or five levels.
    pub(super) fn is_long_mode(&self) -> bool {
        self.cr0 & CR0_PG != 0 && self.cr4 & CR4_PAE != 0 && self.efer & EFER_LMA != 0
    }

    /// Whether the guest is in 64-bit ring 3 and has no way into ring 0. Then it never changes CR3.
    pub(super) fn is_confined(&self) -> bool {
        self.is_long_mode() && self.cpl == 3 && self.idt_limit == 0
    }
}

/// A vCPU's use of guest memory beside its own accesses.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// Its address translation.
    pub(super) paging: Paging,
    /// The pages that KVM itself accesses for it.
    pub(super) shared: Vec<Gpa>,
}
