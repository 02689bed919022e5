//! All integration tests of the migration.

mod failures_destination;
mod failures_machine;
mod failures_postcopy;
mod failures_source;
mod move_backings;
mod move_vm;
mod scripted;
mod support;
mod vmm_access;
mod wire_channel;
mod wire_common;
mod wire_handshake;
mod wire_malformed;
mod wire_roundtrip;
