//! Malformed messages: each mistake gives a different error, and none a panic.

use crate::wire_common::*;
use pageferry_addr::RamPage;
use pageferry_migration::wire::*;
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

/// Recomputes the checksums of a frame.
fn reseal(frame: &mut [u8]) {
    if frame[4..6] == FrameType::Pages.number().to_le_bytes() {
        let count = u32::from_le_bytes(frame[12..16].try_into().unwrap()) as usize;
        let end = (HEADER_BYTES + count.min(MAX_RUNS) * DESCRIPTOR_BYTES).min(frame.len());
        let covered = [&frame[..16], &frame[HEADER_BYTES..end]].concat();
        frame[16..24].copy_from_slice(&xxh3_64(&covered).to_le_bytes());
    }
    let covered = [&frame[..24], &frame[HEADER_BYTES..]].concat();
    frame[24..32].copy_from_slice(&xxh3_64(&covered).to_le_bytes());
}

/// Decodes the header on a channel that may carry it.
fn header_of(frame: &[u8], from: Side) -> Result<FrameHeader, WireError> {
    FrameHeader::decode(frame.first_chunk().unwrap(), from, role_of(frame))
}

fn sample_frames() -> Vec<(Vec<u8>, Side)> {
    let (list, data) = pages();
    let mut frames = vec![(encode_pages(&list, &data), Side::Source)];
    frames.extend(samples().iter().map(|(frame, side)| (encode(frame), *side)));
    frames
}

fn of_type(wanted: FrameType) -> (Vec<u8>, Side) {
    let is = |bytes: &[u8]| bytes[4..6] == wanted.number().to_le_bytes();
    let mut frames = sample_frames().into_iter();
    frames.find(|(bytes, _)| is(bytes)).unwrap()
}

/// Returns the error of a sample with `bytes` at `at` and recomputed checksums.
fn changed(frame_type: FrameType, at: usize, bytes: &[u8]) -> WireError {
    let (mut frame, from) = of_type(frame_type);
    frame[at..at + bytes.len()].copy_from_slice(bytes);
    reseal(&mut frame);
    parse(&frame, from, MEMORY_PAGES).unwrap_err()
}

fn bad_field(error: WireError) -> &'static str {
    match error {
        WireError::BadField { field, .. } => field,
        other => panic!("{other:?}"),
    }
}

fn out_of_range(error: WireError) -> &'static str {
    match error {
        WireError::OutOfRange { field, .. } => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_payload_of_another_length_than_announced_is_refused() {
    for (bytes, from) in sample_frames().into_iter().skip(1) {
        let header = header_of(&bytes, from).unwrap();
        let mut payload = bytes[HEADER_BYTES..].to_vec();
        for len in 0..payload.len() {
            let error = Frame::decode(&header, &payload[..len], MEMORY_PAGES).unwrap_err();
            assert!(matches!(error, WireError::WrongLength { .. }), "{error:?}");
        }
        assert!(Frame::decode(&header, &payload, MEMORY_PAGES).is_ok());
        payload.push(0);
        let error = Frame::decode(&header, &payload, MEMORY_PAGES).unwrap_err();
        assert!(matches!(error, WireError::WrongLength { .. }), "{error:?}");
    }
}

#[test]
fn a_frame_with_any_byte_changed_is_refused() {
    for (frame, from) in sample_frames() {
        for at in 0..frame.len() {
            // Every byte of headers and descriptors, and one in 97 of the data.
            if at > 300 && at % 97 != 0 {
                continue;
            }
            for bit in 0..8 {
                let mut frame = frame.clone();
                frame[at] ^= 1 << bit;
                let result = parse(&frame, from, MEMORY_PAGES);
                assert!(result.is_err(), "byte {at} bit {bit}: {result:?}");
            }
        }
    }
}

#[test]
fn a_changed_byte_of_data_is_a_checksum_error() {
    for frame_type in [
        FrameType::Pages,
        FrameType::VcpuState,
        FrameType::DeviceState,
        FrameType::Missing,
        FrameType::Discarded,
        FrameType::ChannelEnded,
    ] {
        let (mut frame, from) = of_type(frame_type);
        let last = frame.len() - 1;
        frame[last] ^= 1;
        let error = parse(&frame, from, MEMORY_PAGES).unwrap_err();
        assert!(matches!(error, WireError::Checksum { .. }), "{error:?}");
    }
}

#[test]
fn a_changed_descriptor_is_found_before_the_data() {
    let (frame, _) = of_type(FrameType::Pages);
    let header = header_of(&frame, Side::Source).unwrap();
    let len = RunList::descriptors_len(&header).unwrap();
    let mut descriptors = frame[HEADER_BYTES..HEADER_BYTES + len].to_vec();
    assert!(RunList::decode(&header, &descriptors, MEMORY_PAGES).is_ok());
    descriptors[0] ^= 1;
    let error = RunList::decode(&header, &descriptors, MEMORY_PAGES).unwrap_err();
    let what = "Pages descriptors";
    assert!(matches!(error, WireError::Checksum { what: w, .. } if w == what));
    let short = RunList::decode(&header, &descriptors[..len - 1], MEMORY_PAGES).unwrap_err();
    assert!(matches!(short, WireError::WrongLength { .. }));
}

#[test]
fn each_field_of_the_header_is_checked() {
    let (frame, from) = of_type(FrameType::Pass);
    let header = |at: usize, bytes: &[u8], from| {
        let mut frame = frame.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(&mut frame);
        FrameHeader::decode(frame.first_chunk().unwrap(), from, Role::Control)
    };
    assert_eq!(
        header(0, b"GET ", from),
        Err(WireError::FrameMagic {
            found: u32::from_le_bytes(*b"GET ")
        })
    );
    for found in [0, 27, 0x105, u16::MAX] {
        let error = header(4, &found.to_le_bytes(), from);
        assert_eq!(error, Err(WireError::UnknownType { found }));
    }
    assert_eq!(
        header(0, b"PGFR", from.peer()),
        Err(WireError::WrongDirection {
            frame: FrameType::Pass.name(),
            from: from.peer()
        })
    );
    assert_eq!(bad_field(header(6, &[0, 1], from).unwrap_err()), "flags");
    for known in FrameType::ALL {
        let side = [Side::Source, Side::Destination];
        let side = side
            .into_iter()
            .find(|side| known.is_sent_by(*side))
            .unwrap();
        let (min, max) = known.payload_bounds();
        let with_len = |len: u32| {
            let bytes = FrameHeader::unsealed(known, len, 0, 0).to_bytes();
            FrameHeader::decode(&bytes, side, role_of(&bytes)).map(|header| header.payload_len)
        };
        assert_eq!((with_len(min), with_len(max)), (Ok(min), Ok(max)));
        for len in [max + 1, u32::MAX] {
            let (what, len) = (known.name(), u64::from(len));
            let error = WireError::TooLong {
                what,
                len,
                max: max.into(),
            };
            assert_eq!(with_len(len as u32), Err(error));
        }
        if min > 0 {
            assert_eq!(out_of_range(with_len(min - 1).unwrap_err()), "payload_len");
        }
    }
}

#[test]
fn a_header_field_its_type_does_not_use_is_zero() {
    use FrameType::*;
    let no_count = [
        Error,
        VcpuState,
        Running,
        Drained,
        DrainAck,
        Receipt,
        Cancel,
        Ready,
        Go,
        Complete,
        Alive,
        Discarded,
        DiscardHeard,
        Again,
    ];
    for known in no_count {
        assert_eq!(bad_field(changed(known, 12, &[1])), "count");
        assert_eq!(bad_field(changed(known, 12, &[0, 0, 0, 0x80])), "count");
    }
    let no_arg = [
        SetupAck,
        Cancel,
        SwitchOver,
        Ready,
        Go,
        Complete,
        Alive,
        Resume,
        Discarded,
        DiscardHeard,
        Again,
    ];
    for known in no_arg {
        assert_eq!(bad_field(changed(known, 16, &[1])), "arg");
        assert_eq!(bad_field(changed(known, 23, &[1])), "arg");
    }
}

/// Every type, side and channel.
#[test]
fn a_frame_is_refused_from_a_wrong_side_and_on_a_wrong_channel() {
    use FrameType::*;
    let both = [Error, Cancel, Missing, Alive];
    let of_destination = [
        SetupAck,
        Ready,
        Running,
        DrainAck,
        SetupProgress,
        Receipt,
        Resumed,
        Discarded,
        ChannelEnded,
    ];
    for frame in FrameType::ALL {
        let (min, _) = frame.payload_bounds();
        let bytes = FrameHeader::unsealed(frame, min, 0, 0).to_bytes();
        for from in [Side::Source, Side::Destination] {
            let may_send = both.contains(&frame)
                || of_destination.contains(&frame) == (from == Side::Destination);
            for on in Role::ALL {
                let may_travel = match on {
                    Role::Control => ![Pages, Receipt].contains(&frame),
                    Role::Bulk => [Pages, Receipt, Alive].contains(&frame),
                    Role::Urgent | Role::Tunnel | Role::Share => false,
                };
                let refused = FrameHeader::decode(&bytes, from, on).err();
                let expected = match (may_send, may_travel) {
                    (false, _) => Some(WireError::WrongDirection {
                        frame: frame.name(),
                        from,
                    }),
                    (true, false) => Some(WireError::WrongChannel {
                        frame: frame.name(),
                        on,
                    }),
                    (true, true) => None,
                };
                assert_eq!(refused, expected);
            }
        }
    }
}

#[test]
fn each_field_of_a_setup_is_checked() {
    let set = |at: usize, bytes: &[u8]| changed(FrameType::Setup, HEADER_BYTES + at, bytes);
    for channels in [0, 17, u32::MAX] {
        let (bulk, urgent) = (channels.to_le_bytes(), u64::from(channels).to_le_bytes());
        assert_eq!(
            out_of_range(changed(FrameType::Setup, 12, &bulk)),
            "bulk_channels"
        );
        assert_eq!(
            out_of_range(changed(FrameType::Setup, 16, &urgent)),
            "urgent_channels"
        );
    }
    for (at, name) in [(0, "engine"), (64, "isa"), (128, "state_format")] {
        for byte in [b' ', 0x7f, 0xff] {
            assert_eq!(bad_field(set(at, &[byte])), name);
        }
        assert_eq!(out_of_range(set(at, &[0; 64])), "name_len");
        assert_eq!(bad_field(set(at + 63, b"x")), name);
    }
    assert_eq!(out_of_range(set(192, &[0; 4])), "vcpus");
    assert_eq!(
        out_of_range(set(192, &(MAX_VCPUS + 1).to_le_bytes())),
        "vcpus"
    );
    for bytes in [0, 4095, MAX_MEMORY_BYTES + 1, u64::MAX] {
        assert_eq!(out_of_range(set(200, &bytes.to_le_bytes())), "memory_bytes");
    }
    let memory = MEMORY_PAGES * 4096;
    for bytes in [memory + 1, memory - 2048, memory + 4096] {
        assert_eq!(bad_field(set(200, &bytes.to_le_bytes())), "memory_bytes");
    }
    let smaller = (memory - 4096).to_le_bytes();
    assert_eq!(out_of_range(set(200, &smaller)), "region.pages");
    assert_eq!(bad_field(set(196, &8192u32.to_le_bytes())), "page_size");
    assert!(matches!(
        set(208, &65u32.to_le_bytes()),
        WireError::TooLong {
            len: 65,
            max: 64,
            ..
        }
    ));
    assert_eq!(out_of_range(set(208, &[0; 4])), "region_count");
    assert!(matches!(set(208, &[3]), WireError::WrongLength { .. }));
    assert!(matches!(
        set(212, &u32::MAX.to_le_bytes()),
        WireError::TooLong { max: 65_536, .. }
    ));
    assert!(matches!(set(212, &[7]), WireError::WrongLength { .. }));
    assert!(matches!(
        set(216, &1025u32.to_le_bytes()),
        WireError::TooLong {
            len: 1025,
            max: 1024,
            ..
        }
    ));
    assert!(matches!(set(216, &[1]), WireError::WrongLength { .. }));
    assert_eq!(bad_field(set(220, &[1])), "reserved");
    // The devices: 272..340 and 340..408. The first name has 6 characters.
    assert_eq!(bad_field(set(276, b"a b")), "device.name");
    assert_eq!(bad_field(set(276, &[0x80])), "device.name");
    assert_eq!(out_of_range(set(276, &[0; 6])), "name_len");
    assert_eq!(bad_field(set(276, &[0])), "device.name");
    assert_eq!(bad_field(set(339, b"x")), "device.name");
    // The regions: 224..248 and 248..272.
    assert_eq!(bad_field(set(228, &[1])), "region.reserved");
    assert_eq!(bad_field(set(248, &[0])), "region.slot");
    assert_eq!(out_of_range(set(240, &[0; 8])), "region.pages");
    assert_eq!(
        out_of_range(set(240, &u64::MAX.to_le_bytes())),
        "region.pages"
    );
    // The second begins at 615, inside the first; then at the end of the address space.
    assert_eq!(out_of_range(set(256, &615u64.to_le_bytes())), "region.gfn");
    assert_eq!(
        out_of_range(set(256, &u64::MAX.to_le_bytes())),
        "region.gfn"
    );
}

#[test]
fn a_setup_that_breaks_its_own_rules_is_not_sent() {
    let mut setup = setup();
    setup.description = vec![0; MAX_DESCRIPTION_BYTES + 1];
    let mut out = Vec::new();
    let error = Frame::Setup(setup).encode(&mut out).unwrap_err();
    assert!(matches!(error, WireError::TooLong { len: 65_537, .. }));
    let vcpu = VcpuState {
        vcpu: 0,
        state: vec![0; MAX_VCPU_STATE_BYTES + 1],
    };
    let error = Frame::VcpuState(vcpu).encode(&mut out).unwrap_err();
    assert!(matches!(error, WireError::TooLong { len: 65537, .. }));
    let device = DeviceState {
        name: "a".parse().unwrap(),
        version: 1,
        state: vec![0; MAX_DEVICE_STATE_BYTES + 1],
    };
    let error = Frame::DeviceState(device).encode(&mut out).unwrap_err();
    assert!(matches!(
        error,
        WireError::TooLong {
            len: 0x0100_0001,
            max: 0x0100_0000,
            ..
        }
    ));
    for name in ["", "a b", "a\n", "\u{e9}", &"a".repeat(MAX_NAME_BYTES + 1)] {
        assert!(name.parse::<Name>().is_err(), "{name:?}");
    }
    assert!("a".repeat(MAX_NAME_BYTES).parse::<Name>().is_ok());
}

#[test]
fn a_frame_with_a_number_out_of_its_range_is_not_sent() {
    let refused = |frame: Frame| frame.encode(&mut Vec::new()).unwrap_err();
    let channel = ChannelId {
        role: Role::Control,
        index: 0,
        incarnation: 1,
    };
    assert_eq!(bad_field(refused(Frame::CloseChannel(channel))), "role");
    let (role, index) = (Role::Bulk, MAX_CHANNELS);
    let channel = ChannelId {
        role,
        index,
        ..channel
    };
    assert_eq!(out_of_range(refused(Frame::CloseChannel(channel))), "index");
    let (index, incarnation, placed) = (0, 0, 1);
    let channel = ChannelId {
        role,
        index,
        incarnation,
    };
    let ended = Frame::ChannelEnded { channel, placed };
    assert_eq!(out_of_range(refused(ended)), "incarnation");
    assert_eq!(
        out_of_range(refused(Frame::Receipt { frames: 0 })),
        "frames"
    );
    let (pass, pages) = (0, 1);
    let pass = Frame::Pass(Pass { pass, pages });
    assert_eq!(out_of_range(refused(pass)), "pass");
    for channels in [0, MAX_CHANNELS + 1] {
        let mut none = setup();
        none.bulk_channels = channels;
        assert_eq!(out_of_range(refused(Frame::Setup(none))), "bulk_channels");
        let mut none = setup();
        none.urgent_channels = channels;
        assert_eq!(out_of_range(refused(Frame::Setup(none))), "urgent_channels");
    }
}

#[test]
fn each_field_of_the_small_messages_is_checked() {
    use FrameType::*;
    for code in [0, 6, 10, u64::MAX, 0x1_0001] {
        assert_eq!(bad_field(changed(Error, 16, &code.to_le_bytes())), "code");
    }
    for text in [
        &b"\x1b[2J"[..],
        b"\n",
        b"\x7f",
        &[0xff],
        "\u{202e}".as_bytes(),
    ] {
        assert_eq!(bad_field(changed(Error, HEADER_BYTES, text)), "message");
        assert_eq!(bad_field(changed(Discarded, HEADER_BYTES, text)), "reason");
    }
    assert_eq!(out_of_range(changed(SetupAck, 12, &[2])), "keeps");
    let too_many = (MEMORY_PAGES + 1).to_le_bytes();
    for (known, field) in [
        (Pass, "pages"),
        (SetupProgress, "pages"),
        (Drained, "missing"),
        (DrainAck, "missing"),
        (Resumed, "missing"),
    ] {
        assert_eq!(out_of_range(changed(known, 16, &too_many)), field);
    }
    assert_eq!(out_of_range(changed(Pass, 12, &[0])), "pass");
    assert_eq!(out_of_range(changed(SetupProgress, 12, &[2])), "ready");
    assert_eq!(out_of_range(changed(SwitchOver, 12, &[2])), "paused");
    assert_eq!(out_of_range(changed(Receipt, 16, &[0])), "frames");
    for stage in [0, 4, u32::MAX] {
        assert_eq!(
            bad_field(changed(Resume, 12, &stage.to_le_bytes())),
            "stage"
        );
    }
    for stage in [0, 5, u32::MAX] {
        assert_eq!(
            bad_field(changed(Resumed, 12, &stage.to_le_bytes())),
            "stage"
        );
    }
    for known in [CloseChannel, ChannelEnded] {
        for role in [0, 3, 0x101_u32] {
            assert_eq!(bad_field(changed(known, 12, &role.to_le_bytes())), "role");
        }
        for at in [16, 17, 18, 19] {
            assert_eq!(out_of_range(changed(known, at, &[16])), "index");
        }
        assert_eq!(out_of_range(changed(known, 20, &[0])), "incarnation");
    }
    assert_eq!(out_of_range(changed(VcpuState, 16, &[0, 0x10])), "vcpu");
    assert_eq!(out_of_range(changed(VcpuState, 20, &[1])), "vcpu");
    assert_eq!(
        out_of_range(changed(SwitchOver, 32, &too_many)),
        "missing_pages"
    );
    assert_eq!(out_of_range(changed(SwitchOver, 48, &[0])), "vcpus");
    assert_eq!(out_of_range(changed(SwitchOver, 50, &[1])), "vcpus");
    assert_eq!(out_of_range(changed(SwitchOver, 53, &[5])), "devices");
    assert_eq!(out_of_range(changed(SwitchOver, 55, &[1])), "devices");
    // The sample's payload has 106 bytes, and its name 6.
    assert_eq!(out_of_range(changed(DeviceState, 16, &[0])), "name_len");
    assert_eq!(out_of_range(changed(DeviceState, 16, &[65])), "name_len");
    assert_eq!(out_of_range(changed(DeviceState, 23, &[1])), "name_len");
    assert_eq!(bad_field(changed(DeviceState, 16, &[7])), "name");
    assert_eq!(bad_field(changed(DeviceState, 32, b" ")), "name");
}

#[test]
fn each_field_of_a_run_is_checked() {
    use FrameType::Pages;
    // The sample's runs: 3 (data), 10 to 11 (data), 12 to 999 (zero); descriptors at 32, 48, 64.
    let set = |at: usize, bytes: &[u8]| changed(Pages, at, bytes);
    assert_eq!(out_of_range(set(12, &[0])), "count");
    assert_eq!(out_of_range(set(12, &[129])), "count");
    assert_eq!(out_of_range(set(12, &[0xff; 4])), "count");
    assert!(matches!(set(12, &[2]), WireError::WrongLength { .. }));
    assert_eq!(bad_field(set(32 + 12, &[3])), "run.kind");
    assert_eq!(bad_field(set(32 + 15, &[1])), "run.reserved");
    assert_eq!(out_of_range(set(32 + 8, &[0; 4])), "run.pages");
    assert_eq!(out_of_range(set(48, &[3])), "run.first");
    assert_eq!(out_of_range(set(48, &[0xff; 8])), "run.first");
    assert_eq!(out_of_range(set(64, &[11])), "run.first");
    assert_eq!(out_of_range(set(64, &[13])), "run.pages");
    assert_eq!(out_of_range(set(64 + 8, &[0xff; 4])), "run.pages");
    // A data run one page longer than its data, and a zero run that claims to have data.
    assert!(matches!(set(48 + 8, &[1]), WireError::WrongLength { .. }));
    assert!(matches!(
        set(64 + 12, &[0]),
        WireError::TooLong {
            len: 991,
            max: 256,
            ..
        }
    ));
    // A zero run that claims to be confirmed: 988 pages, more than a receiver hashes at a time.
    assert!(matches!(
        set(64 + 12, &[2]),
        WireError::TooLong {
            len: 988,
            max: 512,
            ..
        }
    ));
    let (frame, from) = of_type(Pages);
    for memory in [0, 1, 3, 999] {
        assert!(parse(&frame, from, memory).is_err());
    }
}

#[test]
fn a_payload_of_the_wrong_length_is_not_verified() {
    let (list, data) = pages();
    let bytes = encode_pages(&list, &data);
    let header = header_of(&bytes, Side::Source).unwrap();
    let mut hasher = header.hasher();
    hasher.update(&bytes[HEADER_BYTES..bytes.len() - 1]);
    assert_eq!(hasher.remaining(), 1);
    let error = hasher.clone().verify().unwrap_err();
    assert!(matches!(error, WireError::WrongLength { .. }));
    hasher.update(&bytes[bytes.len() - 1..]);
    assert_eq!(hasher.verify(), Ok(()));
}

#[test]
fn each_field_of_an_urgent_message_is_checked() {
    let resealed = |kind: u8, reserved: u8, page: u64| {
        let mut bytes = [0; URGENT_BYTES];
        (bytes[0], bytes[3]) = (kind, reserved);
        bytes[8..].copy_from_slice(&page.to_le_bytes());
        let covered = [&bytes[..4], &bytes[8..]].concat();
        bytes[4..8].copy_from_slice(&(xxh3_64(&covered) as u32).to_le_bytes());
        bytes
    };
    let error = |bytes, from| UrgentMessage::decode(&bytes, from, MEMORY_PAGES).unwrap_err();
    for kind in [0, 2, 3, 4, 7, 8, 255] {
        let error = error(resealed(kind, 0, 1), Side::Destination);
        assert_eq!(bad_field(error), "kind");
    }
    for kind in [0, 1, 4, 5, 8, 255] {
        assert_eq!(bad_field(error(resealed(kind, 0, 1), Side::Source)), "kind");
    }
    // Only answers have a time.
    for (kind, from) in [
        (1, Side::Destination),
        (5, Side::Destination),
        (6, Side::Source),
    ] {
        assert_eq!(bad_field(error(resealed(kind, 1, 1), from)), "reserved");
    }
    for from in [Side::Source, Side::Destination] {
        assert_eq!(bad_field(error(resealed(6, 0, 1), from)), "page");
    }
    assert_eq!(
        out_of_range(error(resealed(5, 0, 0), Side::Destination)),
        "placed"
    );
    for page in [MEMORY_PAGES, u64::MAX] {
        for (kind, from) in [
            (1, Side::Destination),
            (2, Side::Source),
            (3, Side::Source),
            (7, Side::Source),
        ] {
            assert_eq!(out_of_range(error(resealed(kind, 0, page), from)), "page");
        }
    }
    let none = UrgentMessage::decode(&resealed(1, 0, 0), Side::Destination, 0);
    assert_eq!(bad_field(none.unwrap_err()), "page");
    for at in 0..URGENT_BYTES {
        for good in [
            UrgentMessage::request(RamPage(9)),
            UrgentMessage::receipt(9),
        ] {
            let mut bytes = good;
            bytes[at] ^= 1;
            error(bytes, Side::Destination);
        }
        let mut alive = UrgentMessage::alive();
        alive[at] ^= 1;
        match UrgentMessage::decode(&alive, Side::Source, MEMORY_PAGES) {
            // The check of a confirmation is that of the page too.
            Ok(confirmed) if at == 0 => confirmed.verify_page(&[0; PAGE_BYTES]).unwrap_err(),
            decoded => decoded.unwrap_err(),
        };
    }
}

#[test]
fn an_urgent_page_with_any_part_changed_is_refused() {
    let page = [0x33; PAGE_BYTES];
    let good = urgent_reply_page(RamPage(9), &page);
    let verify = |head: &[u8; URGENT_BYTES], page: &[u8; PAGE_BYTES]| {
        UrgentMessage::decode(head, Side::Source, MEMORY_PAGES)?.verify_page(page)
    };
    assert_eq!(verify(&good, &page), Ok(()));
    for at in 0..URGENT_BYTES {
        let mut head = good;
        head[at] ^= 1;
        // The checksum of a zero reply catches a page that became a zero page.
        assert!(verify(&head, &page).is_err(), "byte {at}");
    }
    for at in [0, 1, 2047, 4095] {
        let mut page = page;
        page[at] ^= 0x80;
        let error = verify(&good, &page).unwrap_err();
        assert!(matches!(error, WireError::Checksum { .. }));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Garbage behind a good header with a good checksum reaches every field check.
    #[test]
    fn sealed_garbage_never_panics(
        number in 1u16..=26,
        payload in prop::collection::vec(any::<u8>(), 0..300),
        count in prop_oneof![0u32..20, any::<u32>()],
        arg in prop_oneof![0u64..2000, any::<u64>()],
        memory in prop_oneof![0u64..2000, any::<u64>()],
    ) {
        let frame_type = FrameType::from_number(number).unwrap();
        let header = FrameHeader::unsealed(frame_type, payload.len() as u32, count, arg);
        let mut frame = header.to_bytes().to_vec();
        frame.extend(&payload);
        reseal(&mut frame);
        for from in [Side::Source, Side::Destination] {
            if let Ok(Parsed::Frame(parsed)) = parse(&frame, from, memory) {
                prop_assert_eq!(encode(&parsed), frame.clone(), "one encoding per message");
            }
        }
    }

    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 64)) {
        prop_assert!(parse(&bytes, Side::Source, u64::MAX).is_err());
        let urgent = bytes.first_chunk().unwrap();
        let _ = UrgentMessage::decode(urgent, Side::Source, u64::MAX);
    }
}
