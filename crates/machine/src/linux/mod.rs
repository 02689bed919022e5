//! Linux as a guest: a riscv64 kernel, an initrd and a command line in a machine's memory.
//!
//! **Guarantee.** All is checked before the first byte is written. A kernel for another
//! architecture, or one that needs instructions that our harts lack, is refused with the reason.
//!
//! **Mechanism.** [`image`] reads the kernel's header. The kernel goes where its header wants it,
//! counted from the start of RAM. The device tree ([`device_tree`]) goes to the end of RAM's first
//! region, and the initrd before it. The first hart starts at the kernel with its id and the
//! address of the device tree (Linux, `Documentation/arch/riscv/boot.rst`). The others are stopped,
//! and the kernel starts them by SBI.
//!
//! **Neighbours.** A soft machine runs it. Loader crates choose a format by the host's
//! architecture, so this is our own.

mod device_tree;
mod image;

use crate::{AccessError, GuestRam, LayoutError, MAX_VCPUS, StartState};
use device_tree::{Chosen, device_tree};
use image::Image;
use pageferry_addr::{Gpa, PAGE_SIZE};
use std::fs::File;
use std::io::Read;
use std::ops::Range;

pub use image::ImageError;

/// The longest command line in bytes: `COMMAND_LINE_SIZE` of riscv Linux, less the final 0.
pub const MAX_COMMAND_LINE: usize = 1023;
/// The longest device tree that riscv Linux maps at its start: `MAX_FDT_SIZE`.
const MAX_DEVICE_TREE: usize = 2 << 20;

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
    /// The bytes of an uncompressed riscv64 `Image`.
    pub kernel: &'a [u8],
    /// The bytes of an initial RAM disk.
    pub initrd: Option<&'a [u8]>,
    /// The kernel's command line, at most [`MAX_COMMAND_LINE`] bytes.
    pub command_line: &'a str,
}

/// The reason why a kernel was not loaded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LinuxError {
    /// The kernel is not one that our harts can run.
    #[error(transparent)]
    Kernel(#[from] ImageError),
    /// The command line is too long.
    #[error("the kernel's command line has {0} bytes: expected at most {MAX_COMMAND_LINE}")]
    CommandLine(usize),
    /// The command line has a byte 0, which would end it.
    #[error("the kernel's command line has a byte 0 at position {0}: leave it out")]
    CommandLineZero(usize),
    /// The initrd has no bytes.
    #[error("the initrd is empty: leave it out, or give one with contents")]
    EmptyInitrd,
    /// Kernel, initrd and device tree do not fit into the first region of RAM.
    #[error(
        "{available} bytes of memory below 3 GiB are too few: kernel, initrd and device tree need \
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

/// The places of the parts in guest-physical memory.
struct Places {
    kernel: u64,
    initrd: Range<u64>,
    device_tree: u64,
}

impl Linux<'_> {
    /// Writes kernel, initrd and device tree to `ram`, for a machine with `vcpus` vCPUs. Returns
    /// the start of vCPU 0; the others stay stopped.
    ///
    /// # Errors
    /// [`LinuxError`]. Nothing was written then, unless the memory left while it was written.
    pub fn load(&self, ram: &GuestRam, vcpus: u32) -> Result<StartState, LinuxError> {
        let image = Image::read(self.kernel)?;
        self.check(vcpus)?;
        let region = &ram.layout().regions()[0];
        let start = region.gfn.gpa().0;
        let end = start + region.pages * PAGE_SIZE;
        // The length of the tree does not depend on the addresses in it.
        let tree = |initrd: &Range<u64>| {
            let chosen = Chosen {
                command_line: self.command_line,
                initrd: self.initrd.map(|_| initrd.clone()),
                seed: seed(),
            };
            device_tree(ram.layout(), vcpus, &chosen)
        };
        let length = tree(&(0..0)).len();
        assert!(length <= MAX_DEVICE_TREE, "{vcpus} vCPUs are few enough");
        let places = self.place(&image, start..end, length as u64)?;
        let parts = [
            (places.kernel, self.kernel),
            (places.initrd.start, self.initrd.unwrap_or_default()),
            (places.device_tree, &tree(&places.initrd)),
        ];
        for (gpa, bytes) in parts {
            ram.try_write(Gpa(gpa), bytes)?;
        }
        Ok(StartState {
            entry: places.kernel,
            stack: 0,
            args: [0, places.device_tree],
            tables: Gpa(0),
        })
    }

    fn check(&self, vcpus: u32) -> Result<(), LinuxError> {
        let line = self.command_line;
        if line.len() > MAX_COMMAND_LINE {
            return Err(LinuxError::CommandLine(line.len()));
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

    fn place(&self, image: &Image, ram: Range<u64>, tree: u64) -> Result<Places, LinuxError> {
        let pages = |bytes: u64| bytes.next_multiple_of(PAGE_SIZE);
        let initrd = self.initrd.map_or(0, |initrd| initrd.len() as u64);
        let available = ram.end - ram.start;
        // All three are far from overflow: the header's fields are bounded, the others are lengths
        // of slices.
        let needed = image.text_offset + pages(image.memory_bytes) + pages(initrd) + pages(tree);
        if needed > available {
            return Err(LinuxError::Memory { needed, available });
        }
        let device_tree = ram.end - pages(tree);
        let initrd_start = device_tree - pages(initrd);
        Ok(Places {
            kernel: ram.start + image.text_offset,
            initrd: initrd_start..initrd_start + initrd,
            device_tree,
        })
    }
}

/// Random bytes for the kernel's generator, which it would gather slowly itself.
fn seed() -> Option<[u8; 64]> {
    let mut bytes = [0; 64];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.is_ok().then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::image::tests::kernel;
    use super::*;
    use crate::RamLayout;

    fn ram(bytes: u64) -> GuestRam {
        GuestRam::new(RamLayout::for_memory(bytes).unwrap()).unwrap()
    }

    fn linux<'a>(kernel: &'a [u8], initrd: &'a [u8]) -> Linux<'a> {
        Linux {
            kernel,
            initrd: Some(initrd),
            command_line: "console=hvc0",
        }
    }

    #[test]
    fn all_parts_are_where_the_first_hart_is_told() {
        let (kernel, ram) = (kernel(), ram(16 << 20));
        let initrd = [7; 5000];
        let start = linux(&kernel, &initrd).load(&ram, 2).unwrap();
        assert_eq!((start.entry, start.args[0]), (2 << 20, 0));
        let mut found = vec![0; kernel.len()];
        ram.try_read(Gpa(2 << 20), &mut found).unwrap();
        assert!(found == kernel);
        let tree = start.args[1];
        let mut magic = [0; 4];
        ram.try_read(Gpa(tree), &mut magic).unwrap();
        assert_eq!(magic, [0xd0, 0x0d, 0xfe, 0xed]);
        let mut found = [0; 5001];
        ram.try_read(Gpa(tree - 8192), &mut found).unwrap();
        assert!(found[..5000] == initrd && found[5000] == 0);
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_written() {
        let kernel = kernel();
        let small = ram(4 << 20);
        let refused = |linux: Linux<'_>, vcpus| {
            let why = linux.load(&small, vcpus).unwrap_err();
            let mut page = vec![1; 4 << 20];
            small.try_read(Gpa(0), &mut page).unwrap();
            assert!(page.iter().all(|byte| *byte == 0), "{why}");
            why
        };
        let long = "x".repeat(MAX_COMMAND_LINE + 1);
        let with = |command_line| Linux {
            command_line,
            ..linux(&kernel, &[1])
        };
        assert_eq!(refused(with(&long), 1), LinuxError::CommandLine(1024));
        assert_eq!(refused(with("a\0b"), 1), LinuxError::CommandLineZero(1));
        assert_eq!(refused(linux(&kernel, &[]), 1), LinuxError::EmptyInitrd);
        let memory = refused(linux(&kernel, &vec![1; 2 << 20]), 1);
        let LinuxError::Memory { needed, available } = memory else {
            panic!("{memory}");
        };
        assert_eq!(available, 4 << 20);
        // As much as is needed is enough.
        let enough = ram(needed);
        linux(&kernel, &vec![1; 2 << 20]).load(&enough, 1).unwrap();
        for vcpus in [0, MAX_VCPUS + 1] {
            let why = refused(linux(&kernel, &[1]), vcpus);
            assert_eq!(why, LinuxError::Vcpus(LayoutError::Vcpus(vcpus)));
        }
    }

    #[test]
    fn the_most_vcpus_have_a_device_tree_that_linux_maps() {
        let layout = RamLayout::for_memory(4 << 30).unwrap();
        let chosen = Chosen {
            command_line: "",
            initrd: None,
            seed: None,
        };
        assert!(device_tree(&layout, MAX_VCPUS, &chosen).len() < MAX_DEVICE_TREE / 2);
    }
}
