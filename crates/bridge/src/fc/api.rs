//! What a move needs of Firecracker's API.

use crate::foreign::VmmError;
use crate::foreign::api::Api;
use rustix::process::Pid;
use serde::Deserialize;
use std::time::Duration;

/// The answer of `GET /`.
#[derive(Deserialize)]
pub(super) struct Instance {
    pub(super) state: String,
    pub(super) vmm_version: String,
}

/// What the process is, and its id, if it is visible here.
pub(super) fn instance(api: &Api, limit: Duration) -> Result<(Instance, Option<Pid>), VmmError> {
    api.get("GET /", limit)
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
