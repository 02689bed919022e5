//! `pageferry bench linux`: Linux on our own hypervisor, beside QEMU and beside a bare guest.

use super::args::LinuxFlags;
use super::{executable, show_rows};
use crate::exit::Failure;
use crate::guest_linux;
use crate::output;
use crate::signals::Interrupts;
use pageferry_bench::linux::LinuxSetting;
use pageferry_machine::Engine;

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
    let guest = guest_linux::find(
        Engine::Soft,
        flags.kernel.as_deref(),
        flags.initrd.as_deref(),
    )?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use crate::bench::args::BenchCommand;
    use clap::Parser;

    fn flags(more: &[&str]) -> LinuxFlags {
        let words = [&["pageferry", "bench", "linux"], more].concat();
        let Command::Bench(args) = Cli::parse_from(words).command else {
            panic!("bench is not bench");
        };
        let BenchCommand::Linux(flags) = args.command else {
            panic!("another benchmark");
        };
        flags
    }

    /// The setting with files that exist.
    fn setting(more: &[&str]) -> LinuxSetting {
        let named = ["--kernel", "/proc/self/exe", "--initrd", "/proc/self/exe"];
        super::setting(&flags(&[&named, more].concat())).unwrap_or_else(|why| panic!("{why}"))
    }

    #[test]
    fn a_quick_run_is_short_unless_more_is_named() {
        assert_eq!(setting(&[]).rounds, LinuxSetting::ROUNDS);
        assert_eq!(setting(&["--quick"]).rounds, 1);
        assert_eq!(setting(&["--quick", "--repeat", "3"]).rounds, 3);
        assert_eq!(setting(&[]).busy_minutes, None);
        assert_eq!(setting(&["--minutes", "10"]).busy_minutes, Some(10));
    }

    #[test]
    fn a_peer_is_measured_only_if_it_is_named() {
        assert_eq!(setting(&[]).qemu, None);
        let peer = |more: &[&str]| setting(&[&["--peer", "qemu"], more].concat()).qemu;
        assert_eq!(peer(&[]), Some("qemu-system-riscv64".into()));
        assert_eq!(peer(&["--peer-program", "q"]), Some("q".into()));
    }

    #[test]
    fn named_files_are_measured() {
        let setting = setting(&[]);
        assert_eq!(setting.kernel, std::path::Path::new("/proc/self/exe"));
        assert_eq!(setting.initrd, setting.kernel);
    }
}
