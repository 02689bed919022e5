//! Linux as a guest: a kernel, an initrd and a command line in a machine's memory.
//!
//! **Guarantee.** All is checked before the first byte is written. A kernel for another
//! architecture, or one that needs instructions that our harts lack, is refused with the reason.
//!
//! **Mechanism.** [`riscv64`] has the kernels of soft machines, [`x86_64`] those of KVM's.
//!
//! **Neighbours.** The caller creates the machine, gives vCPU 0 the start state, and has the
//! devices that the kernel finds.

#[cfg(feature = "soft")]
mod riscv64;
#[cfg(all(feature = "pc", target_arch = "x86_64"))]
mod x86_64;

use crate::{AccessError, LayoutError, MAX_VCPUS};

#[cfg(feature = "soft")]
pub use riscv64::ImageError;
#[cfg(all(feature = "pc", target_arch = "x86_64"))]
pub use x86_64::{PcImageError, is_pc_kernel};

/// A kernel, and what it is started with.
///
/// ```
/// use pageferry_machine::{Engine, ImageError, Linux, LinuxError, MachineSpec, create};
///
/// let machine = create(Engine::Soft, MachineSpec::new(1, 64 << 20))?.machine;
/// let linux = Linux { kernel: b"\x7fELF and so on", initrd: None, command_line: "console=hvc0" };
/// let refused = linux.load(machine.ram(), 1).unwrap_err();
/// assert!(matches!(refused, LinuxError::Kernel(ImageError::Short(_))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Linux<'a> {
    /// The bytes of the kernel: an uncompressed riscv64 `Image`, or an x86-64 `bzImage` or
    /// `vmlinux` with a PVH note.
    pub kernel: &'a [u8],
    /// The bytes of an initial RAM disk.
    pub initrd: Option<&'a [u8]>,
    /// The kernel's command line: at most 1023 bytes for riscv64, and 2047 for x86-64.
    pub command_line: &'a str,
}

/// The reason why a kernel was not loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinuxError {
    /// The kernel is not one that our harts can run.
    #[cfg(feature = "soft")]
    #[error(transparent)]
    Kernel(#[from] ImageError),
    /// The kernel is not one that a PC can start.
    #[cfg(all(feature = "pc", target_arch = "x86_64"))]
    #[error(transparent)]
    PcKernel(#[from] PcImageError),
    /// The command line is too long.
    #[error("the kernel's command line has {bytes} bytes: expected at most {most}")]
    CommandLine {
        /// Its length.
        bytes: usize,
        /// The most that the kernel takes.
        most: usize,
    },
    /// The command line has a byte 0, which would end it.
    #[error("the kernel's command line has a byte 0 at position {0}: leave it out")]
    CommandLineZero(usize),
    /// The initrd has no bytes.
    #[error("the initrd is empty: leave it out, or give one with contents")]
    EmptyInitrd,
    /// The parts do not fit into the first region of RAM.
    #[error(
        "{available} bytes of memory below 3 GiB are too few: the kernel and what is beside it need \
         {needed}"
    )]
    Memory {
        /// The bytes that they need, without any for the kernel's work.
        needed: u64,
        /// The bytes that there are.
        available: u64,
    },
    /// There are more vCPUs than a machine may have.
    #[error(transparent)]
    Vcpus(#[from] LayoutError),
    /// The machine's memory is not here.
    #[error(transparent)]
    Access(#[from] AccessError),
}

impl Linux<'_> {
    /// Checks all but the kernel.
    fn check(&self, vcpus: u32, most: usize) -> Result<(), LinuxError> {
        let line = self.command_line;
        if line.len() > most {
            return Err(LinuxError::CommandLine {
                bytes: line.len(),
                most,
            });
        }
        if let Some(zero) = line.find('\0') {
            return Err(LinuxError::CommandLineZero(zero));
        }
        if self.initrd.is_some_and(<[u8]>::is_empty) {
            return Err(LinuxError::EmptyInitrd);
        }
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(LayoutError::Vcpus(vcpus).into());
        }
        Ok(())
    }
}
