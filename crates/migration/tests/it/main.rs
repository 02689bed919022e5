//! All integration tests of the migration.

mod alone;
mod caller;
mod check;
mod confirm;
mod cpus;
mod devices;
mod failures_channels;
mod failures_destination;
mod failures_machine;
mod failures_postcopy;
mod failures_source;
mod hostile;
mod last_word;
mod move_backings;
mod move_vm;
#[cfg(target_arch = "x86_64")]
mod own_kvm;
mod paused;
mod precopy;
mod prefetch;
mod recorded;
mod recovery;
mod recovery_figures;
mod saved;
mod scripted;
mod sessions;
mod shortage;
mod strangers;
mod support;
mod unread;
mod vmm_access;
mod wire_common;
mod wire_malformed;
mod wire_missing;
mod wire_roundtrip;
