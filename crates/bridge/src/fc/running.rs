//! The memory of a Firecracker that runs its VM, as other processes may read it.
//!
//! **Guarantee.** Nothing is written once [`Running::hold`] has returned. Before that, a copy that
//! is wrong costs time and no page: Firecracker's own snapshot overwrites it in the pause, and each
//! page travels again unless the destination has those bytes.
//!
//! **Mechanism.** No file names the mappings of the guest. So [`regions`] guesses them by their
//! sizes, which follow from the size of memory. Pages are read by `/proc/PID/mem`, and only those
//! that `/proc/PID/pagemap` has. So no page is fetched from a page server or allocated for this.
//! The copy gets memory for the others too if Firecracker is to write them in the pause.
//!
//! **Neighbours.** `source` has the copy.

use crate::foreign::smaps;
use rustix::fs::FallocateFlags;
use rustix::process::Pid;
use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// The pages that are copied at once.
const PIECE: usize = 8;
/// A bit of `pagemap`: the page is present, or swapped out.
const HAS_BYTES: u64 = 0b11 << 62;
/// The longest list of mappings: the kernel's limit is 65 530 of them.
const MAX_MAPS: u64 = 16 << 20;
/// The least memory of a VM, in KiB. Firecracker's own data is less.
const LEAST_RAM: u64 = 1 << 10;
/// The alignment of a region in Firecracker's process.
const ALIGN: u64 = 2 << 20;

/// The memory of a running VM.
pub(super) struct Running {
    mem: File,
    pagemap: File,
    /// The addresses of the regions, in the order of the memory file.
    regions: Vec<Range<u64>>,
    /// Whether a full snapshot follows, which writes all pages.
    full: bool,
    /// Whether nothing may be written any more.
    held: RwLock<bool>,
    /// The bytes that were copied, and the time that took in nanoseconds.
    copied: (AtomicU64, AtomicU64),
}

impl Running {
    /// Looks for the memory of a VM in a process. The reason why it is not found is for people.
    pub(super) fn find(pid: Option<Pid>, bytes: u64, full: bool) -> Result<Self, String> {
        let pid = pid.ok_or("its process is not visible here")?;
        let pid = pid.as_raw_nonzero();
        let open = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            File::open(&path).map_err(|e| format!("cannot open {path}: {e}"))
        };
        let mut maps = Vec::new();
        let read = open("maps")?.take(MAX_MAPS).read_to_end(&mut maps);
        read.map_err(|e| format!("cannot read /proc/{pid}/maps: {e}"))?;
        let maps = String::from_utf8_lossy(&maps);
        let regions = regions(&maps, &sizes(bytes));
        Ok(Self {
            regions: regions.ok_or("no mappings of its process have the sizes of its memory")?,
            mem: open("mem")?,
            pagemap: open("pagemap")?,
            full,
            held: RwLock::new(false),
            copied: Default::default(),
        })
    }

    /// Forbids to write the copy, or allows it again. Waits for those who write.
    pub(super) fn hold(&self, held: bool) {
        *self.held.write().unwrap_or_else(PoisonError::into_inner) = held;
    }

    /// Copies `pages` to `file`, as far as the process has them and lets us read them.
    pub(super) fn copy_to(&self, file: &OwnedFd, pages: Range<u64>) {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        if *held {
            return;
        }
        if self.full {
            // Without this memory the copy is slower, or Firecracker says in the pause what is
            // wrong.
            let (at, length) = (pages.start * PAGE, (pages.end - pages.start) * PAGE);
            let _ = rustix::fs::fallocate(file, FallocateFlags::empty(), at, length);
        }
        let mut offset = 0;
        for region in &self.regions {
            let inside = |page: u64| {
                let at = region.start + (page * PAGE).saturating_sub(offset);
                at.clamp(region.start, region.end)
            };
            let part = inside(pages.start)..inside(pages.end);
            for at in part.clone().step_by(PIECE * PAGE as usize) {
                let end = part.end.min(at + PIECE as u64 * PAGE);
                self.copy_piece(file, at..end, offset + (at - region.start));
            }
            offset += region.end - region.start;
        }
    }

    /// The time that it takes to write so many bytes, as measured by the copy so far.
    pub(super) fn time_of(&self, bytes: u64) -> Option<Duration> {
        let [copied, ns] = [&self.copied.0, &self.copied.1].map(|n| n.load(Ordering::Relaxed));
        let ns = u128::from(bytes) * u128::from(ns) / u128::from(copied.max(1));
        (copied > 0).then(|| Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX)))
    }

    /// Copies the pages at addresses of the process to a place in `file`.
    fn copy_piece(&self, file: &OwnedFd, from: Range<u64>, to: u64) {
        let count = ((from.end - from.start) / PAGE) as usize;
        let mut entries = [0; PIECE * 8];
        let entries = &mut entries[..count * 8];
        let known = self.pagemap.read_exact_at(entries, from.start / PAGE * 8);
        if known.is_err() {
            return;
        }
        let entries = entries.as_chunks::<8>().0;
        let has = |entry: &[u8; 8]| u64::from_ne_bytes(*entry) & HAS_BYTES != 0;
        let mut bytes = [0; PIECE * PAGE as usize];
        let mut at = 0;
        for run in entries.chunk_by(|a, b| has(a) == has(b)) {
            let (start, length) = (at as u64 * PAGE, run.len() * PAGE as usize);
            at += run.len();
            if !has(&run[0]) {
                continue;
            }
            let began = Instant::now();
            // A page that cannot be read may have gone meanwhile.
            if let Ok(got) = self.mem.read_at(&mut bytes[..length], from.start + start) {
                let _ = rustix::io::pwrite(file, &bytes[..got], to + start);
                self.copied.0.fetch_add(got as u64, Ordering::Relaxed);
                let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                self.copied.1.fetch_add(ns, Ordering::Relaxed);
            }
        }
    }
}

/// The resident bytes of a process, if all of its memory that is not resident is zero: then a diff
/// snapshot has all of a VM, and is faster than a full one. It is so for a VM that was booted, or
/// moved, and not for one that was restored by a file, or lacks pages that a page server has.
pub(super) fn resident(pid: Option<Pid>) -> Option<u64> {
    sum_resident(&smaps::read(pid?)?)
}

fn sum_resident(smaps: &str) -> Option<u64> {
    let mut resident = 0_u64;
    for (mapping, field, mut words) in smaps::fields(smaps) {
        let of_file = || {
            let mut words = mapping.split_ascii_whitespace().skip(1);
            Some(words.next()?.contains('w') && words.nth(2)? != "0")
        };
        let mut kib = || words.next()?.parse::<u64>().ok();
        match field {
            "Size:" if of_file()? && kib()? >= LEAST_RAM => return None,
            "Swap:" if kib()? > 0 => return None,
            "Rss:" => resident = resident.saturating_add(kib()? << 10),
            // Somebody has pages of it.
            "VmFlags:" if words.any(|flag| ["um", "uw", "ui"].contains(&flag)) => return None,
            _ => {}
        }
    }
    Some(resident)
}

/// The sizes of the regions of a VM with `bytes` of memory. There is no memory in the last GiB
/// below 4 GiB (x86-64), and between 256 and 512 GiB.
fn sizes(bytes: u64) -> Vec<u64> {
    let below_holes: &[u64] = if cfg!(target_arch = "x86_64") {
        &[3 << 30, 252 << 30]
    } else {
        // It begins at 2 GiB.
        &[254 << 30]
    };
    let mut rest = bytes;
    let mut sizes = Vec::new();
    for most in below_holes.iter().copied().chain([u64::MAX]) {
        let size = rest.min(most);
        if size > 0 {
            sizes.push(size);
        }
        rest -= size;
    }
    sizes
}

/// Guesses the addresses of regions of these sizes, from the text of `/proc/PID/maps`.
///
/// They are private and writable. The kernel joins neighbours to one mapping: then a region is the
/// upper end of it, since the kernel gives addresses downwards.
fn regions(maps: &str, sizes: &[u64]) -> Option<Vec<Range<u64>>> {
    let mut free: Vec<(Range<u64>, bool)> = maps.lines().filter_map(mapping).collect();
    let mut found = Vec::new();
    for size in sizes {
        let length = |mapping: &Range<u64>| mapping.end - mapping.start;
        let exact = |(mapping, _): &(Range<u64>, bool)| length(mapping) == *size;
        let (index, start) = match free.iter().rposition(exact) {
            Some(index) => (index, free[index].0.start),
            None => {
                let start = |mapping: &Range<u64>| {
                    let start = mapping.end.checked_sub(*size)? / ALIGN * ALIGN;
                    (start >= mapping.start).then_some(start)
                };
                let joined = free.iter().enumerate();
                let joined = joined.filter(|(_, (_, anonymous))| *anonymous);
                let joined = joined.filter_map(|(i, (m, _))| Some((length(m), i, start(m)?)));
                let (_, index, start) = joined.min()?;
                (index, start)
            }
        };
        let (mapping, anonymous) = free.swap_remove(index);
        let region = start..start + size;
        free.push((mapping.start..region.start, anonymous));
        free.push((region.end..mapping.end, anonymous));
        free.sort_unstable_by_key(|(mapping, _)| mapping.start);
        found.push(region);
    }
    Some(found)
}

/// The addresses of a private writable mapping, and whether it is anonymous.
fn mapping(line: &str) -> Option<(Range<u64>, bool)> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let address = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = (address(start)?, address(end)?);
    let private = words.next()?.starts_with("rw-p");
    let inode = words.nth(2)?;
    let name = words.next().unwrap_or_default();
    let memory = !name.starts_with('[') || name.starts_with("[anon");
    let whole = start < end && start % PAGE == 0 && end % PAGE == 0;
    (private && memory && whole).then_some((start..end, inode == "0"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_testkit::Random;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_lies_around_the_holes_of_guest_addresses() {
        assert_eq!(sizes(128 * MIB), [128 * MIB]);
        if cfg!(target_arch = "x86_64") {
            assert_eq!(sizes(3 << 30), [3 << 30]);
            assert_eq!(sizes(5 << 30), [3 << 30, 2 << 30]);
            assert_eq!(sizes(300 << 30), [3 << 30, 252 << 30, 45 << 30]);
        }
    }

    #[test]
    fn regions_are_found_by_their_sizes() {
        let maps = "\
            555500000000-555508000000 rw-p 00000000 00:00 0                          [heap]\n\
            7f0000000000-7f0008000000 r--p 00000000 00:00 0 \n\
            7f0010000000-7f0018000000 rw-p 00000000 00:00 0 \n\
            7f0020000000-7f0028000000 ---p 00000000 00:00 0 \n\
            7f0030000000-7f0034000000 rw-p 00000000 fd:01 77                         /tmp/mem\n\
            7f0040000000-7f0048000000 rw-s 00000000 00:01 78                         /memfd:x\n";
        let region = |start: u64, size: u64| start..start + size;
        // Not the heap, and nothing that is shared or cannot be written.
        let found = regions(maps, &[128 * MIB]).unwrap();
        assert_eq!(found, [region(0x7f00_1000_0000, 128 * MIB)]);
        // A VM that was restored from a file.
        let found = regions(maps, &[64 * MIB]).unwrap();
        assert_eq!(found, [region(0x7f00_3000_0000, 64 * MIB)]);
        assert_eq!(regions(maps, &[129 * MIB]), None);
        assert_eq!(regions(maps, &[128 * MIB, 128 * MIB]), None);
    }

    #[test]
    fn a_diff_snapshot_serves_where_all_that_is_absent_is_zero() {
        let memory = |inode: u64, more: &str| {
            format!(
                "7f0010000000-7f0018000000 rw-p 00000000 00:00 {inode} \nSize: 131072 kB\n\
                 Rss: 2048 kB\nSwap: 0 kB\n{more}VmFlags: rd wr mr mw me ac \n"
            )
        };
        let program = "555500000000-555500008000 r-xp 00000000 fd:01 77 /fc\nSize: 4096 kB\n\
                       Rss: 64 kB\nVmFlags: rd ex\n";
        let all = |rest: &str| sum_resident(&format!("{program}{rest}"));
        assert_eq!(all(&memory(0, "")), Some((2048 + 64) << 10));
        // A private mapping of a memory file, one of a page server, and one that is swapped out.
        assert_eq!(all(&memory(78, "")), None);
        assert_eq!(all(&memory(0, "VmFlags: rd wr um\n")), None);
        assert_eq!(all(&memory(0, "Swap: 4 kB\n")), None);
        assert_eq!(sum_resident("Rss: many kB"), None);
    }

    #[test]
    fn regions_that_the_kernel_has_joined_are_found() {
        let maps = "7f0000001000-7f0008203000 rw-p 00000000 00:00 0 \n";
        let found = regions(maps, &[96 * MIB, 32 * MIB]).unwrap();
        let high = 0x7f00_0220_0000..0x7f00_0820_0000;
        let low = 0x7f00_0020_0000..0x7f00_0220_0000;
        assert_eq!(found, [high, low]);
    }

    /// A process may give its mappings any names.
    #[test]
    fn lines_that_are_no_mappings_are_skipped() {
        for line in [
            "",
            "-",
            "zz-1000 rw-p 0 0 0",
            "1000-zz rw-p 0 0 0",
            "2000-1000 rw-p 0 00:00 0",
            "1001-2000 rw-p 0 00:00 0",
            "1000-2000",
            "1000-2000 rw-p 0 00:00",
            "11112222333344445-2000 rw-p 0 00:00 0",
        ] {
            assert_eq!(mapping(line), None, "{line}");
        }
        let right = "1000-3000 rw-p 00000000 00:00 0 [anon:guest]";
        assert_eq!(mapping(right), Some((0x1000..0x3000, true)));
        let mut random = Random::new(1);
        for _ in 0..10_000 {
            let mut line = right.as_bytes().to_vec();
            for _ in 0..1 + random.below(4) {
                let at = random.below(line.len() as u64) as usize;
                line[at] = random.next() as u8;
            }
            let text = String::from_utf8_lossy(&line);
            let sizes = [1 + random.below(1 << 14), random.below(u64::MAX)];
            for region in regions(&text, &sizes).unwrap_or_default() {
                assert!(region.start < region.end, "{text}");
            }
        }
    }
}
