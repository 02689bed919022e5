//! The conditions of a measurement.

use crate::memory;
use pageferry_migration::{Settings, Switch};
use serde::{Deserialize, Serialize};
use std::fs;

/// The host and the build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conditions {
    /// Pageferry's version.
    pub(crate) version: String,
    /// `release`, or `debug` (whose times say nothing about speed).
    pub(crate) build: String,
    /// The kernel's release.
    pub(crate) kernel: String,
    /// The processor's architecture.
    pub(crate) arch: String,
    /// The number of cores that this process may use.
    pub(crate) cores: usize,
    /// The host's memory in bytes.
    pub(crate) host_memory_bytes: Option<u64>,
    /// The connection of the two sides.
    pub(crate) link: String,
    /// Requested passes while the guest runs at the source, if a number was requested.
    pub(crate) precopy_passes: Option<u32>,
    /// The requested end of pre-copy.
    #[serde(default)]
    pub(crate) switch: Option<String>,
    /// The reason why the engine was chosen.
    pub(crate) engine_because: Option<String>,
}

impl Conditions {
    /// The conditions of this process, connected by `link`.
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
            switch: None,
            engine_because: None,
        }
    }

    /// These conditions, with the settings of the source.
    pub(crate) fn with(self, settings: &Settings) -> Self {
        Self {
            precopy_passes: match settings.switch {
                Switch::AfterPasses(passes) => Some(passes),
                Switch::Auto | Switch::Manual => None,
            },
            switch: Some(settings.switch.to_string()),
            ..self
        }
    }
}
