#![expect(unsafe_code, reason = "two system calls that libraries do not wrap")]
//! Scheduler settings: short slices for latency-critical threads, a low priority for background
//! work.
//!
//! Linux 6.12 and later take a slice for ordinary threads in `sched_attr.sched_runtime` (0.1 to 100
//! ms; `kernel/sched/syscalls.c`, `__setparam_fair`). A thread with a shorter slice has an earlier
//! deadline. When it wakes, it runs before threads that compute. Its share of the processor stays
//! the same, and it needs no privilege. Without a short slice, a page that has arrived may wait for
//! a whole slice (about 3 ms) of another vCPU. Older kernels ignore the field.

use std::mem::size_of;

/// The requested slice in nanoseconds: the shortest that the kernel grants.
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

/// The policy of ordinary threads.
const SCHED_OTHER: u32 = 0;

/// Requests short slices for the calling thread if it has the ordinary policy. A refusal by the
/// kernel costs only latency.
pub fn prefer_short_slices() {
    let mut attr = SchedAttr::default();
    // SAFETY: the kernel writes at most the 48 bytes announced, to a live structure of that size.
    // Thread 0 is the calling thread.
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
        // SAFETY: the kernel reads a live structure, whose `size` field holds its size.
        let _ = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    }
}

/// Lowers the priority of the calling thread, for background work beside the guest. Linux keeps the
/// nice value per thread (`setpriority(2)`, notes).
pub(crate) fn lower_priority() {
    // A refusal costs only latency.
    let _ = rustix::process::setpriority_process(None, 10);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_calling_thread_keeps_its_policy_and_nice_value() {
        let read = || {
            let mut attr = SchedAttr::default();
            // SAFETY: as in `prefer_short_slices`.
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
