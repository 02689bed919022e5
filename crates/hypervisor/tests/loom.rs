//! Models of the gate and its users: a flush, a remote fence, a kick, and the completeness of the
//! dirty log.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p pageferry-hypervisor --profile stress --test loom`
//!
//! The model of a vCPU's memory has a shared SPTE, a shared dirty bit, a private TLB entry, and a
//! page. Loom explores all interleavings with few preemptions. In each, it explores all values that
//! an atomic load may return under the C11 model.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use loom::thread;
use pageferry_hypervisor::{Gate, Requests};

fn check(max_preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(max_preemptions);
    builder.check(model);
}

/// After a flush, the host reuses a page: no vCPU reads it through an old translation.
#[test]
fn a_flushed_translation_is_not_used() {
    check(3, || {
        let gate = Arc::new(Gate::new());
        // `spte` is whether the guest's page is mapped. The host writes 1 to `page` after it has
        // taken the page back.
        let spte = Arc::new(AtomicBool::new(true));
        let page = Arc::new(AtomicU64::new(0));
        let vcpu = {
            let (gate, spte, page) = (Arc::clone(&gate), Arc::clone(&spte), Arc::clone(&page));
            thread::spawn(move || {
                let mut tlb = false;
                for _ in 0..2 {
                    match gate.enter() {
                        Err(requests) => {
                            assert!(requests.contains(Requests::FLUSH));
                            tlb = false;
                        }
                        Ok(_inside) => {
                            if !tlb {
                                tlb = spte.load(Ordering::Acquire);
                            }
                            if tlb {
                                assert_eq!(page.load(Ordering::Relaxed), 0, "stale");
                            }
                        }
                    }
                }
            })
        };
        spte.store(false, Ordering::Release);
        if let Some(ticket) = gate.request(Requests::FLUSH) {
            ticket.wait();
        }
        page.store(1, Ordering::Relaxed);
        vcpu.join().unwrap();
    });
}

/// One hart changes a page table and fences another one, which has a bank of translations in use
/// and one parked. When the fence has returned, the other hart uses no translation from before it.
#[test]
fn no_translation_is_used_after_a_remote_fence_has_returned() {
    check(3, || {
        let gates = [Arc::new(Gate::new()), Arc::new(Gate::new())];
        // `entry` is in guest memory, which harts access without order. The guest reuses `page`
        // after it has unmapped it everywhere.
        let entry = Arc::new(AtomicU64::new(1));
        let page = Arc::new(AtomicU64::new(0));
        let other = {
            let (gate, entry, page) =
                (Arc::clone(&gates[1]), Arc::clone(&entry), Arc::clone(&page));
            thread::spawn(move || {
                let (mut current, mut parked) = (false, false);
                for _ in 0..3 {
                    match gate.enter() {
                        Err(requests) => {
                            assert!(requests.contains(Requests::FENCE_VMA));
                            (current, parked) = (false, false);
                        }
                        Ok(_inside) => {
                            if !current {
                                current = entry.load(Ordering::Relaxed) == 1;
                            }
                            if current {
                                assert_eq!(page.load(Ordering::Relaxed), 0, "stale");
                            }
                            core::mem::swap(&mut current, &mut parked);
                        }
                    }
                }
            })
        };
        // The guest's store, the exit with its SBI call, and the fence.
        let inside = gates[0].enter().expect("nobody makes requests here");
        entry.store(0, Ordering::Relaxed);
        drop(inside);
        if let Some(ticket) = gates[1].request(Requests::FENCE_VMA) {
            ticket.wait();
        }
        let inside = gates[0].enter().expect("nobody makes requests here");
        page.store(1, Ordering::Relaxed);
        drop(inside);
        other.join().unwrap();
    });
}

/// Two harts each unmap a page, and fence each other at the same time. Both fences return, and each
/// takes the other's translation away.
#[test]
fn two_harts_fence_each_other() {
    check(2, || {
        let gates = [0, 1].map(|_| Arc::new(Gate::new()));
        let entries = [0, 1].map(|_| Arc::new(AtomicU64::new(1)));
        let pages = [0, 1].map(|_| Arc::new(AtomicU64::new(0)));
        let hart = |own: usize| {
            let (gates, entries, pages) = (gates.clone(), entries.clone(), pages.clone());
            move || {
                let mut cached = false;
                // Uses the other hart's page, then unmaps its own.
                for last in [false, true] {
                    let inside = loop {
                        match gates[own].enter() {
                            Ok(inside) => break inside,
                            Err(_) => cached = false,
                        }
                    };
                    cached |= entries[1 - own].load(Ordering::Relaxed) == 1;
                    if cached {
                        assert_eq!(pages[1 - own].load(Ordering::Relaxed), 0, "stale");
                    }
                    if last {
                        entries[own].store(0, Ordering::Relaxed);
                    }
                    drop(inside);
                }
                if let Some(ticket) = gates[1 - own].request(Requests::FENCE_VMA) {
                    ticket.wait();
                }
                pages[own].store(1, Ordering::Relaxed);
            }
        };
        let other = thread::spawn(hart(1));
        hart(0)();
        other.join().unwrap();
    });
}

/// Two threads each publish a version, and both quiesce. When the ticket of a thread has left, no
/// entry continues that has not seen its version.
#[test]
fn no_entry_outlives_a_quiesce_that_it_has_not_seen() {
    check(3, || {
        let gate = Arc::new(Gate::new());
        let versions = [Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0))];
        // For each thread: whether the vCPU works with an old version.
        let at_work = [Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0))];
        let vcpu = {
            let (gate, versions, at_work) = (Arc::clone(&gate), versions.clone(), at_work.clone());
            thread::spawn(move || {
                let mut entries = 0;
                while entries < 2 {
                    let Ok(_inside) = gate.enter() else { continue };
                    entries += 1;
                    let old = [0, 1].map(|i| versions[i].load(Ordering::Relaxed) == 0);
                    for i in [0, 1] {
                        at_work[i].store(u64::from(old[i]), Ordering::Relaxed);
                    }
                    for busy in &at_work {
                        busy.store(0, Ordering::Relaxed);
                    }
                }
            })
        };
        let quiesce = |i: usize| {
            let (gate, version, busy) = (
                Arc::clone(&gate),
                Arc::clone(&versions[i]),
                Arc::clone(&at_work[i]),
            );
            move || {
                version.store(1, Ordering::Relaxed);
                // If both threads waited in loops, loom would find runs that schedule only them.
                // One check is enough: the claim is about the state after the entry has ended.
                if gate
                    .request(Requests::QUIESCE)
                    .is_none_or(|ticket| ticket.has_left())
                {
                    assert_eq!(
                        busy.load(Ordering::Relaxed),
                        0,
                        "an entry with the old version continues"
                    );
                }
            }
        };
        let other = thread::spawn(quiesce(1));
        quiesce(0)();
        other.join().unwrap();
        vcpu.join().unwrap();
    });
}

/// A kick ends an entry into the guest or prevents the next. A vCPU that polls never misses it.
#[test]
fn a_kick_is_heard_inside_or_taken_outside() {
    check(3, || {
        let gate = Arc::new(Gate::new());
        let why = Arc::new(AtomicU64::new(0));
        let vcpu = {
            let (gate, why) = (Arc::clone(&gate), Arc::clone(&why));
            thread::spawn(move || {
                loop {
                    match gate.enter() {
                        Err(requests) => {
                            assert!(requests.contains(Requests::KICK));
                            assert_eq!(
                                why.load(Ordering::Relaxed),
                                1,
                                "the vCPU does not see the reason for the kick"
                            );
                            break;
                        }
                        // Runs until a request arrives. If none arrived, loom would find an endless
                        // run.
                        Ok(_inside) => {
                            while !gate.has_requests() {
                                thread::yield_now();
                            }
                        }
                    }
                }
                assert!(!gate.is_kicked());
            })
        };
        why.store(1, Ordering::Relaxed);
        let _ = gate.request(Requests::KICK);
        vcpu.join().unwrap();
    });
}

const WRITABLE: u64 = 1;

/// The vCPU's fault path, like `VcpuMemory::fault` without slots. Returns whether its TLB lets
/// writes through.
fn guest_fault(spte: &AtomicU64, dirty: &AtomicU64, write: bool) -> bool {
    let mut writable = spte.load(Ordering::Acquire) == WRITABLE;
    if write && !writable {
        let _ = spte.compare_exchange(0, WRITABLE, Ordering::AcqRel, Ordering::Acquire);
        writable = true;
    }
    if !writable {
        return false;
    }
    if write && dirty.load(Ordering::Acquire) == 0 {
        dirty.fetch_or(1, Ordering::AcqRel);
    }
    write || dirty.load(Ordering::Acquire) != 0
}

/// Stores `value` through the TLB entry `tlb`.
fn guest_write(spte: &AtomicU64, dirty: &AtomicU64, page: &AtomicU64, tlb: &mut bool, value: u64) {
    *tlb = *tlb || guest_fault(spte, dirty, true);
    page.store(value, Ordering::Relaxed);
}

/// The reader of the log. Returns the page's value if the page is in the log.
fn harvest(
    gates: &[Arc<Gate>],
    spte: &AtomicU64,
    dirty: &AtomicU64,
    page: &AtomicU64,
) -> Option<u64> {
    if dirty.load(Ordering::Relaxed) == 0 || dirty.swap(0, Ordering::AcqRel) == 0 {
        return None;
    }
    let _ = spte.compare_exchange(WRITABLE, 0, Ordering::AcqRel, Ordering::Acquire);
    let tickets: Vec<_> = gates
        .iter()
        .filter_map(|gate| gate.request(Requests::FLUSH_WRITES))
        .collect();
    tickets.iter().for_each(|ticket| ticket.wait());
    Some(page.load(Ordering::Relaxed))
}

fn dirty_model(vcpus: u64, writes: u64, preemptions: usize) {
    check(preemptions, move || {
        let gates: Vec<_> = (0..vcpus).map(|_| Arc::new(Gate::new())).collect();
        let spte = Arc::new(AtomicU64::new(0));
        let dirty = Arc::new(AtomicU64::new(0));
        let page = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..vcpus)
            .map(|id| {
                let gate = Arc::clone(&gates[id as usize]);
                let (spte, dirty, page) =
                    (Arc::clone(&spte), Arc::clone(&dirty), Arc::clone(&page));
                thread::spawn(move || {
                    let mut tlb = false;
                    let mut left = writes;
                    while left > 0 {
                        match gate.enter() {
                            Err(_) => tlb = false,
                            Ok(_inside) => {
                                guest_write(&spte, &dirty, &page, &mut tlb, 10 * (id + 1) + left);
                                left -= 1;
                            }
                        }
                    }
                })
            })
            .collect();
        // The copy of a migration: it copies logged pages after the harvest has returned.
        let mut copy = 0;
        if let Some(value) = harvest(&gates, &spte, &dirty, &page) {
            copy = value;
        }
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        if let Some(value) = harvest(&gates, &spte, &dirty, &page) {
            copy = value;
        }
        assert_eq!(copy, page.load(Ordering::Relaxed), "a write is in no log");
    });
}

#[test]
fn no_write_of_one_vcpu_is_missing_from_the_log() {
    dirty_model(1, 3, 5);
}

#[test]
fn no_write_of_two_vcpus_is_missing_from_the_log() {
    dirty_model(2, 2, 3);
}

/// One vCPU reads and then writes a page that another vCPU is just making writable. The page is in
/// the first log that is read after the write, even if the other vCPU has not set the dirty bit
/// yet.
#[test]
fn the_first_log_after_a_write_names_it() {
    check(3, || {
        let gates: Vec<_> = (0..2).map(|_| Arc::new(Gate::new())).collect();
        let spte = Arc::new(AtomicU64::new(0));
        let dirty = Arc::new(AtomicU64::new(0));
        let page = Arc::new(AtomicU64::new(0));
        let run = |id: usize| {
            let gate = Arc::clone(&gates[id]);
            let (spte, dirty, page) = (Arc::clone(&spte), Arc::clone(&dirty), Arc::clone(&page));
            thread::spawn(move || {
                let _inside = loop {
                    if let Ok(inside) = gate.enter() {
                        break inside;
                    }
                };
                let mut tlb = id == 1 && guest_fault(&spte, &dirty, false);
                guest_write(&spte, &dirty, &page, &mut tlb, 1);
            })
        };
        let (other, vcpu) = (run(0), run(1));
        vcpu.join().unwrap();
        assert_eq!(harvest(&gates, &spte, &dirty, &page), Some(1));
        other.join().unwrap();
    });
}
