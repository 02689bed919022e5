//! The protection of connections against other hosts.

use super::HandshakeError;
use crate::address::Address;
use crate::channel::{Tls, TlsConfig, TlsError, is_elsewhere};

/// The protection of a side's connections.
#[derive(Debug, Clone)]
pub enum Protection {
    /// TLS, which both sides must use.
    Tls(TlsConfig),
    /// No TLS.
    Plain(PlainPolicy),
}

/// The peers with which a side without TLS talks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PlainPolicy {
    /// Those of this host: unix sockets and loopback addresses.
    #[default]
    LoopbackOnly,
    /// All. Anyone on the path can then read and change the VM.
    Anywhere,
}

impl Protection {
    /// TLS by the certificates, which are read now, or `plain`.
    ///
    /// # Errors
    /// When the certificates do not serve.
    pub fn load(tls: Option<&Tls>, plain: PlainPolicy) -> Result<Self, TlsError> {
        Ok(match tls {
            Some(tls) => Self::Tls(tls.load()?),
            None => Self::Plain(plain),
        })
    }

    /// Checks that this side may talk to `address`, without asking a resolver. The address behind a
    /// name is checked when there is a connection.
    ///
    /// # Errors
    /// [`HandshakeError::PlainForbidden`] for another host without TLS.
    pub fn allows(&self, address: &Address) -> Result<(), HandshakeError> {
        match self {
            Self::Plain(PlainPolicy::LoopbackOnly) if is_elsewhere(address) => {
                Err(HandshakeError::PlainForbidden {
                    peer: address.authority(),
                })
            }
            _ => Ok(()),
        }
    }
}
