#![expect(unsafe_code, reason = "system calls on signals")]
//! SIGBUS of a poison exit, taken without a signal handler.
//!
//! **Guarantee.** The engine takes only the signals that KVM sends for poison markers of this
//! machine. All others reach the handler that the program has set, at whatever time.
//!
//! **Mechanism.** A vCPU touches a page with a marker:
//!
//! 1. KVM's look-up answers `-EHWPOISON`. KVM sends SIGBUS (`BUS_MCEERR_AR`, `si_addr` the host
//!    address) to the thread inside `KVM_RUN` (`kvm_send_hwpoison_signal` in
//!    `arch/x86/kvm/mmu/mmu.c`).
//! 2. The thread has SIGBUS blocked, and `KVM_RUN` lets it in (`KVM_SET_SIGNAL_MASK`). So `KVM_RUN`
//!    returns `EINTR`, and the signal stays pending.
//! 3. The thread fetches it by `rt_sigtimedwait`, and then unblocks SIGBUS. If the signal is
//!    another, the thread sends it to itself again before it unblocks.
//!
//! SIGBUS is blocked inside `KVM_RUN` only, and only while a marker may exist. Hooks run with the
//! program's own mask.
//!
//! A pending signal of a thread is kept once. If a foreign SIGBUS is pending already, KVM's is
//! lost. The vCPU then touches the page again.

use super::sys;
use kvm_ioctls::VcpuFd;
use libc::{c_int, siginfo_t};
use rustix::io::Errno;
use std::ops::Range;

/// A set of signals as the kernel keeps it: signal N is bit N - 1.
type Set = u64;

const SIGBUS: Set = 1 << (libc::SIGBUS - 1);
/// `BUS_MCEERR_AR` of `include/uapi/asm-generic/siginfo.h`.
const BUS_MCEERR_AR: c_int = 4;

/// The SIGBUS of one vCPU.
#[derive(Debug)]
pub(super) struct Sigbus {
    /// The guest's mapping.
    within: Range<u64>,
    /// The thread's mask for which `KVM_RUN` lets SIGBUS in.
    let_in_for: Option<Set>,
}

impl Sigbus {
    /// For markers in `within`, the guest's mapping.
    pub(super) fn new(within: Range<u64>) -> Self {
        Self {
            within,
            let_in_for: None,
        }
    }

    /// Calls `run` (`KVM_RUN` on `vcpu`). Returns its result, and the address of the marker that it
    /// met.
    ///
    /// # Errors
    /// When the kernel does not set the signal mask. `run` was not called then.
    pub(super) fn collect(
        &mut self,
        vcpu: &VcpuFd,
        run: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(Result<(), Errno>, Option<u64>), Errno> {
        let blocked = Blocked::new();
        // A signal that the thread blocks and KVM_RUN lets in would end every KVM_RUN at once. So
        // the masks differ by SIGBUS alone, also after the program has changed the thread's.
        if self.let_in_for != Some(blocked.before) {
            sys::set_signal_mask(vcpu, Some(blocked.before & !SIGBUS))?;
            self.let_in_for = Some(blocked.before);
        }
        let result = run();
        let met = match result {
            Err(Errno::INTR) => self.fetch(),
            _ => None,
        };
        Ok((result, met))
    }

    /// Lets `KVM_RUN` run with the thread's own mask again.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn end(&mut self, vcpu: &VcpuFd) -> Result<(), Errno> {
        if self.let_in_for.is_some() {
            sys::set_signal_mask(vcpu, None)?;
            self.let_in_for = None;
        }
        Ok(())
    }

    /// Takes this thread's pending SIGBUS, and returns the address if a marker caused it.
    fn fetch(&self) -> Option<u64> {
        let mut foreign = Vec::new();
        let mut met = None;
        while let Some(info) = take_pending() {
            // SAFETY: SIGBUS that the kernel sends has an address.
            let address = || unsafe { info.si_addr() } as u64;
            if info.si_code == BUS_MCEERR_AR && self.within.contains(&address()) {
                met = Some(address());
            } else {
                foreign.push(info);
            }
        }
        // They are delivered when SIGBUS is unblocked.
        foreign.iter().for_each(send_to_self);
        met
    }
}

/// SIGBUS is blocked on this thread until this is dropped.
struct Blocked {
    before: Set,
}

impl Blocked {
    fn new() -> Self {
        Self {
            before: change_mask(libc::SIG_BLOCK, SIGBUS),
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        change_mask(libc::SIG_SETMASK, self.before);
    }
}

/// Changes this thread's mask. Returns the mask before.
fn change_mask(how: c_int, set: Set) -> Set {
    let mut before: Set = 0;
    // SAFETY: the kernel reads one set and writes one, each of the size given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            how,
            &raw const set,
            &raw mut before,
            size_of::<Set>(),
        )
    };
    assert_eq!(result, 0, "the kernel always knows these two changes");
    before
}

/// Takes a pending SIGBUS of this thread or process, without waiting.
fn take_pending() -> Option<siginfo_t> {
    let now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: siginfo_t consists of integers and pointers, for which zero is a value.
    let mut info: siginfo_t = unsafe { std::mem::zeroed() };
    let set = SIGBUS;
    // SAFETY: the kernel reads one set of the size given and one timespec, and writes one siginfo.
    let signal = unsafe {
        libc::syscall(
            libc::SYS_rt_sigtimedwait,
            &raw const set,
            &raw mut info,
            &raw const now,
            size_of::<Set>(),
        )
    };
    // With no time to wait, the only errors are "none is pending" and an unrelated signal.
    (signal == i64::from(libc::SIGBUS)).then_some(info)
}

/// Sends a signal to this thread again, as it came.
fn send_to_self(info: &siginfo_t) {
    // SAFETY: plain system calls; the kernel reads one siginfo. A process may send itself any.
    unsafe {
        libc::syscall(
            libc::SYS_rt_tgsigqueueinfo,
            libc::getpid(),
            libc::gettid(),
            libc::SIGBUS,
            std::ptr::from_ref(info),
        );
    }
}
