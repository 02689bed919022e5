//! Any sequence of events at both ends of a session: no panic, an ended session stays ended, the
//! generation never goes back, and no guest runs that may not.
//!
//! Four bytes are one event: the end and the event, a generation, a detail, and a channel.

use pageferry_migration::session::{
    ChannelId, DestinationStage, Generation, SourceStage, ToDestination, ToSource, destination,
    source,
};
use pageferry_migration::wire::Role;

const EVENT_BYTES: usize = 4;

pub(crate) fn run(data: &[u8]) {
    let (events, _) = data.as_chunks::<EVENT_BYTES>();
    let mut source = AtSource::new();
    let mut destination = AtDestination::new();
    for &[event, generation, detail, id] in events {
        if event & 0x80 == 0 {
            let near = near(source.state.generation, generation);
            source.feed(source_event(event, near, detail, id));
        } else {
            let near = near(destination.state.generation, generation);
            destination.feed(destination_event(event & 0x7f, near, detail, id));
        }
    }
}

/// Mostly the newest generation, or one beside it.
fn near(newest: Generation, byte: u8) -> Generation {
    match byte % 8 {
        0 => newest.saturating_sub(1),
        1 => newest + 1,
        2 => newest + 2 + Generation::from(byte >> 3),
        _ => newest,
    }
}

fn channel(byte: u8) -> ChannelId {
    ChannelId {
        role: Role::Urgent,
        index: u16::from(byte & 1),
        incarnation: u32::from(byte >> 1) % 4 + 1,
    }
}

struct AtSource {
    state: source::Source,
    handed_over: bool,
    /// An event came that lets the guest run here after `Go`.
    may_return: bool,
}

impl AtSource {
    fn new() -> Self {
        Self {
            state: source::Source::new([channel(0), channel(1)]),
            handed_over: false,
            may_return: false,
        }
    }

    fn feed(&mut self, event: source::Event) {
        use source::{Action, End, Event, Stage};
        let (next, actions) = source::step(&self.state, event);
        assert!(next.generation >= self.state.generation);
        match (self.state.stage, next.stage) {
            (Stage::Ended(End::GivenUp), Stage::Ended(End::Forced)) => {
                assert_eq!(event, Event::ResumeHere);
            }
            (Stage::Ended(before), after) => {
                assert_eq!(after, Stage::Ended(before));
                assert!(actions.is_empty());
            }
            _ => {}
        }
        self.may_return |= matches!(
            event,
            Event::ResumeHere
                | Event::Received(
                    _,
                    ToSource::Discarded | ToSource::Resumed(DestinationStage::Discarded)
                )
        );
        if self.handed_over && actions.contains(&Action::ResumeGuest) {
            assert!(self.may_return, "{event:?}");
        }
        if actions.contains(&Action::Send(ToDestination::Go)) {
            assert!(next.has_handed_over());
            self.handed_over = true;
        }
        self.state = next;
    }
}

struct AtDestination {
    state: destination::Destination,
    /// `Go` came.
    may_start: bool,
    started: bool,
}

impl AtDestination {
    fn new() -> Self {
        Self {
            state: destination::Destination::new(),
            may_start: false,
            started: false,
        }
    }

    fn feed(&mut self, event: destination::Event) {
        use destination::{Action, Event, Stage};
        let (next, actions) = destination::step(&self.state, event);
        assert!(next.generation >= self.state.generation);
        if matches!(self.state.stage, Stage::Ended(_)) {
            assert_eq!(next.stage, self.state.stage);
            assert!(actions.is_empty());
        }
        self.may_start |= matches!(event, Event::Received(_, ToDestination::Go));
        if actions.contains(&Action::StartGuest) {
            assert!(self.may_start && !self.started);
            self.started = true;
        }
        // A copy that has run is never called discarded.
        let discarded = [
            Action::Send(ToSource::Discarded),
            Action::SendMissing(DestinationStage::Discarded),
        ];
        assert!(!self.started || !discarded.iter().any(|said| actions.contains(said)));
        self.state = next;
    }
}

fn source_event(byte: u8, generation: Generation, detail: u8, id: u8) -> source::Event {
    use source::Event;
    match byte % 13 {
        0 => Event::Opened(generation),
        1 => Event::Lost(generation),
        2 => Event::UnknownSession(generation),
        3 => Event::ChannelOpened(generation, channel(id)),
        4 => Event::ChannelLost(generation, channel(id)),
        5 => Event::PrecopyDone,
        6 => Event::AllAcknowledged,
        7 => Event::Failed,
        8 => Event::Cancel,
        9 => Event::GiveUp,
        10 => Event::ResumeHere,
        _ => Event::Received(generation, to_source(detail, id)),
    }
}

fn to_source(detail: u8, id: u8) -> ToSource {
    match detail % 10 {
        0 => ToSource::SetupAck,
        8 => ToSource::Running,
        1 => ToSource::Ready,
        2 => ToSource::Resumed(DestinationStage::Ready),
        3 => ToSource::Resumed(DestinationStage::Running),
        4 => ToSource::Resumed(DestinationStage::Complete),
        5 => ToSource::Resumed(DestinationStage::Discarded),
        6 => ToSource::DrainAck,
        7 => ToSource::Discarded,
        _ => ToSource::ChannelEnded {
            channel: channel(id),
            placed: u64::from(detail),
        },
    }
}

fn destination_event(byte: u8, generation: Generation, detail: u8, id: u8) -> destination::Event {
    use destination::Event;
    match byte % 11 {
        0 => Event::Opened(generation),
        1 => Event::Lost(generation),
        2 => Event::ChannelOpened(generation, channel(id)),
        3 => Event::ChannelLost(generation, channel(id)),
        4 => Event::Built,
        5 => Event::Loaded,
        6 => Event::Failed,
        7 => Event::GiveUp,
        8 => Event::GiveUpWhole,
        _ => Event::Received(generation, to_destination(detail, id)),
    }
}

fn to_destination(detail: u8, id: u8) -> ToDestination {
    match detail % 10 {
        0 => ToDestination::Go,
        1 => ToDestination::Resume(SourceStage::HandedOver),
        2 => ToDestination::Resume(SourceStage::Drained),
        3 => ToDestination::Resume(SourceStage::Cancelled),
        4 => ToDestination::Cancel,
        5 => ToDestination::Drained,
        6 => ToDestination::Complete,
        7 => ToDestination::DiscardHeard,
        8 => ToDestination::CloseChannel(channel(id)),
        _ => ToDestination::Again,
    }
}
