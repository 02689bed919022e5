//! The reasons why TLS fails.

use std::io;

use super::FirstBytes;

/// TLS failed, or cannot begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read the PEM file {path}: {source}")]
    File {
        /// Its path.
        path: String,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A PEM text has no certificate.
    #[error("{pem} has no certificate: expected PEM with `BEGIN CERTIFICATE`")]
    NoCertificate {
        /// The name of the text: the path of its file, or the name that the caller gave it.
        pem: String,
    },
    /// A PEM text has no private key.
    #[error("{pem} has no private key: expected PEM with `BEGIN PRIVATE KEY`")]
    NoKey {
        /// The name of the text.
        pem: String,
    },
    /// A PEM text has something else than what it is given for.
    #[error("{pem} {why}")]
    WrongContents {
        /// The name of the text.
        pem: String,
        /// What it has, and what would be right: the rest of the sentence.
        why: &'static str,
    },
    /// A PEM text or a certificate in it is damaged, or of a kind that is not supported.
    #[error("{pem} does not serve: {why}")]
    Malformed {
        /// The name of the text.
        pem: String,
        /// The reason.
        why: String,
    },
    /// The key is that of another certificate.
    #[error(
        "the key {key} is not that of the certificate {cert}: give the two that were made together"
    )]
    KeyMismatch {
        /// The name of the certificate's text.
        cert: String,
        /// The name of the key's text.
        key: String,
    },
    /// The peer's expected name is neither a DNS name nor an IP address.
    #[error("`{name}` cannot be the name in a certificate: expected a DNS name or an IP address")]
    BadName {
        /// The name.
        name: String,
    },
    /// No name is known for the peer.
    #[error("give the name in the peer's certificate: a unix socket has no host to check it by")]
    NoName,
    /// The peer's certificate has expired.
    #[error("the peer's certificate has expired: renew it, or check this host's clock")]
    Expired,
    /// The peer's certificate is not valid yet.
    #[error("the peer's certificate is not valid yet: check the clocks of both hosts")]
    NotYetValid,
    /// The peer's certificate is for other names.
    #[error(
        "the peer's certificate is not for `{expected}`, but for {presented}: dial one of its \
         names, or give the name to expect"
    )]
    WrongName {
        /// The expected name.
        expected: String,
        /// The names in the certificate.
        presented: String,
    },
    /// No CA of this side signed the peer's certificate.
    #[error("no CA of this side signed the peer's certificate: give both sides the same CA")]
    UnknownIssuer,
    /// The peer's certificate is not acceptable for another reason.
    #[error("the peer's certificate is not acceptable: {0}")]
    BadPeerCertificate(String),
    /// The peer sent no certificate.
    #[error("the peer sent no certificate: give it a certificate of this side's CA")]
    NoPeerCertificate,
    /// The peer refused the certificate of this side.
    #[error("the peer refused this side's certificate: {0}")]
    CertificateRefused(String),
    /// The peer broke TLS off with another alert.
    #[error("the peer broke TLS off with alert {0} of TLS")]
    Alert(u8),
    /// The peer is Pageferry without TLS.
    #[error("the peer does not use TLS, and this side does: configure TLS at both or at neither")]
    PeerIsPlain,
    /// The peer speaks another protocol.
    #[error("the peer does not speak TLS: it began with {0}")]
    NotTls(FirstBytes),
    /// The peer closed the connection during the handshake.
    #[error("the peer closed the connection during the TLS handshake: does it use TLS?")]
    Ended,
    /// Bytes of the connection were changed on their way, or the peer breaks the rules of TLS.
    #[error("the bytes that came are damaged: TLS cannot verify them ({0})")]
    Damaged(&'static str),
    /// The peer found the bytes of this side damaged.
    #[error("the bytes that went to the peer were damaged: its TLS could not verify them")]
    DamagedAtPeer,
    /// The two sides have no version or cipher of TLS in common.
    #[error("the peer's TLS does not fit: both sides need TLS 1.3 and AES-GCM or ChaCha20")]
    NothingInCommon,
    /// TLS failed for another reason.
    #[error("TLS failed: {0}")]
    Broken(String),
}

impl TlsError {
    /// Whether bytes changed on their way, or the peer sent what nobody may send.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged(_) | Self::DamagedAtPeer)
    }
}
