//! The status of a session, for other threads of its process.

use crate::wire::ChannelId;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The status of one side of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionStatus {
    /// The progress of the session, in one word of docs/migration-states.md. `none` before it
    /// begins.
    pub stage: &'static str,
    /// Whether the control channel is open.
    pub connected: bool,
    /// The address of the peer on the control channel.
    pub peer: Option<String>,
    /// The generation of the channels.
    pub generation: u32,
    /// How often the control channel was lost.
    pub reconnects: u32,
    /// The open bulk and urgent channels.
    pub channels: Vec<ChannelId>,
    /// Pages that the destination has not confirmed (source), or that are missing (destination).
    pub pages_left: u64,
    /// Pages that were sent and that have no receipt yet (source).
    pub pages_in_flight: u64,
    /// Bytes of pages sent or received so far.
    pub page_bytes: u64,
    /// Threads that wait for missing pages now (destination).
    pub waiting_faults: u64,
    /// How long there has been no control channel, if there is none.
    pub lost_for: Option<Duration>,
    /// The reason why a channel was lost the last time.
    pub last_loss: Option<String>,
}

impl Default for SessionStatus {
    fn default() -> Self {
        Self {
            stage: "none",
            connected: false,
            peer: None,
            generation: 0,
            reconnects: 0,
            channels: Vec::new(),
            pages_left: 0,
            pages_in_flight: 0,
            page_bytes: 0,
            waiting_faults: 0,
            lost_for: None,
            last_loss: None,
        }
    }
}

/// The place where a supervisor publishes its status.
#[derive(Debug, Default)]
pub(crate) struct Board(Mutex<SessionStatus>);

impl Board {
    pub(crate) fn write(&self, status: SessionStatus) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    pub(crate) fn read(&self) -> SessionStatus {
        let status = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        status.clone()
    }
}
