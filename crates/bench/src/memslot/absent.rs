//! A placeholder for hosts on which KVM is not measured.

use super::host::SlotMemory;
use super::split::Split;
use crate::BenchError;
use std::sync::Arc;
use std::time::Duration;

/// Has no values.
pub(super) enum RealKvm {}
/// Has no values.
pub(super) enum RealVm {}

impl RealKvm {
    /// # Errors
    /// Always.
    pub(super) fn open() -> Result<Self, String> {
        Err("only x86-64 Linux is supported".into())
    }
    pub(super) fn max_slots(&self) -> u32 {
        match *self {}
    }
    pub(super) fn set_up(
        &self,
        _: &Arc<SlotMemory>,
        _: Split,
    ) -> Result<(RealVm, Duration), BenchError> {
        match *self {}
    }
}

impl RealVm {
    pub(super) fn move_once(&self) -> Result<(), BenchError> {
        match *self {}
    }
}
