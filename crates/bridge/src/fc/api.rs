//! The part of Firecracker's API that a move needs.

use crate::foreign::api::Api;
use crate::foreign::{STEP_LIMIT, VmmError};
use rustix::process::Pid;
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::time::Duration;

/// The answer of `GET /`.
#[derive(Deserialize)]
pub(super) struct Instance {
    pub(super) state: String,
    pub(super) vmm_version: String,
}

/// The state and version of the process, and its id, if it is visible here.
pub(super) fn instance(api: &Api, limit: Duration) -> Result<(Instance, Option<Pid>), VmmError> {
    api.get("GET /", limit)
}

/// The part of the whole configuration (`GET /vm/config`) that a move needs. Older versions have
/// less.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Whole {
    drives: Vec<Drive>,
    logger: Option<IgnoredAny>,
    metrics: Option<IgnoredAny>,
    vsock: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Drive {
    path_on_host: Option<String>,
}

impl Whole {
    pub(super) fn of(api: &Api) -> Self {
        let whole = api.get("GET /vm/config", STEP_LIMIT);
        whole.map(|(whole, _)| whole).unwrap_or_default()
    }

    /// The files of its drives.
    pub(super) fn disks(&self) -> Vec<String> {
        let paths = self.drives.iter();
        paths
            .filter_map(|drive| drive.path_on_host.clone())
            .collect()
    }

    /// The settings that the VM loses by a move: Firecracker has them in no snapshot.
    pub(super) fn lost(&self) -> Option<String> {
        let lost = [
            (self.logger.is_some(), "its logger's settings"),
            (self.metrics.is_some(), "its metrics' settings"),
            (self.vsock.is_some(), "open vsock connections"),
        ];
        let lost: Vec<_> = lost
            .iter()
            .filter(|(has, _)| *has)
            .map(|(_, what)| *what)
            .collect();
        (!lost.is_empty()).then(|| format!("the VM moves without {}", lost.join(" and ")))
    }
}

/// The data of the metadata service as JSON, or nothing if there is none.
pub(super) fn mmds(api: &Api) -> Result<Vec<u8>, VmmError> {
    match api.call("GET /mmds", None, STEP_LIMIT) {
        Ok(data) if matches!(&data[..], b"null" | b"{}") => Ok(Vec::new()),
        // It was never set up.
        Err(VmmError::Api { .. }) => Ok(Vec::new()),
        data => data,
    }
}

/// Pauses the VM, or lets it run.
pub(super) fn set_running(api: &Api, on: bool, limit: Duration) -> Result<(), VmmError> {
    let state = if on { "Resumed" } else { "Paused" };
    let body = serde_json::json!({ "state": state });
    api.call("PATCH /vm", Some(&body), limit).map(drop)
}

/// The part of `GET /machine-config` that a move needs. Other fields are ignored.
#[derive(Deserialize)]
pub(super) struct MachineConfig {
    pub(super) mem_size_mib: u64,
    pub(super) vcpu_count: u32,
    huge_pages: Option<String>,
    #[serde(default)]
    pub(super) track_dirty_pages: bool,
}

/// Huge pages of a pool, in Firecracker's words.
const POOL: &str = "2M";

/// The most MiB of a VM: what fits in a file.
const MAX_MIB: u64 = 1 << 40;

impl MachineConfig {
    /// Reads a configuration.
    pub(super) fn parse(text: &[u8]) -> Result<Self, String> {
        let config: Self = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        if !(1..=MAX_MIB).contains(&config.mem_size_mib) {
            let mib = config.mem_size_mib;
            return Err(format!("it has {mib} MiB: expected 1 to {MAX_MIB}"));
        }
        match config.huge_pages.as_deref() {
            None | Some("None" | "Transparent" | POOL) => Ok(config),
            Some(other) => {
                let other = other.escape_debug();
                Err(format!(
                    "huge_pages is {other}: expected None, Transparent or {POOL}"
                ))
            }
        }
    }

    /// Whether the VM has huge pages of a pool.
    pub(super) fn has_pool(&self) -> bool {
        self.huge_pages.as_deref() == Some(POOL)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.mem_size_mib << 20
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_that_cannot_move_is_refused_with_a_reason() {
        let parse = |text: &str| MachineConfig::parse(text.as_bytes());
        let right = r#"{"mem_size_mib":128,"vcpu_count":2,"huge_pages":"None","smt":false}"#;
        let config = parse(right).unwrap();
        assert_eq!((config.bytes(), config.has_pool()), (128 << 20, false));
        let huge = parse(r#"{"mem_size_mib":128,"vcpu_count":2,"huge_pages":"2M"}"#);
        assert!(huge.unwrap().has_pool());
        for (text, why) in [
            ("", "EOF"),
            ("[]", "invalid length"),
            (r#"{"vcpu_count":2}"#, "missing field `mem_size_mib`"),
            (r#"{"mem_size_mib":-1,"vcpu_count":2}"#, "invalid value"),
            (r#"{"mem_size_mib":0,"vcpu_count":2}"#, "it has 0 MiB"),
            (
                r#"{"mem_size_mib":18446744073709551615,"vcpu_count":2}"#,
                "expected 1 to",
            ),
            (
                r#"{"mem_size_mib":128,"vcpu_count":2,"huge_pages":"1G"}"#,
                "huge_pages is 1G: expected None",
            ),
        ] {
            let error = parse(text).err().unwrap();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
