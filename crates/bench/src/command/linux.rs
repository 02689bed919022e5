//! `pageferry-bench linux`: Linux on our own hypervisor or on KVM, beside QEMU and beside a bare
//! guest.

use crate::BenchError;
use crate::args::LinuxFlags;
use crate::linux::{KvmSetting, LinuxSetting};
use crate::output::Output;
use pageferry_harness::guest_linux;
use pageferry_machine::Engine;

/// Measures and prints the rows.
pub(super) fn linux(flags: &LinuxFlags) -> Result<(), BenchError> {
    let setting = setting(flags)?;
    let kvm = match flags.engine {
        Engine::Soft => None,
        Engine::Kvm => Some(kvm_setting(flags)?),
    };
    crate::stop_on_interrupt()?;
    let rows = match kvm {
        None => crate::linux::linux(&setting),
        Some(kvm) => crate::linux::linux_on_kvm(&setting, &kvm),
    };
    Output::from(rows?).show(flags.json, None)
}

fn kvm_setting(flags: &LinuxFlags) -> Result<KvmSetting, BenchError> {
    let usage = |why: &str| BenchError::Setting(why.into());
    if flags.minutes.is_some() {
        return Err(usage("--minutes is for --engine soft: leave it out"));
    }
    let taps = match flags.net.as_slice() {
        [] => None,
        [here, there] => Some([here.clone(), there.clone()]),
        _ => {
            return Err(usage(
                "--net needs the names of two taps, with a comma between",
            ));
        }
    };
    Ok(KvmSetting {
        memory_bytes: flags.memory,
        taps,
    })
}

fn setting(flags: &LinuxFlags) -> Result<LinuxSetting, BenchError> {
    let guest = guest_linux::find(
        flags.engine,
        flags.kernel.as_deref(),
        flags.initrd.as_deref(),
    )
    .map_err(BenchError::Setting)?;
    let rounds = if flags.quick { 1 } else { LinuxSetting::ROUNDS };
    let qemu = match flags.engine {
        Engine::Soft => LinuxSetting::QEMU,
        Engine::Kvm => LinuxSetting::QEMU_ON_KVM,
    };
    let program = flags.peer_program.clone().unwrap_or_else(|| qemu.into());
    Ok(LinuxSetting {
        kernel: guest.kernel,
        initrd: guest.initrd,
        qemu: flags.peer.map(|_| program),
        rounds: flags.repeat.unwrap_or(rounds),
        busy_minutes: flags.minutes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn flags(more: &[&str]) -> LinuxFlags {
        let words = [&["pageferry-bench", "linux"], more].concat();
        let Command::Linux(flags) = Cli::parse_from(words).command else {
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
        assert_eq!(
            peer(&["--engine", "kvm"]),
            Some("qemu-system-x86_64".into())
        );
        assert_eq!(peer(&["--peer-program", "q"]), Some("q".into()));
    }

    #[test]
    fn a_run_on_kvm_needs_two_taps_or_none() {
        let kvm = |more: &[&str]| {
            let named = ["--engine", "kvm"];
            kvm_setting(&flags(&[&named, more].concat()))
        };
        let none = kvm(&["--memory", "64M"]).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!((none.memory_bytes, none.taps), (64 << 20, None));
        let taps = kvm(&["--net", "a,b"]).map(|setting| setting.taps);
        assert_eq!(taps.ok(), Some(Some(["a".into(), "b".into()])));
        for bad in [&["--net", "a"], &["--net", "a,b,c"], &["--minutes", "3"]] {
            assert_eq!(kvm(&bad[..]).unwrap_err().exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn named_files_are_measured() {
        let setting = setting(&[]);
        assert_eq!(setting.kernel, std::path::Path::new("/proc/self/exe"));
        assert_eq!(setting.initrd, setting.kernel);
    }
}
