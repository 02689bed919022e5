#![expect(
    unsafe_code,
    reason = "a barrier that does not reach all threads would let memory be freed too early"
)]
//! A barrier in all threads at once, which spares readers a fence at each guard.

use core::fmt;

/// Makes every thread that uses a [`Domain`](crate::Domain) go through a full memory barrier. It is
/// expensive, but only threads that free or exclude pay for it, and readers need no fence of their
/// own. See [`Domain::with_barrier`](crate::Domain::with_barrier).
///
/// In a Linux process it is `membarrier(2)`: [`Barrier::membarrier`], with the feature of that
/// name. In a kernel or a hypervisor it is an interrupt to every processor that may run a reader:
/// [`Barrier::new`].
#[derive(Clone, Copy)]
pub struct Barrier(fn());

impl Barrier {
    /// A barrier made by the function `everywhere`.
    ///
    /// # Safety
    /// When `everywhere` returns, every thread that uses a domain with this barrier has gone
    /// through a full memory barrier at some moment since the call:
    ///
    /// - All threads see, after the call, what that thread stored before that moment (in program
    ///   order).
    /// - That thread's loads after that moment see what the caller had stored or seen before the
    ///   call.
    /// - A thread that is not running has gone through one when it runs again.
    /// - The calling thread goes through one at its call and one at its return.
    ///
    /// This is Linux's `smp_mb`, and `MEMBARRIER_CMD_PRIVATE_EXPEDITED` promises it. Any thread may
    /// call `everywhere`, several at once, also while readers hold guards. It does not use the
    /// domain itself.
    ///
    /// If it panics, nothing has been freed and nobody excludes. From then on the domain calls it
    /// at each scan.
    #[must_use]
    pub const unsafe fn new(everywhere: fn()) -> Self {
        Self(everywhere)
    }

    /// The barrier.
    pub(crate) fn everywhere(self) {
        self.0();
    }

    /// The barrier of this process, by `membarrier(2)`; `None` if the kernel has no private
    /// expedited ones (before Linux 4.14, or refused by a filter). The first call registers the
    /// process, which may take some milliseconds if it has threads already.
    ///
    /// A process that filters its system calls later must still allow this one. If it fails after
    /// it was registered, other than for want of memory at that moment, the thread that frees
    /// or excludes panics, as there is nothing safe to do instead. A child by `fork` inherits
    /// the registration.
    #[cfg(feature = "membarrier")]
    #[must_use]
    pub fn membarrier() -> Option<Self> {
        use rustix::io::Errno;
        use rustix::thread::{MembarrierCommand, membarrier, sched_yield};

        membarrier(MembarrierCommand::RegisterPrivateExpedited).ok()?;
        // SAFETY: registered for this process, and reaches all its threads that run: membarrier(2).
        Some(unsafe {
            Self::new(|| {
                while let Err(error) = membarrier(MembarrierCommand::PrivateExpedited) {
                    assert_eq!(
                        error,
                        Errno::NOMEM,
                        "a process that may register for membarrier(2) goes on allowing MEMBARRIER_CMD_PRIVATE_EXPEDITED"
                    );
                    sched_yield();
                }
            })
        })
    }
}

impl fmt::Debug for Barrier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Barrier").finish_non_exhaustive()
    }
}
