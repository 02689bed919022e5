//! The end of a command: one exit code per class of failure, one sentence per failure.
//!
//! The codes are an interface: scripts and tests read them, and they do not change.

use pageferry_bridge::foreign::{ReceiveError, SourceError, VmmError};
use pageferry_machine::MachineError;
use pageferry_migration::{
    ChannelError, DestinationFailure, DestinationVm, ErrorCode, HandshakeError, MigrationError,
    OpenError, SourceFailure, SourceVm, Status, TlsError,
};
use std::fmt;

/// The class of a command's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// Guest or host found a wrong page.
    Verification = 1,
    /// Flags, sizes, named files.
    Usage = 2,
    /// The chosen engine does not run here.
    Engine = 3,
    /// userfaultfd, the chosen fault delivery or the chosen backing is not available, or a limit of
    /// this host is too low.
    Delivery = 4,
    /// The address or the socket is in use, or cannot be listened on.
    Address = 5,
    /// Nobody answers at the address, or large packets do not get there.
    Unreachable = 6,
    /// The peer speaks another protocol or another version, or sends invalid data. A snapshot is
    /// damaged, or its files are of different snapshots.
    Protocol = 7,
    /// The peer refused. A snapshot, or the disk of a saved VM, is not what was expected.
    Refused = 8,
    /// Ctrl-C, or a request over the control socket.
    Cancelled = 9,
    /// The migration ended after the switch-over. The VM at the destination is incomplete.
    LinkLost = 10,
    /// No VM answers on the control socket.
    NoVm = 11,
    /// This host or the peer's refused a call, or a bug.
    Internal = 12,
    /// The connection broke, or the peer fell silent, before the switch-over. The VM runs on.
    BrokenOff = 13,
    /// A vCPU cannot run any further, or the guest makes no progress.
    Guest = 14,
    /// Other work has the cores: a measurement is not possible now.
    Busy = 15,
    /// The peer could not prove who it is, or this side could not.
    Untrusted = 16,
    /// The VM on the control socket refused the request, as it is now.
    Declined = 17,
}

/// The output of `pageferry help exit-codes`.
pub(crate) const TABLE: &str = "\
Exit codes:
   0  done; for a demo: both verifications hold
   1  verification failed: the guest or the host found a wrong page
   2  wrong flags, sizes or files
   3  the engine asked for does not run on this host
   4  userfaultfd, the fault delivery or the backing asked for is not there, or a limit is too low
   5  the address or socket is in use or cannot be listened on
   6  the address refuses connections or cannot be reached, also if only large packets cannot
   7  the peer speaks another protocol or version; damaged data from it, or in a snapshot
   8  the peer refused (mismatched machine, busy, its limits); --expect-... or a changed disk did
   9  cancelled (Ctrl-C); before the switch-over the VM runs on at the source
  10  the migration ended after the switch-over: the VM at the destination is incomplete
  11  no VM answers on that control socket, or no VMM listens for a tunnel
  12  this host or the peer's refused something (the message says what), or a bug
  13  the connection broke before the switch-over: the VM runs on at the source; a tunnel gave up
  14  the guest stopped, asked for a reboot, or makes no progress
  15  this host is too busy to measure: try again when it is idle
  16  a certificate or proof was refused, or TLS is required: the VM is untouched
  17  the VM refused the request: it cannot do this in its present state";

impl Exit {
    const ALL: [Self; 17] = [
        Self::Verification,
        Self::Usage,
        Self::Engine,
        Self::Delivery,
        Self::Address,
        Self::Unreachable,
        Self::Protocol,
        Self::Refused,
        Self::Cancelled,
        Self::LinkLost,
        Self::NoVm,
        Self::Internal,
        Self::BrokenOff,
        Self::Guest,
        Self::Busy,
        Self::Untrusted,
        Self::Declined,
    ];

    /// The class of another Pageferry process's exit code.
    pub(crate) fn from_code(code: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|exit| *exit as i32 == code)
    }

    /// The name used on the control socket.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Verification => "verification",
            Self::Usage => "usage",
            Self::Engine => "engine",
            Self::Delivery => "delivery",
            Self::Address => "address",
            Self::Unreachable => "unreachable",
            Self::Protocol => "protocol",
            Self::Refused => "refused",
            Self::Cancelled => "cancelled",
            Self::LinkLost => "link-lost",
            Self::NoVm => "no-vm",
            Self::Internal => "internal",
            Self::BrokenOff => "broken-off",
            Self::Guest => "guest",
            Self::Busy => "busy",
            Self::Untrusted => "untrusted",
            Self::Declined => "declined",
        }
    }

    /// The class with this name on the control socket.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|exit| exit.name() == name)
    }
}

/// A command's failure: its class and one sentence for stderr.
#[derive(Debug)]
pub(crate) struct Failure {
    /// The class.
    pub(crate) exit: Exit,
    /// The fault, and the remedy.
    pub(crate) message: String,
}

impl Failure {
    /// A failure of class `exit`.
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self {
            exit,
            message: message.into(),
        }
    }

    /// The host's refusal of `what`.
    pub(crate) fn os(what: impl fmt::Display, error: impl fmt::Display) -> Self {
        Self::new(Exit::Internal, format!("{what}: {error}"))
    }

    /// The same failure, with its consequence added as a sentence.
    pub(crate) fn and(mut self, consequence: &str) -> Self {
        self.message.push_str("; ");
        self.message.push_str(consequence);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<MachineError> for Failure {
    fn from(error: MachineError) -> Self {
        Self::new(of_machine(&error), error.to_string())
    }
}

/// The class of an engine's error.
pub(crate) fn of_machine(error: &MachineError) -> Exit {
    match error {
        MachineError::Layout(_)
        | MachineError::Cpu(_)
        | MachineError::Readers(_)
        | MachineError::Userfaultfds { .. } => Exit::Usage,
        MachineError::EngineUnavailable(_) => Exit::Engine,
        MachineError::NoDelivery(_) | MachineError::NoBacking(_) => Exit::Delivery,
        MachineError::Guest { .. } => Exit::Guest,
        MachineError::BadState(_) => Exit::Protocol,
        MachineError::Refused(why) | MachineError::Engine(why) => {
            why.downcast_ref().map_or(Exit::Internal, of_vmm)
        }
        _ => Exit::Internal,
    }
}

/// The class of an error between us and another VMM.
pub(crate) fn of_vmm(error: &VmmError) -> Exit {
    match error {
        VmmError::Io { .. } | VmmError::Closed(_) | VmmError::Timeout { .. } => Exit::NoVm,
        VmmError::Wire(_)
        | VmmError::Order { .. }
        | VmmError::Http { .. }
        | VmmError::Handshake(_) => Exit::Protocol,
        VmmError::Refused(..) | VmmError::Api { .. } | VmmError::Offer(_) => Exit::Refused,
        VmmError::Stopped => Exit::Cancelled,
        VmmError::Gone { .. } => Exit::LinkLost,
        // The VM or its VMM, as it is now.
        _ => Exit::Declined,
    }
}

impl From<VmmError> for Failure {
    fn from(error: VmmError) -> Self {
        Self::new(of_vmm(&error), error.to_string())
    }
}

impl From<SourceError> for Failure {
    fn from(error: SourceError) -> Self {
        match error {
            SourceError::Migration(failure) => failure.into(),
            SourceError::Vmm(why) => Self::new(of_vmm(&why), SourceError::Vmm(why).to_string()),
            other => Self::new(Exit::LinkLost, other.to_string()),
        }
    }
}

impl From<ReceiveError> for Failure {
    fn from(error: ReceiveError) -> Self {
        match error {
            ReceiveError::Migration(failure) => failure.into(),
            ReceiveError::Refused(why) => {
                Self::new(of_vmm(&why), ReceiveError::Refused(why).to_string())
            }
            other => Self::new(Exit::LinkLost, other.to_string()),
        }
    }
}

impl From<MigrationError> for Failure {
    fn from(error: MigrationError) -> Self {
        Self::new(of_migration(&error), error.to_string())
    }
}

impl From<OpenError> for Failure {
    fn from(error: OpenError) -> Self {
        Self::new(of_open(&error), error.to_string())
    }
}

impl From<SourceFailure> for Failure {
    fn from(failure: SourceFailure) -> Self {
        let exit = match failure.vm {
            SourceVm::Runs => of_migration(&failure.error),
            SourceVm::GivenUp | SourceVm::Forced => Exit::LinkLost,
        };
        Self::new(exit, failure.to_string())
    }
}

impl From<DestinationFailure> for Failure {
    fn from(failure: DestinationFailure) -> Self {
        let exit = match failure.vm {
            // The machine was created, so the engine runs. It lacks a way to deliver faults.
            DestinationVm::Discarded
                if matches!(
                    failure.error,
                    MigrationError::Machine(MachineError::EngineUnavailable(_))
                ) =>
            {
                Exit::Delivery
            }
            DestinationVm::Discarded => of_migration(&failure.error),
            DestinationVm::PausedIncomplete { .. } | DestinationVm::Gone => Exit::LinkLost,
        };
        Self::new(exit, failure.to_string())
    }
}

/// The failure to listen on a socket.
pub(crate) fn of_listen(error: &OpenError) -> Failure {
    Failure::new(Exit::Address, error.to_string())
}

/// The class of a failure to connect a socket.
fn of_open(error: &OpenError) -> Exit {
    match error {
        OpenError::InUse { .. } | OpenError::NotASocket { .. } => Exit::Address,
        // This is a connection: `of_listen` has the other class.
        OpenError::Denied { .. }
        | OpenError::NoSuchPath { .. }
        | OpenError::Refused { .. }
        | OpenError::NoAnswer { .. }
        | OpenError::Unresolved { .. } => Exit::Unreachable,
        OpenError::PortZero { .. } => Exit::Usage,
        _ => Exit::Unreachable,
    }
}

/// The class of a migration's error that left the VM at the source.
pub(crate) fn of_migration(error: &MigrationError) -> Exit {
    match error {
        MigrationError::Channel(ChannelError::Open(open)) => of_open(open),
        MigrationError::Channel(ChannelError::Wire(_))
        | MigrationError::Wire(_)
        | MigrationError::Protocol(_) => Exit::Protocol,
        MigrationError::Channel(ChannelError::Tls(error)) => of_tls(error),
        MigrationError::Handshake(
            HandshakeError::BadProof | HandshakeError::PlainForbidden { .. },
        )
        | MigrationError::Refused(Status::TlsRequired | Status::BadProof) => Exit::Untrusted,
        MigrationError::Handshake(_) | MigrationError::Refused(Status::LargePacketsLost) => {
            Exit::Unreachable
        }
        MigrationError::Channel(ChannelError::Interrupted { .. }) => Exit::Cancelled,
        MigrationError::Channel(_)
        | MigrationError::LinkLost(_)
        | MigrationError::GaveUp { .. }
        | MigrationError::Timeout(_)
        | MigrationError::PeerGaveUp {
            code: ErrorCode::Silence,
            ..
        } => Exit::BrokenOff,
        MigrationError::Refused(
            Status::VersionUnsupported
            | Status::Malformed
            | Status::CapabilityMissing
            | Status::OldGeneration
            | Status::FutureGeneration
            | Status::ChannelTaken
            | Status::TooManyChannels,
        ) => Exit::Protocol,
        MigrationError::PeerGaveUp {
            code: ErrorCode::Protocol,
            ..
        } => Exit::Protocol,
        // The peer did not refuse: it or its host failed.
        MigrationError::PeerGaveUp {
            code: ErrorCode::Resources | ErrorCode::Machine | ErrorCode::Internal,
            ..
        } => Exit::Internal,
        MigrationError::PeerGaveUp {
            code: ErrorCode::VmGone,
            ..
        } => Exit::LinkLost,
        MigrationError::Refused(_)
        | MigrationError::PeerGaveUp { .. }
        | MigrationError::Discarded(_)
        | MigrationError::Mismatch(_) => Exit::Refused,
        MigrationError::Cpus(_) | MigrationError::Settings(_) => Exit::Usage,
        MigrationError::Machine(error) => of_machine(error),
        MigrationError::Cancelled | MigrationError::PeerCancelled => Exit::Cancelled,
        _ => Exit::Internal,
    }
}

/// The class of a failure of TLS. Files that do not serve are those that the user named.
pub(crate) fn of_tls(error: &TlsError) -> Exit {
    match error {
        TlsError::File { .. }
        | TlsError::NoCertificate { .. }
        | TlsError::NoKey { .. }
        | TlsError::WrongContents { .. }
        | TlsError::Malformed { .. }
        | TlsError::KeyMismatch { .. }
        | TlsError::BadName { .. }
        | TlsError::NoName => Exit::Usage,
        TlsError::NotTls(_)
        | TlsError::Damaged(_)
        | TlsError::DamagedAtPeer
        | TlsError::NothingInCommon => Exit::Protocol,
        _ => Exit::Untrusted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_gave_up_is_classed_by_its_reason() {
        for code in ErrorCode::ALL {
            let error = MigrationError::PeerGaveUp {
                code,
                message: "why".into(),
            };
            let expected = match code {
                ErrorCode::Protocol => Exit::Protocol,
                ErrorCode::SetupRefused | ErrorCode::Busy => Exit::Refused,
                ErrorCode::Resources | ErrorCode::Machine | ErrorCode::Internal => Exit::Internal,
                ErrorCode::Silence => Exit::BrokenOff,
                ErrorCode::VmGone => Exit::LinkLost,
                other => panic!("{other:?} has no class here"),
            };
            assert_eq!(of_migration(&error), expected, "{code:?}");
        }
    }

    #[test]
    fn a_channel_too_many_or_out_of_turn_breaks_the_protocol() {
        for status in [
            Status::ChannelTaken,
            Status::TooManyChannels,
            Status::OldGeneration,
            Status::FutureGeneration,
        ] {
            let error = MigrationError::Refused(status);
            assert_eq!(of_migration(&error), Exit::Protocol, "{error}");
            assert!(error.to_string().contains("this"), "{error}");
        }
    }

    #[test]
    fn every_code_is_in_the_table_and_has_its_own_name() {
        for exit in Exit::ALL {
            assert!(
                TABLE.contains(&format!("\n  {:>2}  ", exit as u8)),
                "{exit:?}"
            );
            assert_eq!(Exit::from_name(exit.name()), Some(exit));
        }
        assert_eq!(Exit::from_name("no such"), None);
    }
}
