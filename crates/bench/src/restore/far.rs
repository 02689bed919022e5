//! A store far away, of `bench restore`. It is simulated: each read takes 20 ms longer.

use super::vmm::working_set;
use crate::BenchError;
use pageferry_addr::PAGE_SIZE;
use pageferry_pager::{FileSource, Source, SourceError, Store};
use pageferry_remote::Cache;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The time of a read before its first byte.
const LATENCY: Duration = Duration::from_millis(20);

/// The store. Its address is `far://` and a path.
#[derive(Debug, Default)]
pub(super) struct Far;

/// A file in it.
#[derive(Debug)]
struct FarFile(FileSource);

/// The address of a file.
pub(super) fn address(memory: &Path) -> PathBuf {
    format!("far://{}", memory.display()).into()
}

impl Store for Far {
    fn schemes(&self) -> &[&str] {
        &["far"]
    }

    fn open(&self, address: &str) -> Result<Arc<dyn Source>, SourceError> {
        let path = address.trim_start_matches("far://");
        let file = FarFile(FileSource::open(path.as_ref())?);
        // As before an object store, and as empty as it is there at first.
        Ok(Cache::in_memory().wrap(address, Arc::new(file)))
    }
}

impl Source for FarFile {
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn block(&self) -> u64 {
        256 << 10
    }

    fn reads(&self) -> usize {
        // As an object store.
        64
    }

    fn is_zero(&self, _: u64, _: u64) -> bool {
        false
    }

    fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        std::thread::sleep(LATENCY);
        self.0.read(offset, buffer)
    }

    fn identity(&self) -> String {
        self.0.identity()
    }
}

/// The time in which threads read the blocks of the working set, and do nothing with them.
pub(super) fn transfer(memory: &Path, bytes: u64, set: u64) -> Result<Duration, BenchError> {
    let failed = |why: SourceError| BenchError::Peer(why.to_string());
    let file = FarFile(FileSource::open(memory).map_err(failed)?);
    let block = file.block();
    let pages = working_set(bytes, set).into_iter();
    let blocks: BTreeSet<u64> = pages.map(|page| page * PAGE_SIZE / block).collect();
    let blocks: Vec<u64> = blocks.into_iter().collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(&at) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let len = block.min(bytes - at * block);
            file.read(at * block, &mut vec![0; len as usize])?;
        }
        Ok(())
    };
    let began = Instant::now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..file.reads()).map(|_| scope.spawn(work)).collect();
        let mut all = threads.into_iter();
        all.try_for_each(|thread| thread.join().expect("it only reads"))
    })
    .map_err(failed)?;
    Ok(began.elapsed())
}
