//! The state of everything: both ends, their guests and pages, and the network.

use super::super::{ChannelId, Generation, destination, source};
use super::config::{Config, Lane, Start};
use super::network::{Connection, Key, PageSet, Side};
use crate::wire::Role;

/// The role of a bulk channel. The session treats all roles alike.
const BULK: Role = Role::Bulk;

/// Where a page is, for the source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sent {
    Unsent,
    /// Under way on a channel: its lane, incarnation, and the number of its message.
    InFlight(usize, u32, u64),
    Acknowledged,
}

/// One page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Page {
    pub sent: Sent,
    /// The source has given its memory back.
    pub freed: bool,
    /// The destination has it. The guest there may have written it.
    pub placed: bool,
    /// A vCPU at the destination waits for it.
    pub requested: bool,
}

/// The state of everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub source: source::Source,
    pub destination: destination::Destination,
    pub source_guest: bool,
    pub destination_ran: bool,
    /// The source answers requests.
    pub answers: bool,
    /// The source sends pages that nobody has requested.
    pub pushing: bool,
    /// `AllAcknowledged` is to be posted.
    pub acknowledged: bool,
    /// The destination has posted `Built`.
    pub built: bool,
    /// SwitchOver has come, and what it announced is being loaded.
    pub loading: bool,
    /// The guest was let run, and nobody has said yet that it runs.
    pub starting: bool,
    pub pages: Vec<Page>,
    pub connections: Vec<Connection>,
    /// The newest incarnation of each lane that the destination has accepted in its generation.
    pub accepted: Vec<u32>,
    /// An operator, or a failure after `Go`, has ended the session at one end.
    pub given_up: bool,
    /// The rule that was broken.
    pub broken: Option<&'static str>,
}

impl World {
    pub(super) fn new(config: &Config) -> Self {
        let ids = (0..config.lanes.len()).map(|lane| channel_id(config, lane, 1));
        let missing = Page {
            sent: Sent::Unsent,
            freed: false,
            placed: false,
            requested: false,
        };
        let mut world = Self {
            source: source::Source::new(ids.clone()),
            destination: destination::Destination::new(),
            source_guest: true,
            destination_ran: false,
            answers: false,
            pushing: false,
            acknowledged: false,
            built: config.start == Start::Precopy,
            loading: false,
            starting: false,
            pages: vec![missing; config.pages],
            connections: vec![Connection::new(control(1), Side::Open, Side::Open)],
            accepted: vec![0; config.lanes.len()],
            given_up: false,
            broken: None,
        };
        world.source.link = source::Link::Up;
        if config.start == Start::Precopy {
            world.source.stage = source::Stage::Precopy;
            for (lane, id) in ids.enumerate() {
                world.source.channels[lane].1 = source::Channel::Open;
                world.destination.channels.push(id);
                world.accepted[lane] = 1;
                let key = Key {
                    generation: 1,
                    channel: Some((lane, 1)),
                };
                world
                    .connections
                    .push(Connection::new(key, Side::Open, Side::Open));
            }
        }
        world
    }

    /// Notes a broken property. The first one counts.
    pub(super) fn breaks(&mut self, what: &'static str) {
        self.broken.get_or_insert(what);
    }

    pub(super) fn find(&mut self, key: Key) -> Option<&mut Connection> {
        self.connections.iter_mut().find(|each| each.key == key)
    }

    /// The pages that the destination has not.
    pub(super) fn missing(&self) -> PageSet {
        let bit = |(page, state): (usize, &Page)| if state.placed { 0 } else { 1 << page };
        self.pages.iter().enumerate().map(bit).sum()
    }

    pub(super) fn all_acknowledged(&self) -> bool {
        self.pages
            .iter()
            .all(|page| page.sent == Sent::Acknowledged)
    }

    /// Whether the destination accepts a connection: the rule of generations and incarnations.
    pub(super) fn admits(&self, key: Key) -> bool {
        let here = &self.destination;
        if matches!(here.stage, destination::Stage::Ended(_)) {
            return false;
        }
        match key.channel {
            None => key.generation > here.generation,
            Some((lane, incarnation)) => {
                key.generation == here.generation && incarnation > self.accepted[lane]
            }
        }
    }

    /// Frees what may be freed, and forgets connections that can do nothing any more. Then checks
    /// the properties that hold in each state.
    pub(super) fn settle(&mut self, config: &Config) {
        let rules = config.rules;
        let running = self.destination_ran || !rules.free_when_running;
        for page in &mut self.pages {
            let unneeded = match page.sent {
                Sent::Unsent => false,
                Sent::InFlight(..) => !rules.receipts,
                Sent::Acknowledged => true,
            };
            page.freed |= unneeded && running;
        }
        for each in &mut self.connections {
            each.settle();
        }
        let admitted: Vec<bool> = self
            .connections
            .iter()
            .map(|each| self.admits(each.key))
            .collect();
        let mut admitted = admitted.into_iter();
        self.connections.retain(|each| {
            let admitted = admitted.next() == Some(true);
            each.source != Side::Closed
                || match each.destination {
                    Side::Waiting => admitted,
                    Side::Open | Side::Ghost => true,
                    Side::Closed => false,
                }
        });
        self.connections.sort_by_key(|each| each.key);
        self.check(config);
    }

    fn check(&mut self, config: &Config) {
        use source::{End, Stage};
        if self.source_guest && self.destination_ran {
            self.breaks("the guest runs at the source and has run at the destination");
        }
        let handed_over = matches!(
            self.source.stage,
            Stage::HandedOver | Stage::Drained | Stage::Ended(End::Completed | End::GivenUp)
        );
        // Without this rule, the search goes on until that does harm.
        if config.rules.go && self.destination_ran && !handed_over {
            self.breaks("the guest runs at the destination without Go");
        }
        let reads = |each: &Connection| each.key.channel.is_some() && each.source == Side::Open;
        if self.source_guest && self.answers && self.connections.iter().any(reads) {
            self.breaks("the guest runs at the source, where a channel may read its memory");
        }
        if self.source_guest && self.pages.iter().any(|page| page.freed) {
            self.breaks("the guest runs at the source, which has freed a page");
        }
        let lost = |page: &Page| {
            let under_way = matches!(page.sent, Sent::InFlight(..));
            page.freed && !page.placed && !under_way
        };
        if self.pages.iter().any(lost) {
            self.breaks("a page is missing at the destination, and freed at the source");
        }
        let complete = matches!(
            self.destination.stage,
            destination::Stage::Complete | destination::Stage::Ended(destination::End::Completed)
        );
        if complete && self.missing() != 0 {
            self.breaks("the destination calls itself complete, and a page is missing");
        }
    }

    /// Whether the migration has ended as it should.
    pub(super) fn is_goal(&self) -> bool {
        use destination::{End as There, Stage as At};
        use source::{End, Stage};
        match self.source.stage {
            Stage::Ended(End::Completed) => {
                let kept = matches!(
                    self.destination.stage,
                    At::Complete | At::Ended(There::Completed)
                );
                kept && self.destination_ran && !self.source_guest && self.missing() == 0
            }
            Stage::Ended(End::Kept | End::Returned) => {
                // A destination that has discarded after it was ready may wait until it is told.
                let discarded = matches!(
                    self.destination.stage,
                    At::Discarded | At::Ended(There::Discarded)
                );
                discarded && self.source_guest && !self.destination_ran
            }
            _ => false,
        }
    }
}

/// The control connection of a generation.
pub(super) fn control(generation: Generation) -> Key {
    Key {
        generation,
        channel: None,
    }
}

/// The name of a lane's channel in the session.
pub(super) fn channel_id(config: &Config, lane: usize, incarnation: u32) -> ChannelId {
    let role = match config.lanes[lane] {
        Lane::Bulk => BULK,
        Lane::Urgent => Role::Urgent,
    };
    let before = config.lanes[..lane].iter();
    let index = before.filter(|each| **each == config.lanes[lane]).count();
    ChannelId {
        role,
        index: u16::try_from(index).expect("few lanes"),
        incarnation,
    }
}

/// The lane and incarnation of a channel.
pub(super) fn lane_of(config: &Config, id: ChannelId) -> (usize, u32) {
    let same = |lane: &usize| channel_id(config, *lane, id.incarnation) == id;
    let lane = (0..config.lanes.len()).find(same);
    (lane.expect("a channel of the model"), id.incarnation)
}
