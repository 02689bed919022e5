//! Set-up at the destination: the offer of a source, and whether a machine fits it.

use super::completion::discarded;
use super::config::{DestinationFailure, Offer};
use super::desk::{Candidate, Chosen};
use super::resolver::Resolver;
use super::{Destination, postcopy};
use crate::clock::monotonic;
use crate::control::ControlLink;
use crate::cpus::Pinned;
use crate::error::MigrationError;
use crate::file::damaged;
use crate::orphan::{self, Orphan};
use crate::phase::{Observer, Phase};
use crate::report::DestinationReport;
use crate::vm::{RunningVm, fits};
use crate::wire::{ErrorCode, ErrorMessage, Frame, Setup};
use pageferry_transport::handshake::Identity;
use rustix::event::{PollFd, PollFlags};
use std::sync::Arc;
use std::time::Duration;

/// The longest interval between two looks at `stop`.
const TICK: Duration = Duration::from_millis(50);

/// A source that has connected and offers a VM. Its destination is busy until this is dropped.
pub struct Incoming {
    pub(super) host: Arc<Destination>,
    /// `receive` and `refuse` take it.
    pub(super) control: Option<ControlLink>,
    pub(super) offer: Offer,
    pub(super) setup: Setup,
    pub(super) identity: Identity,
    /// The VM that another process had.
    pub(super) orphan: Option<Orphan>,
    pub(super) began: Duration,
}

/// See [`Destination::accept`].
pub(super) fn accept(
    host: &Arc<Destination>,
    stop: &dyn Fn() -> bool,
) -> Result<Incoming, MigrationError> {
    let chosen = choose(host, stop).inspect_err(|_| turn_away(host))?;
    let Chosen {
        mut candidate,
        said,
    } = chosen;
    let setup = match said {
        Ok(Frame::Setup(setup)) => setup,
        other => {
            let error = match other {
                Ok(frame) => MigrationError::unexpected("Setup", &frame),
                Err(error) => error,
            };
            part(host, candidate, &error.to_frame());
            return Err(error);
        }
    };
    candidate.control.set_memory_pages(setup.memory_pages());
    if !setup.devices.is_empty() {
        candidate.control.expect_devices();
    }
    let identity = Identity {
        session: candidate.session,
        secret: candidate.secret,
    };
    host.desk
        .begin(identity.clone(), setup.bulk_channels, setup.urgent_channels);
    turn_away(host);
    Ok(Incoming {
        host: Arc::clone(host),
        control: Some(candidate.control),
        offer: Offer::of(&setup),
        setup,
        identity,
        orphan: None,
        began: monotonic(),
    })
}

/// Tells the sources that were not taken that the destination is busy.
fn turn_away(host: &Destination) {
    for other in host.desk.take_waiting() {
        let busy = "the destination took another source; try again";
        let frame = Frame::Error(ErrorMessage::new(ErrorCode::Busy, busy));
        part(host, other, &frame);
    }
}

/// Says a last word to a source. The acceptor's thread waits until it has read it: this one has
/// other sources to serve.
fn part(host: &Destination, mut candidate: Candidate, last: &Frame) {
    if candidate.control.send(last).is_ok() {
        host.acceptor.part(candidate.control.into_connection());
    }
}

/// Waits for the first source that speaks.
fn choose(host: &Destination, stop: &dyn Fn() -> bool) -> Result<Chosen, MigrationError> {
    loop {
        if stop() {
            return Err(MigrationError::Cancelled);
        }
        host.desk.arrivals.hush();
        if let Some(chosen) = host.desk.take_first() {
            return Ok(chosen);
        }
        let Some(connections) = host.desk.connections() else {
            continue;
        };
        let mut fds = vec![PollFd::new(&host.desk.arrivals, PollFlags::IN)];
        for connection in &connections {
            fds.push(PollFd::new(&**connection, PollFlags::IN));
        }
        pageferry_transport::sleep_on(&mut fds, TICK);
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if let Some(control) = &self.control {
            control.shutdown();
        }
        self.host.desk.end();
    }
}

impl Incoming {
    /// Returns the offered VM.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Refuses the offer with `message`. The VM runs on at the source.
    pub fn refuse(mut self, message: &str) {
        self.give_up(&Frame::Error(ErrorMessage::new(
            ErrorCode::SetupRefused,
            message,
        )));
    }

    fn give_up(&mut self, last: &Frame) {
        if let Some(mut control) = self.control.take() {
            let _ = control.send(last);
            control.close_gracefully();
        }
    }

    /// Receives the VM into `vm`, a machine of the offered size. Its vCPUs must never have run, and
    /// its hooks must forward to `resolver`. Its vCPUs and devices are paused first. Its memory may
    /// have any bytes. (For a session that was [taken over](super::Destination::take_over), its
    /// vCPUs may run, and its memory has the pages that are not missing.) `stop` ends the migration
    /// until the source has handed the VM over. This sets short scheduler slices for the calling
    /// thread, since vCPUs wait for it. The thread runs on [`DestinationConfig::cpus`] meanwhile,
    /// and so do those that it starts.
    ///
    /// [`DestinationConfig::cpus`]: super::DestinationConfig::cpus
    ///
    /// # Errors
    /// [`DestinationFailure`] says where the VM is.
    pub fn receive(
        mut self,
        vm: &RunningVm<'_>,
        resolver: &Arc<Resolver>,
        stop: &dyn Fn() -> bool,
        observer: &dyn Observer,
    ) -> Result<DestinationReport, DestinationFailure> {
        crate::latency::prefer_short_slices();
        observer.phase(Phase::Setup);
        let fits = fits(&self.setup, vm);
        let prepared = fits.and_then(|states| postcopy::prepare(&self, vm, resolver, states));
        // Only now: to choose a delivery, the machine may have measured with vCPUs of its own.
        let pinned = Pinned::to(self.host.config.cpus.as_ref()).map_err(MigrationError::from);
        match prepared.and_then(|prepared| Ok((prepared, pinned?))) {
            Ok((prepared, _pinned)) => postcopy::run(self, vm, prepared, stop, observer),
            Err(error) => {
                self.give_up(&error.to_frame());
                observer.phase(Phase::Failed);
                Err(discarded(error))
            }
        }
    }
}

impl Orphan {
    /// The VM.
    #[must_use]
    pub fn offer(&self) -> Offer {
        Offer::of(&self.setup)
    }
}

impl Incoming {
    /// The bytes by which another process takes this session over, should this one die when all
    /// that the VM needs to run is loaded: see [`Orphan`]. The bytes have the session's secret.
    ///
    /// # Errors
    /// Never for an offer that has come: it was encoded once.
    pub fn record(&self) -> Result<Vec<u8>, MigrationError> {
        orphan::record(&self.identity, &self.setup)
    }
}

impl Destination {
    /// Takes over the session of a process that died. [`Incoming::receive`] then brings the missing
    /// pages: into a machine whose memory has all others, and whose vCPUs may run. No other session
    /// of this destination may be under way.
    ///
    /// # Errors
    /// [`MigrationError::Mismatch`] if the bits are not those of the VM's pages.
    pub fn take_over(self: &Arc<Self>, orphan: Orphan) -> Result<Incoming, MigrationError> {
        let pages = orphan.setup.memory_pages();
        let words = orphan.missing.len() as u64;
        let behind = match pages % 64 {
            0 => 0,
            used => orphan.missing.last().map_or(0, |last| last >> used),
        };
        if words != pages.div_ceil(64) || behind != 0 {
            return Err(damaged(
                orphan::WHAT,
                "its bits are not those of the VM's pages",
            ));
        }
        let setup = &orphan.setup;
        let (bulk, urgent) = (setup.bulk_channels, setup.urgent_channels);
        self.desk.begin(orphan.identity.clone(), bulk, urgent);
        Ok(Incoming {
            host: Arc::clone(self),
            control: None,
            offer: orphan.offer(),
            setup: orphan.setup.clone(),
            identity: orphan.identity.clone(),
            orphan: Some(orphan),
            began: monotonic(),
        })
    }
}
