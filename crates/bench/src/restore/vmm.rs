#![expect(unsafe_code, reason = "maps guest memory, registers it and touches it")]
//! The VMM of `bench restore`, in a process of its own: it has memory that comes from a snapshot,
//! and threads that touch the working set. It has no guest.

use crate::error::os;
use crate::peer::{Part, kib_of, read_line, send, send_line};
use crate::{BenchError, Samples};
use pageferry_addr::{Hva, PAGE_SIZE};
use pageferry_pager::{Region, connect};
use pageferry_userfault::uffd::{Features, RegisterMode, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// One touch in so many is a write. A private mapping of a file copies these pages only.
const WRITES: usize = 4;

/// Where a VMM has its memory from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Memory {
    /// A page server at this socket.
    Pager(PathBuf),
    /// A private mapping of this file.
    File(PathBuf),
}

/// A VM that is restored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Restored {
    /// Where its memory comes from.
    pub(crate) memory: Memory,
    /// The size of its memory in bytes.
    pub(crate) bytes: u64,
    /// The size of its working set in bytes.
    pub(crate) working_set: u64,
    /// The threads that touch it.
    pub(crate) threads: usize,
}

/// The cost of a VM's working set.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Touched {
    /// Until all of it was touched.
    pub(super) took: Duration,
    /// Times of single touches, in microseconds.
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    /// Memory that the VM shares with nobody.
    pub(super) private_bytes: u64,
}

impl Restored {
    /// Maps the memory. Returns its address, and the userfaultfd of memory from a pager.
    fn map(&self) -> Result<(usize, Option<Userfaultfd>), BenchError> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let len = self.bytes as usize;
        match &self.memory {
            Memory::File(path) => {
                let file = File::open(path).map_err(os("cannot open the memory file"))?;
                // SAFETY: the kernel chooses an unused address.
                let base = unsafe {
                    mmap(
                        std::ptr::null_mut(),
                        len,
                        access,
                        MapFlags::PRIVATE,
                        file,
                        0,
                    )
                };
                let base = base.map_err(os("cannot map the memory file"))?;
                Ok((base.expose_provenance(), None))
            }
            Memory::Pager(_) => {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                // SAFETY: the kernel chooses an unused address.
                let base = unsafe { mmap_anonymous(std::ptr::null_mut(), len, access, flags) };
                let base = base.map_err(os("cannot map memory"))?;
                let base = base.expose_provenance();
                let no_uffd = |why: &dyn std::fmt::Display| BenchError::Setting(why.to_string());
                let uffd = Userfaultfd::open(Features::EVENT_REMOVE).map_err(|e| no_uffd(&e))?;
                let start = Hva(base as u64);
                // SAFETY: another process resolves the faults, and no reference to the range
                // exists.
                unsafe { uffd.register(start, self.bytes, RegisterMode::MISSING) }
                    .map_err(|e| no_uffd(&e))?;
                Ok((base, Some(uffd)))
            }
        }
    }

    /// Maps the memory and connects to its pager. Returns what touches a page, and tells how long
    /// that took in microseconds, and what must stay as long as the VMM lives.
    pub(crate) fn held(
        &self,
    ) -> Result<(impl Fn(u64) -> Result<f64, BenchError>, impl Sized), BenchError> {
        let (base, uffd) = self.map()?;
        let stream = self.connect(base, uffd.as_ref())?;
        Ok((move |page| touch(base, page, false), (stream, uffd)))
    }

    /// Asks the pager for the memory, if it comes from one.
    fn connect(
        &self,
        base: usize,
        uffd: Option<&Userfaultfd>,
    ) -> Result<Option<UnixStream>, BenchError> {
        let (Some(uffd), Memory::Pager(socket)) = (uffd, &self.memory) else {
            return Ok(None);
        };
        let region = Region {
            address: base as u64,
            size: self.bytes,
            offset: 0,
        };
        let stream = connect(socket, &[region], PAGE_SIZE, uffd.as_fd());
        stream.map(Some).map_err(os("cannot reach the page server"))
    }

    /// Plays the VMM to its end: maps its memory, waits for `go`, connects, and touches the working
    /// set.
    fn touched(&self, go: impl FnOnce() -> Result<(), BenchError>) -> Result<Touched, BenchError> {
        let (base, uffd) = self.map()?;
        let set = working_set(self.bytes, self.working_set);
        let touches = |thread: usize| -> Result<Vec<f64>, BenchError> {
            let own = set.iter().enumerate().skip(thread).step_by(self.threads);
            own.map(|(index, page)| touch(base, *page, index % WRITES == 0))
                .collect()
        };
        go()?;
        // A recording is replayed from the handshake on, so that counts.
        let began = Instant::now();
        // Firecracker keeps its end for its whole life.
        let _stream = self.connect(base, uffd.as_ref())?;
        let times = std::thread::scope(|scope| {
            let running: Vec<_> = (0..self.threads)
                .map(|thread| scope.spawn(move || touches(thread)))
                .collect();
            let mut all = running
                .into_iter()
                .map(|thread| thread.join().expect("it only touches"));
            all.try_fold(Vec::new(), |mut times, each| {
                times.extend(each?);
                Ok::<_, BenchError>(times)
            })
        })?;
        let took = began.elapsed();
        let times = Samples::from_iter(times);
        Ok(Touched {
            took,
            p50_us: times.quantile(0.5),
            p99_us: times.quantile(0.99),
            private_bytes: private_bytes()?,
        })
    }
}

/// Touches a page of the mapping at `base`. Returns the time in microseconds.
fn touch(base: usize, page: u64, write: bool) -> Result<f64, BenchError> {
    let at = base + (page * PAGE_SIZE) as usize;
    let at = std::ptr::with_exposed_provenance_mut::<u8>(at);
    let began = Instant::now();
    // SAFETY: the byte lies in the mapping, to which no reference exists. Each page is touched by
    // one thread.
    let byte = unsafe { at.read_volatile() };
    if write {
        // SAFETY: as above.
        unsafe { at.write_volatile(byte) };
    }
    match byte {
        0 => Err(BenchError::WrongValue(format!("page {page} is zero"))),
        _ => Ok(began.elapsed().as_secs_f64() * 1e6),
    }
}

impl Part for Restored {
    const NAME: &'static str = "restored";

    fn play(&self) -> Result<(), BenchError> {
        send(&self.touched(|| {
            send_line("ready")?;
            read_line().map(drop)
        })?)
    }
}

/// The pages of the working set in the order of their touches: runs of 1 to 16 pages at random
/// places, the same for every VM.
pub(super) fn working_set(bytes: u64, working_set: u64) -> Vec<u64> {
    let (pages, wanted) = (bytes / PAGE_SIZE, (working_set / PAGE_SIZE) as usize);
    let mut random = crate::kit::Random::new(29);
    let mut chosen = vec![false; pages as usize];
    let mut set = Vec::with_capacity(wanted);
    while set.len() < wanted {
        let first = random.next() % pages;
        let run = 1 + random.next() % 16;
        for page in first..(first + run).min(pages) {
            if set.len() < wanted && !std::mem::replace(&mut chosen[page as usize], true) {
                set.push(page);
            }
        }
    }
    set
}

fn private_bytes() -> Result<u64, BenchError> {
    // Clean pages of a mapped file are the page cache's, and all VMs of the snapshot share them.
    Ok(kib_of("/proc/self/smaps_rollup", &["Anonymous:"])? << 10)
}
