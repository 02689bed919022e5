//! Messages that are valid, and that break the protocol where they came.

use crate::ledger::{ReceiptError, TakesBack};
use crate::wire::FrameType;
use pageferry_addr::RamPage;

/// A peer broke the protocol: its messages are valid, but not in this state.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A frame that is not due.
    #[error("it sent {found} where {expected} was due")]
    Unexpected {
        /// The frame.
        found: FrameType,
        /// The frames that were due.
        expected: &'static str,
    },
    /// A page that is not missing, or that is being placed.
    #[error(
        "it sent page {first} (or one of the {pages} from there) that was not missing, or sent it twice"
    )]
    NotMissing {
        /// The first page of the run.
        first: RamPage,
        /// The pages of the run.
        pages: u64,
    },
    /// A receipt for messages that were not sent, or that goes back.
    #[error("its receipt is wrong: {0}")]
    Receipt(#[from] ReceiptError),
    /// A missing set that names a page whose receipt has come.
    #[error("it calls a page missing that it has confirmed: {0}")]
    TakesBack(#[from] TakesBack),
    /// A vCPU state twice, or of a vCPU that the VM does not have.
    #[error("it sent an unexpected state of vCPU {vcpu}")]
    VcpuState {
        /// The vCPU.
        vcpu: u32,
    },
    /// Too few or too many vCPU states.
    #[error("it announced {announced} vCPU states, sent {found}, and the VM has {vcpus}")]
    VcpuStates {
        /// The number in SwitchOver.
        announced: u32,
        /// The number of states that came.
        found: usize,
        /// The number of vCPUs.
        vcpus: usize,
    },
    /// A device state twice, or one that Setup has not announced.
    #[error("it sent an unexpected state of device {device} (version {version})")]
    DeviceState {
        /// The device.
        device: String,
        /// The version of the state.
        version: u32,
    },
    /// Too few device states, or another number than announced.
    #[error(
        "it announced {announced} device states, sent {found}, and the VM has {devices} devices"
    )]
    DeviceStates {
        /// The number in SwitchOver.
        announced: u32,
        /// The number of states that came.
        found: usize,
        /// The number of devices.
        devices: usize,
    },
    /// A number of missing pages that differs from the pages named.
    #[error("it announced {announced} missing pages where {found} are")]
    MissingCount {
        /// The number announced.
        announced: u64,
        /// The pages named, or found missing here.
        found: u64,
    },
    /// A confirmation of a page whose bytes this side has not kept.
    #[error(
        "it confirmed a page before the switch-over, or to a machine that keeps no bytes of missing \
         pages: it must send the bytes"
    )]
    CannotConfirm,
    /// SwitchOver before this side had its memory.
    #[error("it sent SwitchOver before this side was ready")]
    SwitchOverTooEarly,
    /// SetupProgress after the last one.
    #[error("it sent SetupProgress after it was ready")]
    ReadyTwice,
    /// A request before the VM was handed over.
    #[error("it requested page {page} before the VM was handed over")]
    EarlyRequest {
        /// The page.
        page: RamPage,
    },
    /// A message of an urgent channel that its sender never sends.
    #[error("it sent a message of kind {kind} on an urgent channel, which it never sends there")]
    UrgentKind {
        /// The number on the wire.
        kind: u8,
    },
    /// Too many answers without a receipt.
    #[error("it does not confirm the pages that it requests")]
    Unconfirmed,
    /// Too many answers are unread, or too many requests.
    #[error("it does not read what it is told")]
    Unread,
    /// A message that contradicts what the session knows of its sender.
    #[error("its messages contradict each other: {0}")]
    Contradiction(&'static str),
}
