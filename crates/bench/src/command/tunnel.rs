//! `pageferry-bench tunnel`: QEMU's migrations through a pair of tunnels.

use super::check_host_memory;
use super::{executable, interrupts, show_rows};
use crate::args::TunnelFlags;
use crate::tunnel::TunnelSetting;
use crate::{BenchError, note};
use std::sync::atomic::Ordering;

/// Measures and prints the rows.
pub(super) fn tunnel(flags: &TunnelFlags) -> Result<(), BenchError> {
    let setting = setting(flags)?;
    check_host_memory(setting.memory_bytes, 2)?;
    // Before the namespaces: an interrupt must not end this process before they are removed.
    let asked = interrupts()?;
    let stop = || asked.load(Ordering::Relaxed);
    let note = &mut note;
    let rows = crate::tunnel::tunnel(&setting, &stop, note)?;
    show_rows(&rows, flags.json)
}

fn setting(flags: &TunnelFlags) -> Result<TunnelSetting, BenchError> {
    let (memory_bytes, rounds) = if flags.quick {
        (TunnelSetting::QUICK_MEMORY, 1)
    } else {
        (TunnelSetting::MEMORY, TunnelSetting::ROUNDS)
    };
    Ok(TunnelSetting {
        executable: executable()?,
        qemu: flags.peer_program.clone(),
        rate: flags.rate,
        memory_bytes: flags.memory.unwrap_or(memory_bytes),
        window_bytes: flags.window,
        rounds: flags.repeat.unwrap_or(rounds),
        tls: flags.tls.given(),
    })
}
