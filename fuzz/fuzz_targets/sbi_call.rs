//! SBI calls with any registers: no panic, the platform is asked only for what exists, and a call
//! that is refused has no effect.

use pageferry_sbi::{Call, Fence, HartMask, HartStatus, Memory, Next, Platform, StartError, serve};

const HARTS: u32 = 70;
const RAM: u64 = 1 << 20;

#[derive(Default)]
struct Checked {
    effects: u32,
}

impl Checked {
    fn access(&mut self, address: u64, bytes: u64) -> Memory<u64, ()> {
        assert!(self.is_ram(address, bytes) && bytes > 0);
        if address < RAM / 2 {
            return Err(());
        }
        self.effects += 1;
        Ok(Some(bytes))
    }
}

impl Platform for Checked {
    type Again = ();

    fn harts(&self) -> u32 {
        HARTS
    }

    fn set_timer(&mut self, _deadline: u64) {
        self.effects += 1;
    }

    fn send_ipi(&mut self, _harts: HartMask) {
        self.effects += 1;
    }

    fn fence(&mut self, _harts: HartMask, _fence: Fence) {
        self.effects += 1;
    }

    fn start(&mut self, hart: u32, entry: u64, _opaque: u64) -> Result<(), StartError> {
        assert!(hart < HARTS);
        if !self.is_ram(entry, 4) {
            return Err(StartError::Address);
        }
        self.effects += 1;
        Ok(())
    }

    fn status(&self, hart: u32) -> HartStatus {
        assert!(hart < HARTS);
        HartStatus::Stopped
    }

    fn is_ram(&self, address: u64, bytes: u64) -> bool {
        address.checked_add(bytes).is_some_and(|end| end <= RAM)
    }

    fn console_write(&mut self, address: u64, bytes: u64) -> Memory<u64, ()> {
        self.access(address, bytes)
    }

    fn console_write_byte(&mut self, _byte: u8) -> bool {
        self.effects += 1;
        true
    }

    fn console_read(&mut self, address: u64, bytes: u64) -> Memory<u64, ()> {
        self.access(address, bytes)
    }
}

/// The extensions that there are, as random registers never name one.
const EXTENSIONS: [u64; 7] = [
    0x10,
    0x5449_4d45,
    0x73_5049,
    0x5246_4e43,
    0x48_534d,
    0x5352_5354,
    0x4442_434e,
];

pub(crate) fn run(data: &[u8]) {
    // Small registers are likelier to mean something.
    let mut registers = [0; 8];
    for (register, bytes) in registers.iter_mut().zip(data.chunks(9)) {
        let mut word = [0; 8];
        word[..bytes.len() - 1].copy_from_slice(&bytes[1..]);
        *register = u64::from_le_bytes(word) >> (bytes[0] % 64);
    }
    let mut call = Call::from_registers(registers);
    if let Some(known) = EXTENSIONS.get(call.extension as usize % 8) {
        call.extension = *known;
    }
    let mut platform = Checked::default();
    match serve(&call, &mut platform) {
        Ok(Next::Return { error: 0, .. }) => assert!(platform.effects <= 1),
        Ok(Next::Return { value, .. }) => assert_eq!((value, platform.effects), (0, 0)),
        Ok(_) | Err(()) => assert_eq!(platform.effects, 0),
    }
}
