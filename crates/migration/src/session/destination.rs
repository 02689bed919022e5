//! The destination's half of the session.

use super::{ChannelId, DestinationStage, Generation, SourceStage, ToDestination, ToSource};

/// The destination's progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The machine is being built and filled. The source has the VM.
    Receiving,
    /// Everything that the guest needs to run is loaded. `Go` is due.
    Ready,
    /// The guest runs here.
    Running,
    /// Every page is here. The source may not know yet.
    Complete,
    /// The copy here was discarded after it was ready. The source may not know yet.
    Discarded,
    /// The session has ended.
    Ended(End),
}

/// The end of a session, seen from the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The whole VM is here.
    Completed,
    /// The copy here never ran, and was discarded. The guest runs at the source.
    Discarded,
    /// The guest ran here, and is paused: pages are missing.
    Incomplete,
}

/// The control channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Link {
    /// There is none.
    Down,
    /// It is open in a new generation. `Resume` is due.
    Resuming,
    /// It is open, and both sides know each other's state.
    Up,
}

/// The state of the destination.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The progress.
    pub stage: Stage,
    /// The control channel of the newest generation.
    pub link: Link,
    /// The newest generation.
    pub generation: Generation,
    /// The open channels other than control.
    pub channels: Vec<ChannelId>,
}

/// An event at the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Event {
    /// The control channel of this generation was accepted.
    Opened(Generation),
    /// The control channel of this generation was lost.
    Lost(Generation),
    /// A message came on the control channel of this generation.
    Received(Generation, ToDestination),
    /// A channel of this generation was accepted.
    ChannelOpened(Generation, ChannelId),
    /// A channel of this generation was lost.
    ChannelLost(Generation, ChannelId),
    /// The machine is built.
    Built,
    /// SwitchOver has come, and all that it announced is loaded.
    Loaded,
    /// The guest runs, or its owner may let it run.
    Started,
    /// This side cannot go on: its machine failed, or a limit is over.
    Failed,
    /// The operator ends the migration here.
    GiveUp,
    /// As `GiveUp`, and no page is missing: the VM is whole, and only the source's word is due.
    GiveUpWhole,
}

/// An action of the destination's supervisor, which carries the actions out in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Send a message on the control channel.
    Send(ToSource),
    /// Send the missing pages, then `Resumed`.
    SendMissing(DestinationStage),
    /// Close the channels of this generation and all older ones, and wait until their readers have
    /// ended.
    EndUpTo(Generation),
    /// Close this channel, wait until its reader has ended, and send `ChannelEnded`.
    EndChannel(ChannelId),
    /// Send all outstanding requests again.
    RepeatRequests,
    /// Run the guest. [`Event::Started`] follows.
    StartGuest,
    /// The source breaks the protocol: close its channels, and wait for it to open new ones.
    Refuse,
    /// The session has ended. At [`End::Incomplete`] the guest is paused first.
    End(End),
}

impl Destination {
    /// A session whose first control channel is open.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            stage: Stage::Receiving,
            link: Link::Up,
            generation: 1,
            channels: Vec::new(),
        }
    }

    /// A session that another process had brought to `stage`: as after the loss of all channels.
    #[must_use]
    pub const fn taken_over(stage: Stage) -> Self {
        Self {
            stage,
            link: Link::Down,
            generation: 1,
            channels: Vec::new(),
        }
    }

    fn end(&mut self, end: End, actions: &mut Vec<Action>) {
        self.stage = Stage::Ended(end);
        actions.push(Action::End(end));
    }

    /// Discards a copy that never ran. The source hears of it.
    fn discard(&mut self, actions: &mut Vec<Action>) {
        if self.link == Link::Up {
            actions.push(Action::Send(ToSource::Discarded));
        }
        if self.stage == Stage::Receiving {
            // The source has heard no `Ready`, so it keeps the guest by itself.
            return self.end(End::Discarded, actions);
        }
        self.stage = Stage::Discarded;
    }

    fn received(&mut self, message: ToDestination, actions: &mut Vec<Action>) {
        use ToDestination as Says;
        match (self.stage, message) {
            (Stage::Ready, Says::Go) if self.link == Link::Up => {
                self.stage = Stage::Running;
                actions.push(Action::StartGuest);
            }
            (Stage::Receiving | Stage::Ready, Says::Cancel) => {
                self.discard(actions);
            }
            (Stage::Discarded, Says::DiscardHeard) => self.end(End::Discarded, actions),
            (_, Says::Resume(said)) if self.link == Link::Resuming => {
                let here = match (self.stage, said) {
                    // It may drain before `Go` arrives: the pages overtake it.
                    (Stage::Ready, SourceStage::HandedOver | SourceStage::Drained) => {
                        DestinationStage::Ready
                    }
                    (Stage::Ready, SourceStage::Cancelled) => {
                        self.stage = Stage::Discarded;
                        DestinationStage::Discarded
                    }
                    (Stage::Running, SourceStage::HandedOver | SourceStage::Drained) => {
                        DestinationStage::Running
                    }
                    (Stage::Complete, SourceStage::HandedOver | SourceStage::Drained) => {
                        DestinationStage::Complete
                    }
                    (Stage::Discarded, _) => DestinationStage::Discarded,
                    // A source that has cancelled never sent `Go`.
                    _ => return actions.push(Action::Refuse),
                };
                self.link = Link::Up;
                actions.push(Action::SendMissing(here));
            }
            (Stage::Running | Stage::Complete, Says::Drained) if self.link == Link::Up => {
                self.stage = Stage::Complete;
                actions.push(Action::Send(ToSource::DrainAck));
            }
            (Stage::Complete, Says::Complete) => self.end(End::Completed, actions),
            (Stage::Running | Stage::Complete, Says::CloseChannel(channel)) => {
                self.end_channel(channel, actions);
            }
            (Stage::Running, Says::Again) => actions.push(Action::RepeatRequests),
            (Stage::Complete, Says::Again) => {}
            // The answer to these is on its way: `Discarded`.
            (Stage::Discarded, _) => {}
            _ => actions.push(Action::Refuse),
        }
    }

    fn end_channel(&mut self, channel: ChannelId, actions: &mut Vec<Action>) {
        let before = self.channels.len();
        self.channels.retain(|open| *open != channel);
        if self.channels.len() < before {
            actions.push(Action::EndChannel(channel));
        }
    }
}

impl Default for Destination {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the next state, and what the supervisor does. An event that means nothing in this state
/// changes nothing.
#[must_use]
pub fn step(destination: &Destination, event: Event) -> (Destination, Vec<Action>) {
    let mut next = destination.clone();
    let mut actions = Vec::new();
    apply(&mut next, event, &mut actions);
    (next, actions)
}

fn apply(here: &mut Destination, event: Event, actions: &mut Vec<Action>) {
    let now = |generation| generation == here.generation;
    match (here.stage, event) {
        (Stage::Ended(_), _) => {}
        (_, Event::Opened(generation)) if generation > here.generation => {
            if here.stage == Stage::Receiving {
                // The source keeps the guest, and has begun nothing that it could resume.
                return here.end(End::Discarded, actions);
            }
            // The readers of older channels end first: what is missing now stays missing.
            here.generation = generation;
            here.channels.clear();
            here.link = Link::Resuming;
            // A generation that is above another one is at least 1.
            actions.push(Action::EndUpTo(generation - 1));
        }
        (_, Event::Received(generation, message)) if now(generation) && here.link != Link::Down => {
            here.received(message, actions);
        }
        (_, Event::ChannelOpened(generation, channel)) if now(generation) => {
            // An attempt to open it that the source has given up.
            let same = |open: &&ChannelId| (open.role, open.index) == (channel.role, channel.index);
            let older = here.channels.iter().find(same);
            if let Some(older) = older.copied() {
                here.end_channel(older, actions);
            }
            here.channels.push(channel);
            if here.stage == Stage::Running {
                actions.push(Action::RepeatRequests);
            }
        }
        (Stage::Receiving, Event::Built) => actions.push(Action::Send(ToSource::SetupAck)),
        (Stage::Receiving, Event::Loaded) => {
            here.stage = Stage::Ready;
            actions.push(Action::Send(ToSource::Ready));
        }
        // `Resumed` says so too: a lost message does no harm.
        (Stage::Running | Stage::Complete, Event::Started) if here.link == Link::Up => {
            actions.push(Action::Send(ToSource::Running));
        }
        (Stage::Receiving, Event::Lost(generation) | Event::ChannelLost(generation, _))
            if now(generation) =>
        {
            here.end(End::Discarded, actions);
        }
        (_, Event::Lost(generation)) if now(generation) => {
            here.link = Link::Down;
            here.channels.clear();
            actions.push(Action::EndUpTo(generation));
        }
        (_, Event::ChannelLost(generation, channel)) if now(generation) => {
            here.end_channel(channel, actions);
        }
        (Stage::Receiving | Stage::Ready, Event::Failed | Event::GiveUp | Event::GiveUpWhole) => {
            here.discard(actions);
        }
        (Stage::Running, Event::Failed | Event::GiveUp) => here.end(End::Incomplete, actions),
        // A failure after the last page concerns no page.
        (Stage::Complete, Event::GiveUp)
        | (Stage::Running | Stage::Complete, Event::GiveUpWhole) => {
            here.end(End::Completed, actions);
        }
        (Stage::Discarded, Event::GiveUp | Event::GiveUpWhole) => {
            here.end(End::Discarded, actions);
        }
        _ => {}
    }
}
