//! The destination: the process that a VM moves to.
//!
//! **Guarantee.** No vCPU sees a page before its right bytes are there. Until the source has
//! confirmed that it will never resume the guest, a lost connection discards the VM here. After
//! that, a lost connection pauses the VM, with an error that gives the number of missing pages. The
//! VM never continues with wrong pages. There is no recovery yet.
//!
//! **Mechanism.** [`Incoming::accept`] takes the two connections and the source's offer. The caller
//! builds such a machine. [`Incoming::receive`] acknowledges, allocates memory in parallel with
//! pre-copy (`allocation`), fills it, and starts the guest at switch-over. It returns when every
//! page is here and both sides have confirmed that. In post-copy the calling thread receives the
//! background push (`place`), and vCPUs fetch their own pages (`resolver`). Where the delivery uses
//! userfaultfds, fault threads serve them (`faults`). All threads share `core`.

mod allocation;
mod collapse;
mod config;
mod core;
mod faults;
mod pieces;
mod place;
mod resolver;
mod running;
mod stalls;
mod urgent;

pub use config::{DestinationConfig, DestinationFailure, DestinationVm, Offer};
pub use resolver::{FAULT_SPIN, Resolver};
pub use stalls::new_histogram;

use self::allocation::Allocation;
use self::core::Core;
use self::place::Placer;
use crate::channel::Listener;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::handshake::Stranger;
use crate::link::{Received, SWITCH_OVER_SPIN_MICROS, StreamLink, UrgentLink};
use crate::phase::{Observer, Phase};
use crate::report::{DestinationReport, PageCounts, PhaseStart};
use crate::source::RunningVm;
use crate::wire::{ErrorCode, Frame, Setup, SetupProgress, SwitchOver};
use pageferry_machine::{DeliveryInUse, FaultEvents, VcpuState};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The interval between two SetupProgress frames.
const REPORT_INTERVAL: Duration = Duration::from_millis(500);
/// The interval at which the destination checks its allocation while no frame arrives.
const ALLOCATION_POLL: Duration = Duration::from_millis(20);

/// A source that has connected and offers a VM.
pub struct Incoming {
    link: StreamLink,
    /// Set-up takes it.
    urgent: Option<UrgentLink>,
    offer: Offer,
    setup: Setup,
    config: DestinationConfig,
    began_ns: u64,
}

/// The results of set-up, pre-copy and switch-over.
struct Started {
    core: Arc<Core>,
    events: Vec<Box<dyn FaultEvents>>,
    delivery: DeliveryInUse,
    missing_at_start: u64,
    precopy: (u64, u64),
}

impl Incoming {
    /// Waits for a source and its offer until `stop` returns true. Strangers that connect meanwhile
    /// are refused and reported to `stranger`.
    ///
    /// # Errors
    /// [`MigrationError::Cancelled`] if `stop` returned true. Otherwise an error of the source or
    /// of the host.
    pub fn accept(
        listener: &Listener,
        config: DestinationConfig,
        stop: &dyn Fn() -> bool,
        stranger: &mut dyn FnMut(&Stranger),
    ) -> Result<Self, MigrationError> {
        let (mut link, urgent) = StreamLink::accept(listener, &config, stop, stranger)?;
        let began_ns = monotonic_ns();
        let setup = match link.receive(config.handshake_limit, stop) {
            Ok(Frame::Setup(setup)) => setup,
            other => {
                let error =
                    other.map_or_else(|error| error, |other| link.unexpected("Setup", &other));
                give_up(&mut link, &error);
                return Err(error);
            }
        };
        link.set_memory_pages(setup.memory_pages());
        let offer = Offer {
            engine: crate::link::machine_engine(setup.engine),
            vcpus: setup.vcpus,
            memory_bytes: setup.memory_bytes,
            guest: setup.description.clone(),
        };
        Ok(Self {
            link,
            urgent: Some(urgent),
            offer,
            setup,
            config,
            began_ns,
        })
    }

    /// Returns the offered VM.
    #[must_use]
    pub fn offer(&self) -> &Offer {
        &self.offer
    }

    /// Refuses the offer with `message`. The VM runs on at the source.
    pub fn refuse(mut self, message: &str) {
        self.link.send_reason(ErrorCode::SetupRefused, message);
        self.link.close_gracefully();
    }

    /// Receives the VM into `vm`, a machine of the offered size. Its vCPUs must never have run, and
    /// its hooks must forward to `resolver`. `stop` ends the migration before switch-over. This
    /// sets short scheduler slices for the calling thread, since vCPUs wait for it.
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
        let mut phases = vec![PhaseStart {
            phase: Phase::Setup,
            at_ns: self.began_ns,
        }];
        let ram = Arc::clone(vm.machine.ram());
        let discarded = |error| DestinationFailure {
            vm: DestinationVm::Discarded,
            error,
        };
        let begun = Placer::try_new(&ram, self.config.silence_limit).and_then(|mut placer| {
            let started =
                self.until_start(vm, resolver, &mut placer, stop, observer, &mut phases)?;
            Ok((started, placer))
        });
        let (started, mut placer) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                give_up(&mut self.link, &error);
                resolver.disconnect();
                observer.phase(Phase::Failed);
                return Err(discarded(error));
            }
        };
        let running = running::Running {
            vm,
            started,
            link: self.link,
            config: &self.config,
            observer,
            phases,
            started_ns: 0,
        };
        running.receive_rest(&mut placer)
    }

    /// Runs set-up, pre-copy and switch-over. Until this returns no vCPU has run, and the VM can be
    /// discarded.
    fn until_start(
        &mut self,
        vm: &RunningVm<'_>,
        resolver: &Resolver,
        placer: &mut Placer<'_>,
        stop: &dyn Fn() -> bool,
        observer: &dyn Observer,
        phases: &mut Vec<PhaseStart>,
    ) -> Result<Started, MigrationError> {
        self.check_fits(vm)?;
        let machine = vm.machine;
        let missing = Arc::new(PageBitmap::try_new(machine.ram().pages() as usize)?);
        let events = machine.arm_userfault(Arc::clone(&missing), self.config.arm_options())?;
        let delivery = machine
            .delivery()
            .ok_or_else(|| MigrationError::Internal("an armed machine has no delivery".into()))?;
        // Allocate the shared state now, before the blackout.
        let urgent = self
            .urgent
            .take()
            .ok_or_else(|| MigrationError::Internal("`receive` ran twice".into()))?;
        let core = Arc::new(Core::new(
            Arc::clone(machine),
            Arc::clone(&missing),
            urgent,
            vm.threads.count(),
        )?);
        resolver.attach(Arc::clone(&core))?;
        self.link.send(&Frame::SetupAck)?;
        // Dropping it ends its threads on every path out of this function.
        let allocation = Allocation::start(machine.ram(), self.config.allocate)?;
        let mut ready = false;
        let mut reported = Instant::now();
        self.link.set_spin(SWITCH_OVER_SPIN_MICROS);

        let enter = |phases: &mut Vec<PhaseStart>, phase| {
            phases.push(PhaseStart {
                phase,
                at_ns: monotonic_ns(),
            });
            observer.phase(phase);
        };
        let mut counts = (0, 0);
        let mut states: Vec<Option<VcpuState>> = vec![None; vm.threads.count()];
        let mut pass = 0;
        let mut pass_pages = 0;
        let switch_over = loop {
            if !ready {
                ready = self.report_allocation(
                    &allocation,
                    &mut reported,
                    machine.ram().pages(),
                    observer,
                )?;
                // A source that has nothing more to send is silent until this side is ready.
                if !ready && !self.link.wait_for_frame(ALLOCATION_POLL, stop)? {
                    continue;
                }
            }
            // While frames follow one another, no wait asks this.
            if stop() {
                return Err(MigrationError::Cancelled);
            }
            match self.link.receive_any(self.config.silence_limit, stop)? {
                Received::Pages(header) => {
                    if pass == 0 {
                        pass = 1;
                        enter(phases, Phase::Precopy { pass });
                    }
                    placer.precopy(&mut self.link, &header)?;
                    let (data, zero) = placer.take_counts();
                    counts = (counts.0 + data, counts.1 + zero);
                    pass_pages += data + zero;
                    observer.progress(Phase::Precopy { pass }, pass_pages, machine.ram().pages());
                }
                Received::Frame(Frame::PassEnd(ended)) => {
                    if ended.pages != pass_pages {
                        return Err(MigrationError::Peer(format!(
                            "it announced a pass of {} pages but sent {pass_pages}",
                            ended.pages
                        )));
                    }
                    pass_pages = 0;
                    pass = ended.pass.saturating_add(1);
                    self.link.send(&Frame::PassAck(ended))?;
                }
                Received::Frame(Frame::MissingBitmap(bitmap)) => {
                    for (offset, word) in bitmap.words.iter().enumerate() {
                        missing.or_word(bitmap.first_word as usize + offset, *word);
                    }
                }
                Received::Frame(Frame::VcpuState(state)) => {
                    let slot = states
                        .get_mut(state.vcpu as usize)
                        .filter(|slot| slot.is_none());
                    *slot.ok_or_else(|| {
                        MigrationError::Peer(format!(
                            "it sent an unexpected state of vCPU {}",
                            state.vcpu
                        ))
                    })? = Some(VcpuState(state.state));
                }
                Received::Frame(Frame::SwitchOver(_)) if !ready => {
                    let why = "it sent SwitchOver before this side was ready";
                    return Err(MigrationError::Peer(why.into()));
                }
                Received::Frame(Frame::SwitchOver(switch_over)) => break switch_over,
                Received::Frame(other) => return Err(self.link.unexpected("SwitchOver", &other)),
            }
        };
        enter(phases, Phase::SwitchOver);
        let states = check_complete(&switch_over, states, &missing)?;
        machine.begin_postcopy()?;
        vm.threads.restore(&states)?;
        Ok(Started {
            core,
            events,
            delivery,
            missing_at_start: switch_over.missing_pages,
            precopy: counts,
        })
    }

    /// Reports the allocation to the source and the observer at intervals. Returns whether it is
    /// complete and reported.
    fn report_allocation(
        &mut self,
        allocation: &Allocation,
        reported: &mut Instant,
        total: u64,
        observer: &dyn Observer,
    ) -> Result<bool, MigrationError> {
        let ready = allocation.is_ready()?;
        if !ready && reported.elapsed() < REPORT_INTERVAL {
            return Ok(false);
        }
        *reported = Instant::now();
        let pages = allocation.done();
        observer.allocated(pages, total);
        let progress = SetupProgress { pages, ready };
        self.link.send(&Frame::SetupProgress(progress))?;
        Ok(ready)
    }

    fn check_fits(&self, vm: &RunningVm<'_>) -> Result<(), MigrationError> {
        let layout = vm.machine.ram().layout();
        let same_regions = self.setup.regions.len() == layout.regions().len()
            && self
                .setup
                .regions
                .iter()
                .zip(layout.regions())
                .all(|(theirs, ours)| {
                    (theirs.slot, theirs.gfn, theirs.pages) == (ours.slot, ours.gfn, ours.pages)
                });
        let mismatch = if self.offer.engine != vm.machine.engine() {
            format!(
                "its engine is {}, this machine's is {}",
                self.offer.engine,
                vm.machine.engine()
            )
        } else if (self.setup.engine, self.setup.isa)
            != crate::link::wire_engine(vm.machine.engine())
        {
            "its instruction set differs from that of this engine".into()
        } else if self.setup.state_format != crate::STATE_FORMAT {
            format!(
                "its vCPU states have format {}, this side knows {}",
                self.setup.state_format,
                crate::STATE_FORMAT
            )
        } else if self.offer.vcpus as usize != vm.threads.count() {
            format!(
                "it has {} vCPUs, this machine has {}",
                self.offer.vcpus,
                vm.threads.count()
            )
        } else if self.offer.memory_bytes != layout.bytes() {
            format!(
                "it has {} bytes of memory, this machine has {}",
                self.offer.memory_bytes,
                layout.bytes()
            )
        } else if !same_regions {
            "its memory regions differ from those of this machine".into()
        } else {
            return Ok(());
        };
        Err(MigrationError::Mismatch(format!(
            "the offered VM does not fit: {mismatch}"
        )))
    }
}

/// Sends the reason why this side gives up, and closes the connection.
fn give_up(link: &mut StreamLink, error: &MigrationError) {
    if matches!(error, MigrationError::Cancelled) {
        link.send_cancel();
    } else {
        link.send_error(error.wire_code(), error);
    }
    link.close_gracefully();
}

/// Checks that all announced pages and states have arrived.
fn check_complete(
    announced: &SwitchOver,
    states: Vec<Option<VcpuState>>,
    missing: &PageBitmap,
) -> Result<Vec<VcpuState>, MigrationError> {
    let found = missing.count() as u64;
    if found != announced.missing_pages {
        return Err(MigrationError::Peer(format!(
            "it announced {} missing pages but named {found}",
            announced.missing_pages
        )));
    }
    let vcpus = states.len();
    let states: Vec<VcpuState> = states.into_iter().flatten().collect();
    if states.len() != vcpus || announced.vcpus as usize != vcpus {
        return Err(MigrationError::Peer(format!(
            "it sent {} states for {vcpus} vCPUs",
            states.len()
        )));
    }
    Ok(states)
}

fn page_counts(precopy: (u64, u64), urgent: u64, background: (u64, u64)) -> PageCounts {
    PageCounts {
        precopy: precopy.0,
        urgent,
        background: background.0,
        zero: precopy.1 + background.1,
    }
}
