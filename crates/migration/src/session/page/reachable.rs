//! All states that events alone lead to, with one channel and few generations.

use std::collections::HashSet;
use std::hash::Hash;

use super::super::{
    ChannelId, DestinationStage, Generation, SourceStage, ToDestination, ToSource, destination,
    source,
};
use crate::wire::Role;

const GENERATIONS: Generation = 3;
const INCARNATIONS: u32 = 2;

fn channel(incarnation: u32) -> ChannelId {
    ChannelId {
        role: Role::Urgent,
        index: 0,
        incarnation,
    }
}

/// Whether a supervisor posts the event in this state: it connects what is being dialled, and loses
/// what it has dialled. (The fuzz target `session_step` feeds all events in any order.)
pub(super) fn is_due_at_source(state: &source::Source, event: source::Event) -> bool {
    use source::{Channel, Event, Link};
    let (known, channel) = state.channels[0];
    match event {
        Event::Opened(_) | Event::UnknownSession(_) => state.link == Link::Dialling,
        Event::ChannelOpened(_, id) => known == id && channel == Channel::Dialling,
        Event::ChannelLost(_, id) => {
            known == id && matches!(channel, Channel::Dialling | Channel::Open)
        }
        Event::Received(_, ToSource::ChannelEnded { channel: id, .. }) => {
            known == id && channel != Channel::Closed
        }
        _ => true,
    }
}

/// Every event at the source.
pub(super) fn source_events(generation: Generation) -> Vec<source::Event> {
    use source::Event;
    let mut events = vec![
        Event::Opened(generation),
        Event::Lost(generation),
        Event::UnknownSession(generation),
    ];
    let mut messages = vec![ToSource::SetupAck, ToSource::Ready, ToSource::Running];
    messages.extend(
        [
            DestinationStage::Ready,
            DestinationStage::Running,
            DestinationStage::Complete,
            DestinationStage::Discarded,
        ]
        .map(ToSource::Resumed),
    );
    messages.extend([ToSource::DrainAck, ToSource::Discarded]);
    let ended = |incarnation| ToSource::ChannelEnded {
        channel: channel(incarnation),
        placed: 7,
    };
    messages.extend((1..=INCARNATIONS).map(ended));
    let received = |message| Event::Received(generation, message);
    events.extend(messages.into_iter().map(received));
    for id in (1..=INCARNATIONS).map(channel) {
        events.push(Event::ChannelOpened(generation, id));
        events.push(Event::ChannelLost(generation, id));
    }
    events.extend([
        Event::PrecopyDone,
        Event::AllAcknowledged,
        Event::Failed,
        Event::Cancel,
        Event::GiveUp,
        Event::ResumeHere,
    ]);
    events
}

pub(super) fn is_of_a_generation_at_source(event: source::Event) -> bool {
    use source::Event;
    !matches!(
        event,
        Event::PrecopyDone
            | Event::AllAcknowledged
            | Event::Failed
            | Event::Cancel
            | Event::GiveUp
            | Event::ResumeHere
    )
}

/// Every event at the destination.
pub(super) fn destination_events(generation: Generation) -> Vec<destination::Event> {
    use destination::Event;
    let mut events = vec![Event::Opened(generation), Event::Lost(generation)];
    let stages = [
        SourceStage::HandedOver,
        SourceStage::Drained,
        SourceStage::Cancelled,
    ];
    let mut messages = vec![ToDestination::Go];
    messages.extend(stages.map(ToDestination::Resume));
    messages.extend([
        ToDestination::Cancel,
        ToDestination::Drained,
        ToDestination::Complete,
        ToDestination::DiscardHeard,
        ToDestination::CloseChannel(channel(1)),
        ToDestination::Again,
    ]);
    let received = |message| Event::Received(generation, message);
    events.extend(messages.into_iter().map(received));
    for id in (1..=INCARNATIONS).map(channel) {
        events.push(Event::ChannelOpened(generation, id));
    }
    events.extend([
        Event::ChannelLost(generation, channel(1)),
        Event::Built,
        Event::Loaded,
        Event::Failed,
        Event::GiveUp,
        Event::GiveUpWhole,
    ]);
    events
}

pub(super) fn is_of_a_generation_at_destination(event: destination::Event) -> bool {
    use destination::Event;
    !matches!(
        event,
        Event::Built | Event::Loaded | Event::Failed | Event::GiveUp | Event::GiveUpWhole
    )
}

/// The states of the source, those that need the fewest events first.
pub(super) fn source() -> Vec<source::Source> {
    closure(source::Source::new([channel(1)]), |state| {
        let within = |next: &source::Source| {
            next.generation <= GENERATIONS
                && next
                    .channels
                    .iter()
                    .all(|(id, _)| id.incarnation <= INCARNATIONS)
        };
        let events = source_events(state.generation).into_iter();
        let due = events.filter(|event| is_due_at_source(state, *event));
        let next = due.map(|event| source::step(state, event).0);
        next.filter(within).collect()
    })
}

/// The states of the destination, those that need the fewest events first.
pub(super) fn destination() -> Vec<destination::Destination> {
    closure(destination::Destination::new(), |state| {
        let mut events = destination_events(state.generation);
        if state.generation < GENERATIONS {
            events.push(destination::Event::Opened(state.generation + 1));
        }
        let next = events.into_iter();
        // An acceptor lets no incarnation in twice.
        let within = |next: &destination::Destination| next.channels.len() <= 1;
        next.map(|event| destination::step(state, event).0)
            .filter(within)
            .collect()
    })
}

fn closure<S: Clone + Eq + Hash>(first: S, next: impl Fn(&S) -> Vec<S>) -> Vec<S> {
    let mut seen = HashSet::from([first.clone()]);
    let mut states = vec![first];
    let mut at = 0;
    while at < states.len() {
        for state in next(&states[at]) {
            if seen.insert(state.clone()) {
                states.push(state);
            }
        }
        at += 1;
    }
    states
}
