//! Checks the way to a destination, and moves nothing.

use super::config::{Route, SourceConfig};
use super::recovery::Worked;
use crate::control::ControlLink;
use crate::error::MigrationError;
use crate::handshake::{Identity, Opened, protection};
use crate::wire::{ChannelKey, Frame, Side};
use std::sync::Arc;

/// The outcome of [`check`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checked {
    /// The address of the destination, for people.
    pub peer: String,
    /// The version of the protocol that both sides speak.
    pub version: u16,
    /// Whether TLS protects the way.
    pub tls: bool,
    /// The name for which the destination's certificate is valid. `None`: without TLS.
    pub tls_name: Option<String>,
}

/// Goes as far as the handshake of a migration: both sides prove who they are, and know the secret
/// of a session. Then the session ends. The destination stays ready, and does not report it. A busy
/// destination is not waited for. `stop` ends the check early.
///
/// # Errors
/// Those of a migration that does not get as far as its offer.
pub fn check(
    route: &Route,
    config: &SourceConfig,
    stop: &dyn Fn() -> bool,
) -> Result<Checked, MigrationError> {
    let identity =
        Identity::random().map_err(|e| MigrationError::os("cannot make a session's secret", e))?;
    let protection = protection(config.tls.as_ref(), config.plain)?;
    let limit = config.limits.connect;
    let key = ChannelKey::control(1);
    let Opened {
        connection, agreed, ..
    } = route.open(&Worked::default(), &protection, &identity, key, limit, stop)?;
    let (tls, tls_name) = (connection.is_tls(), connection.tls_name());
    let peer = connection.peer().to_owned();
    let mut control = ControlLink::new(Arc::new(connection), 1, Side::Destination, 0);
    // The destination gives the place of the session to others.
    control.send(&Frame::Cancel)?;
    control.close_gracefully();
    Ok(Checked {
        peer,
        version: agreed.version,
        tls,
        tls_name,
    })
}
