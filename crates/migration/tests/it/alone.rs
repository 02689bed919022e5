//! Tests that count the threads and descriptors of their process. Each has a process of its own, by
//! [`runs_in_child`].

pub(crate) use pageferry_testkit::process::runs_in_child;
use std::time::{Duration, Instant};

/// The longest time in which everything of a test has ended.
const SOON: Duration = Duration::from_secs(20);

/// Checks that a test leaves no thread and no descriptor. The test creates it first, so that it is
/// dropped last.
pub(crate) struct LeakCheck {
    descriptors: usize,
}

impl LeakCheck {
    /// # Panics
    /// If a test of another thread may run in this process.
    pub(crate) fn start() -> Self {
        assert!(
            !runs_in_child(),
            "a test that counts calls `runs_in_child` first"
        );
        Self {
            descriptors: descriptors().len(),
        }
    }
}

impl Drop for LeakCheck {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        let until = Instant::now() + SOON;
        loop {
            let (threads, open) = (our_threads(), descriptors());
            // There may be fewer: another test may have probed KVM when this one began.
            if threads.is_empty() && open.len() <= self.descriptors {
                return;
            }
            assert!(
                Instant::now() < until,
                "left behind: threads {threads:?}; {} descriptors were open, now {open:?}",
                self.descriptors
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Returns the names of this process's vCPU and migration threads.
fn our_threads() -> Vec<String> {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .map(|name| name.trim_end().to_owned())
        .filter(|name| name.starts_with("vcpu") || name.starts_with("pf-"))
        .collect()
}

/// Returns the targets of this process's open descriptors, without the one that lists them.
fn descriptors() -> Vec<String> {
    std::fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok())
        .map(|target| target.display().to_string())
        .filter(|target| !(target.starts_with("/proc/") && target.ends_with("/fd")))
        .collect()
}
