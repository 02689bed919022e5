//! The line of progress on a terminal: what matters most comes first, and the rest as it fits.

use super::Rates;
use pageferry_harness::size::human;
use pageferry_migration::Phase;
use std::time::{Duration, Instant};

/// The widest and the narrowest bar.
const BAR: (usize, usize) = (40, 10);

/// The name of a phase in a narrow line.
pub(super) fn short(phase: Phase) -> String {
    match phase {
        Phase::Precopy { pass } => format!("{} {pass}", phase.name()),
        _ => phase.name().to_owned(),
    }
}

/// What is known of the current step.
#[derive(Debug, Default)]
pub(super) struct Line {
    step: String,
    began: Option<Instant>,
    /// Units done, and all.
    pub(super) progress: Option<(u64, u64)>,
    /// Something else, shown where there is room.
    pub(super) note: String,
}

impl Line {
    /// A step that begins.
    pub(super) fn of(step: String) -> Self {
        Self {
            step,
            began: Some(Instant::now()),
            ..Self::default()
        }
    }

    /// The line, in at most `width` columns. The step and its percents are what a narrow terminal
    /// shows, then the time left, the rate, the time so far, a bar, and the note.
    pub(super) fn show(&self, rates: Option<Rates>, width: usize) -> String {
        self.lay_out(rates, self.began.map(|began| began.elapsed()), width)
    }

    fn lay_out(&self, rates: Option<Rates>, elapsed: Option<Duration>, width: usize) -> String {
        let share = self.progress.filter(|&(_, total)| total > 0);
        let share = share.map(|(done, total)| done.min(total) as f64 / total as f64);
        let percent = share.map(|share| format!("{:.0}%", share * 100.0));
        let rate = rates.map(|rates| format!("{}/s", human(rates.bytes)));
        let left = rates.and_then(|rates| rates.left);
        let left = left.map(|left| format!("{} left", brief(left)));
        let elapsed = elapsed.map(|elapsed| format!("({})", brief(elapsed)));
        let note = Some(self.note.clone()).filter(|note| !note.is_empty());
        let mut room = width.saturating_sub(self.step.chars().count());
        // By importance: a part is left out if it does not fit.
        let mut fits = |part: Option<String>| {
            let part = part?;
            let columns = part.chars().count() + 1;
            room = room.checked_sub(columns)?;
            Some(part)
        };
        let percent = fits(percent);
        let left = fits(left);
        let rate = fits(rate);
        let elapsed = fits(elapsed);
        let note = fits(note);
        let bar = share.and_then(|share| bar(share, room.checked_sub(3)?));
        let step: String = self.step.chars().take(width).collect();
        let parts = [Some(step), bar, percent, rate, left, elapsed, note];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        parts.join(" ")
    }
}

/// A bar in at most so many columns between its ends.
fn bar(share: f64, columns: usize) -> Option<String> {
    let (most, least) = BAR;
    let columns = columns.min(most);
    let done = (share * columns as f64) as usize;
    (columns >= least).then(|| format!("[{}{}]", "=".repeat(done), " ".repeat(columns - done)))
}

/// A time in two or three digits. It is rounded up: 0 s is over.
fn brief(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    match seconds {
        0..=99 => format!("{seconds} s"),
        100..=5999 => format!("{} min", seconds.div_ceil(60)),
        _ => format!("{} h", seconds.div_ceil(3600)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line() -> Line {
        Line {
            step: short(Phase::Precopy { pass: 12 }),
            progress: Some((45, 100)),
            note: "the destination has allocated 50 % of the memory".into(),
            ..Line::default()
        }
    }

    /// The line of 12 s so far, with 3 to go.
    fn at(width: usize) -> String {
        let rates = Rates {
            bytes: 112 << 20,
            left: Some(Duration::from_millis(2100)),
        };
        line().lay_out(Some(rates), Some(Duration::from_secs(12)), width)
    }

    #[test]
    fn the_line_has_what_fits() {
        // A terminal of 40 columns has 37 beside the spinner.
        assert_eq!(at(37), "pre-copy 12 45% 112 MiB/s 3 s left");
        assert_eq!(at(26), "pre-copy 12 45% 3 s left");
        assert_eq!(at(15), "pre-copy 12 45%");
        assert_eq!(at(11), "pre-copy 12");
        assert_eq!(at(5), "pre-c");
        assert_eq!(at(0), "");
        assert_eq!(
            at(70),
            "pre-copy 12 [===========               ] 45% 112 MiB/s 3 s left (12 s)"
        );
        assert!(at(140).ends_with("% of the memory"), "{}", at(140));
    }

    #[test]
    fn no_line_is_wider_than_its_terminal() {
        for width in 0..200 {
            assert!(
                at(width).chars().count() <= width,
                "{width}: {:?}",
                at(width)
            );
        }
    }

    #[test]
    fn the_longest_line_of_a_move_fits_forty_columns() {
        let rates = Rates {
            bytes: 1023 << 20,
            left: Some(Duration::from_secs(99)),
        };
        for phase in [
            Phase::Precopy { pass: 9 },
            Phase::Postcopy,
            Phase::Completion,
        ] {
            let line = Line {
                step: short(phase),
                progress: Some((1, 1)),
                ..Line::default()
            };
            let shown = line.lay_out(Some(rates), None, 37);
            assert!(shown.ends_with("s left"), "{shown}");
            assert!(shown.contains("1023 MiB/s"), "{shown}");
        }
    }

    #[test]
    fn times_are_short() {
        let brief = |seconds| brief(Duration::from_secs(seconds));
        assert_eq!(brief(0), "0 s");
        assert_eq!(brief(99), "99 s");
        assert_eq!(brief(100), "2 min");
        assert_eq!(brief(5999), "100 min");
        assert_eq!(brief(6000), "2 h");
    }
}
