#![expect(
    unsafe_code,
    reason = "a barrier that does not reach all threads would let memory be freed too early"
)]
//! A barrier in all threads at once. It spares readers a fence at each guard.

use core::fmt;

/// Makes every thread that uses a [`Domain`](crate::Domain) go through a full memory barrier. It is
/// expensive, but only threads that free or exclude pay for it, and readers need no fence. See
/// [`Domain::with_barrier`](crate::Domain::with_barrier).
///
/// In a Linux process it is `membarrier(2)`: [`Barrier::membarrier`], with the feature of that
/// name. In a kernel or a hypervisor it is an interrupt to every processor that may run a reader:
/// [`Barrier::new`].
#[derive(Clone, Copy)]
pub struct Barrier(fn());

impl Barrier {
    /// A barrier that calls the function `everywhere`.
    ///
    /// # Safety
    /// When `everywhere` returns, every thread that uses a domain with this barrier has gone
    /// through a full memory barrier at some moment since the call:
    ///
    /// - After the call, all threads see the stores of that thread before that moment (in program
    ///   order).
    /// - That thread's loads after that moment see everything that the caller had stored or seen
    ///   before the call.
    /// - A thread that is not running has gone through a barrier when it runs again.
    /// - The calling thread goes through a barrier at its call and at its return.
    ///
    /// This is Linux's `smp_mb`, and `MEMBARRIER_CMD_PRIVATE_EXPEDITED` promises it. Any thread may
    /// call `everywhere`, also several threads at once, and while readers hold guards. It must not
    /// use the domain.
    ///
    /// If it panics, nothing has been freed and no thread excludes. From then on the domain calls
    /// it at each scan.
    #[must_use]
    pub const unsafe fn new(everywhere: fn()) -> Self {
        Self(everywhere)
    }

    /// Calls the barrier.
    pub(crate) fn everywhere(self) {
        self.0();
    }

    /// The barrier of this process, by `membarrier(2)`. `None` if the kernel has no private
    /// expedited barriers (before Linux 4.14) or a filter refuses them. The first call registers
    /// the process, which may take some milliseconds if it has threads already.
    ///
    /// A process that filters its system calls later must still allow this one. If the call fails
    /// after the registration for another reason than a momentary lack of memory, the thread that
    /// frees or excludes panics: nothing else would be safe. A child by `fork` inherits the
    /// registration.
    #[cfg(feature = "membarrier")]
    #[must_use]
    pub fn membarrier() -> Option<Self> {
        use rustix::io::Errno;
        use rustix::thread::{MembarrierCommand, membarrier, sched_yield};

        membarrier(MembarrierCommand::RegisterPrivateExpedited).ok()?;
        // SAFETY: the process is registered, and the call reaches all its running threads:
        // membarrier(2).
        Some(unsafe {
            Self::new(|| {
                while let Err(error) = membarrier(MembarrierCommand::PrivateExpedited) {
                    assert_eq!(
                        error,
                        Errno::NOMEM,
                        "membarrier(2) failed after registration: filters must allow MEMBARRIER_CMD_PRIVATE_EXPEDITED"
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
