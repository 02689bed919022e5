//! A process that owns a VM: `run` boots one, `receive` receives one.
//!
//! **Guarantee.** The VM has one activity at a time. [`Activity`] makes requests of the control
//! socket, the migration that brings the VM and the one that takes it away exclude each other. A VM
//! that is incomplete, or has left, is never resumed.
//!
//! **Mechanism.** Control connections answer requests on their own threads. Requests that change
//! the VM hold one lock. A request to migrate is queued for the main thread. That runs it on a
//! separate thread while it watches for Ctrl-C ([`keep`], [`leave`], [`wait`]).

mod keep;
mod leave;
mod recovery;
mod save;
mod service;
mod session_events;
mod state;
mod wait;
mod watch;

pub(crate) use keep::Ended;
pub(crate) use leave::{FINISHING, send_away};
pub(crate) use save::{MEMORY, STATE, check_target};
pub(crate) use service::{HostService, Told, VM_STATES};
pub(crate) use state::{Activity, Host, Jobs};
pub(crate) use wait::{ABANDONED_AT_SOURCE, Answers, StopRequests, catch_defect, wait_for_outcome};
pub(crate) use watch::{Watch, has_switched_over};
