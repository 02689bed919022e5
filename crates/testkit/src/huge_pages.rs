//! Huge pages of the host's pool, for a test.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pools of the host.
const POOLS: &str = "/sys/kernel/mm/hugepages";

/// One test of a process at a time changes a pool.
static TURN: Mutex<()> = Mutex::new(());

/// Free pages in a pool of the host. The pool has its size back when this is dropped.
#[derive(Debug)]
pub struct HugePages {
    pool: &'static str,
    added: u64,
    _turn: MutexGuard<'static, ()>,
}

impl HugePages {
    /// Lets the pool of 2 MiB pages have at least `pages` free pages. Returns `None` if that is not
    /// possible here, after it has reported the test as skipped.
    ///
    /// # Panics
    /// If `PAGEFERRY_REQUIRE` names `hugetlb` and it is not possible.
    #[must_use]
    #[track_caller]
    pub fn at_least(pages: u64) -> Option<Self> {
        Self::of("hugepages-2048kB", pages)
    }

    /// As [`HugePages::at_least`], for pages of 1 GiB. A host can often make some while it runs.
    ///
    /// # Panics
    /// As [`HugePages::at_least`].
    #[must_use]
    #[track_caller]
    pub fn of_1_gib(pages: u64) -> Option<Self> {
        Self::of("hugepages-1048576kB", pages)
    }

    #[track_caller]
    fn of(pool: &'static str, pages: u64) -> Option<Self> {
        let number = |file: &str| number(pool, file);
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let free = || Some(number("free_hugepages")?.saturating_sub(number("resv_hugepages")?));
        let mut taken = Self {
            pool,
            added: 0,
            _turn: turn,
        };
        let (Some(before), Some(has)) = (free(), number("nr_hugepages")) else {
            super::skip("hugetlb", format_args!("the kernel has no {pool}"));
            return None;
        };
        if before < pages {
            if let Err(why) = resize(pool, has + pages - before) {
                super::skip("hugetlb", format_args!("the pool cannot be changed: {why}"));
                return None;
            }
            taken.added = number("nr_hugepages")?.saturating_sub(has);
        }
        if free()? < pages {
            super::skip("hugetlb", format_args!("the host has no memory for {pool}"));
            return None;
        }
        Some(taken)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(has) = number(self.pool, "nr_hugepages") {
            // A test that kept pages in use only leaves the pool larger.
            let _ = resize(self.pool, has.saturating_sub(self.added));
        }
    }
}

fn number(pool: &str, file: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("{POOLS}/{pool}/{file}")).ok()?;
    text.trim().parse().ok()
}

fn resize(pool: &str, pages: u64) -> std::io::Result<()> {
    fs::write(format!("{POOLS}/{pool}/nr_hugepages"), pages.to_string())
}

/// The host's policy for huge pages of shared memory: on request. It has its old value back when
/// this is dropped.
#[derive(Debug)]
pub struct AdvisedHugePages {
    before: Option<String>,
    _turn: MutexGuard<'static, ()>,
}

impl AdvisedHugePages {
    /// Lets shared memory have huge pages on request. Returns `None` if that is not possible here,
    /// after it has reported the test as skipped.
    ///
    /// # Panics
    /// If `PAGEFERRY_REQUIRE` names `thp` and it is not possible.
    #[must_use]
    #[track_caller]
    pub fn new() -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let chosen = fs::read_to_string(POLICY).ok().and_then(|text| {
            let start = text.find('[')? + 1;
            Some(text[start..start + text[start..].find(']')?].to_owned())
        });
        let before = match chosen.as_deref() {
            Some("never" | "deny") => chosen,
            Some(_) => None,
            None => {
                super::skip("thp", "the kernel has no transparent huge pages");
                return None;
            }
        };
        if before.is_some()
            && let Err(why) = fs::write(POLICY, "advise")
        {
            super::skip("thp", format_args!("the policy cannot be changed: {why}"));
            return None;
        }
        Some(Self {
            before,
            _turn: turn,
        })
    }
}

impl Drop for AdvisedHugePages {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = fs::write(POLICY, before);
        }
    }
}

/// The policy for huge pages of shared memory.
const POLICY: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
