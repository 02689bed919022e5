//! Which bytes of a VMM's streams a vCPU waits for.
//!
//! **Mechanism.** A stream is recognised by its first bytes, and by those of the others in the
//! session. No stream is parsed. A wrong guess costs time only: bytes have numbers, so they may
//! change their connection at any time.
//!
//! | direction | bytes | urgent |
//! |---|---|---|
//! | to the VMM that connected | at most [`SHORT`] at once | yes: the return path of QEMU, page faults of Cloud Hypervisor |
//! | from it | the stream begins with `QEVM` | no: QEMU's main stream |
//! | | the stream begins with `0x11223344` | no: multifd |
//! | | the stream begins with 8 and 0 | no: QEMU's main stream after its own recovery, a command |
//! | | another stream of QEMU begins otherwise | yes: the preempt channel, which has no magic |
//! | | a stream begins with 2, and another one with 1, as 16-bit numbers | yes: faults of Cloud Hypervisor |
//!
//! **Source.** QEMU: `QEMU_VM_FILE_MAGIC` in `migration/savevm.h`, `MULTIFD_MAGIC` in
//! `migration/multifd.c`. Cloud Hypervisor: `vm-migration/src/protocol.rs`.

/// The most bytes that come at once on a return path. One that brings more carries data.
pub(super) const SHORT: usize = 16 << 10;

const QEMU: [u8; 4] = *b"QEVM";
/// A command, as a 16-bit number behind its mark. A page on a preempt channel begins with its
/// address, which is never that high.
const QEMU_RESUMED: [u8; 2] = [8, 0];
const MULTIFD: [u8; 4] = 0x1122_3344u32.to_be_bytes();
/// The first two bytes of Cloud Hypervisor's main connection, and of that for faults.
const CLOUD_HYPERVISOR: [u8; 2] = 1u16.to_le_bytes();
const FAULTS: [u8; 2] = 2u16.to_le_bytes();

/// The first bytes of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Head {
    bytes: [u8; 4],
    length: u8,
}

/// What a stream seems to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Nothing has come yet, or nothing that is known.
    #[default]
    Unknown,
    /// The main stream of QEMU.
    QemuMain,
    /// A multifd channel of QEMU.
    QemuMultifd,
    /// The preempt channel of QEMU.
    QemuPreempt,
    /// The main connection of Cloud Hypervisor.
    CloudHypervisor,
    /// The connection of Cloud Hypervisor for page faults.
    CloudHypervisorFaults,
}

impl Kind {
    /// The name, for people and programs.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::QemuMain => "qemu-main",
            Self::QemuMultifd => "qemu-multifd",
            Self::QemuPreempt => "qemu-preempt",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::CloudHypervisorFaults => "cloud-hypervisor-faults",
        }
    }

    /// Whether vCPUs wait for what the VMM sends on it.
    #[must_use]
    pub const fn is_urgent(self) -> bool {
        matches!(self, Self::QemuPreempt | Self::CloudHypervisorFaults)
    }
}

impl Head {
    /// Adds bytes that the VMM has sent.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes.iter().take(4 - usize::from(self.length)) {
            self.bytes[usize::from(self.length)] = byte;
            self.length += 1;
        }
    }

    fn is_qemu_main(&self) -> bool {
        self.bytes == QEMU || self.length > 1 && self.bytes.starts_with(&QEMU_RESUMED)
    }

    /// What a stream seems to be. `others` are the first bytes of all streams of its session.
    #[must_use]
    pub(super) fn kind<'a>(&self, mut others: impl Iterator<Item = &'a Self> + Clone) -> Kind {
        let known = &self.bytes[..usize::from(self.length)];
        let begins = |with: [u8; 2]| known.starts_with(&with);
        if self.is_qemu_main() {
            return Kind::QemuMain;
        }
        if known == MULTIFD {
            return Kind::QemuMultifd;
        }
        let magics: [&[u8]; 3] = [&QEMU, &QEMU_RESUMED, &MULTIFD];
        let may_have_magic = magics.iter().any(|magic| magic.starts_with(known));
        if !may_have_magic && others.clone().any(Self::is_qemu_main) {
            return Kind::QemuPreempt;
        }
        if begins(FAULTS) && others.any(|other| other.bytes.starts_with(&CLOUD_HYPERVISOR)) {
            return Kind::CloudHypervisorFaults;
        }
        if begins(CLOUD_HYPERVISOR) {
            return Kind::CloudHypervisor;
        }
        Kind::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(bytes: &[u8]) -> Head {
        let mut head = Head::default();
        for byte in bytes {
            head.push(&[*byte]);
        }
        head
    }

    fn kinds(streams: &[&[u8]]) -> Vec<Kind> {
        let heads: Vec<Head> = streams.iter().map(|bytes| head(bytes)).collect();
        heads.iter().map(|one| one.kind(heads.iter())).collect()
    }

    #[test]
    fn streams_of_qemu_are_recognised_in_any_order() {
        let (main, multifd) = (b"QEVM\0\0\0\x03", [0x11, 0x22, 0x33, 0x44, 0, 0]);
        // A page of QEMU's RAM begins with its address and flags.
        let preempt = [0, 0, 0, 0, 0x12, 0x34, 0x50, 0x08];
        let expected = [Kind::QemuMain, Kind::QemuMultifd, Kind::QemuPreempt];
        assert_eq!(kinds(&[main, &multifd, &preempt]), expected);
        let turned: Vec<Kind> = expected.into_iter().rev().collect();
        assert_eq!(kinds(&[&preempt, &multifd, main]), turned);
        assert!(expected[2].is_urgent() && !expected[0].is_urgent());
    }

    #[test]
    fn streams_of_qemu_are_recognised_after_its_own_recovery() {
        // The command for the bitmap of a block, and its length.
        let (main, preempt) = ([8, 0, 9, 0, 7], [0, 0, 0, 0, 0x12, 0x34, 0x50, 0x08]);
        let expected = [Kind::QemuMain, Kind::QemuPreempt];
        assert_eq!(kinds(&[&main, &preempt]), expected);
        // In the session of before.
        let found = kinds(&[b"QEVM", &preempt, &main, &preempt]);
        assert_eq!(found[2..], expected);
        assert_eq!(kinds(&[b"QEVM", &[8]])[1], Kind::Unknown);
    }

    #[test]
    fn without_a_main_stream_nothing_is_urgent() {
        assert_eq!(kinds(&[b"QEVX", b"\0\0\0\0", b""]), [Kind::Unknown; 3]);
        // TLS inside of the stream.
        assert_eq!(
            kinds(&[&[0x16, 3, 1, 2], &[0x16, 3, 1, 2]]),
            [Kind::Unknown; 2]
        );
        // Too short to tell.
        assert_eq!(kinds(&[b"QEVM", b"QE"])[1], Kind::Unknown);
        assert_eq!(kinds(&[b"QEVM", b""])[1], Kind::Unknown);
    }

    #[test]
    fn the_faults_of_cloud_hypervisor_are_recognised() {
        let start = [1, 0, 0, 0, 0, 0, 0, 0];
        let found = kinds(&[&start, &[2, 0], &[1, 0, 4, 0]]);
        let main = Kind::CloudHypervisor;
        assert_eq!(found, [main, Kind::CloudHypervisorFaults, main]);
        assert_eq!(kinds(&[&[2, 0]]), [Kind::Unknown]);
    }
}
