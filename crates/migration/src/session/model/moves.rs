//! The moves that are possible next, and their effects.

use super::super::{destination, source};
use super::config::{Config, Lane};
use super::network::{Connection, Key, Message, Place, Side};
use super::world::{Sent, World};

/// One thing that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// The first message on its way arrives.
    Deliver(Key, Place),
    /// The destination accepts a connection.
    Accept(Key),
    /// The source learns that it was accepted.
    Connect(Key),
    /// An end loses a connection, with all that it has not read.
    Lose(Key, Place),
    /// The destination that the source dials does not know the session.
    Unknown(Key),
    /// The destination has built the machine.
    Build,
    /// The destination has loaded what SwitchOver announced.
    Load,
    /// Pre-copy ends.
    PrecopyDone,
    /// The destination hears that its guest runs.
    Start,
    /// The source sends the next page.
    Push(Key, usize),
    /// The source sees that every page is acknowledged.
    AllAcknowledged,
    /// A vCPU at the destination touches a missing page, or the load does.
    Touch(usize),
    /// The source cancels: an operator, or a failure before `Go`.
    Cancel,
    /// The source gives up: an operator, or a failure after `Go`.
    SourceGivesUp,
    /// The machine at the destination fails.
    DestinationFails,
    /// An operator ends the session at the destination.
    DestinationGivesUp,
}

/// Why a move happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cause {
    /// A system without faults does it sooner or later.
    Progress,
    /// Only a guest that runs does it.
    Guest,
    /// The network does it, or a rule is off.
    Fault,
    /// A machine or an operator does it.
    Failure,
}

/// Lists what can happen, in the order in which a system without faults would do it: messages and
/// losses first, and pages that nobody has asked for last.
pub(super) fn moves(config: &Config, world: &World) -> Vec<(Move, Cause)> {
    let mut moves = Vec::new();
    for connection in &world.connections {
        network(config, world, connection, &mut moves);
    }
    at_ends(config, world, &mut moves);
    moves.sort_by_key(|(step, _)| matches!(step, Move::Push(..)));
    moves
}

fn network(config: &Config, world: &World, at: &Connection, moves: &mut Vec<(Move, Cause)>) {
    let key = at.key;
    let mut may = |step, cause| moves.push((step, cause));
    match at.destination {
        Side::Open if !at.to_destination.is_empty() => {
            may(Move::Deliver(key, Place::Destination), Cause::Progress);
        }
        Side::Ghost => may(Move::Deliver(key, Place::Destination), Cause::Fault),
        _ => {}
    }
    match at.source {
        Side::Open if !at.to_source.is_empty() => {
            may(Move::Deliver(key, Place::Source), Cause::Progress);
        }
        Side::Ghost => may(Move::Deliver(key, Place::Source), Cause::Fault),
        _ => {}
    }
    if at.destination == Side::Waiting && world.admits(key) {
        // An attempt that the source has given up may still arrive.
        let cause = match at.source {
            Side::Waiting => Cause::Progress,
            _ => Cause::Fault,
        };
        may(Move::Accept(key), cause);
    }
    if at.source == Side::Waiting && at.destination == Side::Open {
        may(Move::Connect(key), Cause::Progress);
    }
    let ended = matches!(world.destination.stage, destination::Stage::Ended(_));
    let dialled = at.source == Side::Waiting && at.destination == Side::Waiting;
    if dialled && ended && key.channel.is_none() && config.rules.unknown_session {
        may(Move::Unknown(key), Cause::Progress);
    }
    losses(config, world, at, moves);
}

/// Each end may lose an open connection at any time, within the bounds of the search. Once one end
/// has closed it, the other end learns of it: after the last message, or before.
fn losses(config: &Config, world: &World, at: &Connection, moves: &mut Vec<(Move, Cause)>) {
    let key = at.key;
    let cut = match key.channel {
        None => world.source.generation < config.generations,
        Some((_, incarnation)) => incarnation < config.incarnations,
    };
    let cause = |peer: Side, unread: &[Message]| match peer {
        Side::Closed | Side::Ghost if unread.is_empty() => Some(Cause::Progress),
        Side::Closed | Side::Ghost => Some(Cause::Fault),
        _ => cut.then_some(Cause::Fault),
    };
    if matches!(at.source, Side::Open | Side::Waiting)
        && let Some(cause) = cause(at.destination, &at.to_source)
    {
        moves.push((Move::Lose(key, Place::Source), cause));
    }
    if at.destination == Side::Open
        && let Some(cause) = cause(at.source, &at.to_destination)
    {
        moves.push((Move::Lose(key, Place::Destination), cause));
    }
}

fn at_ends(config: &Config, world: &World, moves: &mut Vec<(Move, Cause)>) {
    use destination::Stage as There;
    use source::{Link, Stage};
    let mut may = |step, cause| moves.push((step, cause));
    if world.destination.stage == There::Receiving && !world.built {
        may(Move::Build, Cause::Progress);
    }
    let loading = world.loading && world.destination.stage == There::Receiving;
    if loading && !world.pages.iter().any(|page| page.requested) {
        may(Move::Load, Cause::Progress);
    }
    if world.starting {
        may(Move::Start, Cause::Progress);
    }
    if world.source.stage == Stage::Precopy {
        may(Move::PrecopyDone, Cause::Progress);
    }
    let unsent = |page: &usize| world.pages[*page].sent == Sent::Unsent;
    if world.pushing
        && let Some(page) = (0..world.pages.len()).find(unsent)
    {
        for at in &world.connections {
            if let Some((lane, _)) = at.key.channel
                && config.lanes[lane] == Lane::Bulk
                && at.source == Side::Open
            {
                may(Move::Push(at.key, page), Cause::Progress);
            }
        }
    }
    if world.acknowledged && world.source.stage == Stage::HandedOver {
        // Too early, it has no effect.
        let cause = match world.source.link {
            Link::Up => Cause::Progress,
            _ => Cause::Fault,
        };
        may(Move::AllAcknowledged, cause);
    }
    let touches = loading || world.destination.stage == There::Running;
    if touches && config.lanes.contains(&Lane::Urgent) {
        for (page, state) in world.pages.iter().enumerate() {
            if !state.placed && !state.requested {
                may(Move::Touch(page), Cause::Guest);
            }
        }
    }
    if !config.failures {
        return;
    }
    match world.source.stage {
        Stage::Setup | Stage::Precopy | Stage::SwitchOver => may(Move::Cancel, Cause::Failure),
        Stage::HandedOver | Stage::Drained | Stage::Cancelling => {
            may(Move::SourceGivesUp, Cause::Failure);
        }
        Stage::Ended(_) => {}
    }
    match world.destination.stage {
        There::Receiving | There::Ready | There::Running => {
            may(Move::DestinationFails, Cause::Failure);
        }
        There::Complete | There::Discarded => may(Move::DestinationGivesUp, Cause::Failure),
        There::Ended(_) => {}
    }
}

/// Carries one move out.
pub(super) fn apply(config: &Config, world: &World, step: Move) -> World {
    let mut next = world.clone();
    next.happens(config, step);
    next.settle(config);
    next
}

impl World {
    fn happens(&mut self, config: &Config, step: Move) {
        match step {
            Move::Deliver(key, Place::Destination) => {
                let connection = self.find(key).expect("a connection");
                let message = connection.to_destination.remove(0);
                self.delivered_to_destination(config, key, message);
            }
            Move::Deliver(key, Place::Source) => {
                let connection = self.find(key).expect("a connection");
                let message = connection.to_source.remove(0);
                self.delivered_to_source(config, key, message);
            }
            Move::Accept(key) => self.accept(config, key),
            Move::Connect(key) => self.source_connects(config, key),
            Move::Lose(key, Place::Source) => self.source_loses(config, key),
            Move::Lose(key, Place::Destination) => self.destination_loses(config, key),
            Move::Unknown(key) => {
                self.at_source(config, source::Event::UnknownSession(key.generation), 0);
            }
            Move::Build => {
                self.built = true;
                self.at_destination(config, destination::Event::Built);
            }
            Move::Load => {
                self.loading = false;
                self.at_destination(config, destination::Event::Loaded);
            }
            Move::Start => {
                self.starting = false;
                self.at_destination(config, destination::Event::Started);
            }
            Move::PrecopyDone => self.at_source(config, source::Event::PrecopyDone, 0),
            Move::Push(key, page) => self.send_page(key, page),
            Move::AllAcknowledged => {
                self.acknowledged = false;
                self.at_source(config, source::Event::AllAcknowledged, 0);
            }
            Move::Touch(page) => {
                self.pages[page].requested = true;
                self.request(config, page);
            }
            Move::Cancel => self.at_source(config, source::Event::Cancel, 0),
            Move::SourceGivesUp => {
                self.given_up = true;
                self.at_source(config, source::Event::GiveUp, 0);
            }
            Move::DestinationFails => {
                self.given_up |= self.destination_ran;
                self.at_destination(config, destination::Event::Failed);
            }
            Move::DestinationGivesUp => {
                self.given_up = true;
                let whole = self.pages.iter().all(|page| page.placed);
                self.at_destination(
                    config,
                    match whole {
                        true => destination::Event::GiveUpWhole,
                        false => destination::Event::GiveUp,
                    },
                );
            }
        }
    }

    fn delivered_to_destination(&mut self, config: &Config, key: Key, message: Message) {
        // Without the rule of generations, a message of an older one counts as one of this.
        let generation = match config.rules.generations {
            true => key.generation,
            false => self.destination.generation,
        };
        match message {
            Message::ToDestination(said) => {
                let event = destination::Event::Received(generation, said);
                self.at_destination(config, event);
            }
            Message::SwitchOver if config.foreign => self.loading = true,
            Message::SwitchOver => self.at_destination(config, destination::Event::Loaded),
            Message::Page(page) => self.place(key, page),
            Message::ToSource(..) | Message::Request(_) | Message::Receipt(_) => {
                self.breaks("a message for the source came to the destination");
            }
        }
    }

    fn delivered_to_source(&mut self, config: &Config, key: Key, message: Message) {
        let generation = match config.rules.generations {
            true => key.generation,
            false => self.source.generation,
        };
        match message {
            Message::ToSource(said, missing) => {
                let event = source::Event::Received(generation, said);
                self.at_source(config, event, missing);
            }
            Message::Request(page) => self.requested(key, page),
            Message::Receipt(placed) => self.receipt(key, placed),
            Message::ToDestination(_) | Message::SwitchOver | Message::Page(_) => {
                self.breaks("a message for the destination came to the source");
            }
        }
    }
}
