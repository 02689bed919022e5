//! A riscv64 kernel.
//!
//! [`image`] reads the kernel's header. The kernel goes where its header wants it, counted from the
//! start of RAM. The device tree ([`device_tree`]) goes to the end of RAM's first region, and the
//! initrd before it. The first hart starts at the kernel with its id and the address of the device
//! tree (Linux, `Documentation/arch/riscv/boot.rst`). The others are stopped, and the kernel starts
//! them by SBI.
//!
//! Loader crates choose a format by the host's architecture, so this is our own.

mod device_tree;
mod image;

use super::{Linux, LinuxError};
use crate::board::MmioDevice;
use crate::{GuestRam, StartMode, StartState};
use device_tree::{Chosen, device_tree};
use image::Image;
use pageferry_addr::{Gpa, PAGE_SIZE};
use std::ops::Range;

pub use image::ImageError;

/// `COMMAND_LINE_SIZE` of riscv Linux, less the final 0.
const MAX_COMMAND_LINE: usize = 1023;
/// The longest device tree that riscv Linux maps at its start: `MAX_FDT_SIZE`.
const MAX_DEVICE_TREE: usize = 2 << 20;

/// The places of the parts in guest-physical memory.
struct Places {
    kernel: u64,
    initrd: Range<u64>,
    device_tree: u64,
}

impl Linux<'_> {
    /// Writes a riscv64 kernel, the initrd and a device tree to `ram`, for a machine with `vcpus`
    /// vCPUs. Returns the start of vCPU 0; the others stay stopped.
    ///
    /// # Errors
    /// [`LinuxError`]. Nothing was written then, unless the memory left while it was written.
    pub fn load(&self, ram: &GuestRam, vcpus: u32) -> Result<StartState, LinuxError> {
        self.load_with(ram, vcpus, &[])
    }

    /// [`Linux::load`], for a machine with these virtio devices and an interrupt controller
    /// ([`crate::soft::SoftOptions::interrupts`]).
    ///
    /// # Errors
    /// As [`Linux::load`].
    pub fn load_with(
        &self,
        ram: &GuestRam,
        vcpus: u32,
        devices: &[MmioDevice],
    ) -> Result<StartState, LinuxError> {
        let image = Image::read(self.kernel)?;
        self.check(vcpus, MAX_COMMAND_LINE)?;
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
            device_tree(ram.layout(), vcpus, devices, &chosen)
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
            mode: StartMode::User,
        })
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
    crate::fill_random(&mut bytes).ok()?;
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::image::tests::kernel;
    use super::*;
    use crate::{LayoutError, MAX_VCPUS, RamLayout};

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
        assert_eq!(
            refused(with(&long), 1),
            LinuxError::CommandLine {
                bytes: 1024,
                most: 1023
            }
        );
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
        let devices: Vec<_> = (0..8).map(MmioDevice::at).collect();
        let tree = device_tree(&layout, MAX_VCPUS, &devices, &chosen);
        assert!(tree.len() < MAX_DEVICE_TREE / 2);
    }
}
