#![expect(unsafe_code, reason = "one system call that libraries do not wrap")]
//! Threads that somebody waits for ask the scheduler for short slices.
//!
//! Linux 6.12 and later take a slice for ordinary threads in `sched_attr.sched_runtime` (0.1 to 100
//! ms; `kernel/sched/syscalls.c`, `__setparam_fair`). A thread with a shorter slice has an earlier
//! deadline, so when it wakes it runs before those that compute; its share of the processor stays
//! the same, and no privilege is needed. Without it a page that has arrived may wait for a whole
//! slice (about 3 ms) of another vCPU. Older kernels ignore the field.

use std::mem::size_of;

/// The slice asked for: the shortest the kernel grants, in nanoseconds.
const SLICE_NS: u64 = 100_000;

/// `struct sched_attr`, its first version (`include/uapi/linux/sched/types.h`).
#[repr(C)]
#[derive(Default)]
struct SchedAttr {
    size: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime: u64,
    deadline: u64,
    period: u64,
}

const _: () = assert!(size_of::<SchedAttr>() == 48);

/// `SCHED_OTHER`: the policy of ordinary threads.
const SCHED_OTHER: u32 = 0;

/// Asks for short slices for the calling thread. Threads of another policy than the ordinary one
/// are left as they are. A kernel that refuses costs latency, nothing else.
pub(crate) fn prefer_short_slices() {
    let mut attr = SchedAttr::default();
    // SAFETY: the kernel writes at most the 48 bytes announced to a live structure of that size;
    // the thread is the calling one.
    let got = unsafe {
        libc::syscall(
            libc::SYS_sched_getattr,
            0,
            &raw mut attr,
            size_of::<SchedAttr>(),
            0,
        )
    };
    if got == 0 && attr.policy == SCHED_OTHER {
        attr.size = size_of::<SchedAttr>() as u32;
        attr.runtime = SLICE_NS;
        // SAFETY: the kernel reads a live structure of the size it carries.
        let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    }
}

/// Lets all others go first: for work beside the guest that nobody waits for. Linux counts the nice
/// value by thread (`setpriority(2)`, notes).
pub(crate) fn stand_back() {
    // A host that refuses loses some latency, nothing else.
    let _ = rustix::process::setpriority_process(None, 10);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calling_thread_keeps_its_policy_and_nice_value() {
        let read = || {
            let mut attr = SchedAttr::default();
            // SAFETY: as above.
            let got = unsafe {
                libc::syscall(
                    libc::SYS_sched_getattr,
                    0,
                    &raw mut attr,
                    size_of::<SchedAttr>(),
                    0,
                )
            };
            assert_eq!(got, 0);
            (attr.policy, attr.nice)
        };
        let before = read();
        prefer_short_slices();
        assert_eq!(read(), before);
    }
}
