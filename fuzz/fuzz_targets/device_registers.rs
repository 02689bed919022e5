//! Register accesses and queues of a guest: no panic, and the device always pauses.
//!
//! The first byte is the number of accesses of 6 bytes, which follow: offset, width, value. The
//! rest is guest memory. The device has two queues and the longest code behind them: a network.

use pageferry_addr::Gpa;
use pageferry_devices::{MmioTransport, Net};
use pageferry_machine::{Device, GuestRam, Interrupt, RamLayout};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;

struct Line;

impl Interrupt for Line {
    fn raise(&self) {}
}

pub(crate) fn run(bytes: &[u8]) {
    let Some((count, rest)) = bytes.split_first() else {
        return;
    };
    let (accesses, memory) = rest.split_at(rest.len().min(usize::from(*count) * 6));
    let ram = GuestRam::new(RamLayout::for_memory(1 << 16).unwrap()).unwrap();
    ram.try_write(Gpa(0), memory).unwrap();
    let (tap, other) = UnixDatagram::pair().unwrap();
    tap.set_nonblocking(true).unwrap();
    other.set_nonblocking(true).unwrap();
    let _ = other.send(&[7; 100]);
    let net = Net::new(
        OwnedFd::from(tap).into(),
        "02:00:00:00:00:01".parse().unwrap(),
    );
    let line = Arc::new(Line);
    let device = MmioTransport::new(Box::new(net), Arc::new(ram), line, "net.0").unwrap();
    for access in accesses.chunks_exact(6) {
        let (offset, value) = (u64::from(access[0]) * 2, &access[2..]);
        match access[1] {
            0 => device.read(offset, &mut [0; 4]),
            1 => device.read(offset, &mut [0; 7]),
            2 => device.write(offset, &value[..3]),
            _ => device.write(offset, value),
        }
    }
    device.pause().unwrap();
}
