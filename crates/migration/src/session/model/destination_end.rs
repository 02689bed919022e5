//! The destination's supervisor: carries out the actions of the destination's `step`.

use super::super::ToSource;
use super::super::destination::{Action, End, Event, Stage, step};
use super::config::{Config, Lane};
use super::network::{Key, Message, Side};
use super::world::{World, channel_id, control, lane_of};

impl World {
    /// Feeds the destination an event.
    pub(super) fn at_destination(&mut self, config: &Config, event: Event) {
        let generation = self.destination.generation;
        let (next, actions) = step(&self.destination, event);
        self.destination = next;
        if self.destination.generation < generation {
            self.breaks("the destination's generation went back");
        }
        if self.destination.generation > generation {
            self.accepted.fill(0);
        }
        for action in actions {
            self.destination_does(config, action);
        }
        if self.starting && !config.foreign {
            self.starting = false;
            self.at_destination(config, Event::Started);
        }
        if !config.rules.go && self.destination.stage == Stage::Ready {
            self.destination.stage = Stage::Running;
            self.destination_ran = true;
        }
        if !config.rules.kept_answer && self.destination.stage == Stage::Discarded {
            self.destination.stage = Stage::Ended(End::Discarded);
            self.close_all();
        }
    }

    fn destination_does(&mut self, config: &Config, action: Action) {
        match action {
            Action::Send(message) => self.answer(message),
            Action::SendMissing(stage) => self.answer(ToSource::Resumed(stage)),
            Action::EndUpTo(generation) => {
                let rules = config.rules;
                for each in &mut self.connections {
                    if each.key.generation <= generation {
                        // Bytes that were received, and messages that the reader has posted.
                        let remains = match each.key.channel {
                            Some(_) => !rules.readers_first,
                            None => !rules.generations,
                        };
                        each.close_destination(remains);
                    }
                }
            }
            Action::EndChannel(id) => {
                let key = Key {
                    generation: self.destination.generation,
                    channel: Some(lane_of(config, id)),
                };
                // The reader may have ended by itself, but its count is kept.
                let mut placed = 0;
                if let Some(connection) = self.find(key) {
                    placed = connection.placed;
                    connection.close_destination(!config.rules.readers_first);
                }
                self.answer(ToSource::ChannelEnded {
                    channel: id,
                    placed,
                });
            }
            Action::RepeatRequests => {
                for page in 0..self.pages.len() {
                    if self.pages[page].requested {
                        self.request(config, page);
                    }
                }
            }
            Action::StartGuest => (self.destination_ran, self.starting) = (true, true),
            // Without this rule, the search goes on until a message does harm.
            Action::Refuse if !config.rules.generations => {}
            Action::Refuse => self.breaks("the destination refuses what the source says"),
            Action::End(_) => {
                (self.loading, self.starting) = (false, false);
                self.close_all();
            }
        }
    }

    fn close_all(&mut self) {
        for each in &mut self.connections {
            each.close_destination(false);
        }
    }

    /// Sends a message on the control channel, if there is one.
    fn answer(&mut self, message: ToSource) {
        let missing = match message {
            ToSource::Resumed(_) => self.missing(),
            _ => 0,
        };
        if let Some(connection) = self.find(control(self.destination.generation))
            && connection.destination == Side::Open
        {
            connection.send_to_source(Message::ToSource(message, missing));
        }
    }

    /// Requests a page on the urgent channel, if it is open.
    pub(super) fn request(&mut self, config: &Config, page: usize) {
        for each in &mut self.connections {
            if let Some((lane, _)) = each.key.channel
                && config.lanes[lane] == Lane::Urgent
                && each.destination == Side::Open
            {
                each.send_to_source(Message::Request(page));
            }
        }
    }

    /// Places a page that came on a connection, and sends the receipt.
    pub(super) fn place(&mut self, key: Key, page: usize) {
        if self.pages[page].placed {
            return self.breaks("a page is placed twice: the guest may have written it");
        }
        self.pages[page].placed = true;
        self.pages[page].requested = false;
        let connection = self.find(key).expect("a connection with a page");
        connection.placed += 1;
        if connection.destination == Side::Open {
            connection.send_to_source(Message::Receipt(connection.placed));
        }
    }

    /// Accepts a connection.
    pub(super) fn accept(&mut self, config: &Config, key: Key) {
        self.find(key).expect("an attempt").destination = Side::Open;
        let event = match key.channel {
            None => Event::Opened(key.generation),
            Some((lane, incarnation)) => {
                self.accepted[lane] = incarnation;
                Event::ChannelOpened(key.generation, channel_id(config, lane, incarnation))
            }
        };
        self.at_destination(config, event);
    }

    /// Feeds the destination the loss of a connection.
    pub(super) fn destination_loses(&mut self, config: &Config, key: Key) {
        let posted = key.channel.is_none() && !config.rules.generations;
        let connection = self.find(key).expect("a connection to lose");
        connection.close_destination(posted);
        let event = match key.channel {
            None => Event::Lost(key.generation),
            Some((lane, incarnation)) => {
                Event::ChannelLost(key.generation, channel_id(config, lane, incarnation))
            }
        };
        self.at_destination(config, event);
    }
}
