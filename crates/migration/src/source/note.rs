//! The notes of pre-copy to people at the end of a pass.

use std::time::Duration;

/// The destination keeps no bytes of missing pages, and the machine has a dirty log.
pub(super) const NOT_KEPT_BUT_LOGGED: &str = "the destination keeps no bytes of missing pages, so \
    no page can be confirmed: the dirty log is used";

/// The same for a machine without a log.
pub(super) const NOT_KEPT: &str = "the destination keeps no bytes of missing pages, and this VM has \
    no dirty log: all pages follow the switch-over";

/// The facts of a note.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Whether further passes do not help.
    pub(super) vain: bool,
    /// The expected blackout and its limit, if that holds the switch-over back.
    pub(super) held_back: Option<(Duration, Duration)>,
    /// Bytes a second.
    pub(super) dirty_rate: Option<u64>,
    /// Bytes a second.
    pub(super) link_rate: Option<u64>,
    /// The operator's limit, in bytes a second.
    pub(super) max_bandwidth: Option<u64>,
    /// The pages that are left.
    pub(super) left: u64,
}

/// Returns one sentence, or `None` if all is as expected.
pub(super) fn after_pass(facts: &Facts) -> Option<String> {
    let left = facts.left;
    let why = match facts.vain {
        true => format!("pre-copy does not converge: {}", rates(facts)),
        false => format!("{left} pages are left"),
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    match facts.held_back {
        Some((blackout, limit)) => Some(format!(
            "{why}; passes go on, as the expected blackout of {:.1} ms is above the limit of {:.1} ms",
            ms(blackout),
            ms(limit)
        )),
        None => facts
            .vain
            .then(|| format!("{why}; the VM switches over, and the pages follow in post-copy")),
    }
}

fn rates(facts: &Facts) -> String {
    let dirties = mib(facts.dirty_rate.unwrap_or(0));
    let left = facts.left;
    let carries = match (facts.link_rate, facts.max_bandwidth) {
        (None, _) => "the link is not measured yet".to_owned(),
        // The link may carry more than the operator allows.
        (Some(rate), Some(limit)) if rate >= limit - limit / 5 => {
            format!("the limit allows {}", mib(limit))
        }
        (Some(rate), _) => format!("the link carries {}", mib(rate)),
    };
    format!("the guest dirties {dirties}, {carries}, {left} pages are left")
}

fn mib(rate: u64) -> String {
    format!("{:.1} MiB/s", rate as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    const VAIN: Facts = Facts {
        vain: true,
        held_back: None,
        dirty_rate: Some(200 << 20),
        link_rate: Some(100 << 20),
        max_bandwidth: None,
        left: 1234,
    };

    #[test]
    fn a_note_has_the_figures() {
        let note = after_pass(&VAIN).unwrap();
        let expected = "pre-copy does not converge: the guest dirties 200.0 MiB/s, the link \
                        carries 100.0 MiB/s, 1234 pages are left; the VM switches over, and the \
                        pages follow in post-copy";
        assert_eq!(note, expected);
        let usual = Facts {
            vain: false,
            ..VAIN
        };
        assert_eq!(after_pass(&usual), None);
    }

    #[test]
    fn a_note_names_the_limit_that_holds() {
        let ms = Duration::from_millis;
        let mut facts = Facts {
            held_back: Some((ms(5), ms(2))),
            max_bandwidth: Some(101 << 20),
            ..VAIN
        };
        let note = after_pass(&facts).unwrap();
        for part in [
            "the limit allows 101.0 MiB/s",
            "blackout of 5.0 ms is above the limit of 2.0 ms",
        ] {
            assert!(note.contains(part), "{note}");
        }
        facts.max_bandwidth = Some(900 << 20);
        let note = after_pass(&facts).unwrap();
        assert!(note.contains("the link carries"), "{note}");
        facts.vain = false;
        let note = after_pass(&facts).unwrap();
        assert!(
            note.starts_with("1234 pages are left; passes go on"),
            "{note}"
        );
    }
}
