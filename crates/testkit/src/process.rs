//! A process of its own for a test that counts what the process has, and the counts.

use std::process::Command;

/// Runs the test `name`, as `--list` shows it, in a child process, for a test that needs a process
/// of its own. Returns `false` in that child, where the test continues.
///
/// # Panics
/// If the child fails, or there is no such test.
#[must_use]
pub fn runs_in_child(name: &str) -> bool {
    const CHILD: &str = "PAGEFERRY_TEST_CHILD";
    if std::env::var_os(CHILD).is_some_and(|child| child == name) {
        return false;
    }
    let output = Command::new(std::env::current_exe().expect("a test has a program"))
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, name)
        .output()
        .expect("a test's program runs");
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name}: {}", output.status);
    assert!(text.contains("1 passed"), "there is no test {name}");
    true
}

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory)
        .expect("/proc is mounted")
        .count()
}

/// The number of open descriptors of this process.
///
/// # Panics
/// If `/proc` is not mounted. So do the other functions here.
#[must_use]
pub fn descriptors() -> usize {
    // One of them lists the others.
    entries("/proc/self/fd") - 1
}

/// The number of threads of this process.
#[must_use]
pub fn threads() -> usize {
    entries("/proc/self/task")
}

/// The memory of this process that is resident and belongs to no file, in KiB. The memory of
/// guests is not in it, unless it is private.
#[must_use]
pub fn private_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("/proc is mounted");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok());
    kib.expect("Linux has had RssAnon since 4.5")
}
