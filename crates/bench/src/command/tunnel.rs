//! `pageferry-bench tunnel`: QEMU's migrations through a pair of tunnels.

use super::check_host_memory;
use crate::BenchError;
use crate::args::TunnelFlags;
use crate::output::Output;
use crate::tunnel::TunnelSetting;

/// Measures and prints the rows.
pub(super) fn tunnel(flags: &TunnelFlags) -> Result<(), BenchError> {
    let setting = setting(flags)?;
    check_host_memory(setting.memory_bytes, 2)?;
    // Before the namespaces: an interrupt must not end this process before they are removed.
    crate::stop_on_interrupt()?;
    let rows = crate::tunnel::tunnel(&setting)?;
    Output::from(rows).show(flags.json, None)
}

fn setting(flags: &TunnelFlags) -> Result<TunnelSetting, BenchError> {
    let (memory_bytes, rounds) = if flags.quick {
        (TunnelSetting::QUICK_MEMORY, 1)
    } else {
        (TunnelSetting::MEMORY, TunnelSetting::ROUNDS)
    };
    Ok(TunnelSetting {
        qemu: flags.peer_program.clone(),
        rate: flags.rate,
        memory_bytes: flags.memory.unwrap_or(memory_bytes),
        window_bytes: flags.window,
        rounds: flags.repeat.unwrap_or(rounds),
        tls: flags.tls.given(),
    })
}
