//! What a tunnel answers on its control socket.

use super::{End, text};
use crate::control::protocol::{Event, Request};
use crate::control::server::Service;
use crate::exit::{Exit, Failure};
use pageferry_bridge::tunnel::SessionState;
use pageferry_machine::Console;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(super) struct TunnelService {
    end: Arc<End>,
    began: Instant,
    quits: AtomicBool,
}

impl TunnelService {
    pub(super) fn new(end: Arc<End>) -> Self {
        Self {
            end,
            began: Instant::now(),
            quits: AtomicBool::new(false),
        }
    }

    /// Whether somebody has asked for the end.
    pub(super) fn quits(&self) -> bool {
        self.quits.load(Ordering::Relaxed)
    }
}

fn declined() -> Failure {
    let why = "this is a tunnel and no VM: it knows status, watch, cancel and quit";
    Failure::new(Exit::Declined, why)
}

impl Service for TunnelService {
    fn serve(&self, request: Request, _: &mut dyn FnMut(Event)) -> Result<Value, Failure> {
        match request {
            Request::Status {} => {
                let sessions = self.end.sessions();
                let state = if sessions.is_empty() {
                    "waiting"
                } else {
                    "carrying"
                };
                let sessions: Vec<Value> = sessions.iter().map(text::json).collect();
                Ok(json!({
                    "state": state,
                    "tunnel": { "about": self.end.about(), "sessions": sessions },
                    "pid": std::process::id(),
                    "uptime_ms": self.began.elapsed().as_millis() as u64,
                }))
            }
            Request::Cancel {
                route,
                session,
                force,
            } => {
                let chosen = |state: &SessionState| {
                    let is = |wanted: &Option<String>, found: &str| {
                        wanted.as_ref().is_none_or(|wanted| wanted == found)
                    };
                    is(&route, state.route.as_str()) && is(&session, &state.session)
                };
                let mut sessions = self.end.sessions();
                sessions.retain(chosen);
                let declined = |why: String| Err(Failure::new(Exit::Declined, why));
                if sessions.is_empty() {
                    let of_those = if route.is_some() || session.is_some() {
                        " of those that were chosen"
                    } else {
                        ""
                    };
                    return declined(format!("no migration{of_those} is under way"));
                }
                if let Some(one) = sessions.iter().find(|one| one.in_doubt && !force) {
                    return declined(format!("{}: {}", one.route, text::IN_DOUBT));
                }
                self.end.cancel(force, chosen);
                Ok(json!({"state": "cancelling"}))
            }
            Request::Quit {} => {
                self.quits.store(true, Ordering::Relaxed);
                Ok(json!({}))
            }
            _ => Err(declined()),
        }
    }

    fn console(&self) -> Result<Arc<Console>, Failure> {
        Err(declined())
    }
}
