//! The reasons why TLS fails.

use rustls::{AlertDescription, CertificateError};
use std::io;
use std::path::PathBuf;

use crate::wire::{FirstBytes, HELLO_MAGIC};

/// TLS failed, or cannot begin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read the PEM file {}: {source}", path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// The error of the kernel.
        source: io::Error,
    },
    /// A file has no certificate.
    #[error(
        "{} has no certificate: expected PEM with `BEGIN CERTIFICATE`", path.display()
    )]
    NoCertificate {
        /// Its path.
        path: PathBuf,
    },
    /// A file has no private key.
    #[error("{} has no private key: expected PEM with `BEGIN PRIVATE KEY`", path.display())]
    NoKey {
        /// Its path.
        path: PathBuf,
    },
    /// A file has something else than what it is named for.
    #[error("{} {why}", path.display())]
    WrongFile {
        /// Its path.
        path: PathBuf,
        /// What it has, and what would be right: the rest of the sentence.
        why: &'static str,
    },
    /// A file's PEM or a certificate in it is damaged.
    #[error("{} is damaged or not supported: {why}", path.display())]
    Malformed {
        /// Its path.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The key is that of another certificate.
    #[error(
        "the key {} is not that of the certificate {}: give the two that were made together",
        key.display(),
        cert.display()
    )]
    KeyMismatch {
        /// The path of the certificate.
        cert: PathBuf,
        /// The path of the key.
        key: PathBuf,
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
    CertificateRefused(&'static str),
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
    /// Returns the variant for an error of rustls. `first` are the first bytes of the peer.
    pub(super) fn from_rustls(error: rustls::Error, first: FirstBytes) -> Self {
        match error {
            rustls::Error::InvalidMessage(_) if first.as_slice() == HELLO_MAGIC => {
                Self::PeerIsPlain
            }
            rustls::Error::InvalidMessage(_) if !begins_tls(first.as_slice()) => {
                Self::NotTls(first)
            }
            rustls::Error::InvalidCertificate(error) => Self::from_certificate(error),
            rustls::Error::NoCertificatesPresented => Self::NoPeerCertificate,
            rustls::Error::AlertReceived(alert) => Self::from_alert(alert),
            rustls::Error::DecryptError => Self::Damaged("a record does not decrypt"),
            rustls::Error::PeerSentOversizedRecord => Self::Damaged("a record is too long"),
            rustls::Error::InvalidMessage(_) => Self::Damaged("a message is malformed"),
            rustls::Error::InappropriateMessage { .. }
            | rustls::Error::InappropriateHandshakeMessage { .. }
            | rustls::Error::PeerMisbehaved(_) => Self::Damaged("a message is not due"),
            rustls::Error::PeerIncompatible(_) => Self::NothingInCommon,
            error => Self::Broken(error.to_string()),
        }
    }

    /// Whether bytes changed on their way, or the peer sent what nobody may send.
    pub(crate) const fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged(_) | Self::DamagedAtPeer)
    }

    fn from_certificate(error: CertificateError) -> Self {
        match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYetValid
            }
            CertificateError::NotValidForNameContext {
                expected,
                presented,
            } => Self::WrongName {
                expected: expected.to_str().into_owned(),
                presented: match presented.is_empty() {
                    true => "no name".into(),
                    false => names(&presented),
                },
            },
            CertificateError::UnknownIssuer => Self::UnknownIssuer,
            // A root of the same name with another key.
            CertificateError::BadSignature => Self::UnknownIssuer,
            error => Self::BadPeerCertificate(why_not(&error).to_owned()),
        }
    }

    fn from_alert(alert: AlertDescription) -> Self {
        Self::CertificateRefused(match alert {
            AlertDescription::CertificateExpired => {
                "it has expired or is not valid yet; renew it, or check the clocks of both hosts"
            }
            AlertDescription::UnknownCA | AlertDescription::DecryptError => {
                "no CA of the peer signed it; give both sides the same CA"
            }
            AlertDescription::BadCertificate => {
                "it is not for the name that the peer expects, or it is damaged"
            }
            AlertDescription::UnsupportedCertificate => {
                "its extended key usage must allow both the client's and the server's part"
            }
            AlertDescription::CertificateRevoked => "it was revoked",
            AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
                "it is not acceptable there"
            }
            AlertDescription::CertificateRequired => {
                "this side sent none; give it a certificate of the peer's CA"
            }
            AlertDescription::BadRecordMac
            | AlertDescription::DecryptionFailed
            | AlertDescription::DecodeError
            | AlertDescription::RecordOverflow
            | AlertDescription::IllegalParameter
            | AlertDescription::UnexpectedMessage => return Self::DamagedAtPeer,
            AlertDescription::HandshakeFailure
            | AlertDescription::ProtocolVersion
            | AlertDescription::InsufficientSecurity => return Self::NothingInCommon,
            alert => return Self::Alert(u8::from(alert)),
        })
    }
}

/// Says why a certificate is not acceptable, and which one would be.
pub(super) fn why_not(error: &CertificateError) -> &'static str {
    match error {
        CertificateError::BadEncoding => "it is damaged, or no X.509 certificate",
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "it has expired: renew it, or check this host's clock"
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "it is not valid yet: check this host's clock"
        }
        CertificateError::Revoked => "it was revoked: make another one",
        CertificateError::UnhandledCriticalExtension => UNKNOWN_EXTENSION,
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "its extended key usage must allow both the client's and the server's part"
        }
        CertificateError::UnsupportedSignatureAlgorithmContext { .. }
        | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
            "its signature is of a kind that is not supported: expected SHA-256, SHA-384 or SHA-512 \
             with RSA or ECDSA, or Ed25519"
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "it is for another name"
        }
        // The error is that of the library that reads certificates. It says no more than its name.
        CertificateError::Other(other) => match other.0.to_string().as_str() {
            "UnsupportedCertVersion" => {
                "it is of X.509 version 1: make one of version 3, which has extensions"
            }
            "CaUsedAsEndEntity" => {
                "it is that of a CA: expected one that a CA has issued for the host"
            }
            "EndEntityUsedAsCa" => "it was signed by one that is not that of a CA",
            "UnsupportedCriticalExtension" => UNKNOWN_EXTENSION,
            "NameConstraintViolation" => "its CA may not issue one for this name",
            "PathLenConstraintViolated" | "MaximumPathDepthExceeded" => {
                "more CAs are between it and the root than the root allows"
            }
            _ => "a field of it is malformed or not supported",
        },
        _ => "a field of it is not acceptable",
    }
}

const UNKNOWN_EXTENSION: &str =
    "it has a critical extension that is not supported: make one without it";

/// Returns the names of a certificate as a list. rustls gives them as `DnsName("a.example")`.
fn names(presented: &[String]) -> String {
    let bare = |name: &String| match name.split_once('(') {
        Some((_, rest)) => rest.trim_end_matches(')').replace('"', "`"),
        None => name.clone(),
    };
    presented.iter().map(bare).collect::<Vec<_>>().join(", ")
}

/// Whether `bytes` can be the first of TLS: a record's type and the major version.
fn begins_tls(bytes: &[u8]) -> bool {
    bytes.first().is_none_or(|kind| (20..=23).contains(kind))
        && bytes.get(1).is_none_or(|&major| major == 3)
}
