//! What a tunnel answers on its control socket.

use super::{End, text};
use crate::control::protocol::{Event, Request};
use crate::control::server::Service;
use crate::exit::{Exit, Failure};
use pageferry_machine::Console;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

pub(super) struct TunnelService {
    end: Arc<End>,
    about: String,
    began: Instant,
    quits: AtomicBool,
}

impl TunnelService {
    pub(super) fn new(end: Arc<End>, about: String) -> Self {
        Self {
            end,
            about,
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
                    "tunnel": { "about": self.about, "sessions": sessions },
                    "pid": std::process::id(),
                    "uptime_ms": self.began.elapsed().as_millis() as u64,
                }))
            }
            Request::Cancel {} => {
                if self.end.sessions().is_empty() {
                    return Err(Failure::new(Exit::Declined, "no migration is under way"));
                }
                self.end.cancel();
                Ok(json!({}))
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
