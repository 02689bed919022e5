//! Checks the way to a destination, and moves nothing.

use super::config::{Route, SourceConfig};
use super::recovery::Worked;
use super::setup::channel_ids;
use crate::control::ControlLink;
use crate::error::MigrationError;
use crate::wire::{ChannelKey, Frame, Side, Status, check_channels};
use pageferry_transport::handshake::{Identity, Opened, Protection};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// The interval at which a check looks at its caller's `stop`.
const TICK: Duration = Duration::from_millis(20);

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

/// Goes as far as the handshakes of a migration: on each of its channels, both sides prove who they
/// are, that they know the secret of a session, and that large packets reach them. Then the session
/// ends. The destination stays ready, and does not report it. A busy destination is not waited for.
/// `stop` ends the check early.
///
/// # Errors
/// Those of a migration that does not get as far as its offer. The first channel that fails counts.
pub fn check(
    route: &Route,
    config: &SourceConfig,
    stop: &dyn Fn() -> bool,
) -> Result<Checked, MigrationError> {
    check_channels(config.bulk_channels, config.urgent_channels)?;
    let identity =
        Identity::random().map_err(|e| MigrationError::os("cannot make a session's secret", e))?;
    let protection = Protection::load(config.tls.as_ref(), config.plain)?;
    let key = ChannelKey::control(1);
    let worked = Worked::default();
    let Opened {
        connection, agreed, ..
    } = route.open(&worked, &protection, &identity, key, &config.limits, stop)?;
    let (tls, tls_name) = (connection.is_tls(), connection.tls_name());
    let peer = connection.peer().to_owned();
    let mut control = ControlLink::new(Arc::new(connection), 1, Side::Destination, 0);
    let others = Others {
        route,
        config,
        worked: &worked,
        protection: &protection,
        identity: &identity,
    };
    let opened = others.open_all(stop).map_err(|error| match error {
        // The destination took another source meanwhile. It has said so here.
        MigrationError::Refused(Status::UnknownSession) => match control.receive() {
            Ok(Some(Frame::Error(reason))) => MigrationError::gave_up(&reason),
            _ => error,
        },
        error => error,
    });
    // The destination gives the place of the session to others.
    let ended = control.send(&Frame::Cancel);
    control.close_gracefully();
    opened?;
    ended?;
    Ok(Checked {
        peer,
        version: agreed.version,
        tls,
        tls_name,
    })
}

/// The channels of a session beside its control channel.
struct Others<'a> {
    route: &'a Route,
    config: &'a SourceConfig,
    worked: &'a Worked,
    protection: &'a Protection,
    identity: &'a Identity,
}

impl Others<'_> {
    /// Opens all of them at once, as a migration does, and closes them. The first failure ends the
    /// attempts at the others.
    fn open_all(&self, stop: &dyn Fn() -> bool) -> Result<(), MigrationError> {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (sender, outcomes) = channel();
            let mut first = Ok(());
            for id in channel_ids(self.config) {
                let (sender, over) = (sender.clone(), &over);
                let key = id.key(1);
                let spawned = std::thread::Builder::new()
                    .name("pf-check".into())
                    .spawn_scoped(scope, move || {
                        let over = || over.load(Ordering::Relaxed);
                        let limits = &self.config.limits;
                        let (ways, who) = (self.protection, self.identity);
                        let opened = self.route.open(self.worked, ways, who, key, limits, &over);
                        // The other end lives as long as this scope.
                        let _ = sender.send(opened.map(drop).map_err(MigrationError::from));
                    });
                if let Err(e) = spawned {
                    first = Err(MigrationError::os("cannot start a thread that connects", e));
                    break;
                }
            }
            drop(sender);
            loop {
                if first.is_err() {
                    // Relaxed: it carries nothing but itself.
                    over.store(true, Ordering::Relaxed);
                }
                match outcomes.recv_timeout(TICK) {
                    Ok(outcome) => first = first.and(outcome),
                    Err(RecvTimeoutError::Timeout) if stop() => {
                        first = first.and(Err(MigrationError::Cancelled));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return first,
                }
            }
        })
    }
}
