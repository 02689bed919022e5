//! A process of its own for a test that counts what the process has, or that changes what all
//! threads of a process share. And the counts.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The variable that names the test in a child process.
const CHILD: &str = "PAGEFERRY_TEST_CHILD";

/// The longest time that a child may take. Its test has limits of its own, which are shorter.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs the calling test in a child process, alone, and returns `true` after it. Returns `false` in
/// that child, where the test continues. A test calls it first:
///
/// ```no_run
/// # use pageferry_testkit::process::runs_in_child;
/// // #[test]
/// fn nothing_is_left_behind() {
///     if runs_in_child() {
///         return;
///     }
///     // Here the test has a process of its own.
/// }
/// ```
///
/// Libtest names the thread of each test. With one test thread there is no such name and no other
/// test beside, so the test continues in this process.
///
/// # Panics
/// If the test fails in the child, or takes longer than 15 minutes.
#[must_use]
pub fn runs_in_child() -> bool {
    let thread = std::thread::current();
    let Some(name) = thread.name().filter(|name| *name != "main") else {
        return false;
    };
    if std::env::var_os(CHILD).is_some_and(|child| child == name) {
        return false;
    }
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--include-ignored"])
        .env(CHILD, name)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (stdout, stderr) = (read(child.stdout.take()), read(child.stderr.take()));
    let ended = wait(&mut child);
    let text = stdout.join().unwrap();
    println!("{text}{}", stderr.join().unwrap());
    assert!(
        ended.is_some_and(|success| success),
        "{name} failed in its own process"
    );
    assert!(text.contains("1 passed"), "there is no test {name}");
    true
}

fn read(from: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.unwrap().read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Whether the child has succeeded, or `None` if it had to be killed.
fn wait(child: &mut Child) -> Option<bool> {
    let until = Instant::now() + LIMIT;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status.success());
        }
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
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
