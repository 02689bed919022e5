//! The reasons that rustls gives, in this crate's words.

use rustls::{AlertDescription, CertificateError};

use super::FirstBytes;
use super::TlsError;
use super::kinds::signatures;

impl TlsError {
    /// Returns the variant for an error of rustls. `first` are the first bytes of the peer.
    #[must_use]
    pub fn from_rustls(error: rustls::Error, first: FirstBytes) -> Self {
        match error {
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
            // The others are those of a root of the same name with another key, or kind of key.
            CertificateError::UnknownIssuer
            | CertificateError::BadSignature
            | CertificateError::UnsupportedSignatureAlgorithmForPublicKeyContext { .. } => {
                Self::UnknownIssuer
            }
            error => Self::BadPeerCertificate(why_not(&error)),
        }
    }

    fn from_alert(alert: AlertDescription) -> Self {
        let why = match alert {
            AlertDescription::CertificateExpired => {
                "it has expired or is not valid yet; renew it, or check the clocks of both hosts"
            }
            AlertDescription::UnknownCA => {
                "no CA of the peer signed it; give both sides the same CA"
            }
            AlertDescription::DecryptError => {
                return Self::CertificateRefused(format!(
                    "no CA of the peer signed it, or the peer does not support its kind of \
                     signature; give both sides the same CA, which signs with {}",
                    signatures()
                ));
            }
            AlertDescription::BadCertificate => {
                "it is not for the name that the peer expects, or it is damaged"
            }
            AlertDescription::UnsupportedCertificate => {
                "its extended key usage must allow both the client's and the server's part"
            }
            AlertDescription::CertificateRevoked => "it was revoked",
            AlertDescription::CertificateUnknown | AlertDescription::AccessDenied => {
                "a field of it is not supported there, or the peer's CA may not issue it for a \
                 host; the peer says which"
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
        };
        Self::CertificateRefused(why.to_owned())
    }
}

/// Says why a certificate is not acceptable, and which one would be.
pub(super) fn why_not(error: &CertificateError) -> String {
    let why = match error {
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
        CertificateError::UnsupportedSignatureAlgorithmContext { .. } => {
            return format!(
                "its signature is of a kind that is not supported: expected {}",
                signatures()
            );
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "it is for another name"
        }
        // The library below rustls has more reasons.
        CertificateError::Other(other) => match other.0.downcast_ref() {
            Some(webpki::Error::UnsupportedCertVersion) => {
                "it is of X.509 version 1: make one of version 3, which has extensions"
            }
            Some(webpki::Error::CaUsedAsEndEntity) => {
                "it is that of a CA: expected one that a CA has issued for the host"
            }
            Some(webpki::Error::EndEntityUsedAsCa) => {
                "it was signed by one that is not that of a CA"
            }
            Some(webpki::Error::UnsupportedCriticalExtension) => UNKNOWN_EXTENSION,
            Some(webpki::Error::NameConstraintViolation) => {
                "its CA may not issue one for this name"
            }
            Some(
                webpki::Error::PathLenConstraintViolated | webpki::Error::MaximumPathDepthExceeded,
            ) => "more CAs are between it and the root than the root allows",
            _ => "a field of it is malformed or not supported",
        },
        _ => "a field of it is not acceptable",
    };
    why.to_owned()
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
