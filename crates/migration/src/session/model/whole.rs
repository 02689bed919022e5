//! All rules hold: the search finds nothing. The searches here are parts of the large ones, which
//! `.ci/slow` runs.

use super::config::{Config, Lane, Start};
use super::search::search;

const TWO_BULK: &[Lane] = &[Lane::Bulk, Lane::Bulk];

/// Checks that a search finds nothing wrong. Returns the number of its states.
fn assert_safe(name: &str, config: Config) -> usize {
    let outcome = search(&config);
    println!(
        "{name}: {} states, {} moves, depth {}, completion shown from {} states",
        outcome.states, outcome.moves, outcome.depth, outcome.completing
    );
    if let Some((what, trace)) = outcome.found {
        panic!("{name}: {what}\n{trace}");
    }
    outcome.states
}

#[test]
fn channels_and_control_are_lost_and_sides_fail() {
    let config = Config {
        incarnations: 1,
        ..Config::SMALL
    };
    assert_eq!(
        assert_safe("one bulk, one urgent, failures", config),
        36_439
    );
}

#[test]
fn either_of_two_bulk_channels_is_lost() {
    let config = Config {
        lanes: TWO_BULK,
        generations: 1,
        failures: false,
        ..Config::SMALL
    };
    assert_eq!(assert_safe("two bulk", config), 12_734);
}

#[test]
fn control_is_lost_twice() {
    let config = Config {
        generations: 3,
        incarnations: 1,
        failures: false,
        ..Config::SMALL
    };
    assert_eq!(assert_safe("three generations", config), 60_742);
}

#[test]
fn connections_are_lost_during_setup() {
    let config = Config {
        start: Start::Setup,
        pages: 1,
        incarnations: 1,
        ..Config::SMALL
    };
    assert_eq!(assert_safe("from setup", config), 10_146);
}

const LARGE: Config = Config {
    pages: 3,
    generations: 3,
    // The small searches have another VMM.
    foreign: false,
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
