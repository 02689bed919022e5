//! The virtio devices of a machine, at their addresses.

use crate::{MmioTransport, VirtioDevice};
use pageferry_addr::Gpa;
use pageferry_machine::board::MmioDevice;
use pageferry_machine::{Device, Machine, MachineError};
use std::sync::Arc;

/// The virtio devices of a machine that runs Linux.
pub struct MmioBus(Vec<(MmioDevice, Arc<MmioTransport>)>);

impl MmioBus {
    /// The most devices.
    pub const MOST: usize = MmioDevice::MOST;

    /// Puts `devices`, in that order, at the usual places of `machine`, which has interrupt
    /// controllers.
    ///
    /// # Errors
    /// When the machine has no interrupt controllers, there are more than [`Self::MOST`], or the
    /// kernel refuses.
    pub fn new(
        machine: &dyn Machine,
        devices: Vec<Box<dyn VirtioDevice>>,
    ) -> Result<Self, MachineError> {
        if devices.len() > Self::MOST {
            return Err(MachineError::Device(format!(
                "{} virtio devices, expected at most {}",
                devices.len(),
                Self::MOST
            )));
        }
        let attach = |(index, device): (u32, Box<dyn VirtioDevice>)| {
            let place = MmioDevice::at(index);
            let interrupt = machine.interrupt(place.line)?;
            let ram = Arc::clone(machine.ram());
            let name = format!("virtio.{index}");
            let device = MmioTransport::new(device, ram, interrupt, &name)
                .map_err(|why| MachineError::Device(format!("{name} does not start: {why}")))?;
            let doorbell = Gpa(u64::from(place.address) + MmioTransport::NOTIFY);
            // An engine without doorbells passes the store on to `mmio_write`.
            let _ = machine.doorbell(doorbell, device.notify())?;
            Ok((place, device))
        };
        let devices = (0..).zip(devices).map(attach);
        devices.collect::<Result<_, _>>().map(Self)
    }

    /// The devices, whose states travel.
    pub fn devices(&self) -> impl Iterator<Item = Arc<dyn Device>> {
        self.0.iter().map(|(_, device)| Arc::clone(device) as _)
    }

    /// The places of the devices, for the tables of a kernel.
    #[must_use]
    pub fn places(&self) -> Vec<MmioDevice> {
        self.0.iter().map(|(place, _)| *place).collect()
    }

    /// The device that has `gpa`, and the offset there.
    fn find(&self, gpa: Gpa) -> Option<(u64, &MmioTransport)> {
        self.0.iter().find_map(|(place, device)| {
            let offset = gpa.0.checked_sub(place.address.into())?;
            (offset < place.bytes.into()).then_some((offset, &**device))
        })
    }

    /// Reads `size` bytes, at most 8, from memory where no RAM is. Without a device it reads ones.
    #[must_use]
    pub fn mmio_read(&self, gpa: Gpa, size: u8) -> u64 {
        let mut bytes = [0; 8];
        let wanted = &mut bytes[..usize::from(size.min(8))];
        match self.find(gpa) {
            Some((offset, device)) => device.read(offset, wanted),
            None => wanted.fill(u8::MAX),
        }
        u64::from_le_bytes(bytes)
    }

    /// Writes `size` bytes of `value`, at most 8, to memory where no RAM is.
    pub fn mmio_write(&self, gpa: Gpa, value: u64, size: u8) {
        if let Some((offset, device)) = self.find(gpa) {
            device.write(offset, &value.to_le_bytes()[..usize::from(size.min(8))]);
        }
    }
}
