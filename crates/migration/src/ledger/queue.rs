//! The messages of one channel that have no receipt, in the order of their sending.

use core::ops::Range;
use std::collections::VecDeque;

/// A receipt for fewer messages than an earlier one, or for more than were sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it is for {upto} messages, where {acknowledged} to {sent} are possible")]
pub struct ReceiptError {
    /// The messages that it acknowledges.
    pub upto: u64,
    /// The messages that earlier receipts have acknowledged.
    pub acknowledged: u64,
    /// The messages that were sent.
    pub sent: u64,
}

/// The queue of a channel. The runs of all messages are in one list, so that a message needs no
/// allocation of its own.
#[derive(Debug, Default)]
pub(super) struct Queue {
    /// The messages with a receipt.
    acknowledged: u64,
    /// The number of runs of each message without one.
    messages: VecDeque<usize>,
    /// The runs of these messages.
    runs: VecDeque<Range<usize>>,
}

impl Queue {
    /// Appends a message with these runs of pages.
    pub(super) fn push(&mut self, runs: impl IntoIterator<Item = Range<usize>>) {
        let before = self.runs.len();
        self.runs.extend(runs);
        self.messages.push_back(self.runs.len() - before);
    }

    /// The number of messages without a receipt.
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Checks a receipt for the first `upto` messages.
    pub(super) fn check(&self, upto: u64) -> Result<(), ReceiptError> {
        let acknowledged = self.acknowledged;
        let sent = acknowledged + self.messages.len() as u64;
        if (acknowledged..=sent).contains(&upto) {
            return Ok(());
        }
        Err(ReceiptError {
            upto,
            acknowledged,
            sent,
        })
    }

    /// Takes the messages up to `upto` out, and passes their runs to `each`.
    pub(super) fn take(&mut self, upto: u64, each: impl FnMut(Range<usize>)) {
        let messages = (upto - self.acknowledged) as usize;
        let runs: usize = self.messages.drain(..messages).sum();
        self.acknowledged = upto;
        self.runs.drain(..runs).for_each(each);
    }

    /// Takes all messages out.
    pub(super) fn take_all(&mut self, each: impl FnMut(Range<usize>)) {
        let sent = self.acknowledged + self.messages.len() as u64;
        self.take(sent, each);
    }
}
