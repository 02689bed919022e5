//! The closing lines of a run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::time::Duration;

/// A test of the quick run that takes longer than this is in the closing lines.
pub(super) const SLOW: Duration = Duration::from_secs(5);
/// The number of tests that `--times` prints.
const SLOWEST: usize = 20;

/// The results of the test programs so far.
pub(super) struct Report {
    built: Duration,
    passed: usize,
    /// Tests and programs that failed.
    failures: Vec<String>,
    failed: usize,
    /// The seconds of each test, with its program and name.
    tests: Vec<(f64, String)>,
    programs: Vec<(String, Duration)>,
}

impl Report {
    pub(super) const fn new(built: Duration) -> Self {
        Self {
            built,
            passed: 0,
            failures: Vec::new(),
            failed: 0,
            tests: Vec::new(),
            programs: Vec::new(),
        }
    }

    /// Reads a line that `program` printed, such as `test a::b ... ok <0.012s>`.
    pub(super) fn line(&mut self, program: &str, line: &str) {
        let Some((name, result)) = line
            .strip_prefix("test ")
            .and_then(|rest| rest.rsplit_once(" ... "))
        else {
            return;
        };
        let (result, seconds) = match result.split_once(" <") {
            Some((result, time)) => (result, time.strip_suffix("s>")),
            None => (result, None),
        };
        match result {
            "ok" => {}
            "FAILED" => self.failures.push(format!("{program}: {name}")),
            _ => return,
        }
        if let Some(seconds) = seconds.and_then(|text| text.parse().ok()) {
            self.tests.push((seconds, format!("{program}: {name}")));
        }
    }

    /// Reads a closing line of libtest: `test result: ok. 3 passed; 1 failed; 0 ignored; ..`. It
    /// counts also where the output of tests stands between their lines.
    pub(super) fn result(&mut self, line: &str) {
        let count = |what: &str| -> usize {
            let before = line.split_once(what).map_or("", |(before, _)| before);
            let number = before.rsplit([' ', '.']).next().unwrap_or_default();
            number.parse().unwrap_or(0)
        };
        self.passed += count(" passed;");
        self.failed += count(" failed;");
    }

    /// A program has run for `time`.
    pub(super) fn program(&mut self, name: &str, time: Duration) {
        self.programs.push((name.to_owned(), time));
    }

    /// A program failed, for the reason in `what`.
    pub(super) fn failed(&mut self, what: String) {
        self.failures.push(what);
    }

    pub(super) fn all_passed(&self) -> bool {
        self.failures.is_empty()
    }

    /// The closing lines. Each line of `skips` has a resource, a test and a reason, with tabs
    /// between.
    pub(super) fn text(mut self, times: bool, skips: &str, rotation: &str) -> String {
        let mut text = String::new();
        self.tests.sort_by(|a, b| b.0.total_cmp(&a.0));
        if times {
            text.push_str("Seconds of each test program:\n");
            let _ = writeln!(text, "{:8.1}  build", self.built.as_secs_f64());
            for (name, time) in &self.programs {
                let _ = writeln!(text, "{:8.1}  {name}", time.as_secs_f64());
            }
            let _ = writeln!(text, "The {SLOWEST} slowest tests, in seconds:");
            for (seconds, name) in self.tests.iter().take(SLOWEST) {
                let _ = writeln!(text, "{seconds:8.1}  {name}");
            }
        }
        let limit = SLOW.as_secs_f64();
        let slow = self.tests.iter().take_while(|test| test.0 > limit);
        if slow.clone().next().is_some() {
            let _ = writeln!(text, "SLOW, over {limit} s each:");
            for (seconds, name) in slow {
                let _ = writeln!(text, "{seconds:8.1}  {name}");
            }
        }
        let (skipped, lines) = skipped(skips);
        text.push_str(&lines);
        let _ = writeln!(text, "Seeds by PAGEFERRY_ROTATION={rotation}.");
        if !self.failures.is_empty() {
            text.push_str("FAILED:\n");
            for name in &self.failures {
                let _ = writeln!(text, "  {name}");
            }
        }
        // A test that skips a part passes, and counts once, as skipped.
        let passed = self.passed.saturating_sub(skipped);
        let _ = writeln!(
            text,
            "{passed} passed, {} failed, {skipped} skipped",
            self.failed
        );
        text
    }
}

/// The number of tests that were skipped, and the lines that say why.
fn skipped(skips: &str) -> (usize, String) {
    let mut by_resource: BTreeMap<&str, (BTreeSet<&str>, &str)> = BTreeMap::new();
    let mut tests = BTreeSet::new();
    for line in skips.lines() {
        let mut fields = line.splitn(3, '\t');
        let (Some(resource), Some(test)) = (fields.next(), fields.next()) else {
            continue;
        };
        let why = fields.next().unwrap_or_default();
        tests.insert(test);
        by_resource
            .entry(resource)
            .or_insert_with(|| (BTreeSet::new(), why))
            .0
            .insert(test);
    }
    if tests.is_empty() {
        return (0, "Nothing was skipped.\n".to_owned());
    }
    let mut text = format!("SKIPPED, in part or whole: {}\n", count(tests.len()));
    for (resource, (tests, why)) in by_resource {
        let _ = writeln!(text, "  {resource}: {}. {why}", count(tests.len()));
    }
    (tests.len(), text)
}

fn count(tests: usize) -> String {
    format!("{tests} {}", if tests == 1 { "test" } else { "tests" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_summed_up_by_resource_and_tests_are_counted_once() {
        let lines = "kvm\ta one\tno /dev/kvm\nlab\ta one\tno lab\nkvm\tb two\tno /dev/kvm\n\
                     kvm\ta one\tno /dev/kvm\n";
        let text = "SKIPPED, in part or whole: 2 tests\n  kvm: 2 tests. no /dev/kvm\n  \
                    lab: 1 test. no lab\n";
        assert_eq!(skipped(lines), (2, text.to_owned()));
    }

    #[test]
    fn a_run_without_skips_says_so_and_a_torn_line_is_passed_over() {
        for lines in ["", "kvm"] {
            assert_eq!(skipped(lines), (0, "Nothing was skipped.\n".to_owned()));
        }
    }

    #[test]
    fn the_closing_lines_count_tests_and_name_the_slow_and_the_failed() {
        let mut report = Report::new(Duration::from_secs(60));
        report.line("x it", "running 4 tests");
        report.line("x it", "test a::one ... ok <0.250s>");
        report.line("x it", "test two - should panic ... ok <7.000s>");
        report.line("x it", "test three ... FAILED <0.100s>");
        report.line("x it", "test four ... ignored, measures: nothing");
        report.line("documentation", "test src/lib.rs - (line 3) ... ok");
        report.result("test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured");
        report.result("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured");
        report.program("x it", Duration::from_secs(8));
        let text = report.text(false, "kvm\tx one\tno /dev/kvm\n", "7");
        assert_eq!(
            text,
            "SLOW, over 5 s each:\n     7.0  x it: two - should panic\nSKIPPED, in part or whole: \
             1 test\n  kvm: 1 test. no /dev/kvm\nSeeds by PAGEFERRY_ROTATION=7.\nFAILED:\n  x it: \
             three\n2 passed, 1 failed, 1 skipped\n"
        );
    }

    #[test]
    fn times_are_listed_slowest_first() {
        let mut report = Report::new(Duration::from_secs(60));
        report.line("x it", "test a ... ok <0.250s>");
        report.line("x it", "test b ... ok <2.000s>");
        report.program("x it", Duration::from_secs(3));
        let text = report.text(true, "", "0");
        let rows: Vec<_> = text.lines().map(str::trim).collect();
        assert_eq!(rows[1..3], ["60.0  build", "3.0  x it"]);
        assert_eq!(rows[4..6], ["2.0  x it: b", "0.2  x it: a"]);
    }
}
