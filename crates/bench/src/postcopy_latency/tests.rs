//! Verdicts and rows of made-up rounds.

use super::noise::Noise;
use super::round::{Measured, Round};
use super::rows;
use super::setting::{Column, HostPage, Mode, flags};
use super::stalls::Stalls;
use crate::output::Output;
use crate::row::Row;
use pageferry_machine::Delivery;

fn column(vcpus: u32, host_page: HostPage) -> Column {
    Column {
        host_page,
        vcpus,
        congestion: "cubic".into(),
        link: None,
        bulk: 1,
        queue: None,
    }
}

/// The output of one column.
fn reported(rate: &str, column: &Column, rounds: &[Round]) -> Output {
    let mut output = Output::default();
    rows::add(&mut output, &flags(&["--rate", rate]), column, rounds);
    output
}

/// The rows of a mode in a case, without those of aims.
fn plain<'a>(output: &'a Output, case: &'a str, mode: &'a str) -> impl Iterator<Item = &'a Row> {
    let of = output
        .rows
        .iter()
        .filter(move |row| row.case == case && row.target.is_none());
    of.filter(move |row| row.subject.starts_with(mode))
}

/// A row whose stalls all last as long.
fn row(us: u64, pushed: Option<(f64, f64)>) -> Measured {
    Measured {
        stalls: Stalls::of([(us * 1000, 10)]),
        link_busy_percent: pushed.map(|pushed| pushed.0),
        total_s: pushed.map(|pushed| pushed.1),
        bulk_rate: None,
        delivery: Some(Delivery::Exit),
    }
}

/// A round with the mean of preempt, in microseconds.
fn round(preempt_us: u64, others_percent: f64) -> Round {
    let noise = Noise {
        others_percent,
        sleeper_p99_us: 80.0,
    };
    let rows = vec![
        (Mode::Vanilla, row(9000, Some((95.0, 2.0)))),
        (Mode::Preempt, row(preempt_us, Some((94.0, 2.1)))),
        (Mode::NoPrefetch, row(preempt_us, Some((94.0, 2.1)))),
        (Mode::Idle, row(120, None)),
        (Mode::Floor, row(100, None)),
    ];
    Round { noise, rows }
}

fn verdicts(column: &Column, rounds: &[Round]) -> Vec<Option<bool>> {
    let output = reported("1gbit", column, rounds);
    let aims = output.rows.iter().filter(|row| row.target.is_some());
    aims.map(|row| row.met).collect()
}

#[test]
fn aims_are_judged_by_medians_over_the_rounds_that_count() {
    let one = column(1, HostPage::Size4K);
    let quiet = |us| round(us, 2.0);
    let good = vec![quiet(200); 5];
    assert_eq!(verdicts(&one, &good), [Some(true); 7]);
    // Two bad rounds of seven do not change a median.
    let mixed = [good, vec![quiet(5000); 2]].concat();
    assert_eq!(verdicts(&one, &mixed), [Some(true); 7]);
    let bad = verdicts(&one, &vec![quiet(3000); 9]);
    let (missed, met) = (Some(false), Some(true));
    assert_eq!(bad, [missed, missed, missed, missed, met, met, met]);
}

#[test]
fn too_few_quiet_rounds_give_no_verdict_and_show_all_rounds() {
    let one = column(1, HostPage::Size4K);
    let rounds = [vec![round(200, 2.0); 4], vec![round(300, 40.0); 5]].concat();
    assert_eq!(verdicts(&one, &rounds), [None; 7]);
    let output = reported("1gbit", &one, &rounds);
    let mean = plain(&output, "latency.mean", "preempt")
        .next()
        .expect("a row");
    assert_eq!(mean.samples, 9);
    assert!(
        output.notes[0].contains("4 of 9 rounds count, too few"),
        "{:?}",
        output.notes
    );
}

#[test]
fn noisy_rounds_are_left_out_of_the_figures() {
    let rounds = [vec![round(200, 2.0); 5], vec![round(900, 11.0); 4]].concat();
    let output = reported("1gbit", &column(1, HostPage::Size4K), &rounds);
    let mean = plain(&output, "latency.mean", "preempt")
        .next()
        .expect("a row");
    assert_eq!((mean.max, mean.samples), (200.0, 5));
}

#[test]
fn each_column_has_the_aims_of_its_conditions() {
    let count =
        |vcpus, host_page| verdicts(&column(vcpus, host_page), &vec![round(150, 0.0); 5]).len();
    assert_eq!(count(1, HostPage::Size4K), 7);
    assert_eq!(count(16, HostPage::Size4K), 6);
    assert_eq!(count(1, HostPage::Size2M), 3);
    assert_eq!(count(4, HostPage::Size4K), 0);
    let one = column(1, HostPage::Size4K);
    let slow = reported("100mbit", &one, &vec![round(1, 0.0); 9]);
    assert!(
        slow.rows.iter().all(|row| row.target.is_none()),
        "they are for 1 Gbit/s"
    );
}

#[test]
fn every_mode_has_its_rows() {
    let rounds = vec![round(200, 2.0); 5];
    let output = reported("1gbit", &column(1, HostPage::Size4K), &rounds);
    for mode in ["vanilla", "preempt", "idle", "floor"] {
        let rows = plain(&output, "latency.p99", mode);
        assert_eq!(rows.count(), 1, "{mode}");
    }
    let total = plain(&output, "latency.total", "preempt")
        .next()
        .expect("a row");
    assert_eq!(total.figure(), "2.10 s");
    assert_eq!(plain(&output, "latency.total", "idle").count(), 0);
}

#[test]
fn qemu_has_rows_and_verdicts_where_it_was_measured() {
    let one = column(1, HostPage::Size4K);
    let beside = |qemu_us| {
        let mut round = round(200, 2.0);
        round
            .rows
            .push((Mode::QemuPreemptNoDelay, row(qemu_us, Some((96.0, 2.0)))));
        round
    };
    let ahead = verdicts(&one, &vec![beside(3000); 5]);
    assert_eq!(
        ahead.len(),
        verdicts(&one, &vec![round(200, 2.0); 5]).len() + 3
    );
    assert_eq!(ahead.iter().filter(|met| **met == Some(false)).count(), 0);
    // QEMU with shorter stalls, none above 2 ms.
    let behind = verdicts(&one, &vec![beside(100); 5]);
    assert_eq!(behind.iter().filter(|met| **met == Some(false)).count(), 2);
    let output = reported("1gbit", &one, &vec![beside(3000); 5]);
    assert_eq!(
        plain(&output, "latency.mean", "qemu preempt nodelay").count(),
        1
    );
}
