//! How far a command is, for those who watch it.
//!
//! **Guarantee.** Who reports progress never waits for who shows it: a migration's threads put an
//! update into a [`Feed`] and go on, also in the blackout, and no thread is woken by that.
//!
//! **Mechanism.** Whoever shows updates polls the feed: a [`Display`] from a thread of its own
//! (bars on a terminal, plain lines elsewhere), a control socket's connection from its thread.

mod display;
mod feed;

pub(crate) use display::Display;
pub(crate) use feed::{Feed, Update};
