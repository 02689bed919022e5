//! A PC: the devices at their I/O ports, and the VM's generation.

use crate::{Power, SerialPort};
use pageferry_addr::Gpa;
use pageferry_machine::board::{COM1, COM1_LINE, GENERATION, GENERATION_LINE};
use pageferry_machine::{Console, Device, GuestRam, Interrupt, Machine, MachineError, Reset};
use std::sync::Arc;

/// The devices at the I/O ports of a PC that runs Linux.
pub struct Pc {
    console: Arc<Console>,
    serial: Arc<SerialPort>,
    power: Arc<Power>,
    /// Says that the generation is new.
    generation: Arc<dyn Interrupt>,
    ram: Arc<GuestRam>,
}

impl Pc {
    /// The devices for `machine`, which has interrupt controllers: a serial port, power
    /// management, and the VM's generation.
    ///
    /// # Errors
    /// When the machine has no interrupt controllers, or the kernel refuses.
    pub fn new(machine: &dyn Machine) -> Result<Self, MachineError> {
        let console = Arc::new(Console::default());
        let serial = SerialPort::new(Arc::clone(&console), machine.interrupt(COM1_LINE)?);
        Ok(Self {
            console,
            serial,
            power: Arc::default(),
            generation: machine.interrupt(GENERATION_LINE)?,
            ram: Arc::clone(machine.ram()),
        })
    }

    /// The console at the serial port.
    #[must_use]
    pub fn console(&self) -> &Arc<Console> {
        &self.console
    }

    /// The devices whose states travel.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        vec![
            Arc::clone(&self.console) as _,
            Arc::clone(&self.serial) as _,
            Arc::clone(&self.power) as _,
        ]
    }

    /// Gives the VM a new generation, and tells the guest. A guest that was saved must get one
    /// before it runs: several may go on from one state, and none may repeat the random numbers of
    /// another. Source: "Virtual Machine Generation ID" (Microsoft).
    ///
    /// # Errors
    /// The error of getrandom(2), or of the write to guest memory.
    pub fn renew_generation(&self) -> Result<(), MachineError> {
        let mut generation = [0; 16];
        let refused = |why: &dyn std::fmt::Display| {
            MachineError::Device(format!("the VM gets no new generation: {why}"))
        };
        pageferry_machine::fill_random(&mut generation).map_err(|why| refused(&why))?;
        let written = self.ram.write(Gpa(GENERATION), &generation, &|| false);
        written.map_err(|why| refused(&why))?;
        self.generation.raise();
        Ok(())
    }

    /// The end of the guest, if it has asked for one.
    #[must_use]
    pub fn ended(&self) -> Option<Reset> {
        self.power.ended()
    }

    /// Reads `size` bytes from I/O ports. A port without a device reads ones.
    #[must_use]
    pub fn port_read(&self, port: u16, size: u8) -> u32 {
        let byte = |at: u16| match at {
            COM1..COM1_END => self.serial.read(at - COM1),
            Power::BASE..Power::END => self.power.read(at),
            _ => u8::MAX,
        };
        let bytes = std::array::from_fn(|index| match index as u8 {
            index if index < size => byte(port.wrapping_add(index.into())),
            _ => 0,
        });
        u32::from_le_bytes(bytes)
    }

    /// Writes `size` bytes of `value` to I/O ports. A port without a device takes them.
    pub fn port_write(&self, port: u16, value: u32, size: u8) {
        for (index, byte) in (0..u16::from(size)).zip(value.to_le_bytes()) {
            match port.wrapping_add(index) {
                at @ COM1..COM1_END => self.serial.write(at - COM1, byte),
                at @ Power::BASE..Power::END => self.power.write(at, byte),
                _ => {}
            }
        }
    }
}

const COM1_END: u16 = COM1 + SerialPort::PORTS;
