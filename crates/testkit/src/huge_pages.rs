//! Huge pages of the host, for a test.

use std::fs::{self, File};

/// Free pages in a pool of the host. The pool has its size back when this is dropped.
#[derive(Debug)]
pub struct HugePages(
    #[expect(dead_code, reason = "its drop gives the pages back")] pageferry_hosts::HugePages,
);

impl HugePages {
    /// Lets the pool of 2 MiB pages have at least `pages` free pages. Returns `None` if that is not
    /// possible here, after it has reported the test as skipped.
    ///
    /// # Panics
    /// If `PAGEFERRY_REQUIRE` names `hugetlb` and it is not possible.
    #[must_use]
    #[track_caller]
    pub fn at_least(pages: u64) -> Option<Self> {
        Self::or_skip(pageferry_hosts::HugePages::of_2_mib(pages))
    }

    /// As [`HugePages::at_least`], for pages of 1 GiB. A host can often make some while it runs.
    ///
    /// # Panics
    /// As [`HugePages::at_least`].
    #[must_use]
    #[track_caller]
    pub fn of_1_gib(pages: u64) -> Option<Self> {
        Self::or_skip(pageferry_hosts::HugePages::of_1_gib(pages))
    }

    #[track_caller]
    fn or_skip(pages: Result<pageferry_hosts::HugePages, String>) -> Option<Self> {
        match pages {
            Ok(pages) => Some(Self(pages)),
            Err(why) => {
                super::skip("hugetlb", why);
                None
            }
        }
    }
}

/// The host's policy for huge pages of shared memory: on request. It has its old value back when
/// this is dropped.
#[derive(Debug)]
pub struct AdvisedHugePages {
    before: Option<String>,
    _turn: File,
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
        let Ok(turn) = pageferry_hosts::lock(POLICY) else {
            super::skip("thp", "the kernel has no transparent huge pages");
            return None;
        };
        let text = fs::read_to_string(POLICY).expect("the policy");
        let chosen = text.split(['[', ']']).nth(1).expect("a chosen policy");
        let before = matches!(chosen, "never" | "deny").then(|| chosen.to_owned());
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
