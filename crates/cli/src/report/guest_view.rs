//! What a Linux guest saw of its own move.

use serde::{Deserialize, Serialize};

/// The guest's own view of a move, from its console.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuestView {
    /// The largest gap of the guest's timer of 1 ms before the move, nanoseconds.
    pub(crate) gap_before_ns: u64,
    /// The same from the move's begin until all of the VM was at the destination.
    pub(crate) gap_during_ns: u64,
    /// The same afterwards.
    pub(crate) gap_after_ns: u64,
    /// How much the guest's clock fell behind the host's in the move. Negative if it ran ahead.
    pub(crate) clock_lost_ns: i64,
    /// The pages whose contents the guest has checked.
    pub(crate) pages_checked: u64,
    /// The part of them that it checked at the destination.
    pub(crate) pages_checked_there: u64,
    /// The pages whose contents were wrong.
    pub(crate) pages_wrong: u64,
    /// The times that the guest has computed the MD5 sum of a tree of files.
    pub(crate) md5_rounds: u64,
    /// The sums that were wrong.
    pub(crate) md5_wrong: u64,
    /// What is wrong, each as a clause.
    pub(crate) faults: Vec<String>,
}

impl GuestView {
    /// Whether the guest noticed nothing.
    pub(crate) fn holds(&self) -> bool {
        self.faults.is_empty()
    }
}
