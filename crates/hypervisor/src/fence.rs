//! Fences that one hart requests of others: what SBI's RFENCE extension needs.
//!
//! **Guarantee.** When [`Vm::fence`] returns, no chosen vCPU uses a translation, or code, from
//! before the call. The vCPU sees all stores that the caller saw before the call.
//!
//! **Mechanism.** A fence is a request at the gates of the chosen vCPUs, like a flush. Requests
//! merge, so a fence is for all addresses and all address spaces. A loom model checks it.

use crate::gate::Requests;
use crate::slots::Memslots;
use crate::vm::Vm;

/// A fence on another hart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum RemoteFence {
    /// SFENCE.VMA without operands.
    Translations,
    /// FENCE.I.
    Code,
}

impl<M: Memslots> Vm<M> {
    /// Makes every vCPU whose id `includes` accepts execute `fence` before its next instruction,
    /// and waits until those that are inside their guests have left.
    ///
    /// Call it outside the guest: from the thread of a vCPU that has exited, or from a thread
    /// without a vCPU. A vCPU may fence itself. Ids without a vCPU are ignored.
    pub fn fence(&self, fence: RemoteFence, includes: impl Fn(u32) -> bool) {
        let request = match fence {
            RemoteFence::Translations => Requests::FENCE_VMA,
            RemoteFence::Code => Requests::FENCE_I,
        };
        self.state.mmu.platform().request_of(request, includes);
    }
}
