//! The destination's verdict on a connection.

/// The verdict in a [`HelloReply`](super::HelloReply) and in a [`Welcome`](super::Welcome). The
/// numbers are those on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
#[repr(u16)]
#[non_exhaustive]
pub enum Status {
    /// The connection was accepted.
    #[error("accepted")]
    Accepted = 0,
    /// The two sides have no protocol version in common.
    #[error("the two sides have no protocol version in common")]
    VersionUnsupported = 1,
    /// The destination receives another migration.
    #[error("the destination is busy with another migration")]
    Busy = 2,
    /// The channel belongs to a session that the destination does not know.
    #[error("the destination does not know this session")]
    UnknownSession = 3,
    /// The destination does not know the role.
    #[error("the destination does not know the role of this channel")]
    BadRole = 4,
    /// The offer lacks a capability that this version requires.
    #[error("the destination requires a capability that was not offered")]
    CapabilityMissing = 5,
    /// The page sizes differ.
    #[error("the destination's page size differs")]
    PageSize = 6,
    /// The message is damaged: its checksum does not fit, or reserved bytes are not zero.
    #[error("the destination found the preamble damaged")]
    Malformed = 7,
    /// The generation is over, or a later incarnation was accepted before.
    #[error("the destination has accepted a later channel than this one already")]
    OldGeneration = 8,
    /// No control channel of this generation was accepted yet.
    #[error("the destination has no control channel of this generation yet")]
    FutureGeneration = 9,
    /// This channel was accepted before, in the same generation and incarnation.
    #[error("the destination has accepted this channel already")]
    ChannelTaken = 10,
    /// The index is not below the number of channels that the set-up announced.
    #[error("the destination expects fewer channels than this one's index needs")]
    TooManyChannels = 11,
    /// The proof does not fit: the source does not know the secret of the session.
    #[error("the destination found the proof of this session wrong")]
    BadProof = 12,
    /// The connection is plain, and the destination requires TLS.
    #[error("the destination requires TLS: give this side a certificate, its key and the CA")]
    TlsRequired = 13,
    /// The credentials came, and nothing of the `path_check` behind them.
    #[error(
        "small packets reach the destination and large ones do not: make the MTU of both hosts fit the path"
    )]
    LargePacketsLost = 14,
}

impl Status {
    /// Every status, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::Accepted,
        Self::VersionUnsupported,
        Self::Busy,
        Self::UnknownSession,
        Self::BadRole,
        Self::CapabilityMissing,
        Self::PageSize,
        Self::Malformed,
        Self::OldGeneration,
        Self::FutureGeneration,
        Self::ChannelTaken,
        Self::TooManyChannels,
        Self::BadProof,
        Self::TlsRequired,
        Self::LargePacketsLost,
    ];

    /// Returns the status of this number, or `None` if there is none.
    #[must_use]
    pub fn of_number(number: u16) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_status_has_the_number_of_its_place() {
        for (place, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(status as u16), place);
            assert_eq!(Status::of_number(place as u16), Some(status));
        }
        assert_eq!(Status::of_number(15), None);
    }
}
