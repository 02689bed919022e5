//! `bench states`: the states of a guest's pages, without a guest.
//!
//! **Guarantee.** Each run checks the pages that it claimed and installed.
//!
//! **Mechanism.** A read of all words of a bitmap without set bits is compared with a search of it.
//! Two threads, each with half of the pages, are compared with one thread that has all of them. A
//! thread claims runs of missing pages, and marks them as present. In a second case it also copies
//! the bytes of each page. Nothing here waits for another thread. So the time of a thread is its
//! processor time, which has no part of other work on the host.

use crate::args::Common;
use crate::demand_paging::HostRam;
use crate::{BenchError, Bound, Conditions, Row, Samples, cores, rounds};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::{Claim, PageBitmap, PageStates};
use rustix::thread::CpuSet;
use rustix::time::{ClockId, clock_gettime};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The size of the guest whose bitmap is searched.
const LARGE: u64 = 12 << 40;
/// The size of the guest whose pages are claimed and not copied.
const UNCOPIED: u64 = 64 << 30;
/// The size of the guest whose pages are copied.
const COPIED: u64 = 256 << 20;
/// The pages that are claimed around a page.
const AROUND: usize = 16;
/// The searches of a sample.
const SEARCHES: u32 = 32;

/// Runs `bench states` and returns its rows.
///
/// # Errors
/// [`BenchError`].
pub(crate) fn states(common: &Common) -> Result<Vec<Row>, BenchError> {
    let repeat = common.rounds(5, 1);
    let mut rows = vec![read_words(repeat)?];
    let ram = HostRam::new(COPIED)?;
    for (case, bytes, ram) in [
        ("states.claim", UNCOPIED, None),
        ("states.claim_install", COPIED, Some(&*ram)),
    ] {
        let mut rates = [Samples::default(), Samples::default()];
        // Taking turns on one core says nothing of threads at once.
        let ways = [Some(None), cores::two().map(Some)];
        for _ in rounds(repeat, case) {
            for (two, rates) in ways.iter().flatten().zip(&mut rates) {
                let pages = (bytes / PAGE_SIZE) as usize;
                let took = claim_all(pages, *two, ram)?;
                rates.push(pages as f64 / took.as_secs_f64());
            }
        }
        let row = |threads: usize| {
            let note = format!(
                "no vCPUs; runs of {AROUND} pages, disjoint halves of the guest; by the processor \
                 time of the slowest thread"
            );
            let conditions = Conditions::here(0, bytes, note);
            rates[threads - 1].row(case, format!("threads: {threads}"), "pages/s", conditions)
        };
        rows.push(row(1));
        if !rates[1].is_empty() {
            rows.push(
                row(2)
                    .against("threads: 1", rates[0].median())
                    .aiming_at(Bound::RatioAtLeast(1.7)),
            );
        }
    }
    Ok(rows)
}

/// The time of reading the words of an empty bitmap, next to the time of a search.
fn read_words(repeat: u32) -> Result<Row, BenchError> {
    let pages = (LARGE / PAGE_SIZE) as usize;
    let map = PageBitmap::try_new(pages).map_err(pageferry_machine::MachineError::from)?;
    let words = pages.div_ceil(64);
    let read = || (0..words).fold(0, |all, word| all | map.word(word));
    // From now on, the words that are read have memory, or the kernel's page of zeroes.
    let mut left = read();
    let (mut found_us, mut read_us) = (Samples::default(), Samples::default());
    for _ in rounds(repeat, "searching") {
        let began = Instant::now();
        for _ in 0..SEARCHES {
            left |= u64::from(black_box(&map).next_set(0).is_some());
        }
        found_us.push(began.elapsed().as_secs_f64() * 1e6 / f64::from(SEARCHES));
        let began = Instant::now();
        left |= black_box(read());
        read_us.push(began.elapsed().as_secs_f64() * 1e6);
    }
    if left != 0 {
        return Err(BenchError::WrongValue("an empty bitmap has a bit".into()));
    }
    let conditions = Conditions::here(0, LARGE, "no vCPUs; a bitmap without set bits");
    Ok(read_us
        .row("states.read_words", "empty bitmap", "us", conditions)
        .against("one search of it", found_us.median())
        .aiming_at(Bound::RatioAtLeast(500.0)))
}

/// Claims and installs all of `pages` pages with one thread, or with one on each of `two` cores.
/// With `ram` it copies their bytes. Returns the processor time of the slowest thread.
fn claim_all(
    pages: usize,
    two: Option<[CpuSet; 2]>,
    ram: Option<&HostRam>,
) -> Result<Duration, BenchError> {
    const BYTES: [u8; PAGE_SIZE as usize] = [0x5a; PAGE_SIZE as usize];
    let no_memory = pageferry_machine::MachineError::from;
    let missing = Arc::new(PageBitmap::try_new(pages).map_err(no_memory)?);
    missing.set_range(0..pages);
    let states = PageStates::try_new(missing).map_err(no_memory)?;
    let each = pages / if two.is_some() { 2 } else { 1 };
    let work = |thread: u32| -> Result<Duration, BenchError> {
        let (thread, began) = (thread as usize, processor_time());
        for at in (thread * each..(thread + 1) * each).step_by(AROUND) {
            let mut installed = 0;
            let page = RamPage(at as u64);
            let claim = states.claim_around(page, at..at + AROUND, |first, pages| {
                if let Some(ram) = ram {
                    (0..pages as u64)
                        .for_each(|page| ram.placing().write(RamPage(first.0 + page), &BYTES));
                }
                installed += states.arrive(first, pages).requested;
            });
            if (claim, installed) != (Claim::Mine, AROUND) {
                let what = format!("{page:?} and those behind it are {claim:?}: {installed} pages");
                return Err(BenchError::WrongValue(what));
            }
        }
        Ok(processor_time().saturating_sub(began))
    };
    let slowest = match two {
        None => work(0)?,
        Some(two) => {
            let [one, other] = cores::on_two(two, work);
            one?.max(other?)
        }
    };
    match states.missing().count() {
        0 => Ok(slowest),
        left => Err(BenchError::WrongValue(format!(
            "{left} pages are still missing after every page was installed"
        ))),
    }
}

/// The processor time of the calling thread.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_pages_are_claimed_and_installed_by_one_thread_or_two() {
        let ram = HostRam::new(4 * AROUND as u64 * PAGE_SIZE).unwrap();
        for two in [None, cores::two()] {
            claim_all(4 * AROUND, two, Some(&ram)).unwrap();
            claim_all(4096, two, None).unwrap();
        }
    }
}
