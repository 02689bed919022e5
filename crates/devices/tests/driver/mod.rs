//! A driver of a virtio device, for tests.

use pageferry_addr::Gpa;
use pageferry_devices::{MmioTransport, VirtioDevice};
use pageferry_machine::{GuestRam, Interrupt, RamLayout};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

pub(crate) const RAM: u64 = 1 << 20;

#[derive(Default)]
pub(crate) struct Line(pub(crate) AtomicU64);

impl Interrupt for Line {
    fn raise(&self) {
        #[cfg(shuttle)]
        shuttle::thread::yield_now();
        self.0.fetch_add(1, SeqCst);
    }
}

/// The addresses of a queue's rings.
#[derive(Clone, Copy)]
pub(crate) struct Rings {
    pub(crate) descriptors: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
}

pub(crate) const FIRST: Rings = Rings {
    descriptors: 0x8000,
    available: 0x1000,
    used: 0x2000,
};

/// A driver with queues of 8 entries, of which it uses one.
pub(crate) struct Driver {
    pub(crate) rings: Rings,
    pub(crate) ram: Arc<GuestRam>,
    pub(crate) line: Arc<Line>,
    pub(crate) device: Arc<MmioTransport>,
    pub(crate) next: u16,
}

impl Driver {
    pub(crate) fn of(device: impl VirtioDevice + 'static, ram: &Arc<GuestRam>) -> Self {
        let (ram, line) = (Arc::clone(ram), Arc::new(Line::default()));
        let interrupt = Arc::clone(&line) as Arc<dyn Interrupt>;
        let device = MmioTransport::new(Box::new(device), Arc::clone(&ram), interrupt, "v.0");
        let device = device.unwrap();
        Self {
            rings: FIRST,
            ram,
            line,
            device,
            next: 0,
        }
    }

    pub(crate) fn set(&self, offset: u64, value: u32) {
        self.device.write(offset, &value.to_le_bytes());
    }

    pub(crate) fn get(&self, offset: u64) -> u32 {
        let mut word = [0; 4];
        self.device.read(offset, &mut word);
        u32::from_le_bytes(word)
    }

    /// Sets the device up, without the features of its type.
    pub(crate) fn start(&self) {
        self.start_queues(&[FIRST]);
    }

    pub(crate) fn start_queues(&self, queues: &[Rings]) {
        for (offset, value) in [(0x70, 3), (0x24, 1), (0x20, 1), (0x70, 8)] {
            self.set(offset, value);
        }
        for (index, rings) in (0..).zip(queues) {
            self.set(0x30, index);
            self.set(0x38, 8);
            self.set(0x80, rings.descriptors as u32);
            self.set(0x90, rings.available as u32);
            self.set(0xa0, rings.used as u32);
            self.set(0x44, 1);
            assert_eq!(self.get(0x44), 1);
        }
        self.set(0x70, 4);
        assert_eq!(self.get(0x70), 0xf);
    }

    pub(crate) fn put(&self, at: u64, bytes: &[u8]) {
        self.ram.try_write(Gpa(at), bytes).unwrap();
    }

    pub(crate) fn bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.ram.try_read(Gpa(at), &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn descriptor(&self, index: u64, at: u64, len: u32, flags: u16, next: u16) {
        let word = u128::from(at) | u128::from(len) << 64;
        let word = word | u128::from(flags) << 96 | u128::from(next) << 112;
        self.put(self.rings.descriptors + 16 * index, &word.to_le_bytes());
    }

    /// Offers the chain of descriptor 0.
    pub(crate) fn offer(&mut self) {
        self.put(
            self.rings.available + 4 + 2 * u64::from(self.next % 8),
            &[0, 0],
        );
        self.next = self.next.wrapping_add(1);
        self.put(self.rings.available + 2, &self.next.to_le_bytes());
        self.set(0x50, 0);
    }

    pub(crate) fn answered(&self) -> u16 {
        u16::from_le_bytes(self.bytes(self.rings.used + 2))
    }
}

pub(crate) fn ram() -> Arc<GuestRam> {
    Arc::new(GuestRam::new(RamLayout::for_memory(RAM).unwrap()).unwrap())
}
