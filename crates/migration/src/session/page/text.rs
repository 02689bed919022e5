//! The page's text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use super::super::{destination, source};
use super::reachable;

const INTRODUCTION: &str = "\
<!-- Written from `crates/migration/src/session` by a test. Do not edit. -->

# States of a migration

Each end of a migration is a state and a pure function `step(state, event)`. It returns the next
state and the actions that follow. A supervisor thread at each end feeds it events and carries the
actions out, in their order. This page lists all that the two functions do.

Five rules decide who runs the VM when connections are lost:

1. *Go.* The destination says `Ready` when it has all that it needs to run the guest. The source
   answers `Go`. From then on the source never resumes the guest unless the destination says
   `Discarded`. The destination runs the guest on `Go`, never before.
2. *Kept answer.* A destination that discards its copy after `Ready` keeps that answer until the
   source has heard it.
3. *Generations.* All channels belong to a generation. When the control channel is lost, the source
   dials the next generation. Messages of older generations have no effect.
4. *Readers first.* The destination ends the readers of old channels before it says which pages are
   missing. So no page arrives that it has called missing.
5. *Answers before Go.* The source answers requests from SwitchOver on. So the load may need pages,
   and nothing is handed over before the load has succeeded. A source that takes the guest back ends
   its channels first: no thread reads memory that the guest writes.

To *run* the guest means to let it run on. A guest that its owner has paused is taken over in the
same way, and stays paused: SwitchOver says so.

No timer decides which side runs. `crates/migration/src/session/model` searches all orders of events
at both ends, and shows that each rule is needed.

## How to read the tables

- A state is a stage and the state of the control channel, its *link*. A side also knows its
  generation, and the state of every other channel.
- `→ X` is a message X that comes on the control channel. All events are those of the newest
  generation. An event that is not listed changes nothing.
- The link and the channel stay as they are where the next state does not name them.
- `Send(X)` sends a message X on the control channel. The comments in `source.rs` and
  `destination.rs` say what each action does.
- Some rows need a faulty peer. The functions answer those as well.
- `ResumeHere` is a command of an operator who knows that the destination is gone. It is the only
  event that can make the guest run twice.
";

fn source_stage(stage: source::Stage) -> &'static str {
    use source::{End, Stage};
    match stage {
        Stage::Setup => "The source offers the VM, and opens the channels. The guest runs here.",
        Stage::Precopy => "The source sends pages. The guest runs here.",
        Stage::SwitchOver => {
            "The guest stands still. All that the destination needs to run it is sent."
        }
        Stage::HandedOver => "`Go` was sent. The guest runs there, or will.",
        Stage::Drained => "As `HandedOver`, and every page is acknowledged.",
        Stage::Cancelling => {
            "The guest runs here again. The destination may hold a copy that is ready, and must \
             discard it."
        }
        Stage::Ended(End::Completed) => "The destination has the whole VM and has confirmed it.",
        Stage::Ended(End::Kept) => "The guest runs here. It was never handed over.",
        Stage::Ended(End::Returned) => {
            "The guest runs here: the destination discarded its copy, which never ran."
        }
        Stage::Ended(End::GivenUp) => "The guest was handed over. It stays paused here.",
        Stage::Ended(End::Forced) => {
            "An operator resumed the guest here, at the risk that it also runs there."
        }
    }
}

fn destination_stage(stage: destination::Stage) -> &'static str {
    use destination::{End, Stage};
    match stage {
        Stage::Receiving => "The machine is being built and filled. The source has the VM.",
        Stage::Ready => "Everything that the guest needs to run is loaded. `Go` is due.",
        Stage::Running => "The guest runs here.",
        Stage::Complete => {
            "The guest runs here, and every page is here. The source may not know yet."
        }
        Stage::Discarded => {
            "The copy here was discarded after it was ready. The source may not know yet."
        }
        Stage::Ended(End::Completed) => "The whole VM is here.",
        Stage::Ended(End::Discarded) => {
            "The copy here never ran, and was discarded. The guest runs at the source."
        }
        Stage::Ended(End::Incomplete) => "The guest ran here, and is paused: pages are missing.",
    }
}

/// An event that changes something.
#[derive(PartialEq, Eq)]
struct Row {
    event: String,
    next: String,
    actions: String,
}

/// The rows of one stage, each with the links that it holds for.
#[derive(Default)]
struct Table {
    heading: String,
    meaning: &'static str,
    rows: Vec<(Vec<String>, Row)>,
    /// The messages that are refused.
    refused: BTreeMap<String, BTreeSet<String>>,
}

impl Table {
    fn add(&mut self, link: String, row: Row) {
        let other = |(links, known): &(Vec<String>, Row)| {
            known.event == row.event && *known != row && links.contains(&link)
        };
        let twice = self.rows.iter().any(other);
        assert!(
            !twice,
            "{}, {link}: {}: two outcomes",
            self.heading, row.event
        );
        match self.rows.iter_mut().find(|(_, known)| *known == row) {
            Some((links, _)) if links.contains(&link) => {}
            Some((links, _)) => links.push(link),
            None => self.rows.push((vec![link], row)),
        }
    }

    fn write(mut self, text: &mut String) {
        write!(text, "\n### `{}`\n\n{}\n", self.heading, self.meaning).expect("a string");
        if self.rows.is_empty() && self.refused.is_empty() {
            return;
        }
        self.rows.sort_by(|(_, a), (_, b)| a.event.cmp(&b.event));
        text.push_str("\n| event | link | next state | actions |\n|---|---|---|---|\n");
        for (mut links, row) in self.rows {
            links.sort();
            writeln!(
                text,
                "| {} | {} | {} | {} |",
                row.event,
                links.join(", "),
                row.next,
                row.actions
            )
            .expect("a string");
        }
        if !self.refused.is_empty() {
            text.push_str("\n| refused | link |\n|---|---|\n");
            let mut by_links = BTreeMap::<String, Vec<String>>::new();
            for (message, links) in self.refused {
                let links: Vec<String> = links.into_iter().collect();
                by_links.entry(links.join(", ")).or_default().push(message);
            }
            for (links, messages) in by_links {
                writeln!(text, "| {} | {links} |", messages.join(", ")).expect("a string");
            }
        }
    }
}

/// Returns the table of a stage, which may be new.
fn table<'a>(tables: &'a mut Vec<Table>, heading: String, meaning: &'static str) -> &'a mut Table {
    let known = tables.iter().position(|table| table.heading == heading);
    let at = known.unwrap_or_else(|| {
        tables.push(Table {
            heading,
            meaning,
            ..Table::default()
        });
        tables.len() - 1
    });
    &mut tables[at]
}

fn list(actions: impl Iterator<Item = String>) -> String {
    let quoted: Vec<String> = actions.map(|action| format!("`{action}`")).collect();
    quoted.join(", ")
}

pub(super) fn page() -> String {
    let mut text = String::from(INTRODUCTION);
    text.push_str("\n## Source\n");
    text.push_str("\nThe first state is `Setup` with the link `Dialling`.\n");
    source_tables(&mut text);
    text.push_str("\n## Destination\n");
    text.push_str("\nThe first state is `Receiving` with the link `Up`.\n");
    destination_tables(&mut text);
    text
}

fn source_tables(text: &mut String) {
    let mut tables = Vec::new();
    for state in reachable::source() {
        let table = table(
            &mut tables,
            format!("{:?}", state.stage),
            source_stage(state.stage),
        );
        for event in reachable::source_events(state.generation) {
            let (next, actions) = source::step(&state, event);
            let due = reachable::is_due_at_source(&state, event);
            if !due || next == state && actions.is_empty() {
                continue;
            }
            let before = state.channels[0].1;
            let (event, of_channel) = source_event(event, before);
            let mut then = format!("`{:?}`", next.stage);
            if next.link != state.link {
                write!(then, ", link {:?}", next.link).expect("a string");
            }
            if of_channel && next.channels[0].1 != before {
                write!(then, ", channel {:?}", next.channels[0].1).expect("a string");
            }
            let row = Row {
                event,
                next: then,
                actions: list(actions.into_iter().map(source_action)),
            };
            table.add(format!("{:?}", state.link), row);
        }
    }
    tables.sort_by_key(|table| table.heading.starts_with("Ended"));
    for table in tables {
        table.write(text);
    }
}

/// Returns the event's name, and whether it is about a channel other than control.
fn source_event(event: source::Event, channel: source::Channel) -> (String, bool) {
    use super::super::ToSource;
    use source::Event;
    let (name, of_channel) = match event {
        Event::Opened(_) => ("`Opened`".into(), false),
        Event::Lost(_) => ("`Lost`".into(), false),
        Event::UnknownSession(_) => ("`UnknownSession`".into(), false),
        Event::ChannelOpened(..) => ("`ChannelOpened`".into(), true),
        Event::ChannelLost(..) => ("`ChannelLost`".into(), true),
        Event::Received(_, ToSource::ChannelEnded { .. }) => ("→ `ChannelEnded`".into(), true),
        Event::Received(_, message) => (format!("→ `{message:?}`"), false),
        other => (format!("`{other:?}`"), false),
    };
    if of_channel {
        (format!("{name}, channel {channel:?}"), true)
    } else {
        (name, false)
    }
}

fn source_action(action: source::Action) -> String {
    use super::super::ToDestination;
    use source::Action;
    match action {
        Action::Dial(_) => "Dial(next generation)".into(),
        Action::DialChannel(_) => "DialChannel".into(),
        Action::CloseChannel(_) => "CloseChannel".into(),
        Action::Reclaim { .. } => "Reclaim".into(),
        Action::Send(ToDestination::CloseChannel(_)) => "Send(CloseChannel)".into(),
        other => format!("{other:?}"),
    }
}

fn destination_tables(text: &mut String) {
    use destination::Event;
    let mut tables = Vec::new();
    for state in reachable::destination() {
        let table = table(
            &mut tables,
            format!("{:?}", state.stage),
            destination_stage(state.stage),
        );
        let mut events = reachable::destination_events(state.generation);
        events.push(Event::Opened(state.generation + 1));
        for event in events {
            let (next, actions) = destination::step(&state, event);
            if next == state && actions.is_empty() {
                continue;
            }
            let named = destination_event(event, !state.channels.is_empty());
            if actions == [destination::Action::Refuse] {
                assert!(next == state, "a refused message changes nothing");
                table
                    .refused
                    .entry(named)
                    .or_default()
                    .insert(format!("{:?}", state.link));
                continue;
            }
            let mut then = format!("`{:?}`", next.stage);
            if next.link != state.link {
                write!(then, ", link {:?}", next.link).expect("a string");
            }
            let row = Row {
                event: named,
                next: then,
                actions: list(actions.into_iter().map(destination_action)),
            };
            table.add(format!("{:?}", state.link), row);
        }
    }
    tables.sort_by_key(|table| table.heading.starts_with("Ended"));
    for table in tables {
        table.write(text);
    }
}

fn destination_event(event: destination::Event, is_open: bool) -> String {
    use super::super::ToDestination;
    use destination::Event;
    match event {
        Event::Opened(_) => "`Opened`, newer generation".into(),
        Event::Lost(_) => "`Lost`".into(),
        Event::ChannelOpened(..) if is_open => "`ChannelOpened`, an older one is open".into(),
        Event::ChannelOpened(..) => "`ChannelOpened`".into(),
        Event::ChannelLost(..) => "`ChannelLost`".into(),
        Event::Received(_, ToDestination::CloseChannel(_)) => "→ `CloseChannel`".into(),
        Event::Received(_, message) => format!("→ `{message:?}`"),
        other => format!("`{other:?}`"),
    }
}

fn destination_action(action: destination::Action) -> String {
    use super::super::ToSource;
    use destination::Action;
    match action {
        Action::EndUpTo(_) => "EndUpTo".into(),
        Action::EndChannel(_) => "EndChannel".into(),
        Action::Send(ToSource::ChannelEnded { .. }) => "Send(ChannelEnded)".into(),
        other => format!("{other:?}"),
    }
}
