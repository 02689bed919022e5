//! The device tree of a soft machine, as far as Linux needs it.

use crate::RamLayout;
use crate::board::{MmioDevice, PLIC, PLIC_SOURCES};
use pageferry_addr::PAGE_SIZE;
use pageferry_hypervisor::hart::{Interrupt, TIMEBASE_HZ};
use std::ops::Range;
use vm_fdt::{FdtWriter, FdtWriterResult};

/// The extensions of our harts, in the names of Linux's binding `riscv/extensions.yaml`.
const EXTENSIONS: [&str; 6] = ["i", "m", "a", "zicsr", "zifencei", "sstc"];

/// The node `chosen`.
pub(super) struct Chosen<'a> {
    pub(super) command_line: &'a str,
    /// The guest-physical addresses of the initrd.
    pub(super) initrd: Option<Range<u64>>,
    pub(super) seed: Option<[u8; 64]>,
}

/// The device tree of a machine with `vcpus` vCPUs and virtio devices. With devices, there is an
/// interrupt controller.
///
/// # Panics
/// If the command line has a byte 0.
pub(super) fn device_tree(
    layout: &RamLayout,
    vcpus: u32,
    devices: &[MmioDevice],
    chosen: &Chosen<'_>,
) -> Vec<u8> {
    let tree = write(layout, vcpus, devices, chosen);
    tree.expect("names and strings have no byte 0, and nodes are closed")
}

fn write(
    layout: &RamLayout,
    vcpus: u32,
    devices: &[MmioDevice],
    chosen: &Chosen<'_>,
) -> FdtWriterResult<Vec<u8>> {
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_string("compatible", "pageferry,soft")?;
    fdt.property_string("model", "pageferry,soft")?;

    let node = fdt.begin_node("chosen")?;
    fdt.property_string("bootargs", chosen.command_line)?;
    if let Some(initrd) = &chosen.initrd {
        fdt.property_u64("linux,initrd-start", initrd.start)?;
        fdt.property_u64("linux,initrd-end", initrd.end)?;
    }
    if let Some(seed) = &chosen.seed {
        fdt.property("rng-seed", seed)?;
    }
    fdt.end_node(node)?;

    for region in layout.regions() {
        let start = region.gfn.gpa().0;
        let node = fdt.begin_node(&format!("memory@{start:x}"))?;
        fdt.property_string("device_type", "memory")?;
        fdt.property_array_u64("reg", &[start, region.pages * PAGE_SIZE])?;
        fdt.end_node(node)?;
    }

    let cpus = fdt.begin_node("cpus")?;
    fdt.property_u32("#address-cells", 1)?;
    fdt.property_u32("#size-cells", 0)?;
    fdt.property_u32("timebase-frequency", TIMEBASE_HZ as u32)?;
    for vcpu in 0..vcpus {
        let cpu = fdt.begin_node(&format!("cpu@{vcpu:x}"))?;
        fdt.property_string("device_type", "cpu")?;
        fdt.property_string("compatible", "riscv")?;
        fdt.property_u32("reg", vcpu)?;
        fdt.property_string("status", "okay")?;
        // The first is for kernels that know only the old binding.
        fdt.property_string("riscv,isa", "rv64ima_zicsr_zifencei_sstc")?;
        fdt.property_string("riscv,isa-base", "rv64i")?;
        fdt.property_string_list(
            "riscv,isa-extensions",
            EXTENSIONS.map(String::from).to_vec(),
        )?;
        fdt.property_string("mmu-type", "riscv,sv48")?;
        let controller = fdt.begin_node("interrupt-controller")?;
        fdt.property_string("compatible", "riscv,cpu-intc")?;
        fdt.property_u32("#interrupt-cells", 1)?;
        fdt.property_null("interrupt-controller")?;
        // Handles count from 1.
        fdt.property_phandle(vcpu + 1)?;
        fdt.end_node(controller)?;
        fdt.end_node(cpu)?;
    }
    fdt.end_node(cpus)?;
    if !devices.is_empty() {
        write_devices(&mut fdt, vcpus, devices)?;
    }
    fdt.end_node(root)?;
    fdt.finish()
}

/// The interrupt controller, and the devices that it serves.
fn write_devices(fdt: &mut FdtWriter, vcpus: u32, devices: &[MmioDevice]) -> FdtWriterResult<()> {
    let handle = vcpus + 1;
    let plic = fdt.begin_node(&format!("interrupt-controller@{:x}", PLIC.start))?;
    fdt.property_string_list(
        "compatible",
        vec!["sifive,plic-1.0.0".into(), "riscv,plic0".into()],
    )?;
    fdt.property_array_u64("reg", &[PLIC.start, PLIC.end - PLIC.start])?;
    fdt.property_u32("#address-cells", 0)?;
    fdt.property_u32("#interrupt-cells", 1)?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_u32("riscv,ndev", PLIC_SOURCES)?;
    let external = Interrupt::External as u32;
    let contexts: Vec<u32> = (1..=vcpus).flat_map(|hart| [hart, external]).collect();
    fdt.property_array_u32("interrupts-extended", &contexts)?;
    fdt.property_phandle(handle)?;
    fdt.end_node(plic)?;
    for device in devices {
        let node = fdt.begin_node(&format!("virtio_mmio@{:x}", device.address))?;
        fdt.property_string("compatible", "virtio,mmio")?;
        fdt.property_array_u64("reg", &[device.address.into(), device.bytes.into()])?;
        fdt.property_u32("interrupt-parent", handle)?;
        fdt.property_u32("interrupts", device.line)?;
        fdt.end_node(node)?;
    }
    Ok(())
}
