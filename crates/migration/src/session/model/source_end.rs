//! The source's supervisor: carries out the actions of the source's `step`.

use super::super::ToDestination;
use super::super::source::{Action, Event, Stage, step};
use super::config::Config;
use super::network::{Connection, Key, Message, PageSet, Side};
use super::world::{Sent, World, channel_id, control, lane_of};

impl World {
    /// Feeds the source an event. `missing` came with it, if it is a message.
    pub(super) fn at_source(&mut self, config: &Config, event: Event, missing: PageSet) {
        let (next, actions) = step(&self.source, event);
        self.source = next;
        for action in actions {
            self.source_does(config, action, missing);
        }
    }

    fn source_does(&mut self, config: &Config, action: Action, missing: PageSet) {
        let generation = self.source.generation;
        match action {
            Action::Dial(generation) => self.dial(control(generation)),
            Action::Send(message) => {
                self.answers |= message == ToDestination::Go;
                self.send_on_control(Message::ToDestination(message));
            }
            Action::DialChannel(id) => self.dial(Key {
                generation,
                channel: Some(lane_of(config, id)),
            }),
            Action::CloseChannel(_)
                if !config.rules.channels_first && self.source.stage == Stage::Cancelling => {}
            Action::CloseChannel(id) => {
                let key = Key {
                    generation,
                    channel: Some(lane_of(config, id)),
                };
                if let Some(connection) = self.find(key) {
                    connection.close_source(false);
                }
            }
            Action::CloseGeneration => {
                for each in &mut self.connections {
                    // Messages that the reader has posted already are still to come.
                    let posted = each.key.channel.is_none() && !config.rules.generations;
                    each.close_source(posted);
                }
                self.pushing = false;
            }
            Action::Reclaim { channel, placed } => {
                let before = self.all_acknowledged();
                let (lane, incarnation) = lane_of(config, channel);
                self.acknowledge(lane, incarnation, placed);
                for page in 0..self.pages.len() {
                    if matches!(self.pages[page].sent, Sent::InFlight(at, number, _)
                        if (at, number) == (lane, incarnation))
                    {
                        self.unsend(page);
                    }
                }
                self.post_acknowledged(!before);
            }
            Action::AdoptMissing => self.adopt(missing),
            Action::StartPrecopy | Action::End(_) => {}
            Action::SwitchOver => {
                self.source_guest = false;
                self.answers = config.rules.answers_before_go;
                self.send_on_control(Message::SwitchOver);
            }
            Action::StartPush => {
                (self.answers, self.pushing) = (true, true);
                self.post_acknowledged(true);
            }
            Action::ResumeGuest => self.source_guest = true,
        }
    }

    fn dial(&mut self, key: Key) {
        let connection = Connection::new(key, Side::Waiting, Side::Waiting);
        self.connections.push(connection);
    }

    fn send_on_control(&mut self, message: Message) {
        match self.find(control(self.source.generation)) {
            Some(connection) if connection.source == Side::Open => {
                connection.send_to_destination(message);
            }
            _ => self.breaks("the source sends without a control channel"),
        }
    }

    /// Sends a page on an open channel.
    pub(super) fn send_page(&mut self, key: Key, page: usize) {
        let connection = self.find(key).expect("an open channel");
        connection.sent += 1;
        connection.send_to_destination(Message::Page(page));
        let number = connection.sent;
        let (lane, incarnation) = key.channel.expect("not control");
        self.pages[page].sent = Sent::InFlight(lane, incarnation, number);
    }

    /// Takes a request: a page that is under way, or there, needs nothing.
    pub(super) fn requested(&mut self, key: Key, page: usize) {
        if self.answers && self.pages[page].sent == Sent::Unsent {
            self.send_page(key, page);
        }
    }

    /// Takes a receipt for the first `placed` messages of a channel.
    pub(super) fn receipt(&mut self, key: Key, placed: u64) {
        let (lane, incarnation) = key.channel.expect("not control");
        let before = self.all_acknowledged();
        self.acknowledge(lane, incarnation, placed);
        self.post_acknowledged(!before);
    }

    fn acknowledge(&mut self, lane: usize, incarnation: u32, placed: u64) {
        for page in &mut self.pages {
            if matches!(page.sent, Sent::InFlight(at, number, sent)
                if (at, number) == (lane, incarnation) && sent <= placed)
            {
                page.sent = Sent::Acknowledged;
            }
        }
    }

    fn unsend(&mut self, page: usize) {
        if self.pages[page].freed {
            self.breaks("a page must be sent again, and the source has freed it");
        }
        self.pages[page].sent = Sent::Unsent;
    }

    fn adopt(&mut self, missing: PageSet) {
        let before = self.all_acknowledged();
        for page in 0..self.pages.len() {
            let named = missing & (1 << page) != 0;
            match (self.pages[page].sent, named) {
                (Sent::Acknowledged, true) => {
                    self.breaks("the destination misses a page that it has acknowledged");
                }
                (Sent::Unsent, false) => self.breaks("the destination has a page that is unsent"),
                (_, true) => self.unsend(page),
                (_, false) => self.pages[page].sent = Sent::Acknowledged,
            }
        }
        self.post_acknowledged(!before);
    }

    fn post_acknowledged(&mut self, wanted: bool) {
        self.acknowledged |= wanted && self.all_acknowledged();
    }

    /// Feeds the source the loss of a connection.
    pub(super) fn source_loses(&mut self, config: &Config, key: Key) {
        let posted = key.channel.is_none() && !config.rules.generations;
        let connection = self.find(key).expect("a connection to lose");
        connection.close_source(posted);
        let event = match key.channel {
            None => Event::Lost(key.generation),
            Some((lane, incarnation)) => {
                Event::ChannelLost(key.generation, channel_id(config, lane, incarnation))
            }
        };
        self.at_source(config, event, 0);
    }

    /// Feeds the source the success of an attempt to connect.
    pub(super) fn source_connects(&mut self, config: &Config, key: Key) {
        self.find(key).expect("an attempt").source = Side::Open;
        let event = match key.channel {
            None => Event::Opened(key.generation),
            Some((lane, incarnation)) => {
                Event::ChannelOpened(key.generation, channel_id(config, lane, incarnation))
            }
        };
        self.at_source(config, event, 0);
    }
}
