//! What the lines of a Linux guest say about its move.
//!
//! The first process of the guest, `lab/guest-linux/init.c`, says what the lines mean. All other
//! lines are the kernel's. A line that is malformed is ignored: text of the kernel may be in its
//! middle.

use super::text::Line;
use crate::report::GuestView;

/// What the kernel says when something is wrong with it.
const COMPLAINTS: [&str; 5] = [
    "Oops",
    "BUG:",
    "rcu: INFO",
    "Unable to handle",
    "Kernel panic",
];
/// The most faults that are kept.
const MAX_FAULTS: usize = 16;
/// How much the guest's clock and the host's may differ over a move. Each clock is read by a thread
/// that a busy host delays.
const CLOCK_MARGIN_NS: i128 = 250_000_000;
/// The ticks that are heard before the move, and again after it: about two seconds.
pub(super) const TICKS: u64 = 20;

/// The meaning of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Said {
    /// The guest's clock, and the largest gap of its timer since the last such line, nanoseconds.
    Tick { clock_ns: u64, gap_ns: u64 },
    /// Pages checked, and wrong ones.
    Load(Count),
    /// Sums of files, and wrong ones.
    Md5(Count),
    /// Something is wrong.
    Fault(String),
    /// Anything else.
    Other,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Count {
    done: u64,
    wrong: u64,
}

fn parse(line: &[u8]) -> Said {
    let text = String::from_utf8_lossy(line);
    if text.contains("PF FAIL") || COMPLAINTS.iter().any(|words| text.contains(words)) {
        // It goes to the user's terminal.
        let shown = text.trim().replace(char::is_control, "?");
        return Said::Fault(format!("the guest said '{shown}'"));
    }
    let mut words = text.split(' ');
    if words.next() != Some("PF") {
        return Said::Other;
    }
    let what = words.next();
    let mut number = || words.next()?.parse().ok();
    let (Some(first), Some(second)) = (number(), number()) else {
        return Said::Other;
    };
    let count = Count {
        done: first,
        wrong: second,
    };
    match (what, words.next()) {
        (Some("tick"), None) => Said::Tick {
            clock_ns: first,
            gap_ns: second,
        },
        (Some("load"), None) => Said::Load(count),
        (Some("md5"), None) => Said::Md5(count),
        _ => Said::Other,
    }
}

/// One kind of checks that the guest makes.
#[derive(Debug, Default)]
struct Checks {
    last: Count,
    /// The last count of the source.
    at_source: u64,
    /// A line came after the move.
    goes_on: bool,
}

impl Checks {
    fn hear(&mut self, count: Count, ended: bool) {
        self.last.done = self.last.done.max(count.done);
        self.last.wrong = self.last.wrong.max(count.wrong);
        self.goes_on |= ended && self.last.done > self.at_source;
    }
}

/// The view so far.
#[derive(Debug, Default)]
pub(super) struct Hearing {
    checks: [Checks; 2],
    /// The move's begin and end, nanoseconds of the host's clock.
    began_ns: Option<u64>,
    ended_ns: Option<u64>,
    /// A tick has come whose gap began after the move's end.
    is_after: bool,
    ticks_before: u64,
    ticks_after: u64,
    last_clock_ns: u64,
    /// The least differences of the host's clock and the guest's before and after the move. The
    /// least ones have the shortest delays in them.
    shift_before_ns: Option<i128>,
    shift_after_ns: Option<i128>,
    view: GuestView,
}

impl Hearing {
    /// Whether all kinds of work have begun.
    fn works(&self) -> bool {
        self.checks.iter().all(|checks| checks.last.done > 0)
    }

    /// Whether enough was heard before the move.
    pub(super) fn is_warm(&self) -> bool {
        self.ticks_before >= TICKS
    }

    /// Whether enough was heard after the move.
    pub(super) fn is_done(&self) -> bool {
        self.ticks_after >= TICKS && self.checks.iter().all(|checks| checks.goes_on)
    }

    /// The ticks of the period that counts now.
    pub(super) fn ticks(&self) -> u64 {
        if self.began_ns.is_none() {
            self.ticks_before
        } else {
            self.ticks_after
        }
    }

    /// The move begins.
    pub(super) fn begin(&mut self, at_ns: u64) {
        self.began_ns = Some(at_ns);
    }

    /// All of the VM is at the destination, and all lines of the source have been heard.
    pub(super) fn finish(&mut self, at_ns: u64) {
        self.ended_ns = Some(at_ns);
        for checks in &mut self.checks {
            checks.at_source = checks.last.done;
        }
    }

    /// Takes a line.
    pub(super) fn hear(&mut self, line: &Line) {
        let ended = self.ended_ns.is_some_and(|end| line.at_ns > end);
        match parse(&line.text) {
            Said::Tick { clock_ns, gap_ns } => self.tick(line.at_ns, clock_ns, gap_ns),
            Said::Load(count) => self.checks[0].hear(count, ended),
            Said::Md5(count) => self.checks[1].hear(count, ended),
            Said::Fault(what) => self.fault(what),
            Said::Other => {}
        }
    }

    fn tick(&mut self, at_ns: u64, clock_ns: u64, gap_ns: u64) {
        if clock_ns <= self.last_clock_ns {
            self.fault(format!(
                "the guest's clock went from {} to {clock_ns} ns",
                self.last_clock_ns
            ));
        }
        self.last_clock_ns = clock_ns;
        let shift = i128::from(at_ns) - i128::from(clock_ns);
        let least = |found: &mut Option<i128>| {
            *found = Some(found.map_or(shift, |found| found.min(shift)));
        };
        let (began, ended) = (self.began_ns, self.ended_ns);
        if began.is_none_or(|began| at_ns < began) {
            // The start of the work is no part of it.
            if self.works() {
                self.ticks_before += 1;
                self.view.gap_before_ns = self.view.gap_before_ns.max(gap_ns);
                least(&mut self.shift_before_ns);
            }
        } else if self.is_after {
            self.ticks_after += 1;
            self.view.gap_after_ns = self.view.gap_after_ns.max(gap_ns);
            least(&mut self.shift_after_ns);
        } else {
            // The gap of the first line after the end may have begun before it.
            self.view.gap_during_ns = self.view.gap_during_ns.max(gap_ns);
            self.is_after = ended.is_some_and(|ended| at_ns > ended);
        }
    }

    fn fault(&mut self, what: String) {
        if self.view.faults.len() < MAX_FAULTS {
            self.view.faults.push(what);
        }
    }

    /// The view, with all checks made.
    pub(super) fn view(mut self) -> GuestView {
        let [load, md5] = &self.checks;
        let (load_there, md5_there) = (
            load.last.done - load.at_source,
            md5.last.done - md5.at_source,
        );
        let view = &mut self.view;
        view.pages_checked = load.last.done;
        view.pages_checked_there = load_there;
        view.pages_wrong = load.last.wrong;
        view.md5_rounds = md5.last.done;
        view.md5_wrong = md5.last.wrong;
        if view.pages_wrong > 0 {
            let words = format!("the guest found {} wrong pages", view.pages_wrong);
            self.fault(words);
        }
        if self.view.md5_wrong > 0 {
            let words = format!(
                "the guest found {} wrong sums of files",
                self.view.md5_wrong
            );
            self.fault(words);
        }
        if load_there == 0 || md5_there == 0 {
            self.fault("the guest checked nothing at the destination".into());
        }
        match (self.shift_before_ns, self.shift_after_ns) {
            (Some(before), Some(after)) => {
                let lost = after - before;
                if lost.abs() > CLOCK_MARGIN_NS {
                    self.fault(format!(
                        "the guest's clock differs from the host's by {lost} ns since the move"
                    ));
                }
                let clamped = lost.clamp(i64::MIN.into(), i64::MAX.into());
                self.view.clock_lost_ns = clamped as i64;
            }
            _ => self.fault("the guest's timer was not heard on both sides of the move".into()),
        }
        self.view
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn only_whole_lines_of_the_guest_count() {
        let tick = |clock_ns, gap_ns| Said::Tick { clock_ns, gap_ns };
        let count = |done, wrong| Count { done, wrong };
        assert_eq!(parse(b"PF tick 12 3"), tick(12, 3));
        assert_eq!(parse(b"PF load 7 0"), Said::Load(count(7, 0)));
        assert_eq!(parse(b"PF md5 7 1"), Said::Md5(count(7, 1)));
        for other in [
            "",
            "PF",
            "PF tick",
            "PF tick 1",
            "PF tick 1 x",
            "PF tick -1 2",
            "PF tick 1 2 3",
            "PF tick 99999999999999999999 1",
            "PF tock 1 2",
            " PF tick 1 2",
            "PF tick 1 [  0.1] hello",
            "[    0.100000] random: crng init done",
        ] {
            assert_eq!(parse(other.as_bytes()), Said::Other, "{other}");
        }
        assert_eq!(parse(b"\xff\xfe\x00"), Said::Other);
    }

    #[test]
    fn complaints_are_faults_and_cannot_change_a_terminal() {
        for text in [
            "PF FAIL clone",
            "x PF FAIL clone",
            "[ 1.0] Oops [#1]",
            "[ 1.0] watchdog: BUG: soft lockup",
            "[ 1.0] rcu: INFO: rcu_sched detected stalls",
            "[ 1.0] Unable to handle kernel paging request",
            "[ 1.0] Kernel panic - not syncing",
        ] {
            let Said::Fault(words) = parse(text.as_bytes()) else {
                panic!("{text}");
            };
            assert!(words.contains(text), "{words}");
        }
        let Said::Fault(words) = parse(b"PF FAIL \x1b[2J") else {
            panic!("no fault");
        };
        assert!(!words.contains('\x1b'), "{words}");
    }

    /// Two seconds before the move, one of it, and two after. `line` may change each line.
    fn hear(mut line: impl FnMut(u64, String) -> String) -> GuestView {
        let mut hearing = Hearing::default();
        for round in 1..=52 {
            let at_ns = 1_000_000 * MS + round * 100 * MS;
            match round {
                22 => {
                    assert!(hearing.is_warm());
                    hearing.begin(at_ns - 1);
                }
                30 => hearing.finish(at_ns - 1),
                _ => {}
            }
            let gap = match round {
                ..22 => 2 * MS,
                22..=30 => 30 * MS,
                _ => 3 * MS,
            };
            for text in [
                format!("PF load {} 0", round * 1000),
                format!("PF md5 {round} 0"),
                format!("PF tick {} {gap}", round * 100 * MS),
            ] {
                let text = line(round, text).into_bytes();
                hearing.hear(&Line { at_ns, text });
            }
        }
        assert!(hearing.is_done());
        hearing.view()
    }

    #[test]
    fn a_guest_that_notices_nothing_holds() {
        let view = hear(|_, text| text);
        assert!(view.holds(), "{view:?}");
        let gaps = [view.gap_before_ns, view.gap_during_ns, view.gap_after_ns];
        // The first line at the destination counts as part of the move.
        assert_eq!(gaps, [2 * MS, 30 * MS, 3 * MS]);
        assert_eq!(
            (view.pages_checked, view.pages_checked_there),
            (52_000, 23_000)
        );
        assert_eq!((view.md5_rounds, view.md5_wrong), (52, 0));
        assert_eq!(view.clock_lost_ns, 0);
    }

    #[test]
    fn what_a_guest_notices_is_a_fault() {
        let fault = |part: &str, line: &dyn Fn(u64, String) -> String| {
            let view = hear(line);
            assert!(!view.holds());
            assert!(view.faults.iter().any(|f| f.contains(part)), "{view:?}");
            view
        };
        let changed = |from: &'static str, to: &'static str| {
            move |round: u64, text: String| {
                if round == 40 && text.starts_with(from) {
                    to.to_owned()
                } else {
                    text
                }
            }
        };
        fault("2 wrong pages", &changed("PF load", "PF load 40000 2"));
        fault("1 wrong sums", &changed("PF md5", "PF md5 40 1"));
        fault("clone", &changed("PF md5", "PF FAIL clone"));
        fault("clock went", &changed("PF tick", "PF tick 5 5"));
        let later = |by_ms: i64| {
            move |round: u64, text: String| match text.strip_prefix("PF tick ") {
                Some(_) if round > 30 => {
                    let clock = (round as i64 * 100 + by_ms) * MS as i64;
                    format!("PF tick {clock} 1")
                }
                _ => text,
            }
        };
        let view = fault("differs", &later(-300));
        assert_eq!(view.clock_lost_ns, 300 * MS as i64);
        fault("differs", &later(300));
        assert!(hear(later(-50)).holds());
    }

    #[test]
    fn a_guest_that_is_silent_at_the_destination_is_a_fault() {
        let mut hearing = Hearing::default();
        hearing.begin(1);
        hearing.finish(2);
        let view = hearing.view();
        assert_eq!(view.faults.len(), 2, "{view:?}");
    }

    #[test]
    fn faults_are_bounded() {
        let mut hearing = Hearing::default();
        for _ in 0..1000 {
            let text = b"PF FAIL".to_vec();
            hearing.hear(&Line { at_ns: 1, text });
        }
        assert_eq!(hearing.view.faults.len(), MAX_FAULTS);
    }
}
