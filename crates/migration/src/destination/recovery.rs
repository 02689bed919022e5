//! Takes the channels that the source opens, and ends lost ones.
//!
//! The readers of old channels end before the missing pages are named. A reader that has ended has
//! given back the `placing` bits of its last frame.

use super::bulk::Bulk;
use super::shared::Letter;
use super::{Stage, Supervisor};
use crate::control::ControlLink;
use crate::error::MigrationError;
use crate::session::destination::Event;
use crate::session::{ChannelId, Generation, ToSource};
use crate::wire::{ChannelKey, Role, Side};
use pageferry_transport::channel::Connection;
use std::sync::Arc;
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// An open bulk channel and its reader.
pub(super) struct BulkChannel<'s> {
    id: ChannelId,
    generation: Generation,
    pub(super) bulk: Arc<Bulk>,
    /// `None` while the host has no room for it.
    thread: Option<ScopedJoinHandle<'s, ()>>,
}

impl BulkChannel<'_> {
    /// Ends the reader. Returns the number of frames whose pages are in place.
    fn end(self) -> u64 {
        self.bulk.close();
        // A reader that panics leaves its `placing` bits to the end of the generation.
        let _ = self.thread.map(ScopedJoinHandle::join);
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
                self.link.reconnects += 1;
                self.link.lost_since = None;
                let pages = self.guest.core.page_count();
                let connection = Arc::new(connection);
                let control = ControlLink::new(connection, generation, Side::Source, pages);
                self.link.protected = control.protection();
                self.link.control = Some(control);
            }
            // The desk lets no tunnel in.
            Role::Tunnel | Role::Share => connection.shutdown(),
            _ if generation != self.state.generation => connection.shutdown(),
            Role::Bulk => {
                // An older incarnation ends first.
                self.feed(Event::ChannelOpened(generation, id));
                self.link.bulk.push(BulkChannel {
                    id,
                    generation,
                    bulk: Arc::new(Bulk::new(connection)),
                    thread: None,
                });
                self.start_readers();
            }
            Role::Urgent => {
                let Some(place) = self.guest.core.urgent.get(usize::from(id.index)) else {
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

    /// Starts the readers that are due. A host without room for a thread ends a migration that has
    /// not been handed over. Later it costs only time, as the VM runs here and nowhere else: the
    /// channel stays open without a reader, the supervisor tries again, and vCPUs that need a page
    /// are served on urgent channels.
    pub(super) fn start_readers(&mut self) {
        let (inbound, patience, scope) = (self.link.inbound, self.link.patience, self.scope);
        for channel in self
            .link
            .bulk
            .iter_mut()
            .filter(|open| open.thread.is_none())
        {
            let (generation, id) = (channel.generation, channel.id);
            let of_thread = Arc::clone(&channel.bulk);
            let started = std::thread::Builder::new()
                .name("pf-bulk".into())
                .spawn_scoped(scope, move || {
                    let error = of_thread.run(inbound, patience);
                    of_thread.close();
                    let lost = Letter::ChannelLost(generation, id, error);
                    inbound.core.letters.post(lost);
                });
            match started {
                Ok(thread) => channel.thread = Some(thread),
                Err(error) => {
                    let error = MigrationError::os("cannot start the thread of a channel", error);
                    if self.state.stage == Stage::Receiving {
                        return self.fail(error);
                    }
                    let error = error.to_string();
                    if self.link.last_loss.as_ref() != Some(&error) {
                        tracing::warn!(generation, channel = %id, %error, "trying again");
                        self.link.last_loss = Some(error);
                    }
                    return;
                }
            }
        }
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
        if let Some(left_out) = self.link.losses.take() {
            tracing::warn!(generation, channel = %id, %error, left_out, "a channel is lost");
        }
        self.link.lost.noticed(id);
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
        if error.is_lost() && self.state.stage == Stage::Receiving && self.link.control.is_some() {
            self.link.pending_loss.keep((generation, id, error));
            return;
        }
        self.note_loss(error);
        self.events.push_back(Event::ChannelLost(generation, id));
    }

    /// A channel is lost, and the source has not said why.
    pub(super) fn conclude_loss(&mut self) {
        if let Some((generation, id, error)) = self.link.pending_loss.take_due() {
            self.note_loss(error);
            self.events.push_back(Event::ChannelLost(generation, id));
        }
    }

    /// Ends the channels of `generation` and of those before.
    pub(super) fn end_up_to(&mut self, generation: Generation) {
        if self
            .link
            .control
            .as_ref()
            .is_some_and(|control| control.generation <= generation)
        {
            self.link.naming = None;
            if let Some(mut control) = self.link.control.take() {
                let _ = control.flush();
                control.shutdown();
            }
            self.link.lost_since.get_or_insert_with(Instant::now);
        }
        for channel in &self.guest.core.urgent {
            channel.close();
        }
        let old = |channel: &BulkChannel<'_>| channel.generation <= generation;
        for channel in self.link.bulk.iter().filter(|channel| old(channel)) {
            channel.bulk.close();
        }
        let (ended, kept) = std::mem::take(&mut self.link.bulk)
            .into_iter()
            .partition(old);
        self.link.bulk = kept;
        let ended: Vec<BulkChannel<'_>> = ended;
        for channel in ended {
            channel.end();
        }
        self.guest.core.pages.end_all_placing();
        self.link.lost.end_generation();
    }

    /// Ends one channel, and tells the source how much of it is in place.
    pub(super) fn end_channel(&mut self, id: ChannelId) {
        let placed = match id.role {
            Role::Urgent => self
                .guest
                .core
                .urgent
                .get(usize::from(id.index))
                .and_then(|place| place.end(id)),
            _ => self
                .link
                .bulk
                .iter()
                .position(|open| open.id == id)
                .map(|at| self.link.bulk.swap_remove(at).end()),
        };
        if let Some(placed) = placed {
            self.link.lost.closed(id);
            self.say(ToSource::ChannelEnded {
                channel: id,
                placed,
            });
        }
    }
}
