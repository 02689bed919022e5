//! Kicks: any thread makes a vCPU leave the guest, without a lost wake-up.
//!
//! Three words. The kicker sets `kicked`, and the vCPU's thread takes it. `immediate_exit`, in the
//! page shared with the kernel, prevents the *next* entry. `inside` says that the vCPU's thread is
//! at `KVM_RUN`, so that ending the *present* entry needs a signal.
//!
//! ```text
//! kicker                          vCPU thread
//! K1 kicked = true                V1 inside = true            (SeqCst)
//! K2 immediate_exit = 1 (SeqCst)  V2 KVM_RUN, reads immediate_exit
//! K3 if inside: signal            V3 inside = false
//!                                 V4 on EINTR: immediate_exit = 0
//!                                 V5 if kicked.swap(false): Exit::Kicked
//! ```
//!
//! *The entry after a kick does not last.*
//!
//! 1. K2 and V1 are sequentially consistent stores, and each is followed by a load of the other's
//!    word.
//! 2. So K3 sees `inside`, or V2 sees `immediate_exit`.
//! 3. If V2 sees `immediate_exit`, `KVM_RUN` returns `EINTR` at once.
//! 4. If K3 sees `inside`, the kicker signals a thread that is inside, before or behind its
//!    `KVM_RUN`.
//! 5. Inside, the signal ends `KVM_RUN`.
//! 6. Before, the handler runs in user mode, and V2 comes after K2 in this thread's order, so V2
//!    sees `immediate_exit`.
//! 7. Behind, the next V2 sees `immediate_exit`.
//!
//! *Taking one kick does not lose the next.* Let a second kicker run beside V4 and V5.
//!
//! 1. If its K1 comes before V5, V5 takes it with the first. One exit serves both, as at least one
//!    exit follows each.
//! 2. If its K1 comes after V5, so does its K2, hence after V4. `immediate_exit` stays 1 for the
//!    next entry.
//! 3. If its K1 comes before V5 and its K2 after V5, `immediate_exit` stays set without a kick. The
//!    next entry returns one spurious `EINTR`. The vCPU clears `immediate_exit` and enters again.
//!
//! The order of K1 and K2 matters, and so does the order of V4 and V5.
//!
//! *No signal to a stranger.*
//!
//! 1. The kernel may reuse a thread's id once the thread has ended.
//! 2. A thread-local destructor clears the id, so before the thread ends.
//! 3. It holds the mutex that kickers hold while they signal.

use super::run_page::RunPage;
use super::signal;
use super::sync::{AtomicBool, Ordering, fence};
use crate::Kicker;
use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

/// The words that the vCPU and its kickers share.
pub(super) struct Kick {
    pub(super) page: RunPage,
    kicked: AtomicBool,
    inside: AtomicBool,
    /// The kernel's id of the vCPU's thread while that thread lives.
    thread: Mutex<Option<libc::c_int>>,
}

/// The vCPUs that this thread runs.
struct Registrations(Vec<Arc<Kick>>);

impl Drop for Registrations {
    fn drop(&mut self) {
        let me = own_tid();
        for kick in &self.0 {
            let mut thread = kick.lock_thread();
            if *thread == Some(me) {
                *thread = None;
            }
        }
    }
}

thread_local! {
    static REGISTRATIONS: RefCell<Registrations> = const { RefCell::new(Registrations(Vec::new())) };
}

fn own_tid() -> libc::c_int {
    rustix::thread::gettid().as_raw_nonzero().get()
}

impl Kick {
    pub(super) fn new(page: RunPage) -> Arc<Self> {
        Arc::new(Self {
            page,
            kicked: AtomicBool::new(false),
            inside: AtomicBool::new(false),
            thread: Mutex::new(None),
        })
    }

    fn lock_thread(&self) -> std::sync::MutexGuard<'_, Option<libc::c_int>> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Directs kicks to the calling thread, if `last` is another. Returns whether it was.
    pub(super) fn register_thread(self: &Arc<Self>, last: &mut Option<ThreadId>) -> bool {
        let me = std::thread::current().id();
        if *last == Some(me) {
            return false;
        }
        signal::unblock();
        REGISTRATIONS.with_borrow_mut(|all| {
            all.0.retain(|kick| Arc::strong_count(kick) > 1);
            if !all.0.iter().any(|kick| Arc::ptr_eq(kick, self)) {
                all.0.push(Arc::clone(self));
            }
        });
        *self.lock_thread() = Some(own_tid());
        *last = Some(me);
        true
    }

    /// Calls `enter` (`KVM_RUN`) so that a kick ends it.
    pub(super) fn while_inside<T>(&self, enter: &mut dyn FnMut() -> T) -> T {
        self.inside.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let result = enter();
        self.inside.store(false, Ordering::Release);
        result
    }

    /// Takes the kick, if there is one. For the vCPU's thread only.
    pub(super) fn take(&self) -> bool {
        self.page.immediate_exit().store(0, Ordering::SeqCst);
        self.kicked.swap(false, Ordering::SeqCst)
    }

    /// Calls `enter` (`KVM_RUN`) so that it only completes a pending exit and does not run the
    /// guest. Takes no kick and loses none.
    pub(super) fn without_entering<T>(&self, enter: &mut dyn FnMut() -> T) -> T {
        self.page.immediate_exit().store(1, Ordering::SeqCst);
        let result = enter();
        self.page.immediate_exit().store(0, Ordering::SeqCst);
        // As V4 and V5: a kick that this load does not see stores its 1 after our 0.
        if self.kicked.load(Ordering::SeqCst) {
            self.page.immediate_exit().store(1, Ordering::SeqCst);
        }
        result
    }
}

impl Kicker for Kick {
    fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        self.page.immediate_exit().store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.inside.load(Ordering::SeqCst) {
            // Held while signalling: the thread cannot end meanwhile.
            if let Some(thread) = *self.lock_thread() {
                signal::send_kick(thread);
            }
        }
    }

    fn is_kicked(&self) -> bool {
        self.kicked.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvm_ioctls::Kvm;
    use std::sync::atomic::AtomicUsize;

    /// A kick beside a take: either `take` returns it, or `immediate_exit` stops the next entry.
    #[test]
    fn a_kick_that_is_not_taken_always_stops_the_next_entry() {
        let rounds = pageferry_testkit::sized(5_000, 50_000) as usize;
        if let Err(why) = crate::kvm::probe_vm() {
            pageferry_testkit::skip("kvm", why);
            return;
        }
        let kvm = Kvm::new().unwrap();
        let fd = kvm.create_vm().unwrap().create_vcpu(0).unwrap();
        let kick = Kick::new(RunPage::map(&fd, kvm.get_vcpu_mmap_size().unwrap()).unwrap());
        // Both threads spin at the same round number, so that they collide.
        let meeting = [(); 2].map(|()| AtomicUsize::new(0));
        let meet = |me: usize, round: usize| {
            meeting[me].store(round, Ordering::SeqCst);
            let mut spins = 0u32;
            while meeting[1 - me].load(Ordering::SeqCst) < round {
                spins += 1;
                if spins.is_multiple_of(1000) {
                    std::thread::yield_now();
                }
                std::hint::spin_loop();
            }
        };
        let mut lost = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=rounds {
                    meet(0, 2 * round);
                    (0..round % 16).for_each(|_| std::hint::spin_loop());
                    kick.kick();
                    meet(0, 2 * round + 1);
                }
            });
            for round in 1..=rounds {
                kick.kick();
                meet(1, 2 * round);
                (0..round % 13).for_each(|_| std::hint::spin_loop());
                let taken = kick.take();
                meet(1, 2 * round + 1);
                let stops = kick.page.immediate_exit().load(Ordering::SeqCst) != 0;
                if !taken || (!stops && kick.is_kicked()) {
                    // Both threads continue: otherwise one would wait for the other for ever.
                    lost += 1;
                }
                kick.take();
            }
        });
        assert_eq!(lost, 0, "of {rounds} kicks beside a take");
    }
}
