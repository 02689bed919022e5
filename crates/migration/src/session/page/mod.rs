//! Writes `docs/migration-states.md` from the two `step` functions.
//!
//! **Mechanism.** `reachable` feeds every event to every state that events alone lead to. A row of
//! the page is an event that changes something in a state. States that differ only in their
//! generation share a row; the tests check that they may.

mod reachable;
mod text;

use std::path::Path;

const FILE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../docs/migration-states.md"
);

#[test]
fn the_page_has_what_the_step_functions_do() {
    let page = text::page();
    if !Path::new(FILE).parent().is_some_and(Path::is_dir) {
        println!("SKIPPED: a package has no docs/");
        return;
    }
    if std::env::var_os("PAGEFERRY_UPDATE_DOCS").is_some() {
        std::fs::write(FILE, &page).expect("docs/ can be written");
    }
    let written = std::fs::read_to_string(FILE).unwrap_or_default();
    assert!(
        written == page,
        "docs/migration-states.md is out of date. To write it again: \
         PAGEFERRY_UPDATE_DOCS=1 cargo test -p pageferry-migration --lib session::page"
    );
}

#[test]
fn an_older_generation_changes_nothing() {
    for state in reachable::source() {
        for event in reachable::source_events(state.generation - 1) {
            if reachable::is_of_a_generation_at_source(event) {
                let (next, actions) = super::source::step(&state, event);
                assert!(next == state && actions.is_empty(), "{state:?}, {event:?}");
            }
        }
    }
    for state in reachable::destination() {
        for event in reachable::destination_events(state.generation - 1) {
            if reachable::is_of_a_generation_at_destination(event) {
                let (next, actions) = super::destination::step(&state, event);
                assert!(next == state && actions.is_empty(), "{state:?}, {event:?}");
            }
        }
    }
}
