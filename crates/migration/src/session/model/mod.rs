//! An exhaustive search over both ends of a session, their pages, and the network between them.
//!
//! **Guarantee.** Within the bounds of a [`Config`](config::Config), no order of events breaks a
//! property: at most one side runs the guest, the destination runs it after `Go` only, no page is
//! placed twice or lost, none is freed without a receipt, and nothing is refused. From every state
//! in which nobody has given up, a system without faults ends as it should.
//!
//! **Mechanism.** A [`World`](world::World) has the states of both ends and all messages on their
//! way. A [`Move`](moves::Move) is one event at one end. The production `step` functions decide;
//! `source_end` and `destination_end` carry their actions out. Each of the session's rules can be
//! switched off there, and each search without one finds a counterexample.
//!
//! **Freezes, cuts and half-closed connections** are orders of events. A message that waits is a
//! freeze. An end that loses a connection drops what it has not read. The other end reads what is
//! on its way, all of it or a part, and learns of the loss at any later time.
//!
//! **Limits.** Pages are pushed in the order of their numbers. Each end handles one event at a
//! time, so races within one end are not searched. `ResumeHere` is left out: it is a risk by
//! design.

mod config;
mod destination_end;
mod moves;
mod network;
mod rules;
mod search;
mod source_end;
mod whole;
mod world;
