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
    #[error("the peer broke TLS off with the alert {0}")]
    Alert(String),
    /// The peer is Pageferry without TLS.
    #[error("the peer does not use TLS, and this side does: configure TLS at both or at neither")]
    PeerIsPlain,
    /// The peer speaks another protocol.
    #[error("the peer does not speak TLS: it began with {0}")]
    NotTls(FirstBytes),
    /// The peer closed the connection during the handshake.
    #[error("the peer closed the connection during the TLS handshake: does it use TLS?")]
    Ended,
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
            error => Self::Broken(error.to_string()),
        }
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
            error => Self::BadPeerCertificate(error.to_string()),
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
            alert => return Self::Alert(format!("{alert:?}")),
        })
    }
}

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
