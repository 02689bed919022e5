//! The power management registers of ACPI: how a guest switches itself off, or starts anew.
//!
//! The blocks are those of ACPI 6.5, section 4.8.3: PM1 events (status and enable, two bytes each)
//! and PM1 control (two bytes). A reset register follows (section 4.8.4.6), which takes
//! [`board::RESET_VALUE`]. No event ever comes.

use pageferry_machine::board;
use pageferry_machine::{Apply, Device, MachineError, Reset, ResetKind};
use std::sync::{Mutex, OnceLock, PoisonError};

/// ACPI's mode is on: the kernel need not switch to it.
const SCI_EN: u16 = 1;
const SLEEP_TYPE: u16 = 7 << 10;
const SLEEP_ENABLE: u16 = 1 << 13;

#[derive(Clone, Copy, Default)]
struct Registers {
    enable: u16,
    control: u16,
}

/// See the module.
#[derive(Default)]
pub struct Power {
    registers: Mutex<Registers>,
    ended: OnceLock<Reset>,
}

impl Power {
    /// The first of its I/O ports.
    pub const BASE: u16 = board::PM1_EVENT;
    /// The first I/O port behind them.
    pub const END: u16 = board::RESET + 1;

    /// The end of the guest, if it has asked for one.
    #[must_use]
    pub fn ended(&self) -> Option<Reset> {
        self.ended.get().copied()
    }

    /// The two bytes at `port`.
    fn word(&self, port: u16) -> u16 {
        let registers = *self
            .registers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match port - Self::BASE {
            2 => registers.enable,
            4 => registers.control | SCI_EN,
            _ => 0,
        }
    }

    /// Reads the byte at `port`, which is one of its own.
    #[must_use]
    pub fn read(&self, port: u16) -> u8 {
        self.word(port & !1).to_le_bytes()[usize::from(port & 1)]
    }

    /// Writes the byte at `port`, which is one of its own.
    pub fn write(&self, port: u16, value: u8) {
        let end = |kind| Reset {
            kind,
            failure: false,
        };
        if port == board::RESET {
            if value == board::RESET_VALUE {
                let _ = self.ended.set(end(ResetKind::Reboot));
            }
            return;
        }
        let mut registers = self
            .registers
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let word = match (port - Self::BASE) & !1 {
            2 => &mut registers.enable,
            4 => &mut registers.control,
            _ => return,
        };
        let mut bytes = word.to_le_bytes();
        bytes[usize::from(port & 1)] = value;
        *word = u16::from_le_bytes(bytes);
        let control = registers.control;
        if control & SLEEP_ENABLE != 0 {
            // The bit reads as 0.
            registers.control = control & !SLEEP_ENABLE;
            if control & SLEEP_TYPE == u16::from(board::SOFT_OFF) << 10 {
                let _ = self.ended.set(end(ResetKind::Shutdown));
            }
        }
    }
}

/// The state: the enable and the control register.
impl Device for Power {
    fn name(&self) -> &str {
        "power"
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        Ok(()) // It does no work of its own.
    }

    fn resume(&self) {}

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        let word = |port| self.word(port).to_le_bytes();
        Ok([word(Self::BASE + 2), word(board::PM1_CONTROL)].concat())
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        let &[e0, e1, c0, c1] = bytes else {
            return Err(MachineError::Device(format!(
                "{} bytes for power management, expected 4",
                bytes.len()
            )));
        };
        let moved = Registers {
            enable: u16::from_le_bytes([e0, e1]),
            control: u16::from_le_bytes([c0, c1]) & !SLEEP_ENABLE,
        };
        Ok(Box::new(move || {
            *self
                .registers
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = moved;
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write_word(power: &Power, port: u16, value: u16) {
        let [low, high] = value.to_le_bytes();
        power.write(port, low);
        power.write(port + 1, high);
    }

    #[test]
    fn a_guest_switches_itself_off() {
        let power = Power::default();
        assert_eq!(power.read(board::PM1_CONTROL) & 1, 1, "SCI_EN");
        write_word(&power, board::PM1_CONTROL, 3 << 10 | SLEEP_ENABLE);
        assert_eq!(power.ended(), None, "another sleep is none");
        write_word(&power, board::PM1_CONTROL, 5 << 10 | SLEEP_ENABLE | SCI_EN);
        let ended = power.ended().unwrap();
        assert_eq!((ended.kind, ended.failure), (ResetKind::Shutdown, false));
        // Nothing changes that.
        power.write(board::RESET, board::RESET_VALUE);
        assert_eq!(power.ended(), Some(ended));
    }

    #[test]
    fn a_guest_starts_anew() {
        let power = Power::default();
        power.write(board::RESET, 0);
        assert_eq!(power.ended(), None);
        power.write(board::RESET, board::RESET_VALUE);
        assert_eq!(power.ended().unwrap().kind, ResetKind::Reboot);
    }

    #[test]
    fn registers_travel_and_a_request_does_not() {
        let (here, there) = (Power::default(), Power::default());
        write_word(&here, Power::BASE + 2, 0x120);
        write_word(&here, board::PM1_CONTROL, 0x400);
        there.decode(1, &here.save().unwrap()).unwrap()();
        let word = |port| u16::from_le_bytes([there.read(port), there.read(port + 1)]);
        assert_eq!((word(Power::BASE), word(Power::BASE + 2)), (0, 0x120));
        assert_eq!(word(board::PM1_CONTROL), 0x401);
        let why = there.decode(1, &[0; 5]).err().unwrap().to_string();
        assert!(why.contains("5 bytes for power management"), "{why}");
        there.decode(1, &[0xff; 4]).unwrap()();
        there.write(Power::BASE, 0);
        assert_eq!(there.ended(), None);
    }
}
