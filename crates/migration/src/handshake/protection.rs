//! The protection of connections against other hosts.

use crate::channel::{TlsConfig, TlsFiles};
use crate::error::MigrationError;

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
pub enum PlainPolicy {
    /// Those of this host: unix sockets and loopback addresses.
    #[default]
    LoopbackOnly,
    /// All. Anyone on the path can then read and change the VM.
    Anywhere,
}

/// Returns the protection of a session: TLS by the files, which are read now, or `plain`.
///
/// # Errors
/// When the files do not serve.
pub(crate) fn protection(
    files: Option<&TlsFiles>,
    plain: PlainPolicy,
) -> Result<Protection, MigrationError> {
    Ok(match files {
        Some(files) => Protection::Tls(files.load().map_err(crate::channel::ChannelError::from)?),
        None => Protection::Plain(plain),
    })
}
