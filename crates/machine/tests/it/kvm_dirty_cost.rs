//! The costs of each kind of dirty log, to a busy guest and to the harvester. Run it with `cargo
//! test --release -p pageferry-machine --test it -- --ignored --nocapture kvm_dirty_cost::`.

use crate::kvm_dirty_random::{RANDOM, word_of};
use crate::support::{DATA, drive_beside, no_kvm, run, start, tracked, word};
use pageferry_addr::RamPage;
use pageferry_machine::Exit;
use pageferry_machine::kvm::DirtyTracking;
use pageferry_userfault::PageBitmap;
use std::time::{Duration, Instant};

/// The passes of one run, and their length.
const PASSES: u32 = 4;
const PASS: Duration = Duration::from_millis(500);

/// A run: stores per second of all vCPUs, and the time of each harvest but the first.
struct Cost {
    stores: f64,
    harvests: Vec<Duration>,
    /// The last harvest, of stopped vCPUs.
    last: Duration,
}

/// vCPUs store to random pages out of `used`, a power of two, while the log is harvested at the end
/// of each pass. Without `log`, nothing is logged.
fn cost(tracking: DirtyTracking, vcpus: u64, used: u64, log: bool) -> Cost {
    let first = DATA.0 + 1;
    let mut new = tracked(vcpus as u32, first + used, tracking);
    let ram = new.machine.ram().clone();
    for (id, vcpu) in (0..).zip(&mut new.vcpus) {
        let mut code = RANDOM;
        code[2..10].copy_from_slice(&(0x9e37_79b9_7f4a_7c15_u64 ^ id).to_le_bytes());
        code[11..15].copy_from_slice(&(word_of(id) as u32).to_le_bytes());
        let args = [RamPage(first).byte_offset(), used - 1];
        start(&ram, vcpu.as_mut(), id, &code, args);
    }
    let dirty = PageBitmap::new(ram.pages() as usize);
    let stores = || -> u64 {
        let counts = (0..vcpus).map(|id| word(&ram, DATA, word_of(id) as usize / 8));
        counts.sum()
    };
    let mut harvests = Vec::new();
    let mut rate = 0.0;
    let mut vcpus = std::mem::take(&mut new.vcpus);
    let harvest = |rearm| {
        let begin = Instant::now();
        new.machine.harvest_dirty(&dirty, rearm).unwrap();
        let took = begin.elapsed();
        dirty.clear_range(0..dirty.pages());
        took
    };
    drive_beside(
        &mut vcpus,
        |vcpu| assert_eq!(run(vcpu), Exit::Kicked),
        || {
            // All pages are mapped first.
            while stores() < 8 * used {
                std::thread::sleep(Duration::from_millis(20));
            }
            if log {
                new.machine.set_dirty_log(true).unwrap();
            }
            let (begin, before) = (Instant::now(), stores());
            for _ in 0..PASSES {
                std::thread::sleep(PASS);
                if log {
                    harvests.push(harvest(true));
                }
            }
            rate = (stores() - before) as f64 / begin.elapsed().as_secs_f64();
        },
    );
    let last = if log { harvest(false) } else { Duration::ZERO };
    Cost {
        stores: rate,
        harvests,
        last,
    }
}

#[test]
#[ignore = "measures: the dirty logs"]
fn of_a_guest_that_stores_to_random_pages() {
    if no_kvm() {
        return;
    }
    for vcpus in [1, 2] {
        for used in [1 << 12, 1 << 15, 1 << 16, 1 << 17] {
            for round in 0..3 {
                let off = cost(DirtyTracking::Bitmap, vcpus, used, false);
                for tracking in [
                    DirtyTracking::Bitmap,
                    DirtyTracking::Ring(1 << 12),
                    DirtyTracking::Ring(1 << 16),
                ] {
                    let mut cost = cost(tracking, vcpus, used, true);
                    cost.harvests.sort_unstable();
                    println!(
                        "{vcpus} vCPUs, {used:6} pages, round {round}, {tracking:?}: {:.1} M stores/s, {:.2} of no log; harvest {:?}, last {:?}",
                        cost.stores / 1e6,
                        cost.stores / off.stores,
                        cost.harvests[cost.harvests.len() / 2],
                        cost.last
                    );
                }
            }
        }
    }
}
