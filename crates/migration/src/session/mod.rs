//! The session: what both ends know and decide, apart from pages.
//!
//! **Guarantee.** At most one side runs the guest at any time. A session outlives its connections:
//! while both processes live and the network returns, the migration completes without an operator.
//! No timer decides which side runs.
//!
//! **Mechanism.** Each end is a state and a pure function ([`source::step`], [`destination::step`])
//! without I/O, clocks or threads. A supervisor thread at each end feeds it [events](source::Event)
//! and carries out its actions. Five rules make it safe:
//!
//! 1. *Go.* The destination says `Ready` when it has all that it needs to run. The source answers
//!    `Go`. From then on the source never resumes the guest unless the destination says
//!    `Discarded`. The destination runs the guest on `Go`, never before.
//! 2. *Kept answer.* A destination that discards its copy after `Ready` says so until the source
//!    has heard it.
//! 3. *Generations.* All channels belong to a generation. A side that hears a newer generation ends
//!    the older ones. Messages of older generations have no effect.
//! 4. *Readers first.* The destination ends the readers of old channels before it says which pages
//!    are missing. So no page arrives that it has called missing.
//! 5. *Answers before Go.* The source answers requests from SwitchOver on. So the load may need
//!    pages, and nothing is handed over before the load has succeeded. A source that takes the guest
//!    back ends its channels first.
//!
//! A sixth rule is the ledger's: the source frees a page only after its receipt, and only once it
//! has heard that the guest runs at the destination (`Running`, or `Resumed` with
//! [`Running`](DestinationStage::Running) or [`Complete`](DestinationStage::Complete)). Until then
//! the destination may still discard its copy.
//!
//! **Neighbours.** `model/` searches all states of both ends and a network that delays and cuts.
//! `page/` writes `docs/migration-states.md`. `source/` and `destination/` have the supervisors.
//! The ledger has the pages.

pub mod destination;
#[cfg(test)]
mod model;
#[cfg(test)]
mod page;
pub mod source;

pub use crate::wire::{ChannelId, DestinationStage, SourceStage};

/// The number of a generation: 1 for the first channels of a session.
pub type Generation = u32;

/// A message of the control channel to the destination, as far as it changes the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToDestination {
    /// The source has handed the VM over: run it.
    Go,
    /// The first message of a generation after the first: what the source has decided so far.
    Resume(SourceStage),
    /// The source cancelled the migration: its guest runs.
    Cancel,
    /// The source knows that the destination has every page.
    Drained,
    /// The source has heard `DrainAck`.
    Complete,
    /// The source has heard `Discarded`.
    DiscardHeard,
    /// The source has closed a channel: the destination ends its reader and says so.
    CloseChannel(ChannelId),
    /// Pages of a closed channel are unsent again: repeat the outstanding requests.
    Again,
}

/// A message of the control channel to the source, as far as it changes the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ToSource {
    /// The machine is built. The source may open the other channels.
    SetupAck,
    /// Everything that the guest needs to run is loaded.
    Ready,
    /// The guest runs here.
    Running,
    /// The answer to `Resume`. The missing pages came before it.
    Resumed(DestinationStage),
    /// The destination has every page.
    DrainAck,
    /// The destination has discarded its copy, which never ran.
    Discarded,
    /// The reader of a channel has ended.
    ChannelEnded {
        /// The channel.
        channel: ChannelId,
        /// The number of the channel's messages whose pages are in place.
        placed: u64,
    },
}
