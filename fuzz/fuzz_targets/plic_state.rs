//! The state of a soft machine's interrupt controller: no panic, and what is accepted is saved as
//! it came.

use pageferry_machine::soft::{self, SoftOptions};
use pageferry_machine::{Device, MachineSpec};
use std::sync::{Arc, LazyLock};

static DEVICE: LazyLock<Arc<dyn Device>> = LazyLock::new(|| {
    let options = SoftOptions {
        interrupts: true,
        ..SoftOptions::default()
    };
    let new = soft::create_with(MachineSpec::new(2, 1 << 16), options).unwrap();
    let mut devices = new.machine.devices().into_iter();
    devices.find(|device| device.name() == "plic").unwrap()
});

pub(crate) fn run(bytes: &[u8]) {
    if let Ok(apply) = DEVICE.decode(1, bytes) {
        apply();
        DEVICE.resume();
        assert_eq!(DEVICE.save().unwrap(), bytes);
    }
}
