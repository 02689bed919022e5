//! DeviceState frames of one switch-over: no panic on any bytes, and no device changes unless the
//! states of all are there and fit.
//!
//! The first byte of the input is the number in SwitchOver. Then come frames: the length of the
//! payload (2 bytes), the version (1), the length of the name (1), and the payload.

use pageferry_machine::{Apply, Device, MachineError};
use pageferry_migration::devices::DeviceStates;
use pageferry_migration::wire::{DeviceEntry, Frame, FrameHeader, FrameType, HEADER_BYTES};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A device with a state of 0 to 8 bytes.
struct Number(&'static str, AtomicU64);

impl Device for Number {
    fn name(&self) -> &str {
        self.0
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }

    fn resume(&self) {}

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Ok(self.1.load(Relaxed).to_le_bytes().to_vec())
    }

    fn decode<'a>(&'a self, version: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        assert_eq!(version, 1);
        let mut number = [0; 8];
        let to = number.get_mut(..bytes.len());
        to.ok_or_else(|| MachineError::Device("too long".into()))?
            .copy_from_slice(bytes);
        let number = u64::from_le_bytes(number);
        Ok(Box::new(move || self.1.store(number, Relaxed)))
    }
}

const UNTOUCHED: u64 = u64::MAX;

pub(crate) fn run(data: &[u8]) {
    let Some((&announced, mut rest)) = data.split_first() else {
        return;
    };
    let numbers = ["a", "bb"].map(|name| Arc::new(Number(name, UNTOUCHED.into())));
    let devices = numbers.clone().map(|number| number as Arc<dyn Device>);
    let entries = devices.each_ref().map(|device| DeviceEntry {
        name: device.name().parse().expect("a name"),
        version: 1,
    });
    let mut states = DeviceStates::due(&devices, &entries).expect("the same devices");
    while let Some((&[low, high, version, name_len], behind)) = rest.split_first_chunk() {
        let len = usize::from(u16::from_le_bytes([low, high])).min(behind.len());
        let (payload, behind) = behind.split_at(len);
        rest = behind;
        let Some(frame) = sealed(version, name_len, payload) else {
            return;
        };
        if states.take(frame).is_err() {
            break;
        }
    }
    let decoded = states.decode(announced.into());
    assert!(numbers.iter().all(|n| n.1.load(Relaxed) == UNTOUCHED));
    if let Ok(applies) = decoded {
        assert_eq!((announced, applies.len()), (2, 2));
        applies.into_iter().for_each(|apply| apply());
    }
}

/// Decodes a frame with a right checksum, and checks that it is encoded to the same bytes.
fn sealed(
    version: u8,
    name_len: u8,
    payload: &[u8],
) -> Option<pageferry_migration::wire::DeviceState> {
    let (len, count, arg) = (payload.len() as u32, version.into(), name_len.into());
    let header = FrameHeader::unsealed(FrameType::DeviceState, len, count, arg);
    let mut bytes = header.to_bytes().to_vec();
    let mut hasher = header.hasher();
    hasher.update(payload);
    hasher.seal(&mut bytes);
    let mut header = header;
    let checksum = bytes[HEADER_BYTES - 8..].try_into().expect("8 bytes");
    header.checksum = u64::from_le_bytes(checksum);
    bytes.extend_from_slice(payload);
    let frame = Frame::decode(&header, payload, 0).ok()?;
    let mut again = Vec::new();
    frame.encode(&mut again).expect("it was decoded");
    assert_eq!(again, bytes);
    match frame {
        Frame::DeviceState(state) => Some(state),
        _ => unreachable!("the header says so"),
    }
}
