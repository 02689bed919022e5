//! The answers of a VM's control socket.

use super::leave::explain;
use super::session_events::SessionEvents;
use super::state::{Activity, Host, Job};
use super::watch::has_switched_over;
use crate::console;
use crate::control::change::{self, ChangeOptions};
use crate::control::options::MigrateOptions;
use crate::control::protocol::{Event, Request};
use crate::control::server::Service;
use crate::exit::{Exit, Failure};
use crate::memory::Overhead;
use crate::output;
use crate::progress::{Feed, Update};
use crate::report::{Report, Verified};
use crate::signals::Interrupts;
use crate::vm::{PAUSE_LIMIT, Vm};
use pageferry_machine::Console;
use pageferry_migration::{
    Phase, Route, SettingsError, SourceFailure, SourceSession, SourceVm, check,
};
use pageferry_transport::TLS_VERSION;
use pageferry_transport::address::Address;
use serde_json::{Value, json};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// The states of a VM.
pub(crate) const VM_STATES: [&str; 8] = [
    "waiting",
    "arriving",
    "running",
    "paused",
    "leaving",
    "left",
    "given-up",
    "incomplete",
];

/// The longest wait for the end of an arrival. Without the source it ends after 10 s.
const END_OF_ARRIVAL: Duration = Duration::from_secs(15);

/// Serves a host's control socket.
pub(crate) struct HostService(pub(crate) Arc<Host>);

/// What was told of a migration that takes a VM away.
pub(crate) struct Told<'a> {
    feed: &'a Feed,
    session: &'a SourceSession,
    events: SessionEvents,
}

impl<'a> Told<'a> {
    pub(crate) fn new(feed: &'a Feed, session: &'a SourceSession) -> Self {
        Self {
            feed,
            session,
            events: SessionEvents::default(),
        }
    }

    /// Tells what is new.
    pub(crate) fn tell(&mut self, event: &mut dyn FnMut(Event)) {
        for update in self.feed.take() {
            event(match update {
                Update::Phase(phase) => Event::Phase(phase.into()),
                Update::Progress { done, total } => Event::Progress { done, total },
                Update::Allocated { done, total } => Event::Allocated { done, total },
                Update::Step(text) | Update::Note(text) => Event::Note(text),
            });
        }
        let status = self.session.status();
        let rates = self.events.rates(&status);
        for happened in self.events.see(&status).into_iter().chain(rates) {
            event(Event::Session(happened));
        }
    }
}

/// A destination waits for its VM.
fn no_vm() -> Failure {
    Failure::new(Exit::NoVm, "there is no VM here yet")
}

pub(super) fn refuse(message: impl Into<String>) -> Failure {
    Failure::new(Exit::Declined, message)
}

pub(super) fn address(text: &str) -> Result<Address, Failure> {
    text.parse()
        .map_err(|e| Failure::new(Exit::Usage, format!("{e}")))
}

impl Service for HostService {
    fn serve(&self, request: Request, event: &mut dyn FnMut(Event)) -> Result<Value, Failure> {
        let host = &self.0;
        match request {
            Request::Status {} => Ok(host.status()),
            Request::Pause {} => host.as_owner(|vm| {
                vm.threads().pause(PAUSE_LIMIT)?;
                Ok(json!({"state": "paused"}))
            }),
            Request::Resume {} => host.as_owner(|vm| {
                vm.threads().resume();
                Ok(json!({"state": "running"}))
            }),
            Request::Verify {} => host.while_here(|vm| {
                let mut verified = Verified::new(&vm.verify()?);
                if let Some(earlier) = host.earlier.get() {
                    verified.host &= earlier.host;
                    verified.words = format!("{}; earlier: {}", verified.words, earlier.words);
                }
                Ok(json!(verified))
            }),
            Request::Migrate {
                to,
                precopy_passes,
                options,
            } => host.migrate(&to, precopy_passes, &options, event),
            Request::Check { to, options } => host.check(&to, &options),
            Request::Set(change) => host.set(&change),
            Request::Cancel {
                route: None,
                session: None,
                force: false,
            } => host.cancel(),
            Request::Cancel { .. } => {
                let why = "only a tunnel's migrations have routes, and may be forced to end";
                Err(Failure::new(Exit::Declined, why))
            }
            Request::Recover { to, listen } => host.recover(to.as_deref(), listen.as_deref()),
            Request::Abandon { resume_here } => host.abandon(resume_here),
            // The connection to the console is the server's.
            Request::Console {} => self.console().map(|_| Value::Null),
            Request::Report {} => host.report(),
            Request::Quit {} => {
                host.ask_to_quit();
                Ok(json!({"state": "ending"}))
            }
        }
    }

    fn console(&self) -> Result<Arc<Console>, Failure> {
        let vm = self.0.vm();
        let vm = vm.ok_or_else(no_vm)?;
        // A machine may have a console that its guest does not know.
        let console = vm.console().filter(|_| vm.workload().is_none());
        let none = "the guest has no console: only a kernel (`run --kernel`) has one";
        console.cloned().ok_or_else(|| refuse(none))
    }
}

impl Host {
    /// Runs `act` on a VM that has no other activity.
    fn while_here<T>(&self, act: impl FnOnce(&Vm) -> Result<T, Failure>) -> Result<T, Failure> {
        self.wait_for_the_end_of_an_arrival();
        let _exclusive = self.exclusive()?;
        act(&*self.vm_here(&self.activity())?)
    }

    /// Pauses or resumes a VM that is here. During a migration, the source may do so before the
    /// switch-over, and the destination after the hand-over. So the VM never runs on both sides.
    fn as_owner<T>(&self, act: impl FnOnce(&Vm) -> Result<T, Failure>) -> Result<T, Failure> {
        let _exclusive = self.exclusive()?;
        let activity = self.activity();
        let done = match (&activity, self.vm(), self.session(), self.destination()) {
            (Activity::Leaving(_), Some(vm), Some(session), _) => {
                session.before_switch_over(|| act(&vm))
            }
            (Activity::Arriving(_), Some(vm), _, Some(there)) => there.after_hand_over(|| act(&vm)),
            _ => return act(&*self.vm_here(&activity)?),
        };
        done.unwrap_or_else(|| {
            Err(refuse(match activity {
                Activity::Leaving(_) => {
                    "the VM is handed over: pause and resume it at its destination"
                }
                _ => "the VM is not handed over yet: pause and resume it at its source",
            }))
        })
    }

    /// Whether the VM is paused by its owner. `None` without a VM that its owner may run.
    pub(super) fn is_paused(&self) -> Option<bool> {
        let here = || self.vm().map(|vm| vm.threads().is_paused());
        let session = || self.session_status().filter(|status| !status.is_over());
        match self.activity() {
            Activity::Here => here(),
            Activity::Leaving(Phase::Setup | Phase::Precopy { .. }) => here(),
            // The migration has paused it here.
            Activity::Leaving(_) => session().map(|status| status.paused),
            Activity::Arriving(phase) if has_switched_over(phase) => here(),
            _ => None,
        }
    }

    /// Waits while a VM whose pages are all here is still arriving. The source may know already
    /// that it is complete: what its user asks for next must not depend on which process is faster.
    fn wait_for_the_end_of_an_arrival(&self) {
        let until = Instant::now() + END_OF_ARRIVAL;
        while Instant::now() < until
            && let Activity::Arriving(Phase::Completion | Phase::Completed) = self.activity()
        {
            std::thread::sleep(Interrupts::POLL);
        }
    }

    /// Excludes other operations on the VM.
    fn exclusive(&self) -> Result<MutexGuard<'_, ()>, Failure> {
        match self.busy.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(refuse(
                "another request to the VM is being served; try again",
            )),
        }
    }

    fn vm_here(&self, activity: &Activity) -> Result<Arc<Vm>, Failure> {
        let why = match activity {
            Activity::Here => {
                return self.vm().ok_or_else(no_vm);
            }
            Activity::Waiting => return Err(no_vm()),
            Activity::Arriving(phase) => {
                format!("the VM is still being received ({phase}); try again when it is here")
            }
            Activity::Leaving(phase) => format!("the VM is being migrated ({phase})"),
            Activity::Left { to } => format!("the VM was migrated to {to}"),
            Activity::GivenUp { to } => format!(
                "the VM had been handed over to {to} when the migration failed: it stays paused here, as it may have run there"
            ),
            Activity::Incomplete { missing } => {
                format!(
                    "the VM stays paused: {missing} of its pages never arrived, and it must not run without them"
                )
            }
        };
        Err(refuse(why))
    }

    /// The state of the VM in one word, of [`VM_STATES`].
    pub(crate) fn state_name(&self) -> &'static str {
        let is_paused = || self.vm().is_some_and(|vm| vm.threads().is_paused());
        match self.activity() {
            Activity::Waiting => "waiting",
            Activity::Arriving(_) => "arriving",
            Activity::Here if is_paused() => "paused",
            Activity::Here => "running",
            Activity::Leaving(_) => "leaving",
            Activity::Left { .. } => "left",
            Activity::GivenUp { .. } => "given-up",
            Activity::Incomplete { .. } => "incomplete",
        }
    }

    fn status(&self) -> Value {
        let activity = self.activity();
        let vm = self.vm();
        let vm = vm.as_ref();
        let state = self.state_name();
        let phase = match &activity {
            Activity::Arriving(phase) | Activity::Leaving(phase) => Some(phase.to_string()),
            _ => None,
        };
        // While a VM is being received, its control pages may be neither missing nor complete.
        let readable = match &activity {
            Activity::Arriving(phase) => has_switched_over(*phase),
            _ => true,
        };
        let known = vm.filter(|vm| readable && vm.workload().is_some());
        let guest = known.map(|vm| {
            let controls = vm.controls();
            let field = |get: fn(&pageferry_guest::Control) -> u64| -> Vec<Option<u64>> {
                controls.iter().map(|c| c.as_ref().map(get)).collect()
            };
            json!({
                "pass": field(|c| c.pass),
                "pages_done": field(|c| c.done),
                "errors": controls.iter().flatten().map(|c| c.errors).sum::<u64>(),
            })
        });
        let overhead = Overhead::beside(vm.map(|vm| vm.backing()));
        let delivery = vm.and_then(|vm| vm.delivery());
        json!({
            "state": state,
            "phase": phase,
            "paused": self.is_paused(),
            "to": match &activity { Activity::Left { to } | Activity::GivenUp { to } => Some(to), _ => None },
            "missing": match activity { Activity::Incomplete { missing } => Some(missing), _ => None },
            "session": self.session_status().as_ref().map(super::recovery::json_of),
            "engine": vm.map(|vm| vm.engine().name()),
            "delivery": delivery.as_ref().map(|d| d.delivery.name()),
            "delivery_because": delivery.as_ref().map(|d| &d.because),
            "vcpus": vm.map(|vm| vm.vcpus()),
            "memory_bytes": vm.map(|vm| vm.memory_bytes()),
            "backing": vm.map(|vm| vm.backing().name()),
            "engine_large_bytes": vm.and_then(|vm| vm.engine_large_bytes()),
            "allocated_bytes": self.allocated(),
            "guest": guest,
            "failures": vm.map(|vm| vm.threads().failures()),
            "overhead_bytes": overhead.map(|o| json!({"anon": o.anon, "file": o.file, "tables": o.tables, "total": o.total()})),
            "lost_lines": output::lost_lines(),
            "lost_console_bytes": console::lost_bytes(),
            "defects": output::defects(),
            "pid": std::process::id(),
            "uptime_ms": u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn migrate(
        &self,
        to: &str,
        precopy_passes: Option<u32>,
        options: &MigrateOptions,
        event: &mut dyn FnMut(Event),
    ) -> Result<Value, Failure> {
        let to = address(to)?;
        let config = options
            .config(precopy_passes)
            .map_err(|e| Failure::new(Exit::Usage, e))?;
        let session = Arc::new(SourceSession::new().map_err(Failure::from)?);
        session.prepare(config.settings);
        let feed = Feed::new();
        let (done, outcome) = channel();
        self.wait_for_the_end_of_an_arrival();
        {
            let _exclusive = self.exclusive()?;
            self.vm_here(&self.activity())?;
            let job = Job {
                to,
                config,
                session: Arc::clone(&session),
                feed: Arc::clone(&feed),
                done,
            };
            self.set_session(&session);
            self.set_activity(Activity::Leaving(Phase::Setup));
            if self.jobs.send(job).is_err() {
                self.set_activity(Activity::Here);
                return Err(refuse("the VM is ending"));
            }
        }
        let mut told = Told::new(&feed, &session);
        loop {
            let outcome = outcome.recv_timeout(Interrupts::POLL);
            told.tell(event);
            match outcome {
                Ok(Ok(report)) => return Ok(json!(report)),
                Ok(Err(failure)) => return Err(failure),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(refuse("the VM ended before it was migrated"));
                }
            }
        }
    }

    /// Goes as far as the proofs of both sides, and leaves the VM alone.
    fn check(&self, to: &str, options: &MigrateOptions) -> Result<Value, Failure> {
        let route = Route::To(address(to)?);
        let config = options
            .config(None)
            .map_err(|e| Failure::new(Exit::Usage, e))?;
        let vm = {
            let _exclusive = self.exclusive()?;
            self.vm_here(&self.activity())?
        };
        let checked = check(&route, &config, &|| self.quits()).map_err(|error| {
            let stays = SourceVm::Runs;
            explain(SourceFailure { vm: stays, error }, &vm)
        })?;
        Ok(json!({
            "peer": checked.peer,
            "version": checked.version,
            "tls": checked.tls.then_some(TLS_VERSION),
            "peer_name": checked.tls_name,
        }))
    }

    /// Changes the settings of the migration that is under way.
    fn set(&self, options: &ChangeOptions) -> Result<Value, Failure> {
        if let Activity::Arriving(_) = self.activity() {
            return Err(refuse("this is the destination: set it at the source"));
        }
        let change = options.change().map_err(|e| Failure::new(Exit::Usage, e))?;
        let none = SettingsError::NoMigration;
        let session = self.session().ok_or_else(|| refuse(none.to_string()))?;
        let settings = session.set(&change).map_err(|error| match error {
            SettingsError::NoMigration | SettingsError::TooLate => refuse(error.to_string()),
            error => Failure::new(Exit::Usage, error.to_string()),
        })?;
        Ok(change::json_of(&settings))
    }

    fn cancel(&self) -> Result<Value, Failure> {
        match self.activity() {
            Activity::Leaving(phase) if has_switched_over(phase) => Err(refuse(
                "too late to cancel: the VM was handed over to the destination already",
            )),
            Activity::Leaving(_) => {
                if let Some(session) = self.session() {
                    session.cancel();
                }
                Ok(json!({"state": "cancelling"}))
            }
            _ => Err(refuse("no migration is under way")),
        }
    }

    fn report(&self) -> Result<Value, Failure> {
        let mut received = self
            .received()
            .ok_or_else(|| refuse("no migration has brought a VM here"))?;
        let vm = self.vm().ok_or_else(no_vm)?;
        received.large_mappings = Some(vm.large_mappings());
        Ok(json!(Report {
            engine: vm.engine().name().into(),
            vcpus: vm.vcpus(),
            memory_bytes: vm.memory_bytes(),
            sent: None,
            received: Some(received),
            verified: None,
            guest_view: None,
            conditions: crate::report::Conditions::here("received"),
        }))
    }
}
