//! All rules hold: the search finds nothing. The large searches run in `.ci/slow`.

use super::config::{Config, Lane, Start};
use super::search::search;

const TWO_BULK: &[Lane] = &[Lane::Bulk, Lane::Bulk];

fn assert_safe(name: &str, config: Config) {
    let outcome = search(&config);
    println!(
        "{name}: {} states, {} moves, depth {}, completion shown from {} states",
        outcome.states, outcome.moves, outcome.depth, outcome.completing
    );
    if let Some((what, trace)) = outcome.found {
        panic!("{name}: {what}\n{trace}");
    }
}

#[test]
fn channels_and_control_are_lost_and_sides_fail() {
    assert_safe("one bulk, one urgent, failures", Config::SMALL);
}

#[test]
fn either_of_two_bulk_channels_is_lost() {
    let config = Config {
        lanes: TWO_BULK,
        failures: false,
        ..Config::SMALL
    };
    assert_safe("two bulk", config);
}

#[test]
fn control_is_lost_twice() {
    let config = Config {
        pages: 3,
        generations: 3,
        incarnations: 1,
        failures: false,
        ..Config::SMALL
    };
    assert_safe("three pages, three generations", config);
}

#[test]
fn connections_are_lost_during_setup() {
    let config = Config {
        start: Start::Setup,
        pages: 1,
        incarnations: 1,
        ..Config::SMALL
    };
    assert_safe("from setup", config);
}

const LARGE: Config = Config {
    pages: 3,
    generations: 3,
    failures: false,
    most_states: 60_000_000,
    ..Config::SMALL
};

#[test]
#[ignore = "minutes and gigabytes: .ci/slow runs it"]
fn large_with_one_bulk_and_one_urgent_channel() {
    assert_safe("large, one bulk, one urgent", LARGE);
}

#[test]
#[ignore = "minutes and gigabytes: .ci/slow runs it"]
fn large_with_two_bulk_channels() {
    let config = Config {
        lanes: TWO_BULK,
        ..LARGE
    };
    assert_safe("large, two bulk", config);
}

#[test]
#[ignore = "minutes and gigabytes: .ci/slow runs it"]
fn large_with_failures() {
    let config = Config {
        pages: 2,
        failures: true,
        ..LARGE
    };
    assert_safe("large, failures", config);
}
