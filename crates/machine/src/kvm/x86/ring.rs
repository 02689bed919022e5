//! A dirty ring: the pages that one vCPU wrote, as the kernel hands them over.
//!
//! The kernel and this process share an array of entries (`struct kvm_dirty_gfn`). An entry's flags
//! say whose turn it is:
//!
//! | flags | state | next |
//! |---|---|---|
//! | 0 | free | the kernel writes slot and offset, then sets `DIRTY` |
//! | `DIRTY` | a page was written | the reader notes the page, then sets `RESET` |
//! | `RESET` | the reader is done with it | `KVM_RESET_DIRTY_RINGS` protects the page and frees the entry |
//!
//! Kernel and reader each go round the ring with a counter that wraps at 2^32. The number of
//! entries is a power of two, so the counters need no correction at the wrap.
//!
//! **Ordering.** The reader loads flags with acquire, so it finds the slot and offset that the
//! kernel wrote before. It stores `RESET` with release: the kernel may write the entry anew only
//! after the reader has read it.
//!
//! **Neighbours.** `dirty_ring` maps rings and resets them. This file has no system call, and works
//! on any memory.

use super::sync::{AtomicU32, AtomicU64, Ordering};
use kvm_bindings::kvm_dirty_gfn;
use std::mem::{align_of, offset_of, size_of};

/// `KVM_DIRTY_GFN_F_DIRTY` and `KVM_DIRTY_GFN_F_RESET` of `include/uapi/linux/kvm.h`. No entry has
/// both.
const DIRTY: u32 = 1 << 0;
const RESET: u32 = 1 << 1;

/// `struct kvm_dirty_gfn`. Its fields are atomics, since the kernel writes them meanwhile.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct DirtyGfn {
    flags: AtomicU32,
    /// The slot's id in the lower half, its address space in the upper half.
    slot: AtomicU32,
    /// The page's index in its slot.
    offset: AtomicU64,
}

const _: () = {
    assert!(size_of::<DirtyGfn>() == 16 && size_of::<kvm_dirty_gfn>() == 16);
    assert!(align_of::<DirtyGfn>() == 8 && align_of::<kvm_dirty_gfn>() == 8);
    assert!(offset_of!(DirtyGfn, flags) == offset_of!(kvm_dirty_gfn, flags));
    assert!(offset_of!(DirtyGfn, slot) == offset_of!(kvm_dirty_gfn, slot));
    assert!(offset_of!(DirtyGfn, offset) == offset_of!(kvm_dirty_gfn, offset));
    assert!(kvm_bindings::KVM_DIRTY_GFN_F_MASK == DIRTY | RESET);
};

/// The reader's place in one ring.
#[derive(Debug, Default)]
pub(super) struct RingReader {
    next: u32,
}

impl RingReader {
    /// Calls `found` with slot and offset of each dirty entry, in the order of the writes. With
    /// `take`, hands these entries back to the kernel. Without it, the next call finds them again.
    /// Returns the number of entries handed back, also when `found` fails: it then is the number
    /// before that entry.
    ///
    /// The vCPU may run meanwhile. The call looks at each entry once at most.
    ///
    /// # Panics
    /// If the number of entries is no power of two.
    pub(super) fn read<E>(
        &mut self,
        entries: &[DirtyGfn],
        take: bool,
        mut found: impl FnMut(u32, u64) -> Result<(), E>,
    ) -> (usize, Result<(), E>) {
        assert!(entries.len().is_power_of_two(), "no ring");
        let (mut next, mut taken) = (self.next, 0);
        for _ in entries {
            let entry = &entries[next as usize & (entries.len() - 1)];
            if entry.flags.load(Ordering::Acquire) != DIRTY {
                break;
            }
            let slot = entry.slot.load(Ordering::Relaxed);
            if let Err(e) = found(slot, entry.offset.load(Ordering::Relaxed)) {
                return (taken, Err(e));
            }
            next = next.wrapping_add(1);
            if take {
                entry.flags.store(RESET, Ordering::Release);
                self.next = next;
                taken += 1;
            }
        }
        (taken, Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use std::convert::Infallible;

    /// The kernel's side, as `virt/kvm/dirty_ring.c` does it.
    struct Kernel {
        dirty: u32,
        reset: u32,
    }

    impl Kernel {
        fn entry(entries: &[DirtyGfn], counter: u32) -> &DirtyGfn {
            &entries[counter as usize & (entries.len() - 1)]
        }

        /// Whether there was room.
        fn push(&mut self, entries: &[DirtyGfn], slot: u32, offset: u64) -> bool {
            let room = (self.dirty.wrapping_sub(self.reset) as usize) < entries.len();
            if room {
                let entry = Self::entry(entries, self.dirty);
                assert_eq!(entry.flags.load(Ordering::Acquire), 0, "not free");
                entry.slot.store(slot, Ordering::Relaxed);
                entry.offset.store(offset, Ordering::Relaxed);
                entry.flags.store(DIRTY, Ordering::Release);
                self.dirty = self.dirty.wrapping_add(1);
            }
            room
        }

        /// Frees at most `limit` entries, as a signal may stop the ioctl.
        fn reset(&mut self, entries: &[DirtyGfn], limit: usize) -> Vec<(u32, u64)> {
            let mut freed = Vec::new();
            while freed.len() < limit {
                let entry = Self::entry(entries, self.reset);
                if entry.flags.load(Ordering::Acquire) & RESET == 0 {
                    break;
                }
                freed.push((
                    entry.slot.load(Ordering::Relaxed),
                    entry.offset.load(Ordering::Relaxed),
                ));
                entry.flags.store(0, Ordering::Release);
                self.reset = self.reset.wrapping_add(1);
            }
            freed
        }
    }

    fn ring(entries: usize, start: u32) -> (Vec<DirtyGfn>, Kernel, RingReader) {
        let entries = std::iter::repeat_with(DirtyGfn::default).take(entries);
        let kernel = Kernel {
            dirty: start,
            reset: start,
        };
        (entries.collect(), kernel, RingReader { next: start })
    }

    fn read(reader: &mut RingReader, entries: &[DirtyGfn], take: bool) -> Vec<(u32, u64)> {
        let mut found = Vec::new();
        let (taken, result) = reader.read(entries, take, |slot, offset| {
            found.push((slot, offset));
            Ok::<_, Infallible>(())
        });
        assert_eq!(result, Ok(()));
        assert_eq!(taken, if take { found.len() } else { 0 });
        found
    }

    #[derive(Clone, Debug)]
    enum Op {
        Push(u32, u64),
        Look,
        Take,
        TakeUntilError(usize),
        Reset(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => (0..3u32, any::<u64>()).prop_map(|(slot, offset)| Op::Push(slot, offset)),
            1 => Just(Op::Look),
            2 => Just(Op::Take),
            1 => (0..4usize).prop_map(Op::TakeUntilError),
            2 => (1..9usize).prop_map(Op::Reset),
        ]
    }

    proptest! {
        /// Against two queues: entries to read, and entries to reset.
        #[test]
        fn every_entry_is_read_once_and_then_reset_once(
            ops in proptest::collection::vec(op(), 0..200),
            bits in 0..4u32,
            // Close to the counters' wrap too.
            start in prop_oneof![Just(0), u32::MAX - 40..=u32::MAX],
        ) {
            // As a counter of the kernel starts at 0, an index is a counter's remainder anyway.
            let (entries, mut kernel, mut reader) = ring(1 << bits, start);
            let (mut unread, mut unreset) = (VecDeque::new(), VecDeque::new());
            for op in ops {
                match op {
                    Op::Push(slot, offset) => {
                        let room = unread.len() + unreset.len() < entries.len();
                        prop_assert_eq!(kernel.push(&entries, slot, offset), room);
                        if room {
                            unread.push_back((slot, offset));
                        }
                    }
                    Op::Look => {
                        prop_assert_eq!(read(&mut reader, &entries, false), Vec::from(unread.clone()));
                    }
                    Op::Take => {
                        prop_assert_eq!(read(&mut reader, &entries, true), Vec::from(unread.clone()));
                        unreset.append(&mut unread);
                    }
                    Op::TakeUntilError(after) => {
                        let mut left = after;
                        let (taken, result) = reader.read(&entries, true, |_, _| {
                            left = left.checked_sub(1).ok_or("enough")?;
                            Ok::<_, &str>(())
                        });
                        prop_assert_eq!(taken, after.min(unread.len()));
                        prop_assert_eq!(result.is_err(), after < unread.len());
                        unreset.extend(unread.drain(..taken));
                    }
                    Op::Reset(limit) => {
                        let freed = kernel.reset(&entries, limit);
                        let expected: Vec<_> =
                            unreset.drain(..limit.min(unreset.len())).collect();
                        prop_assert_eq!(freed, expected);
                    }
                }
            }
        }
    }

    /// The kernel pushes on one thread while the reader takes on another.
    #[test]
    fn a_reader_beside_the_kernel_finds_whole_entries() {
        const PUSHES: u64 = if cfg!(miri) { 50 } else { 100_000 };
        let (entries, mut kernel, mut reader) = ring(8, u32::MAX - 20);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..PUSHES {
                    while !kernel.push(&entries, number as u32, number) {
                        kernel.reset(&entries, usize::MAX);
                        std::thread::yield_now();
                    }
                }
            });
            let mut number = 0;
            while number < PUSHES {
                for (slot, offset) in read(&mut reader, &entries, true) {
                    assert_eq!((slot, offset), (number as u32, number));
                    number += 1;
                }
                std::thread::yield_now();
            }
        });
    }
}
