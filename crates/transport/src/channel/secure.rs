//! TLS on a connection: its start, its handshake, and what binds other proofs to it.

use rustix::event::PollFlags;
use std::io;
use std::os::fd::AsFd;
use std::sync::Mutex;

use super::tls::Session;
use super::wait::Waiter;
use super::{ChannelError, Connection, TlsConfig, TlsError, Wait};

impl Connection {
    /// Begins TLS as the side that dialled. `host` is the dialled host, `None` for a unix socket.
    /// No other bytes may have been sent or received.
    ///
    /// # Errors
    /// [`TlsError::NoName`], [`TlsError::BadName`].
    pub(crate) fn begin_tls_client(
        mut self,
        config: &TlsConfig,
        host: Option<&str>,
    ) -> Result<Self, TlsError> {
        self.tls = Some(Box::new(Mutex::new(Session::new(config.client(host)?))));
        self.checked_name = config.name_of(host);
        Ok(self)
    }

    /// Begins TLS as the side that accepted. No other bytes may have been sent or received.
    ///
    /// # Errors
    /// [`TlsError::Broken`].
    pub(crate) fn begin_tls_server(&mut self, config: &TlsConfig) -> Result<(), TlsError> {
        self.tls = Some(Box::new(Mutex::new(Session::new(config.server()?))));
        self.checked_name = config.name_of(None);
        Ok(())
    }

    /// Completes the TLS handshake. Does nothing without TLS.
    ///
    /// The side that dialled is done before the other side has judged its certificate. A refusal
    /// arrives with the first read.
    ///
    /// # Errors
    /// [`ChannelError::Tls`], `TimedOut`, `Interrupted`, `Lost`.
    pub(crate) fn finish_tls(&self, wait: &Wait<'_>) -> Result<(), ChannelError> {
        let mut waiter = Waiter::new(wait);
        while let Some(events) = self.step_tls(wait.what)? {
            waiter.wait(self.as_fd(), events)?;
        }
        Ok(())
    }

    /// Continues the TLS handshake without waiting. Returns the event to wait for, `None` at its
    /// end.
    ///
    /// # Errors
    /// [`ChannelError::Tls`], `Lost`.
    pub(crate) fn step_tls(&self, what: &'static str) -> Result<Option<PollFlags>, ChannelError> {
        let Some(mut session) = self.session() else {
            return Ok(None);
        };
        loop {
            match session.handshake(self.as_fd()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map_err(|error| ChannelError::from_io(what, error)),
            }
        }
    }

    /// Whether TLS protects this connection.
    #[must_use]
    pub const fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The name of the peer in its certificate: the one that was asked for, or else the first DNS
    /// name. `None` without TLS, before the end of its handshake, and for a certificate without DNS
    /// names of which none was asked for.
    #[must_use]
    pub fn tls_name(&self) -> Option<String> {
        let session = self.session()?;
        // Without it, the peer has shown no certificate yet.
        let shown = session.has_peer();
        shown.then(|| {
            self.checked_name
                .clone()
                .or_else(|| session.peer_dns_name())
        })?
    }

    /// Returns 32 bytes that only the two ends of this TLS connection know. They differ from those
    /// of every other connection. Without TLS, all are zero.
    ///
    /// # Errors
    /// [`TlsError::Broken`] before the end of the TLS handshake.
    pub fn exporter(&self) -> Result<[u8; 32], TlsError> {
        self.session()
            .map_or(Ok([0; 32]), |session| session.exporter())
    }
}
