//! The source's half of the session.

use super::{ChannelId, DestinationStage, Generation, SourceStage, ToDestination, ToSource};

/// The source's progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The source offers the VM, and opens the channels.
    Setup,
    /// The source sends pages. The guest runs here.
    Precopy,
    /// The guest stands still. All that the destination needs to run it is sent, or will be.
    SwitchOver,
    /// `Go` was sent. The guest runs there, or will.
    HandedOver,
    /// Every page is acknowledged.
    Drained,
    /// The guest runs here again. The destination may hold a copy that is ready, and must discard
    /// it.
    Cancelling,
    /// The session has ended.
    Ended(End),
}

/// The end of a session, seen from the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The destination has the whole VM and has confirmed it.
    Completed,
    /// The guest runs here. It was never handed over.
    Kept,
    /// The guest runs here: the destination discarded its copy, which never ran.
    Returned,
    /// The guest was handed over. It stays paused here.
    GivenUp,
    /// An operator resumed the guest here, at the risk that it also runs there.
    Forced,
}

/// The control channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// It is being opened.
    Dialling,
    /// It is open in a new generation. `Resumed` is due.
    Resuming,
    /// It is open, and both sides know each other's state.
    Up,
}

/// A bulk or urgent channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Channel {
    /// Not wanted now.
    Closed,
    /// It is being opened.
    Dialling,
    /// It is open.
    Open,
    /// It was lost. The destination's `ChannelEnded` is due.
    Ending,
}

/// The state of the source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// The progress.
    pub stage: Stage,
    /// The control channel of the newest generation.
    pub link: Link,
    /// The newest generation.
    pub generation: Generation,
    /// The channels other than control, with their newest incarnations.
    pub channels: Vec<(ChannelId, Channel)>,
}

/// An event at the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The control channel of this generation is open.
    Opened(Generation),
    /// The control channel of this generation was lost.
    Lost(Generation),
    /// The control channel of this generation was refused: the destination does not know the
    /// session, or has ended it.
    UnknownSession(Generation),
    /// A message came on the control channel of this generation.
    Received(Generation, ToSource),
    /// A channel of this generation is open.
    ChannelOpened(Generation, ChannelId),
    /// A channel of this generation was lost.
    ChannelLost(Generation, ChannelId),
    /// Pre-copy is over, and the destination has its memory.
    PrecopyDone,
    /// No page is without a receipt.
    AllAcknowledged,
    /// This side cannot go on: its machine failed, or a limit is over.
    Failed,
    /// The operator cancels the migration.
    Cancel,
    /// The operator, or a limit that the operator has set, ends the attempts to reach the
    /// destination.
    GiveUp,
    /// The operator knows that the destination is gone, and resumes the guest here.
    ResumeHere,
}

/// An action of the source's supervisor, which carries the actions out in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Open the control channel of this generation, and retry until it is open.
    Dial(Generation),
    /// Send a message on the control channel.
    Send(ToDestination),
    /// Open this channel, and retry while its generation lasts.
    DialChannel(ChannelId),
    /// Close this channel and end its threads.
    CloseChannel(ChannelId),
    /// Close all channels of the generation and end their threads.
    CloseGeneration,
    /// `placed` messages of this channel count as acknowledged. The pages of the others are unsent
    /// again.
    Reclaim {
        /// The channel.
        channel: ChannelId,
        /// The number of messages.
        placed: u64,
    },
    /// The missing pages that the destination has named are the unsent ones.
    AdoptMissing,
    /// Begin pre-copy.
    StartPrecopy,
    /// Stop the guest and its devices. Answer requests for pages from now on. Send the missing
    /// pages, all states and SwitchOver.
    SwitchOver,
    /// Push the pages that nobody has requested, too. That waits until the guest runs there:
    /// before, it would compete with all that the guest waits for.
    StartPush,
    /// Resume the guest and its devices, if they stand still. No channel is open that could read
    /// their memory.
    ResumeGuest,
    /// The session has ended.
    End(End),
}

impl Source {
    /// A session that is about to open its first control channel.
    #[must_use]
    pub fn new(channels: impl IntoIterator<Item = ChannelId>) -> Self {
        let closed = |channel| (channel, Channel::Closed);
        Self {
            stage: Stage::Setup,
            link: Link::Dialling,
            generation: 1,
            channels: channels.into_iter().map(closed).collect(),
        }
    }

    /// A session that another process had handed over, as after the loss of all channels. It is
    /// about to open the control channel of `generation`.
    #[must_use]
    pub fn taken_over(
        channels: impl IntoIterator<Item = ChannelId>,
        generation: Generation,
    ) -> Self {
        Self {
            stage: Stage::HandedOver,
            generation,
            ..Self::new(channels)
        }
    }

    /// Whether the guest has been handed over. Then only `Discarded` brings it back.
    #[must_use]
    pub fn has_handed_over(&self) -> bool {
        matches!(self.stage, Stage::HandedOver | Stage::Drained)
    }

    /// Returns what `Resume` says.
    fn stage_on_wire(&self) -> SourceStage {
        match self.stage {
            Stage::HandedOver => SourceStage::HandedOver,
            Stage::Drained => SourceStage::Drained,
            _ => SourceStage::Cancelled,
        }
    }

    fn slot(&mut self, id: ChannelId) -> Option<&mut (ChannelId, Channel)> {
        let same = |(known, _): &&mut (ChannelId, Channel)| *known == id;
        self.channels.iter_mut().find(same)
    }

    /// Opens all channels, with new incarnations where one was open before.
    fn dial_channels(&mut self, actions: &mut Vec<Action>) {
        for (id, state) in &mut self.channels {
            *state = Channel::Dialling;
            actions.push(Action::DialChannel(*id));
        }
    }

    /// Ends the generation, and opens the control channel of the next.
    fn redial(&mut self, actions: &mut Vec<Action>) {
        actions.push(Action::CloseGeneration);
        for (_, state) in &mut self.channels {
            *state = Channel::Closed;
        }
        let Some(next) = self.generation.checked_add(1) else {
            // The destination takes no generation twice, so it cannot be reached any more.
            return self.give_up(actions);
        };
        self.generation = next;
        self.link = Link::Dialling;
        actions.push(Action::Dial(next));
    }

    /// Ends the session without the destination.
    fn give_up(&mut self, actions: &mut Vec<Action>) {
        let end = if self.has_handed_over() {
            End::GivenUp
        } else {
            End::Kept
        };
        self.end(end, actions);
    }

    fn end(&mut self, end: End, actions: &mut Vec<Action>) {
        actions.push(Action::CloseGeneration);
        if matches!(end, End::Kept | End::Returned | End::Forced) {
            actions.push(Action::ResumeGuest);
        }
        self.stage = Stage::Ended(end);
        actions.push(Action::End(end));
    }

    /// Ends a migration that has not been handed over.
    fn cancel(&mut self, actions: &mut Vec<Action>) {
        let up = self.link == Link::Up;
        if up {
            actions.push(Action::Send(ToDestination::Cancel));
        }
        if self.stage != Stage::SwitchOver {
            return self.end(End::Kept, actions);
        }
        // The destination may be ready. Then it waits for `Go`, until it hears this.
        self.stage = Stage::Cancelling;
        if up {
            for (id, state) in &mut self.channels {
                *state = Channel::Closed;
                actions.push(Action::CloseChannel(*id));
            }
        } else {
            self.redial(actions);
        }
        if self.stage == Stage::Cancelling {
            actions.push(Action::ResumeGuest);
        }
    }

    fn received(&mut self, message: ToSource, actions: &mut Vec<Action>) {
        use DestinationStage as There;
        match (self.stage, message) {
            (Stage::Setup, ToSource::SetupAck) => self.dial_channels(actions),
            (Stage::SwitchOver, ToSource::Ready) => {
                self.stage = Stage::HandedOver;
                actions.push(Action::Send(ToDestination::Go));
            }
            (Stage::HandedOver, ToSource::Running) => actions.push(Action::StartPush),
            (
                Stage::Setup | Stage::Precopy,
                ToSource::Discarded | ToSource::Resumed(There::Discarded),
            ) => self.end(End::Kept, actions),
            // Before `Go` the guest is kept, and after it the guest returns.
            (_, ToSource::Discarded | ToSource::Resumed(There::Discarded)) => {
                let end = if self.has_handed_over() {
                    End::Returned
                } else {
                    End::Kept
                };
                actions.push(Action::Send(ToDestination::DiscardHeard));
                self.end(end, actions);
            }
            (Stage::HandedOver | Stage::Drained, ToSource::Resumed(there))
                if self.link == Link::Resuming =>
            {
                self.link = Link::Up;
                match there {
                    There::Complete => return self.complete(actions),
                    There::Ready => actions.push(Action::Send(ToDestination::Go)),
                    There::Running | There::Discarded => {}
                }
                actions.push(Action::AdoptMissing);
                if self.stage == Stage::Drained {
                    actions.push(Action::Send(ToDestination::Drained));
                } else {
                    self.dial_channels(actions);
                    if there == There::Running {
                        actions.push(Action::StartPush);
                    }
                }
            }
            (Stage::Drained, ToSource::DrainAck) => self.complete(actions),
            (Stage::HandedOver | Stage::Drained, ToSource::ChannelEnded { channel, placed }) => {
                let drained = self.stage == Stage::Drained;
                let Some(slot) = self.slot(channel) else {
                    return;
                };
                if !next_incarnation(&mut slot.0) {
                    return self.redial(actions);
                }
                actions.extend([
                    Action::CloseChannel(channel),
                    Action::Reclaim { channel, placed },
                ]);
                if drained {
                    slot.1 = Channel::Closed;
                    return;
                }
                slot.1 = Channel::Dialling;
                actions.extend([
                    Action::Send(ToDestination::Again),
                    Action::DialChannel(slot.0),
                ]);
            }
            // Nothing else is due. It may be late: the answer to a state that has passed.
            _ => {}
        }
    }

    fn complete(&mut self, actions: &mut Vec<Action>) {
        actions.push(Action::Send(ToDestination::Complete));
        self.end(End::Completed, actions);
    }
}

/// Numbers the next connection of a channel. Returns false if the generation has no number left:
/// the next generation counts anew.
fn next_incarnation(id: &mut ChannelId) -> bool {
    let next = id.incarnation.checked_add(1);
    id.incarnation = next.unwrap_or(1);
    next.is_some()
}

/// Returns the next state, and what the supervisor does. An event that means nothing in this state
/// changes nothing.
#[must_use]
pub fn step(source: &Source, event: Event) -> (Source, Vec<Action>) {
    let mut next = source.clone();
    let mut actions = Vec::new();
    apply(&mut next, event, &mut actions);
    (next, actions)
}

fn apply(source: &mut Source, event: Event, actions: &mut Vec<Action>) {
    let now = |generation| generation == source.generation;
    match (source.stage, event) {
        (Stage::Ended(End::GivenUp), Event::ResumeHere) => source.end(End::Forced, actions),
        (Stage::Ended(_), _) => {}
        (_, Event::Opened(generation)) if now(generation) => {
            if source.stage == Stage::Setup {
                source.link = Link::Up;
            } else {
                source.link = Link::Resuming;
                let resume = ToDestination::Resume(source.stage_on_wire());
                actions.push(Action::Send(resume));
            }
        }
        (_, Event::Received(generation, message))
            if now(generation) && source.link != Link::Dialling =>
        {
            source.received(message, actions);
        }
        (Stage::Setup, Event::ChannelOpened(generation, id)) if now(generation) => {
            if let Some(slot) = source.slot(id) {
                slot.1 = Channel::Open;
            }
            if source
                .channels
                .iter()
                .all(|(_, state)| *state == Channel::Open)
            {
                source.stage = Stage::Precopy;
                actions.push(Action::StartPrecopy);
            }
        }
        (_, Event::ChannelOpened(generation, id)) if now(generation) => {
            if let Some(slot) = source.slot(id) {
                slot.1 = Channel::Open;
            }
        }
        (Stage::Precopy, Event::PrecopyDone) => {
            source.stage = Stage::SwitchOver;
            actions.push(Action::SwitchOver);
        }
        (Stage::HandedOver, Event::AllAcknowledged) if source.link == Link::Up => {
            source.stage = Stage::Drained;
            actions.push(Action::Send(ToDestination::Drained));
        }
        (Stage::HandedOver | Stage::Drained | Stage::Cancelling, Event::Lost(generation))
            if now(generation) =>
        {
            source.redial(actions);
        }
        (Stage::HandedOver | Stage::Drained, Event::ChannelLost(generation, id))
            if now(generation) =>
        {
            match source.slot(id) {
                Some(slot) if slot.1 == Channel::Open => {
                    slot.1 = Channel::Ending;
                    actions.push(Action::CloseChannel(id));
                    actions.push(Action::Send(ToDestination::CloseChannel(id)));
                }
                // The destination may have accepted it. So the next attempt has a new number.
                Some(slot) if slot.1 == Channel::Dialling => {
                    if !next_incarnation(&mut slot.0) {
                        return source.redial(actions);
                    }
                    actions.push(Action::DialChannel(slot.0));
                }
                _ => {}
            }
        }
        (Stage::Setup | Stage::Precopy | Stage::SwitchOver, Event::Lost(generation))
            if now(generation) =>
        {
            source.link = Link::Dialling;
            source.cancel(actions);
        }
        (Stage::Setup | Stage::Precopy | Stage::SwitchOver, Event::ChannelLost(generation, _))
            if now(generation) =>
        {
            source.cancel(actions);
        }
        (Stage::Setup | Stage::Precopy | Stage::SwitchOver, Event::Failed | Event::Cancel) => {
            source.cancel(actions);
        }
        // It has discarded what it had, and was never told to run it.
        (Stage::Cancelling, Event::UnknownSession(generation)) if now(generation) => {
            source.end(End::Kept, actions);
        }
        (Stage::Cancelling, Event::GiveUp) => source.end(End::Kept, actions),
        (Stage::HandedOver | Stage::Drained, Event::GiveUp | Event::Failed) => {
            source.end(End::GivenUp, actions);
        }
        (Stage::HandedOver | Stage::Drained, Event::ResumeHere) => {
            source.end(End::Forced, actions);
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Role;

    const BULK: ChannelId = ChannelId {
        role: Role::Bulk,
        index: 0,
        incarnation: u32::MAX,
    };

    fn source(stage: Stage, generation: Generation, channel: Channel) -> Source {
        Source {
            stage,
            link: Link::Up,
            generation,
            channels: vec![(BULK, channel)],
        }
    }

    #[test]
    fn a_generation_follows_when_a_channel_has_used_its_last_number() {
        let ended = ToSource::ChannelEnded {
            channel: BULK,
            placed: 3,
        };
        for (channel, event) in [
            (Channel::Ending, Event::Received(7, ended)),
            (Channel::Dialling, Event::ChannelLost(7, BULK)),
        ] {
            let (next, actions) = step(&source(Stage::HandedOver, 7, channel), event);
            assert_eq!((next.generation, next.link), (8, Link::Dialling));
            assert_eq!(next.channels[0].0.incarnation, 1);
            assert_eq!(actions, [Action::CloseGeneration, Action::Dial(8)]);
        }
    }

    #[test]
    fn a_source_that_has_used_its_last_generation_gives_up_as_if_an_operator_did() {
        for (stage, end) in [
            (Stage::HandedOver, End::GivenUp),
            (Stage::Drained, End::GivenUp),
            (Stage::Cancelling, End::Kept),
        ] {
            let lost = Event::Lost(u32::MAX);
            let (next, actions) = step(&source(stage, u32::MAX, Channel::Open), lost);
            assert_eq!(next.stage, Stage::Ended(end));
            let resumes = actions.contains(&Action::ResumeGuest);
            assert_eq!(resumes, end == End::Kept, "{stage:?}");
            // An operator who knows better may still resume the guest here.
            let (forced, _) = step(&next, Event::ResumeHere);
            let may = end == End::GivenUp;
            assert_eq!(forced.stage == Stage::Ended(End::Forced), may);
        }
    }
}
