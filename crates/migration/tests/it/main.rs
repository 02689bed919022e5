//! All integration tests of the migration.

mod alone;
mod caller;
mod check;
mod cpus;
mod devices;
mod failures_channels;
mod failures_destination;
mod failures_machine;
mod failures_postcopy;
mod failures_source;
mod handshake_common;
mod hostile;
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
mod scripted;
mod sessions;
mod shortage;
mod strangers;
mod support;
mod vmm_access;
mod wire_channel;
mod wire_common;
mod wire_handshake;
mod wire_malformed;
mod wire_missing;
mod wire_preamble;
mod wire_roundtrip;
mod wire_tls;
