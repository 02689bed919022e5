//! One sample of each test: the host's side, in step with the guest's.
//!
//! The sizes and steps are those of `tools/testing/selftests/kvm/memslot_perf_test.c` in Linux,
//! with one difference. Its host calls `madvise(MADV_DONTNEED)`, upon which the kernel calls KVM's
//! MMU notifier. This one calls only the notifier's counterpart,
//! [`pageferry_hypervisor::Vm::invalidate_hva`]. Freeing and allocating host pages is no work of
//! the slots, takes at least 1.4 us per page, and would hide the slots' cost.

use super::program::{VALUE_1, VALUE_2, swept};
use super::split::Split;
use super::test_vm::{Program, Start, TestVm};
use super::{Test, wrong};
use crate::{BenchError, Samples};
use pageferry_addr::{Gpa, PAGE_SIZE};
use pageferry_hypervisor::Memslots;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// The first tested page. The page before it is for synchronisation.
const FIRST: u64 = 1;
/// Pages of the map test's area.
pub(super) const MAP_PAGES: u64 = 8192;
/// Pages of the unmap tests' area.
pub(super) const UNMAP_PAGES: u64 = 32_768;
/// Pages of the chunks of "unmap 2M".
const CHUNK_PAGES: u64 = 512;
/// Pages of the whole area. The move tests and the set-up divide it into slots.
pub(super) const ALL_PAGES: u64 = 131_072;
/// The number of pages that the guest of the move tests writes.
const MOVE_PAGES: u64 = 50;
/// The number of moves, there and back, that are timed together. The time of one move depends on
/// the guest's state at that moment: it may fault, exit, or need no wait at all. Single moves would
/// fall into step with the guest's passes, and the median would be that of one such state.
const MOVES: u32 = 16;
/// The offset in a slot's first page of the word that the sweep reads.
const TOKEN: u64 = 1024;

/// Runs `test` on the VM once, and then again until `at_least` has passed. Returns seconds per run:
/// the mean, or for the move tests the median of batches, because their runs take microseconds.
///
/// # Errors
/// If the guest is late, or one of its values is in the wrong place.
pub(super) fn sample<M: Memslots>(
    test_vm: &TestVm<M>,
    test: Test,
    at_least: Duration,
) -> Result<f64, BenchError> {
    match test {
        Test::Map => {
            begin_halves(test_vm, MAP_PAGES, PAGE_SIZE)?;
            // This run allocates tables and host pages, so that later runs do not.
            map_once(test_vm, false)?;
            let seconds = repeated(at_least, || map_once(test_vm, false))?;
            // The first run clears all words. The second one finds all of them stored again.
            map_once(test_vm, true)?;
            map_once(test_vm, true)?;
            ended_inside(test_vm)?;
            Ok(seconds)
        }
        Test::Unmap | Test::UnmapChunked => {
            let chunk = if test == Test::Unmap { 1 } else { CHUNK_PAGES };
            begin_halves(test_vm, UNMAP_PAGES, UNMAP_PAGES / 2 * PAGE_SIZE)?;
            let seconds = repeated(at_least, || unmap_once(test_vm, chunk))?;
            ended_inside(test_vm)?;
            Ok(seconds)
        }
        Test::MoveActive | Test::MoveInactive => moves(test_vm, test, at_least),
        Test::SlotSetup => {
            check_slots(test_vm)?;
            Ok(test_vm.setup.as_secs_f64())
        }
    }
}

/// Seconds per run of `once`.
fn repeated(
    at_least: Duration,
    mut once: impl FnMut() -> Result<(), BenchError>,
) -> Result<f64, BenchError> {
    let (began, mut runs) = (Instant::now(), 0u32);
    loop {
        once()?;
        runs += 1;
        let took = began.elapsed();
        if took >= at_least {
            return Ok(took.as_secs_f64() / f64::from(runs));
        }
    }
}

/// Clears the first word of the pages, and starts the guest that writes two halves of them.
fn begin_halves<M: Memslots>(
    test_vm: &TestVm<M>,
    pages: u64,
    stride: u64,
) -> Result<(), BenchError> {
    for page in (FIRST..FIRST + pages).step_by((stride / PAGE_SIZE) as usize) {
        test_vm.word(page, 0).store(0, Ordering::Relaxed);
    }
    test_vm.start(Start {
        program: Program::Halves,
        first: Split::gpa(FIRST),
        middle: Split::gpa(FIRST + pages / 2),
        end: Split::gpa(FIRST + pages),
        stride,
    })
}

/// The guest maps one half while the host unmaps the other, in turns.
fn map_once<M: Memslots>(test_vm: &TestVm<M>, check_all: bool) -> Result<(), BenchError> {
    let half = MAP_PAGES / 2;
    test_vm.unmap(FIRST + half, half);
    test_vm.synchronise()?;
    check_half(test_vm, FIRST, half, VALUE_1, check_all)?;
    test_vm.unmap(FIRST, half);
    test_vm.synchronise()?;
    check_half(test_vm, FIRST + half, half, VALUE_2, check_all)
}

/// The guest maps one page of each half, and the host unmaps the halves in chunks.
fn unmap_once<M: Memslots>(test_vm: &TestVm<M>, chunk: u64) -> Result<(), BenchError> {
    let half = UNMAP_PAGES / 2;
    for (first, value) in [(FIRST, VALUE_1), (FIRST + half, VALUE_2)] {
        test_vm.synchronise()?;
        check(test_vm, first, value)?;
        for at in (first..first + half).step_by(chunk as usize) {
            test_vm.unmap(at, chunk);
        }
    }
    Ok(())
}

/// Checks and clears the first and the last page of a half, or with `all` every page.
fn check_half<M: Memslots>(
    test_vm: &TestVm<M>,
    first: u64,
    pages: u64,
    value: u64,
    all: bool,
) -> Result<(), BenchError> {
    let step = if all { 1 } else { pages - 1 };
    (first..first + pages)
        .step_by(step as usize)
        .try_for_each(|page| check(test_vm, page, value))
}

/// Checks and clears one page's word.
fn check<M: Memslots>(test_vm: &TestVm<M>, page: u64, value: u64) -> Result<(), BenchError> {
    expect(
        page,
        value,
        test_vm.word(page, 0).swap(0, Ordering::Relaxed),
    )
}

fn expect(page: u64, value: u64, found: u64) -> Result<(), BenchError> {
    if found == value {
        Ok(())
    } else {
        Err(wrong(format!(
            "page {page} has {found:#x} instead of {value:#x}"
        )))
    }
}

/// The pages that a sample of `test` may write.
#[cfg(test)]
pub(super) fn touched(test: Test, split: Split) -> Box<dyn Iterator<Item = u64>> {
    let source = split.first(split.slots - 1);
    match test {
        Test::Map => Box::new(FIRST..FIRST + MAP_PAGES),
        Test::Unmap | Test::UnmapChunked => {
            Box::new((FIRST..FIRST + UNMAP_PAGES).step_by(UNMAP_PAGES as usize / 64))
        }
        Test::MoveActive | Test::MoveInactive => Box::new(source - MOVE_PAGES..source + MOVE_PAGES),
        Test::SlotSetup => Box::new((0..split.slots).map(move |index| split.first(index))),
    }
}

fn ended_inside<M: Memslots>(test_vm: &TestVm<M>) -> Result<(), BenchError> {
    match test_vm.end()?.astray {
        None => Ok(()),
        Some((gpa, _)) => Err(wrong(format!("the guest found no slot at {gpa}"))),
    }
}

/// Moves the last slot behind all others and back while the guest writes to the pages below it. In
/// the active test, half of these pages are in the slot itself.
fn moves<M: Memslots>(
    test_vm: &TestVm<M>,
    test: Test,
    at_least: Duration,
) -> Result<f64, BenchError> {
    let last = test_vm.split.slots - 1;
    let source = test_vm.split.first(last);
    let beyond = if test == Test::MoveActive {
        MOVE_PAGES / 2
    } else {
        0
    };
    assert!(
        test_vm.split.pages_of(last) >= beyond,
        "the area is in the slots"
    );
    let area = source + beyond - MOVE_PAGES..source + beyond;
    let around = [area.start - 1, area.end];
    let around = || {
        around
            .into_iter()
            .filter(|&page| page < test_vm.split.pages)
    };
    for page in area.clone().chain(around()) {
        test_vm.word(page, 0).store(0, Ordering::Relaxed);
    }
    test_vm.start(Start {
        program: Program::Writer,
        first: Split::gpa(area.start),
        middle: Split::gpa(area.end),
        end: Split::gpa(area.end),
        stride: PAGE_SIZE,
    })?;
    test_vm.wait_passes(1)?;
    let (began, mut runs) = (Instant::now(), Samples::default());
    while runs.is_empty() || began.elapsed() < at_least {
        // On a busy host the guest's thread may wait for a core. A move then interrupts no guest.
        // So each batch begins while the guest is running.
        test_vm.wait_passes(1)?;
        let batch = Instant::now();
        for _ in 0..MOVES {
            move_once(test_vm)?;
        }
        runs.push(batch.elapsed().as_secs_f64() / f64::from(MOVES));
    }
    // The first pass may have begun while the slot was away. The second begins and ends with the
    // slot in its place.
    test_vm.wait_passes(2)?;
    let astray = test_vm.end()?.astray;
    for page in area {
        expect(page, VALUE_1, test_vm.word(page, 0).load(Ordering::Relaxed))?;
    }
    for page in around() {
        expect(page, 0, test_vm.word(page, 0).load(Ordering::Relaxed))?;
    }
    let away = Split::gpa(source)..Split::gpa(source + beyond);
    match astray {
        Some((low, high)) if !(away.contains(&low) && away.contains(&high)) => Err(wrong(format!(
            "the guest found no slot from {low} to {high}, but only {}..{} had moved away",
            away.start, away.end
        ))),
        _ => Ok(runs.median()),
    }
}

/// Moves the last slot behind all others and back.
pub(super) fn move_once<M: Memslots>(test_vm: &TestVm<M>) -> Result<(), BenchError> {
    let last = test_vm.split.slots - 1;
    test_vm.move_slot(last, Split::gpa(test_vm.split.pages))?;
    test_vm.move_slot(last, Split::gpa(test_vm.split.first(last)))
}

/// The guest reads a word of every slot's first page. It must find the values that the host stored.
fn check_slots<M: Memslots>(test_vm: &TestVm<M>) -> Result<(), BenchError> {
    let split = test_vm.split;
    for index in 0..split.slots {
        let token = (u64::from(index) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        test_vm
            .word(split.first(index), TOKEN)
            .store(token, Ordering::Relaxed);
    }
    let expected = swept((0..split.slots).map(|index| {
        test_vm
            .word(split.first(index), TOKEN)
            .load(Ordering::Relaxed)
    }));
    let at = |page| Gpa(Split::gpa(page).0 + TOKEN);
    test_vm.start(Start {
        program: Program::Sweep,
        first: at(0),
        middle: at(split.first(split.slots - 1) + 1),
        end: at(0),
        stride: split.pages_of(0) * PAGE_SIZE,
    })?;
    let ended = test_vm.ended()?;
    if ended.answer == expected && ended.astray.is_none() {
        Ok(())
    } else {
        Err(wrong(format!(
            "the guest read {:#x} from the slots, but the host stored {expected:#x}",
            ended.answer
        )))
    }
}
