//! Pages that the pools of huge pages have for a while.

use rustix::fs::{FlockOperation, flock};
use rustix::io::retry_on_intr;
use std::fs::{self, File};

/// The pools of the machine.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// Free pages in a pool of the machine. The pool has its size back when this is dropped.
#[derive(Debug)]
pub struct HugePages {
    pool: &'static str,
    added: u64,
    /// Only one holder on this machine changes the pools.
    _turn: File,
}

impl HugePages {
    /// Lets the pool of 2 MiB pages have at least `pages` free pages.
    ///
    /// # Errors
    /// The reason why this is not possible here, as a clause.
    pub fn of_2_mib(pages: u64) -> Result<Self, String> {
        Self::of("hugepages-2048kB", pages)
    }

    /// As [`HugePages::of_2_mib`], for pages of 1 GiB. A machine can often make some while it runs.
    ///
    /// # Errors
    /// As [`HugePages::of_2_mib`].
    pub fn of_1_gib(pages: u64) -> Result<Self, String> {
        Self::of("hugepages-1048576kB", pages)
    }

    fn of(pool: &'static str, pages: u64) -> Result<Self, String> {
        let turn = lock(POOLS).map_err(|why| format!("the pools cannot be locked: {why}"))?;
        let number =
            |file: &str| number(pool, file).ok_or_else(|| format!("the kernel has no pool {pool}"));
        let free = || -> Result<u64, String> {
            Ok(number("free_hugepages")?.saturating_sub(number("resv_hugepages")?))
        };
        let (before, has) = (free()?, number("nr_hugepages")?);
        let mut taken = Self {
            pool,
            added: 0,
            _turn: turn,
        };
        if before < pages {
            resize(pool, has + pages - before)
                .map_err(|why| format!("the pool {pool} cannot be changed: {why}"))?;
            taken.added = number("nr_hugepages")?.saturating_sub(has);
        }
        if free()? < pages {
            return Err(format!(
                "the machine has no memory for {pages} pages of {pool}"
            ));
        }
        Ok(taken)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(has) = number(self.pool, "nr_hugepages") {
            // Pages that are still in use only leave the pool larger.
            let _ = resize(self.pool, has.saturating_sub(self.added));
        }
    }
}

/// Waits until no other thread or process of the machine has this lock.
///
/// # Errors
/// If there is no such file.
pub fn lock(path: &str) -> std::io::Result<File> {
    let file = File::open(path)?;
    retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
    Ok(file)
}

fn number(pool: &str, file: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("{POOLS}/{pool}/{file}")).ok()?;
    text.trim().parse().ok()
}

fn resize(pool: &str, pages: u64) -> std::io::Result<()> {
    fs::write(format!("{POOLS}/{pool}/nr_hugepages"), pages.to_string())
}
