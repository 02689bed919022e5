//! An operator's hold on a migration: its status, another way, and its end.

use super::service::{address, refuse};
use super::state::{Activity, Host};
use super::watch::has_switched_over;
use crate::exit::{Exit, Failure, of_listen};
use pageferry_migration::{Listener, Route, SessionStatus};
use pageferry_transport::TLS_VERSION;
use serde_json::{Value, json};
use std::sync::PoisonError;
use std::time::Duration;

impl Host {
    /// The status of the migration that is under way, or of the last one.
    pub(crate) fn session_status(&self) -> Option<SessionStatus> {
        let leaving = self.session().map(|session| session.status());
        leaving
            .or_else(|| self.destination().map(|there| there.status()))
            .or_else(|| self.arrived().cloned())
            .filter(|status| status.stage != "none")
    }

    /// Gives the migration another way.
    pub(super) fn recover(&self, to: Option<&str>, listen: Option<&str>) -> Result<Value, Failure> {
        match (self.activity(), to, listen) {
            (_, Some(_), Some(_)) | (_, None, None) => Err(Failure::new(
                Exit::Usage,
                "give either `to` (at the source) or `listen` (at the destination)",
            )),
            (Activity::Leaving(phase), Some(to), None) if has_switched_over(phase) => {
                let to = address(to)?;
                let session = self
                    .session()
                    .ok_or_else(|| refuse("no migration is under way"))?;
                session.recover(Route::To(to));
                Ok(json!({"state": "recovering"}))
            }
            (Activity::Leaving(_), Some(_), None) => Err(refuse(
                "the VM is not handed over yet: if its connection breaks, it runs on here; migrate it again",
            )),
            (Activity::Arriving(_), None, Some(listen)) => {
                let there = self
                    .destination()
                    .ok_or_else(|| refuse("no VM is being received"))?;
                let listener = Listener::bind(&address(listen)?).map_err(|e| of_listen(&e))?;
                let bound = listener.local_addr().to_string();
                there.listen_also(listener);
                Ok(json!({"state": "recovering", "listening": bound}))
            }
            (Activity::Leaving(_), None, Some(_)) => Err(refuse(
                "this is the source: give it the destination's address (--to)",
            )),
            (Activity::Arriving(_), Some(_), None) => Err(refuse(
                "this is the destination: give it an address to listen on (--listen)",
            )),
            _ => Err(refuse(
                "no migration is under way: there is nothing to recover",
            )),
        }
    }

    /// Ends the migration, since its other side is gone.
    pub(super) fn abandon(&self, resume_here: bool) -> Result<Value, Failure> {
        match self.activity() {
            Activity::Leaving(phase) if has_switched_over(phase) => {
                let session = self
                    .session()
                    .ok_or_else(|| refuse("no migration is under way"))?;
                if resume_here {
                    session.resume_here();
                    return Ok(json!({"state": "resuming", "lost": AT_RISK}));
                }
                session.give_up();
                Ok(
                    json!({"state": "given-up", "lost": "nothing yet: the VM stays paused here with all its pages (--resume-here runs it)"}),
                )
            }
            Activity::GivenUp { .. } if resume_here => {
                let _busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
                let vm = self.vm().ok_or_else(|| refuse("there is no VM here"))?;
                // The migration left it on. A failure costs only speed.
                let _ = vm.running().machine.set_dirty_log(false);
                let running = vm.running();
                running.devices.iter().for_each(|device| device.resume());
                // It is taken back as it was handed over.
                let was_paused = self.session().is_some_and(|s| s.status().paused);
                if !was_paused {
                    vm.threads().resume();
                }
                self.set_activity(Activity::Here);
                let state = if was_paused { "paused" } else { "running" };
                Ok(json!({"state": state, "lost": AT_RISK}))
            }
            Activity::GivenUp { .. } => Err(refuse(
                "the migration was given up already: --resume-here runs the VM, `pageferry quit` ends it",
            )),
            Activity::Leaving(_) => Err(refuse(
                "the VM is not handed over yet: use `pageferry cancel`, and it runs on here",
            )),
            Activity::Arriving(_) if resume_here => Err(refuse(
                "--resume-here is for the source: a VM that is here in part cannot run",
            )),
            Activity::Arriving(_) => {
                let there = self
                    .destination()
                    .ok_or_else(|| refuse("no VM is being received"))?;
                let status = there.status();
                if matches!(status.stage, "none" | "receiving") {
                    return Err(refuse(
                        "the VM is not handed over yet: use `pageferry cancel` at its source, and it runs on there",
                    ));
                }
                let left = status.pages_left;
                there.give_up();
                let whole = left == 0 && matches!(status.stage, "running" | "complete");
                let lost = match whole {
                    true => "nothing: all of its pages are here, and it stays here".to_owned(),
                    false => format!("the VM, if it ran here: {left} of its pages never came"),
                };
                Ok(json!({"state": "ending", "lost": lost}))
            }
            _ => Err(refuse(
                "no migration is under way: there is nothing to abandon",
            )),
        }
    }
}

/// The cost of `--resume-here`.
const AT_RISK: &str =
    "all that the VM did at the destination; if it still runs there, it runs twice now";

/// A time in milliseconds.
pub(super) fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A time in microseconds.
pub(super) fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A session's status as on the control socket.
pub(super) fn json_of(status: &SessionStatus) -> Value {
    let channels: Vec<String> = status.channels.iter().map(ToString::to_string).collect();
    json!({
        "stage": status.stage,
        "connected": status.connected,
        "peer": status.peer,
        "version": status.protected.as_ref().map(|p| p.version),
        "tls": status.protected.as_ref().is_some_and(|p| p.tls).then_some(TLS_VERSION),
        "peer_name": status.protected.as_ref().and_then(|p| p.peer_name.as_ref()),
        "generation": status.generation,
        "reconnects": status.reconnects,
        "channels_lost": status.channels_lost,
        "channels": channels,
        "pages_left": status.pages_left,
        "pages_in_flight": status.pages_in_flight,
        "bytes_left": status.bytes_left(),
        "page_bytes": status.page_bytes,
        "page_rate": status.page_rate,
        "dirty_rate": status.dirty_rate,
        "passes": status.passes,
        "link_rate": status.link_rate,
        "blackout_forecast_us": status.blackout_forecast.map(us),
        "note": status.note,
        "settings": status.settings.as_ref().map(crate::control::change::json_of),
        "time_left_ms": status.time_left.map(ms),
        "waiting_faults": status.waiting_faults,
        "lost_for_ms": status.lost_for.map(ms),
        "last_loss": status.last_loss,
    })
}
