#![expect(unsafe_code, reason = "has the signatures of the steps of TLS")]
//! TLS in a build without it. No value of these types exists, so no call on one happens.

use rustix::event::PollFlags;
use std::convert::Infallible;
use std::io::{self, IoSlice};
use std::os::fd::BorrowedFd;

use super::{Sent, TlsError};
use crate::channel::raw::Cursor;

/// The place of a side's certificates. This build has no TLS, so there is none: build
/// `pageferry-transport` with the feature `tls`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls(Infallible);

impl Tls {
    /// Reads the certificates.
    ///
    /// # Errors
    /// None: this is never called.
    pub const fn load(&self) -> Result<TlsConfig, TlsError> {
        match self.0 {}
    }
}

/// The certificates of a side.
#[derive(Debug, Clone)]
pub struct TlsConfig(Infallible);

impl TlsConfig {
    pub(in crate::channel) const fn client(&self, _: Option<&str>) -> Result<Absent, TlsError> {
        match self.0 {}
    }

    pub(in crate::channel) const fn name_of(&self, _: Option<&str>) -> Option<String> {
        match self.0 {}
    }

    pub(in crate::channel) const fn server(&self) -> Result<Absent, TlsError> {
        match self.0 {}
    }
}

/// The state of rustls.
pub(in crate::channel) struct Absent(Infallible);

/// The TLS state of one connection.
#[derive(Debug)]
pub(in crate::channel) struct Session(Infallible);

impl Session {
    pub(in crate::channel) const fn new(tls: Absent) -> Self {
        match tls.0 {}
    }

    pub(in crate::channel) const fn handshake(
        &mut self,
        _: BorrowedFd<'_>,
    ) -> io::Result<Option<PollFlags>> {
        match self.0 {}
    }

    pub(in crate::channel) const fn exporter(&self) -> Result<[u8; 32], TlsError> {
        match self.0 {}
    }

    pub(in crate::channel) const fn has_peer(&self) -> bool {
        match self.0 {}
    }

    pub(in crate::channel) const fn peer_dns_name(&self) -> Option<String> {
        match self.0 {}
    }

    pub(in crate::channel) const fn has_pending(&self) -> bool {
        match self.0 {}
    }

    pub(in crate::channel) const fn look(&mut self, _: BorrowedFd<'_>) -> io::Result<()> {
        match self.0 {}
    }

    /// # Safety
    /// None: this is never called.
    pub(in crate::channel) const unsafe fn receive(
        &mut self,
        _: BorrowedFd<'_>,
        _: &mut Cursor<'_>,
    ) -> io::Result<usize> {
        match self.0 {}
    }

    /// # Safety
    /// None: this is never called.
    pub(in crate::channel) const unsafe fn send(
        &mut self,
        _: BorrowedFd<'_>,
        _: &mut Cursor<'_>,
    ) -> io::Result<Sent> {
        match self.0 {}
    }

    pub(in crate::channel) const fn send_slices(
        &mut self,
        _: BorrowedFd<'_>,
        _: &[IoSlice<'_>],
        _: &mut usize,
    ) -> io::Result<Sent> {
        match self.0 {}
    }

    pub(in crate::channel) const fn flush(&mut self, _: BorrowedFd<'_>) -> io::Result<Sent> {
        match self.0 {}
    }

    pub(in crate::channel) const fn close_write(&mut self, _: BorrowedFd<'_>) {
        match self.0 {}
    }
}
