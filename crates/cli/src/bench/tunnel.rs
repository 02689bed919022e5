//! `pageferry bench tunnel`: QEMU's migrations through a pair of tunnels.

use super::args::TunnelFlags;
use super::{executable, show_rows};
use crate::exit::Failure;
use crate::output;
use crate::signals::Interrupts;
use crate::vm::check_host_memory;
use pageferry_bench::tunnel::TunnelSetting;

/// Measures and prints the rows.
///
/// # Errors
/// The failure of the measurement, or an interrupt.
pub(super) fn tunnel(flags: &TunnelFlags) -> Result<(), Failure> {
    let setting = setting(flags)?;
    check_host_memory(setting.memory_bytes, 2)?;
    // Before the namespaces: an interrupt must not end this process before they are removed.
    let interrupts = Interrupts::install(false)?;
    let stop = || interrupts.any();
    let note = &mut |doing: &str| output::note(doing);
    let rows = pageferry_bench::tunnel::tunnel(&setting, &stop, note)?;
    show_rows(&rows, flags.json)
}

fn setting(flags: &TunnelFlags) -> Result<TunnelSetting, Failure> {
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
        tls: flags.tls.files(),
    })
}
