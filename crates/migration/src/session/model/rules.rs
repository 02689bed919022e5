//! Without any one rule, the search finds a counterexample.

use super::config::{Config, Lane, Rules};
use super::search::search;

/// One page and one channel: enough for a standstill, which takes a whole search to find.
const TINY: Config = Config {
    lanes: &[Lane::Bulk],
    pages: 1,
    ..Config::SMALL
};

/// Searches without a rule. The counterexample says one of `expected`.
fn assert_needed(config: Config, rules: Rules, expected: &str) {
    let outcome = search(&Config { rules, ..config });
    let (what, trace) = outcome.found.expect("a counterexample");
    println!("{} states: {what}\n{trace}", outcome.states);
    assert_eq!(what, expected, "{trace}");
}

#[test]
fn without_generations_an_old_message_counts() {
    let rules = Rules {
        generations: false,
        ..Rules::ALL
    };
    assert_needed(
        TINY,
        rules,
        "the destination misses a page that it has acknowledged",
    );
}

#[test]
fn without_readers_first_a_page_is_placed_twice() {
    let rules = Rules {
        readers_first: false,
        ..Rules::ALL
    };
    assert_needed(
        Config::SMALL,
        rules,
        "a page is placed twice: the guest may have written it",
    );
}

#[test]
fn without_go_the_guest_runs_twice() {
    let rules = Rules {
        go: false,
        ..Rules::ALL
    };
    assert_needed(
        Config::SMALL,
        rules,
        "the guest runs at the source and has run at the destination",
    );
}

#[test]
fn without_answers_before_go_a_load_that_needs_a_page_never_ends() {
    let rules = Rules {
        answers_before_go: false,
        ..Rules::ALL
    };
    let config = Config {
        lanes: &[Lane::Urgent],
        ..TINY
    };
    assert_needed(
        config,
        rules,
        "without faults, it comes to a standstill before its end",
    );
}

#[test]
fn without_channels_first_memory_is_read_that_the_guest_writes() {
    let rules = Rules {
        channels_first: false,
        ..Rules::ALL
    };
    assert_needed(
        Config::SMALL,
        rules,
        "the guest runs at the source, where a channel may read its memory",
    );
}

#[test]
fn without_receipts_a_page_is_lost() {
    let rules = Rules {
        receipts: false,
        ..Rules::ALL
    };
    assert_needed(
        Config::SMALL,
        rules,
        "a page must be sent again, and the source has freed it",
    );
}

#[test]
fn without_a_running_guest_a_page_is_freed_that_comes_back() {
    let rules = Rules {
        free_when_running: false,
        ..Rules::ALL
    };
    assert_needed(
        Config::SMALL,
        rules,
        "the guest runs at the source, which has freed a page",
    );
}

#[test]
fn without_a_kept_answer_no_guest_runs() {
    let rules = Rules {
        kept_answer: false,
        ..Rules::ALL
    };
    assert_needed(TINY, rules, "without faults, it goes round for ever");
}

#[test]
fn without_an_answer_for_unknown_sessions_a_cancel_never_ends() {
    let rules = Rules {
        unknown_session: false,
        ..Rules::ALL
    };
    assert_needed(
        TINY,
        rules,
        "without faults, it comes to a standstill before its end",
    );
}
