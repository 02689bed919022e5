//! The state of a virtio device: no panic, and what is accepted is saved as it came.

use pageferry_devices::{Entropy, MmioTransport};
use pageferry_machine::{Device, GuestRam, Interrupt, RamLayout};
use std::sync::{Arc, OnceLock};

struct Line;

impl Interrupt for Line {
    fn raise(&self) {}
}

static DEVICE: OnceLock<Arc<MmioTransport>> = OnceLock::new();

pub(crate) fn run(bytes: &[u8]) {
    let device = DEVICE.get_or_init(|| {
        let ram = GuestRam::new(RamLayout::for_memory(1 << 16).unwrap()).unwrap();
        let entropy = Box::new(Entropy);
        let device = MmioTransport::new(entropy, Arc::new(ram), Arc::new(Line), "rng.0").unwrap();
        device.pause().unwrap();
        device
    });
    if let Ok(apply) = device.decode(1, bytes) {
        apply();
        assert_eq!(device.save().unwrap(), bytes);
    }
}
