//! Takes the channels that the source opens, and ends lost ones.
//!
//! The readers of old channels end before the missing pages are named. A reader that has ended has
//! given back the `placing` bits of its last frame.

use super::bulk::Bulk;
use super::shared::Letter;
use super::{Stage, Supervisor};
use crate::channel::Connection;
use crate::control::ControlLink;
use crate::error::MigrationError;
use crate::session::destination::Event;
use crate::session::{ChannelId, Generation, ToSource};
use crate::wire::{ChannelKey, Role, Side};
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// An open bulk channel and its reader.
pub(super) struct BulkChannel<'s> {
    id: ChannelId,
    generation: Generation,
    pub(super) bulk: Arc<Bulk>,
    thread: ScopedJoinHandle<'s, ()>,
}

impl BulkChannel<'_> {
    /// Ends the reader. Returns the number of frames whose pages are in place.
    fn end(self) -> u64 {
        self.bulk.close();
        // A reader that panics leaves its `placing` bits to the end of the generation.
        let _ = self.thread.join();
        self.bulk.placed()
    }
}

impl Supervisor<'_, '_, '_> {
    /// The source has opened a channel.
    pub(super) fn arrived(&mut self, key: ChannelKey, connection: Connection) {
        let generation = key.generation;
        let id = ChannelId {
            role: key.role,
            index: key.index,
            incarnation: key.incarnation,
        };
        match key.role {
            Role::Control => {
                // The readers of older channels end within this.
                self.feed(Event::Opened(generation));
                if self.state.generation != generation
                    || matches!(self.state.stage, Stage::Ended(_))
                {
                    return connection.shutdown();
                }
                self.reconnects += 1;
                self.lost_since = None;
                let pages = self.core.pages();
                let connection = Arc::new(connection);
                let control = ControlLink::new(connection, generation, Side::Source, pages);
                self.protected = control.protection();
                self.control = Some(control);
            }
            _ if generation != self.state.generation => connection.shutdown(),
            Role::Bulk => {
                // An older incarnation ends first.
                self.feed(Event::ChannelOpened(generation, id));
                if let Err(error) = self.start_bulk(generation, id, connection) {
                    self.fail(error);
                }
            }
            Role::Urgent => {
                let Some(place) = self.core.urgent.get(usize::from(id.index)) else {
                    return connection.shutdown();
                };
                if let Some(older) = self.older(id) {
                    self.end_channel_if_open(older);
                }
                place.open(generation, id, Arc::new(connection));
                self.feed(Event::ChannelOpened(generation, id));
            }
        }
    }

    /// An open channel of this place.
    fn older(&self, id: ChannelId) -> Option<ChannelId> {
        let same = |open: &&ChannelId| (open.role, open.index) == (id.role, id.index);
        self.state.channels.iter().find(same).copied()
    }

    fn end_channel_if_open(&mut self, id: ChannelId) {
        self.feed(Event::ChannelLost(self.state.generation, id));
    }

    fn start_bulk(
        &mut self,
        generation: Generation,
        id: ChannelId,
        connection: Connection,
    ) -> Result<(), MigrationError> {
        let bulk = Arc::new(Bulk::new(connection));
        let of_thread = Arc::clone(&bulk);
        let (inbound, patience) = (self.inbound, self.patience);
        let thread = std::thread::Builder::new()
            .name("pf-bulk".into())
            .spawn_scoped(self.scope, move || {
                let error = of_thread.run(inbound, patience);
                of_thread.close();
                inbound
                    .core
                    .letters
                    .post(Letter::ChannelLost(generation, id, error));
            })
            .map_err(|e| MigrationError::os("cannot start the thread of a channel", e))?;
        self.bulk.push(BulkChannel {
            id,
            generation,
            bulk,
            thread,
        });
        Ok(())
    }

    pub(super) fn channel_lost(
        &mut self,
        generation: Generation,
        id: ChannelId,
        error: MigrationError,
    ) {
        if generation != self.state.generation || !self.state.channels.contains(&id) {
            return;
        }
        tracing::warn!(generation, channel = %id, %error, "a channel is lost");
        if error.is_fatal_here() {
            return self.fail(error);
        }
        // A source that breaks the protocol on one channel loses all: what its other channels bring
        // may be wrong too.
        let lost = error.is_lost()
            || matches!(
                error,
                MigrationError::Timeout(_) | MigrationError::Cancelled
            );
        if !lost {
            return self.lose_control(error);
        }
        self.note_loss(error);
        self.events.push_back(Event::ChannelLost(generation, id));
    }

    /// Ends the channels of generations before `generation`.
    pub(super) fn end_older(&mut self, generation: Generation) {
        if self
            .control
            .as_ref()
            .is_some_and(|control| control.generation < generation)
        {
            if let Some(mut control) = self.control.take() {
                let _ = control.flush();
                control.shutdown();
            }
            self.lost_since.get_or_insert_with(Instant::now);
        }
        for channel in &self.core.urgent {
            channel.close();
        }
        let old = |channel: &BulkChannel<'_>| channel.generation < generation;
        for channel in self.bulk.iter().filter(|channel| old(channel)) {
            channel.bulk.close();
        }
        let (ended, kept) = std::mem::take(&mut self.bulk).into_iter().partition(old);
        self.bulk = kept;
        let ended: Vec<BulkChannel<'_>> = ended;
        for channel in ended {
            channel.end();
        }
        self.core.end_all_placing();
    }

    /// Ends one channel, and tells the source how much of it is in place.
    pub(super) fn end_channel(&mut self, id: ChannelId) {
        let placed = match id.role {
            Role::Urgent => self
                .core
                .urgent
                .get(usize::from(id.index))
                .and_then(|place| place.end(id)),
            _ => self
                .bulk
                .iter()
                .position(|open| open.id == id)
                .map(|at| self.bulk.swap_remove(at).end()),
        };
        if let Some(placed) = placed {
            self.say(ToSource::ChannelEnded {
                channel: id,
                placed,
            });
        }
    }
}
