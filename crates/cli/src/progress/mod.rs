//! The progress of a command, and its display.
//!
//! **Guarantee.** A thread that reports progress never waits for a viewer. A migration's threads
//! put an update into a [`Feed`] and continue, even in the blackout. No thread is woken by that.
//!
//! **Mechanism.** Viewers poll the feed. A [`Display`] does so from its thread (one line on a
//! terminal, plain lines elsewhere), a control connection from its own.

mod display;
mod feed;
mod line;
mod terminal;
mod work;

pub(crate) use display::Display;
pub(crate) use feed::{Feed, Rates, Update};
pub(crate) use work::with_progress;
