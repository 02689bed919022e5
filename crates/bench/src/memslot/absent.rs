//! KVM on hosts for which it is not measured.

use super::host::Host;
use super::split::Split;
use crate::BenchError;
use std::sync::Arc;
use std::time::Duration;

/// Never made.
pub(super) enum RealKvm {}
/// Never made.
pub(super) enum RealVm {}

impl RealKvm {
    /// # Errors
    /// Always.
    pub(super) fn open() -> Result<Self, String> {
        Err("it is measured on x86-64 Linux only".into())
    }
    pub(super) fn max_slots(&self) -> u32 {
        match *self {}
    }
    pub(super) fn set_up(&self, _: &Arc<Host>, _: Split) -> Result<(RealVm, Duration), BenchError> {
        match *self {}
    }
}

impl RealVm {
    pub(super) fn move_once(&self) -> Result<(), BenchError> {
        match *self {}
    }
}
