//! A Cloud Hypervisor that a VM arrives at.
//!
//! **Guarantee.** A page fault is answered once, and when its page has its right bytes.
//!
//! **Mechanism.** The receiving process gets memfds of ours and Config while the VM still runs at
//! its source, and the connection for page faults. It gets State in the switch-over, and Complete
//! on `Go`. A thread answers its page faults, one at a time, until it has all pages.
//!
//! A VM that is loaded outlives our process, if a keeper has its descriptors too.
//!
//! **Neighbours.** `foreign::arrival` has the state machine, and `receiver` speaks with the
//! process.

use super::receiver::{Ended, Keep, Receiver};
use super::wire;
use super::{KIND, STATE_DEVICE};
use crate::foreign::arrival::{Arriving, Life};
use crate::foreign::description::Description;
use crate::foreign::keeper::End;
use crate::foreign::kept::Kept;
use crate::foreign::{LeftBehind, ReceiverOptions, VmmError, check};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{GuestRam, Machine, MachineError, MachineKind};
use pageferry_migration::Incoming;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tracing::error;

/// The bytes that one access brings at most.
const FETCH_BYTES: u64 = 256 << 10;

/// A VM that an earlier process of ours has left at an API socket.
pub(super) fn left_behind(api: &Path) -> Result<Option<LeftBehind>, VmmError> {
    let Some((kept, ring, orphan, fds)) = Kept::found_move(api, End::Destination)? else {
        return Ok(None);
    };
    let description = Description::parse(&orphan.offer().guest)?;
    let mappings = wire::mappings(description.config.as_bytes())?;
    let process = Receiver::found(api, (kept, ring), fds, &mappings)?;
    let vmm = Arc::new(Guest::new(process, true));
    Ok(Some(LeftBehind { vmm, orphan }))
}

/// A receiving process.
pub(super) struct Guest {
    process: Receiver,
    /// Whether it was loaded by another process of ours.
    found: bool,
    /// Whether the missing pages are known, or never will be.
    open: OnceLock<bool>,
}

impl Guest {
    /// Gives the process its memory and Config.
    pub(super) fn prepare(
        options: &mut ReceiverOptions,
        incoming: &Incoming,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, VmmError> {
        let offer = incoming.offer();
        let config = Description::parse(&offer.guest)?.config.into_bytes();
        let mappings = wire::mappings(&config)?;
        let sizes = mappings.iter().map(|mapping| mapping.size);
        check(offer, KIND.engine, sizes.fold(0, u64::saturating_add))?;
        let session = incoming.record();
        let keep = Keep {
            record: &session.map_err(|e| VmmError::Offer(e.to_string()))?,
            end: End::Destination,
            keeper: options.keeper.as_mut(),
        };
        let process = Receiver::prepare(&options.api, &mappings, &config, keep, stop)?;
        Ok(Self::new(process, false))
    }

    fn new(process: Receiver, found: bool) -> Self {
        Self {
            process,
            found,
            open: OnceLock::new(),
        }
    }

    /// Waits until pages are here. Returns false if they never come.
    fn bring(&self, life: &Life, first: RamPage, bytes: u64) -> bool {
        let stop = || life.is_over();
        let mut rest = vec![0; bytes.min(FETCH_BYTES) as usize];
        let mut done = 0;
        while done < bytes {
            let part = &mut rest[..(bytes - done).min(FETCH_BYTES) as usize];
            if let Err(error) = self.process.ram.read((first, done), part, &stop) {
                error!(%error, "a page fault is left without an answer");
                return false;
            }
            done += part.len() as u64;
        }
        true
    }
}

impl Arriving for Guest {
    fn state_device(&self) -> &'static str {
        STATE_DEVICE
    }
    fn load(&self, state: &[u8], paused: bool) -> Result<(), VmmError> {
        self.process.load(state, true)?;
        // Before the source hears that the VM is ready.
        self.process.answers.kept.loaded(paused);
        Ok(())
    }
    fn check_alive(&self) -> Result<(), VmmError> {
        match self.process.main.has_ended()? {
            true => Err(VmmError::Closed("load State")),
            false => Ok(()),
        }
    }
    fn handed_over(&self) {
        self.process.answers.kept.handed_over();
    }
    fn start(&self, paused: bool) -> Result<(), VmmError> {
        self.process.complete(paused)
    }
    fn set_running(&self, on: bool, limit: Duration) -> Result<(), VmmError> {
        let endpoint = match on {
            true => "PUT /api/v1/vm.resume",
            false => "PUT /api/v1/vm.pause",
        };
        self.process.api.call(endpoint, None, limit).map(drop)
    }
    fn serve(&self, life: &Life) -> Result<bool, VmmError> {
        if !self.open.wait() {
            return Ok(false);
        }
        let bring = |first, pages| self.bring(life, first, pages * PAGE_SIZE);
        let ended = self.process.answer_faults(&bring)?;
        let (asked, pages) = (self.process.answers.asked(), self.process.ram.pages());
        match ended {
            Ended::Closed if asked == pages => Ok(true),
            Ended::Unanswered => Ok(false),
            // Before `Go`, the other connection has the reason.
            Ended::Closed if !life.await_change(|progress| progress.go) => Ok(false),
            Ended::Closed => Err(VmmError::Gone { asked, pages }),
        }
    }
    fn shutdown(&self) {
        let _ = self.open.set(false);
        self.process.shutdown();
    }
}

impl Machine for Guest {
    fn kind(&self) -> MachineKind<'_> {
        KIND
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.process.ram
    }
    fn has_dirty_log(&self) -> bool {
        false
    }
    /// The missing pages are final: they are kept, and page faults are answered from now on.
    fn begin_postcopy(&self) -> Result<(), MachineError> {
        if !self.found
            && let Some(missing) = self.process.ram.missing()
        {
            self.process.answers.kept.set_missing(&missing.snapshot());
        }
        self.process.ram.begin();
        let _ = self.open.set(true);
        Ok(())
    }
    fn install(&self, first: RamPage, pages: u64) -> Result<(), MachineError> {
        self.process.answers.kept.came(first, pages);
        Ok(())
    }
}
