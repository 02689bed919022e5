//! Letters to the supervisor of the destination.

use crate::error::MigrationError;
use crate::session::{ChannelId, Generation};
use crate::wire::ChannelKey;
use pageferry_transport::channel::Connection;

/// A letter to the supervisor.
pub(super) enum Letter {
    /// The source has opened a channel.
    Arrived(ChannelKey, Connection),
    /// A channel was lost.
    ChannelLost(Generation, ChannelId, MigrationError),
    /// No page is missing any more.
    AllHere,
    /// This side cannot go on. The reason is in the core.
    Failed,
    /// The operator ends the migration here.
    GiveUp,
    /// The VMM that has the VM runs it.
    Started,
    /// The VMM that has the VM has ended.
    Gone(String),
}
