//! Huge pages of the host's pool, for a test.

use std::fs;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The pool of pages of 2 MiB.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";

/// One test of a process at a time changes the pool.
static TURN: Mutex<()> = Mutex::new(());

/// Free pages of 2 MiB in the host's pool. The pool has its size back when this is dropped.
#[derive(Debug)]
pub struct HugePages {
    added: u64,
    _turn: MutexGuard<'static, ()>,
}

impl HugePages {
    /// Lets the pool have at least `pages` free pages. Returns `None` if that is not possible here,
    /// after it has reported the test as skipped.
    ///
    /// # Panics
    /// If `PAGEFERRY_REQUIRE` names `hugetlb` and it is not possible.
    #[must_use]
    #[track_caller]
    pub fn at_least(pages: u64) -> Option<Self> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let free = || Some(number("free_hugepages")?.saturating_sub(number("resv_hugepages")?));
        let mut pool = Self {
            added: 0,
            _turn: turn,
        };
        let (Some(before), Some(has)) = (free(), number("nr_hugepages")) else {
            super::skip("hugetlb", "the kernel has no pool of 2 MiB pages");
            return None;
        };
        if before < pages {
            if let Err(why) = resize(has + pages - before) {
                super::skip("hugetlb", format_args!("the pool cannot be changed: {why}"));
                return None;
            }
            pool.added = number("nr_hugepages")?.saturating_sub(has);
        }
        if free()? < pages {
            super::skip("hugetlb", "the host has no memory for pages of 2 MiB");
            return None;
        }
        Some(pool)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(has) = number("nr_hugepages") {
            // A test that kept pages in use only leaves the pool larger.
            let _ = resize(has.saturating_sub(self.added));
        }
    }
}

fn number(file: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("{POOL}/{file}")).ok()?;
    text.trim().parse().ok()
}

fn resize(pages: u64) -> std::io::Result<()> {
    fs::write(format!("{POOL}/nr_hugepages"), pages.to_string())
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
