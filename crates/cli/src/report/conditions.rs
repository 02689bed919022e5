//! What a measurement was made on.

use crate::memory;
use serde::{Deserialize, Serialize};
use std::fs;

/// The host and the build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conditions {
    /// Pageferry's version.
    pub(crate) version: String,
    /// `release`, or `debug` (then no number says anything about speed).
    pub(crate) build: String,
    /// The kernel's release.
    pub(crate) kernel: String,
    /// The processor's architecture.
    pub(crate) arch: String,
    /// How many cores this process may use.
    pub(crate) cores: usize,
    /// The host's memory in bytes.
    pub(crate) host_memory_bytes: Option<u64>,
    /// What the two sides were connected by.
    pub(crate) link: String,
    /// Passes asked for while the guest runs at the source.
    pub(crate) precopy_passes: Option<u32>,
    /// Why the engine was chosen.
    pub(crate) engine_because: Option<String>,
}

impl Conditions {
    /// Of this process, connected by `link`.
    pub(crate) fn here(link: impl Into<String>) -> Self {
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            version: env!("CARGO_PKG_VERSION").into(),
            build: if cfg!(debug_assertions) {
                "debug"
            } else {
                "release"
            }
            .into(),
            kernel: kernel.trim().into(),
            arch: std::env::consts::ARCH.into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            host_memory_bytes: memory::host_bytes(),
            link: link.into(),
            precopy_passes: None,
            engine_because: None,
        }
    }
}
