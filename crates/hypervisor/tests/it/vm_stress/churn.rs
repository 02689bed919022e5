//! The host's actions on a VM while its harts run, on one thread for each kind.

use super::guest::PAGES;
use super::host::{self, Host, MISSING, Part};
use crate::support::fleet::Fleet;
use crate::support::vm::HostRam;
use pageferry_hypervisor::{Region, SlotFlags, Vm};
use pageferry_testkit::Random;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

macro_rules! done {
    ($($name:ident $text:literal)*) => {
        /// A counted kind of event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Done { $($name),* }

        impl Done {
            const ALL: &[(Self, &str)] = &[$((Self::$name, $text)),*];
        }
    };
}

done! {
    Invalidations "invalidations"
    PagesUnmapped "pages invalidated"
    Logs "logs"
    PagesLogged "pages logged"
    Deletions "deletions"
    Moves "moves"
    OtherSlots "other slots"
    Retries "accesses without a slot"
    Zaps "zaps"
    PagesZapped "pages zapped"
    Agings "agings"
    PagesYoung "pages found young"
    Userfaults "userfault flags"
    PagesBrought "pages brought"
    PagesTracked "pages tracked"
    Refusals "stores refused"
}

/// The number of events of each kind.
#[derive(Debug, Default)]
pub(crate) struct Counts([AtomicU64; Done::ALL.len()]);

impl Counts {
    pub(crate) fn add(&self, what: Done, times: u64) {
        self.0[what as usize].fetch_add(times, Ordering::Relaxed);
    }

    fn get(&self, what: Done) -> u64 {
        self.0[what as usize].load(Ordering::Relaxed)
    }

    /// The kinds without an event.
    pub(crate) fn missing(&self) -> Vec<Done> {
        let all = Done::ALL.iter().map(|&(what, _)| what);
        all.filter(|&what| self.get(what) == 0).collect()
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, &(what, text)) in Done::ALL.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{} {text}", self.get(what))?;
        }
        Ok(())
    }
}

type Churn = fn(&Vm, &Host, &Counts, &Fleet);

/// All kinds of actions.
pub(crate) const ALL: [Churn; 5] = [notify, change_slots, zap_and_age, miss, track];

/// Lets the harts run for up to `most` microseconds. It only makes the mixture of events better.
pub(crate) fn pause(random: &mut Random, most: u64) {
    std::thread::sleep(Duration::from_micros(random.next() % most));
}

/// Up to 64 random pages, and sometimes all pages.
fn some_pages(random: &mut Random) -> Range<u64> {
    if random.next().is_multiple_of(32) {
        return 0..PAGES;
    }
    let first = random.next() % PAGES;
    first..(first + 1 + random.next() % 64).min(PAGES)
}

/// An MMU notifier that replaces pages.
fn notify(vm: &Vm, host: &Host, counts: &Counts, fleet: &Fleet) {
    let mut random = Random::new(11);
    while !fleet.is_stopped() {
        let pages = some_pages(&mut random);
        let wait = Duration::from_micros(random.next() % 200);
        let change = || host.take_for_a_while(&pages, || std::thread::sleep(wait));
        let (unmapped, ()) = vm.invalidate_hva_around(host.hvas(&pages), change);
        counts.add(Done::Invalidations, 1);
        counts.add(Done::PagesUnmapped, unmapped);
        pause(&mut random, 1000);
    }
}

/// Deletes and moves slots that harts use, and creates and deletes an unused slot.
fn change_slots(vm: &Vm, host: &Host, counts: &Counts, fleet: &Fleet) {
    const UNUSED: u64 = 0x2000_0000;
    let mut random = Random::new(12);
    let spare = HostRam::new(2);
    let delete = |slot| vm.set_user_memory_region2(Region::delete(slot)).unwrap();
    // The host owns the slot's pages until the slot is back.
    let away = |part, random: &mut Random| {
        host.take_all(part);
        pause(random, 300);
        host.bring_all(part);
    };
    while !fleet.is_stopped() {
        match random.next() % 3 {
            0 => {
                delete(host::DELETED.slot);
                away(host::DELETED, &mut random);
                host.set(vm, host::DELETED, SlotFlags::EMPTY);
                counts.add(Done::Deletions, 1);
            }
            1 => {
                host.set_elsewhere(vm, host::MOVED);
                away(host::MOVED, &mut random);
                host.set(vm, host::MOVED, SlotFlags::EMPTY);
                counts.add(Done::Moves, 2);
            }
            _ => {
                vm.set_user_memory_region2(spare.region(host::UNUSED_SLOT, UNUSED, 0, 2))
                    .unwrap();
                delete(host::UNUSED_SLOT);
                counts.add(Done::OtherSlots, 1);
            }
        }
        pause(&mut random, 1500);
    }
}

/// Zaps everything, or ages pages.
fn zap_and_age(vm: &Vm, host: &Host, counts: &Counts, fleet: &Fleet) {
    let mut random = Random::new(13);
    while !fleet.is_stopped() {
        if random.next().is_multiple_of(8) {
            counts.add(Done::PagesZapped, vm.zap_all());
            counts.add(Done::Zaps, 1);
        } else {
            let pages = some_pages(&mut random);
            let young = vm.age_hva(host.hvas(&pages), random.next().is_multiple_of(2));
            counts.add(Done::PagesYoung, young);
            counts.add(Done::Agings, 1);
        }
        pause(&mut random, 1000);
    }
}

/// Makes pages missing for a while. It sets all bits before the slot gets the flag. From then on,
/// no hart accesses a page whose bit is set.
fn miss(vm: &Vm, host: &Host, counts: &Counts, fleet: &Fleet) {
    let mut random = Random::new(14);
    while !fleet.is_stopped() {
        for page in MISSING.first..MISSING.first + MISSING.pages {
            if !random.next().is_multiple_of(4) {
                host.missing.set_range(page as usize..page as usize + 1);
            }
        }
        host.set(vm, MISSING, SlotFlags::USERFAULT);
        host.take_missing();
        counts.add(Done::Userfaults, 1);
        pause(&mut random, 4000);
        host.bring_all(MISSING);
        host.set(vm, MISSING, SlotFlags::EMPTY);
        pause(&mut random, 2000);
    }
}

/// Tracks pages for a while, also of slots that change meanwhile.
fn track(vm: &Vm, host: &Host, counts: &Counts, fleet: &Fleet) {
    let mut random = Random::new(15);
    while !fleet.is_stopped() {
        let part = Part::ALL[(random.next() % Part::ALL.len() as u64) as usize];
        let first = random.next() % part.pages;
        let pages = first..(first + 1 + random.next() % 32).min(part.pages);
        // Deleting the slot ends its tracking.
        let goes = part == host::DELETED;
        match vm.track_writes(part.slot, pages.clone()) {
            Ok(tracked) => counts.add(Done::PagesTracked, tracked),
            Err(refused) => assert!(goes, "{refused}"),
        }
        if !goes {
            let wait = || pause(&mut random, 300);
            host.check_still(part.first + pages.start..part.first + pages.end, wait);
        }
        let untracked = vm.untrack_writes(part.slot, pages.clone());
        assert!(goes || untracked == Ok(pages.end - pages.start));
        pause(&mut random, 1500);
    }
}
