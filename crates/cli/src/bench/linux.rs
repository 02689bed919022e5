//! `pageferry bench linux`: Linux on our own hypervisor, beside QEMU and beside a bare guest.

use super::args::LinuxFlags;
use super::{executable, show_rows};
use crate::exit::Failure;
use crate::guest_linux;
use crate::output;
use crate::signals::Interrupts;
use pageferry_bench::linux::LinuxSetting;

/// Measures and prints the rows.
///
/// # Errors
/// The failure of the measurement, or an interrupt.
pub(super) fn linux(flags: &LinuxFlags) -> Result<(), Failure> {
    let setting = setting(flags)?;
    let interrupts = Interrupts::install(false)?;
    let stop = || interrupts.any();
    let rows = pageferry_bench::linux::linux(&setting, &stop, &mut |doing| output::note(doing))?;
    show_rows(&rows, flags.json)
}

fn setting(flags: &LinuxFlags) -> Result<LinuxSetting, Failure> {
    let guest = guest_linux::find(flags.kernel.as_deref(), flags.initrd.as_deref())?;
    let rounds = if flags.quick { 1 } else { LinuxSetting::ROUNDS };
    Ok(LinuxSetting {
        executable: executable()?,
        kernel: guest.kernel,
        initrd: guest.initrd,
        qemu: flags.peer.map(|_| flags.peer_program.clone()),
        rounds: flags.repeat.unwrap_or(rounds),
        busy_minutes: flags.minutes,
    })
}
