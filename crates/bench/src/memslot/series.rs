//! The figures of the kernel's patch series, for comparison.
//!
//! Source: cover letter of "KVM: Scalable memslots implementation", v5, Maciej S. Szmigiero,
//! 2021-09-20 (`cover.1632171478.git.maciej.szmigiero@oracle.com`). He measured them with
//! `memslot_perf_test` on a Xeon 8167M with the TDP MMU off. Its "32k slots" are 32 764 slots, and
//! 8194 in the map test.

use super::Test;
use serde::Serialize;

/// The source of the figures, as text.
pub const SOURCE: &str =
    "\"KVM: Scalable memslots implementation\" v5, 2021: kernel before -> after, on a Xeon 8167M";

/// Seconds per run of a test, with the kernel before and after the series.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Xeon {
    /// Seconds with the copied array.
    pub before_s: f64,
    /// Seconds with the trees.
    pub after_s: f64,
}

/// The number of slots, and the seconds before and after for each of [`Test::ALL`].
type SeriesRow = (u32, [Option<(f64, f64)>; 6]);

const TABLE: [SeriesRow; 7] = [
    (
        10,
        [
            Some((0.0192, 0.0186)),
            Some((0.0313, 0.0310)),
            Some((0.000348, 0.000351)),
            Some((0.000110, 0.000_094_8)),
            Some((0.000111, 0.000_093_3)),
            Some((0.000342, 0.000283)),
        ],
    ),
    (
        30,
        [
            Some((0.0192, 0.0190)),
            Some((0.0325, 0.0310)),
            Some((0.000373, 0.000373)),
            Some((0.000100, 0.000_086_5)),
            Some((0.000106, 0.000_091_8)),
            Some((0.000989, 0.000775)),
        ],
    ),
    (
        50,
        [
            Some((0.0192, 0.0190)),
            Some((0.0339, 0.0311)),
            Some((0.000399, 0.000395)),
            Some((0.000_099_9, 0.000_085_4)),
            Some((0.000_099_2, 0.000_082_6)),
            Some((0.00141, 0.000990)),
        ],
    ),
    (
        100,
        [
            Some((0.0195, 0.0191)),
            Some((0.0374, 0.0312)),
            Some((0.000470, 0.000447)),
            Some((0.000_095_6, 0.000_080_0)),
            Some((0.000101, 0.000_084_0)),
            Some((0.00260, 0.00174)),
        ],
    ),
    (
        509,
        [
            Some((0.0232, 0.0223)),
            Some((0.0724, 0.0315)),
            Some((0.00155, 0.000869)),
            Some((0.000101, 0.000_079_2)),
            Some((0.000108, 0.000_084_7)),
            Some((0.0135, 0.00803)),
        ],
    ),
    (8194, [Some((0.200, 0.0541)), None, None, None, None, None]),
    (
        32_764,
        [
            None,
            Some((3.88, 0.0351)),
            Some((3.88, 0.0348)),
            Some((0.00142, 0.000_078_6)),
            Some((0.00148, 0.000_088_0)),
            Some((16.1, 0.59)),
        ],
    ),
];

/// The figures of the series for `test` with `slots` slots, if it has them.
#[must_use]
pub fn xeon(test: Test, slots: u32) -> Option<Xeon> {
    let (_, row) = TABLE.iter().find(|(of, _)| *of == slots)?;
    let (before_s, after_s) = row[test as usize]?;
    Some(Xeon { before_s, after_s })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The improvement column of the cover letter, in percent. It prints less than 3 as "None".
    #[test]
    fn the_improvements_of_the_cover_letter_follow_from_its_figures() {
        let claimed = [
            (10, [3, 0, 0, 14, 16, 17]),
            (30, [0, 5, 0, 14, 13, 22]),
            (50, [0, 8, 0, 15, 17, 30]),
            (100, [0, 17, 5, 16, 17, 33]),
            (509, [4, 56, 44, 22, 21, 41]),
        ];
        for (slots, percents) in claimed {
            for (test, claimed) in Test::ALL.into_iter().zip(percents) {
                let x = xeon(test, slots).expect("a full table");
                let percent = 100.0 * (1.0 - x.after_s / x.before_s);
                if claimed == 0 {
                    assert!(percent.abs() < 3.0, "{test:?} {slots}: {percent}");
                } else {
                    assert!(
                        (percent - f64::from(claimed)).abs() < 1.0,
                        "{test:?} {slots}: {percent}"
                    );
                }
            }
        }
        assert_eq!(xeon(Test::Map, 32_764), None);
        assert_eq!(
            xeon(Test::SlotSetup, 32_764).map(|x| x.before_s),
            Some(16.1)
        );
    }
}
