//! Shared by the tests of the wire format: one sample of every frame, and a parser of whole frames.

use pageferry_addr::{Gfn, RamPage};
use pageferry_migration::wire::*;

/// The memory of the samples' VM, in pages.
pub(crate) const MEMORY_PAGES: u64 = 1000;

/// The result of [`parse`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Parsed {
    Frame(Frame),
    Pages(RunList, Vec<u8>),
}

/// The role of a channel that carries frames of the type in this header.
pub(crate) fn role_of(head: &[u8]) -> Role {
    let bulk = [FrameType::Pages, FrameType::Receipt];
    let found = bulk.map(|known| head[4..6] == known.number().to_le_bytes());
    match found.contains(&true) {
        true => Role::Bulk,
        false => Role::Control,
    }
}

/// Decodes one frame like a receiver: the header, then descriptors and data, or the payload.
pub(crate) fn parse(bytes: &[u8], from: Side, memory_pages: u64) -> Result<Parsed, WireError> {
    let cut = |what, needed: usize| WireError::Truncated {
        what,
        needed: needed as u64,
        got: bytes.len() as u64,
    };
    let head = bytes
        .first_chunk::<HEADER_BYTES>()
        .ok_or(cut("header", HEADER_BYTES))?;
    let header = FrameHeader::decode(head, from, role_of(head))?;
    let len = header.payload_len as usize;
    let payload = bytes
        .get(HEADER_BYTES..HEADER_BYTES + len)
        .ok_or(cut("payload", HEADER_BYTES + len))?;
    if header.frame_type != FrameType::Pages {
        return Frame::decode(&header, payload, memory_pages).map(Parsed::Frame);
    }
    let (descriptors, data) = payload.split_at(RunList::descriptors_len(&header)?);
    let list = RunList::decode(&header, descriptors, memory_pages)?;
    let mut hasher = header.hasher();
    hasher.update(descriptors);
    for piece in data.chunks(1000) {
        hasher.update(piece);
    }
    hasher.verify()?;
    Ok(Parsed::Pages(list, data.to_vec()))
}

pub(crate) fn encode(frame: &Frame) -> Vec<u8> {
    let mut bytes = vec![0xee; 7];
    frame.encode(&mut bytes).unwrap();
    bytes
}

pub(crate) fn encode_pages(list: &RunList, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut hasher = list.encode_head(&mut bytes);
    hasher.update(data);
    hasher.seal(&mut bytes);
    bytes.extend_from_slice(data);
    bytes
}

pub(crate) fn setup() -> Setup {
    let region = |slot, gfn, pages| Region {
        slot,
        gfn: Gfn(gfn),
        pages,
    };
    let device = |name: &str, version| DeviceEntry {
        name: name.parse().unwrap(),
        version,
    };
    Setup {
        bulk_channels: 4,
        urgent_channels: 2,
        kind: Kind {
            engine: "soft".parse().unwrap(),
            isa: "riscv64".parse().unwrap(),
            state_format: "soft-riscv64/1".parse().unwrap(),
        },
        vcpus: 4,
        memory_bytes: MEMORY_PAGES * PAGE_BYTES as u64,
        regions: vec![region(0, 16, 600), region(7, 4096, 400)],
        devices: vec![device("uart.0", 2), device("rng.0", u32::MAX)],
        description: b"workload".to_vec(),
    }
}

/// Pages 3 (data), 10 to 11 (data), 12 to 999 (zero), with their bytes.
pub(crate) fn pages() -> (RunList, Vec<u8>) {
    let mut list = RunList::new(MEMORY_PAGES);
    for page in [3, 10, 11] {
        list.push(RamPage(page), RunKind::Data).unwrap();
    }
    for page in 12..MEMORY_PAGES {
        list.push(RamPage(page), RunKind::Zero).unwrap();
    }
    let data = (0..3 * PAGE_BYTES)
        .map(|i| (i * 7 + i / 256) as u8)
        .collect();
    (list, data)
}

/// A frame of every type except Pages, once for each side that sends it.
pub(crate) fn samples() -> Vec<(Frame, Side)> {
    use Side::{Destination, Source};
    let pass = Pass {
        pass: 2,
        pages: 777,
    };
    let channel = ChannelId {
        role: Role::Bulk,
        index: 3,
        incarnation: 2,
    };
    let error = ErrorMessage::new(ErrorCode::SetupRefused, "memory sizes differ");
    vec![
        (Frame::Setup(setup()), Source),
        (Frame::SetupAck { keeps: true }, Destination),
        (
            Frame::SetupProgress(SetupProgress {
                pages: 640,
                ready: true,
            }),
            Destination,
        ),
        (Frame::Error(error.clone()), Source),
        (Frame::Error(error), Destination),
        (Frame::Cancel, Source),
        (Frame::Cancel, Destination),
        (Frame::Pass(pass), Source),
        (Frame::Missing(missing()), Source),
        (Frame::Missing(missing()), Destination),
        (
            Frame::VcpuState(VcpuState {
                vcpu: 3,
                state: (0..100).collect(),
            }),
            Source,
        ),
        (
            Frame::DeviceState(DeviceState {
                name: "uart.0".parse().unwrap(),
                version: 2,
                state: (0..100).collect(),
            }),
            Source,
        ),
        (
            Frame::SwitchOver(SwitchOver {
                missing_pages: 900,
                vcpus: 4,
                devices: 2,
                stopped_at_ns: 123_456_789_012,
                paused: true,
            }),
            Source,
        ),
        (Frame::Ready, Destination),
        (Frame::Go, Source),
        (
            Frame::Running {
                started_at_ns: 123_456_999_999,
            },
            Destination,
        ),
        (Frame::Drained { missing: 900 }, Source),
        (Frame::DrainAck { missing: 900 }, Destination),
        (Frame::Complete, Source),
        (Frame::Receipt { frames: 77 }, Destination),
        (Frame::Alive, Source),
        (Frame::Alive, Destination),
        (Frame::Resume(SourceStage::Drained), Source),
        (
            Frame::Resumed {
                stage: DestinationStage::Running,
                missing: 640,
            },
            Destination,
        ),
        (Frame::Discarded(Text::new("out of memory")), Destination),
        (Frame::DiscardHeard, Source),
        (Frame::CloseChannel(channel), Source),
        (
            Frame::ChannelEnded {
                channel,
                placed: 41,
            },
            Destination,
        ),
        (Frame::Again, Source),
    ]
}

/// Pages 5, 7 to 206 and 999, counted from page 3.
pub(crate) fn missing() -> MissingRuns {
    MissingRuns {
        base: 3,
        runs: vec![5..6, 7..207, 999..1000],
    }
}
