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
        let header = FrameHeader::decode(bytes.first_chunk().unwrap(), from).unwrap();
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
        FrameType::MissingBitmap,
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
    let header = FrameHeader::decode(frame.first_chunk().unwrap(), Side::Source).unwrap();
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
    let (frame, from) = of_type(FrameType::PassEnd);
    let header = |at: usize, bytes: &[u8], from| {
        let mut frame = frame.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        reseal(&mut frame);
        FrameHeader::decode(frame.first_chunk().unwrap(), from)
    };
    assert_eq!(
        header(0, b"GET ", from),
        Err(WireError::FrameMagic {
            found: u32::from_le_bytes(*b"GET ")
        })
    );
    for found in [0, 17, 0x105, u16::MAX] {
        let error = header(4, &found.to_le_bytes(), from);
        assert_eq!(error, Err(WireError::UnknownType { found }));
    }
    assert_eq!(
        header(0, b"PGFR", from.peer()),
        Err(WireError::WrongDirection {
            frame: FrameType::PassEnd,
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
        assert!(max as usize <= MAX_PAYLOAD_BYTES);
        let with_len = |len: u32| {
            let bytes = FrameHeader::unsealed(known, len, 0, 0).to_bytes();
            FrameHeader::decode(&bytes, side).map(|header| header.payload_len)
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
    for known in [
        Setup, SetupAck, Error, Cancel, VcpuState, SwitchOver, Running, RunningAck,
    ] {
        assert_eq!(bad_field(changed(known, 12, &[1])), "count");
    }
    for known in [DrainEnd, DrainAck, Complete] {
        assert_eq!(bad_field(changed(known, 12, &[0, 0, 0, 0x80])), "count");
        assert_eq!(bad_field(changed(known, 23, &[1])), "arg");
    }
    for known in [Setup, SetupAck, Cancel, SwitchOver, RunningAck] {
        assert_eq!(bad_field(changed(known, 16, &[1])), "arg");
    }
}

#[test]
fn each_field_of_a_setup_is_checked() {
    let set = |at: usize, bytes: &[u8]| changed(FrameType::Setup, HEADER_BYTES + at, bytes);
    for engine in [0, 3, 255] {
        assert_eq!(bad_field(set(0, &[engine])), "engine");
        assert_eq!(bad_field(set(1, &[engine])), "isa");
    }
    assert_eq!(out_of_range(set(2, &[0, 0])), "state_format");
    assert_eq!(out_of_range(set(4, &[0; 4])), "vcpus");
    assert_eq!(
        out_of_range(set(4, &(MAX_VCPUS + 1).to_le_bytes())),
        "vcpus"
    );
    for bytes in [0, 4095, MAX_MEMORY_BYTES + 1, u64::MAX] {
        assert_eq!(out_of_range(set(8, &bytes.to_le_bytes())), "memory_bytes");
    }
    let memory = MEMORY_PAGES * 4096;
    for bytes in [memory + 1, memory - 2048, memory + 4096] {
        assert_eq!(bad_field(set(8, &bytes.to_le_bytes())), "memory_bytes");
    }
    let smaller = (memory - 4096).to_le_bytes();
    assert_eq!(out_of_range(set(8, &smaller)), "region.pages");
    assert_eq!(bad_field(set(16, &8192u32.to_le_bytes())), "page_size");
    assert!(matches!(
        set(20, &65u32.to_le_bytes()),
        WireError::TooLong {
            len: 65,
            max: 64,
            ..
        }
    ));
    assert_eq!(out_of_range(set(20, &[0; 4])), "region_count");
    assert!(matches!(set(20, &[3]), WireError::WrongLength { .. }));
    assert!(matches!(
        set(24, &u32::MAX.to_le_bytes()),
        WireError::TooLong { max: 4096, .. }
    ));
    assert!(matches!(set(24, &[7]), WireError::WrongLength { .. }));
    assert_eq!(bad_field(set(31, &[1])), "reserved");
    // The regions: 32..56 and 56..80.
    assert_eq!(bad_field(set(36, &[1])), "region.reserved");
    assert_eq!(bad_field(set(56, &[0])), "region.slot");
    assert_eq!(out_of_range(set(48, &[0; 8])), "region.pages");
    assert_eq!(
        out_of_range(set(48, &u64::MAX.to_le_bytes())),
        "region.pages"
    );
    // The second begins at 615, inside the first; then at the end of the address space.
    assert_eq!(out_of_range(set(64, &615u64.to_le_bytes())), "region.gfn");
    assert_eq!(out_of_range(set(64, &u64::MAX.to_le_bytes())), "region.gfn");
}

#[test]
fn a_setup_that_breaks_its_own_rules_is_not_sent() {
    let mut setup = setup();
    setup.description = vec![0; MAX_DESCRIPTION_BYTES + 1];
    let mut out = Vec::new();
    let error = Frame::Setup(setup).encode(&mut out).unwrap_err();
    assert!(matches!(error, WireError::TooLong { len: 4097, .. }));
    let vcpu = VcpuState {
        vcpu: 0,
        state: vec![0; MAX_VCPU_STATE_BYTES + 1],
    };
    let error = Frame::VcpuState(vcpu).encode(&mut out).unwrap_err();
    assert!(matches!(error, WireError::TooLong { len: 65537, .. }));
    let bitmap = MissingBitmap {
        first_word: 0,
        words: vec![],
    };
    let error = Frame::MissingBitmap(bitmap).encode(&mut out).unwrap_err();
    assert_eq!(out_of_range(error), "payload_len");
}

#[test]
fn each_field_of_the_small_messages_is_checked() {
    use FrameType::*;
    for code in [0, 8, u64::MAX, 0x1_0001] {
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
    }
    let too_many = (MEMORY_PAGES + 1).to_le_bytes();
    assert_eq!(out_of_range(changed(PassEnd, 16, &too_many)), "arg");
    assert_eq!(out_of_range(changed(PassAck, 16, &too_many)), "arg");
    assert_eq!(out_of_range(changed(VcpuState, 16, &[0, 0x10])), "vcpu");
    assert_eq!(out_of_range(changed(VcpuState, 20, &[1])), "vcpu");
    assert_eq!(
        out_of_range(changed(SwitchOver, 32, &too_many)),
        "missing_pages"
    );
    assert_eq!(out_of_range(changed(SwitchOver, 48, &[0])), "vcpus");
    assert_eq!(out_of_range(changed(SwitchOver, 50, &[1])), "vcpus");
    assert_eq!(bad_field(changed(SwitchOver, 55, &[1])), "reserved");
    for at in [32, 40, 48, 56] {
        assert_eq!(bad_field(changed(DrainEnd, at, &[0xff; 8])), "total");
        assert_eq!(bad_field(changed(DrainAck, at, &[0x77])), "total");
    }
}

#[test]
fn a_bitmap_stays_inside_memory() {
    use FrameType::MissingBitmap;
    // 1000 pages are 16 words, the last of 40 bits; the sample has words 13 to 15.
    assert_eq!(
        out_of_range(changed(MissingBitmap, 16, &[14])),
        "first_word"
    );
    assert_eq!(
        out_of_range(changed(MissingBitmap, 16, &[0xff; 8])),
        "first_word"
    );
    assert_eq!(bad_field(changed(MissingBitmap, 12, &[2])), "count");
    assert_eq!(
        bad_field(changed(MissingBitmap, HEADER_BYTES + 16 + 5, &[1])),
        "words"
    );
    let (frame, from) = of_type(MissingBitmap);
    assert_eq!(out_of_range(parse(&frame, from, 128).unwrap_err()), "count");
    assert_eq!(out_of_range(parse(&frame, from, 0).unwrap_err()), "count");
    let mut longer = frame;
    longer.extend([0; 4]);
    longer[8..12].copy_from_slice(&28u32.to_le_bytes());
    reseal(&mut longer);
    let error = parse(&longer, from, MEMORY_PAGES).unwrap_err();
    assert!(matches!(error, WireError::WrongLength { len: 28, .. }));
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
    assert_eq!(bad_field(set(32 + 12, &[2])), "run.kind");
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
    let (frame, from) = of_type(Pages);
    for memory in [0, 1, 3, 999] {
        assert!(parse(&frame, from, memory).is_err());
    }
}

#[test]
fn a_payload_of_the_wrong_length_is_not_verified() {
    let (list, data) = pages();
    let bytes = encode_pages(&list, &data);
    let header = FrameHeader::decode(bytes.first_chunk().unwrap(), Side::Source).unwrap();
    let mut hasher = header.hasher();
    hasher.update(&bytes[HEADER_BYTES..bytes.len() - 1]);
    assert_eq!(hasher.remaining(), 1);
    let error = hasher.clone().verify().unwrap_err();
    assert!(matches!(error, WireError::WrongLength { .. }));
    hasher.update(&bytes[bytes.len() - 1..]);
    assert_eq!(hasher.verify(), Ok(()));
}

#[test]
fn other_protocols_are_recognized_by_their_first_bytes() {
    let shown = |bytes: &[u8]| check_magic(bytes).unwrap_err().to_string();
    assert!(shown(b"GET / HTTP/1.1\r\n").contains("\"GET / HT\" (HTTP?)"));
    assert!(shown(b"SSH-2.0-x").contains("(SSH?)"));
    assert!(shown(&[0x16, 3, 1, 2, 0, 1, 0, 1]).contains("16 03 01 02 00 01 00 01 (TLS?)"));
    assert!(shown(b"P!").contains("\"P!\""));
    assert!(
        shown(&[0x1b, b'c']).contains("bytes 1b 63"),
        "nothing for a terminal"
    );
    for len in 0..=8 {
        assert_eq!(check_magic(&HELLO_MAGIC[..len]), Ok(()));
        if len < 8 {
            let mut wrong = HELLO_MAGIC[..=len].to_vec();
            wrong[len] ^= 0x20;
            let error = check_magic(&wrong).unwrap_err();
            assert!(matches!(error, WireError::NotPageferry { .. }));
        }
    }
}

fn hello_with(at: usize, bytes: &[u8]) -> [u8; HELLO_BYTES] {
    put(
        Hello::ours(Role::Stream, SessionId([7; 16])).encode(),
        at,
        bytes,
    )
}

fn put(mut message: [u8; HELLO_BYTES], at: usize, bytes: &[u8]) -> [u8; HELLO_BYTES] {
    message[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = xxh3_64(&message[..56]);
    message[56..].copy_from_slice(&checksum.to_le_bytes());
    message
}

#[test]
fn each_field_of_a_hello_is_checked_and_answered() {
    let refused = |at, bytes: &[u8]| {
        let message = hello_with(at, bytes);
        let error = Hello::decode(&message).unwrap_err();
        let answer = HelloReply::refusal_of(&message, &error).map(|reply| reply.status);
        (error, answer)
    };
    let version = |version, minimum| WireError::Version { version, minimum };
    let unsupported = Some(Status::VersionUnsupported);
    assert_eq!(refused(8, &[0, 0, 0, 0]), (version(0, 0), unsupported));
    assert_eq!(refused(8, &[9, 0, 3, 0]), (version(9, 3), unsupported));
    assert_eq!(refused(10, &[3, 0]), (version(2, 3), unsupported));
    // The version is checked before the fields that a later one may use.
    assert_eq!(refused(8, &[3, 0, 3, 0, 9, 1, 1, 1]).1, unsupported);
    let field = |at, bytes: &[u8]| {
        let (error, answer) = refused(at, bytes);
        (bad_field(error), answer)
    };
    assert_eq!(field(12, &[2]), ("role", Some(Status::BadRole)));
    for at in 13..16 {
        assert_eq!(field(at, &[1]), ("reserved", Some(Status::Malformed)));
    }
    for at in 44..56 {
        assert_eq!(field(at, &[1]), ("padding", Some(Status::Malformed)));
    }
    for bits in [0, 1, 2, !3] {
        let missing = Some(Status::CapabilityMissing);
        assert_eq!(
            field(32, &u64::to_le_bytes(bits)),
            ("capabilities", missing)
        );
    }
    let size = Some(Status::PageSize);
    assert_eq!(field(40, &16384u32.to_le_bytes()), ("page_size", size));
    assert_eq!(
        refused(0, b"PGFERRY1").1,
        None,
        "no answer to another protocol"
    );
}

#[test]
fn a_preamble_with_any_bit_changed_is_refused() {
    let hello = Hello::ours(Role::Stream, SessionId([7; 16]));
    let good = hello.encode();
    let reply = HelloReply::accept(&hello).encode();
    for at in 0..HELLO_BYTES {
        for bit in 0..8 {
            let (mut a, mut b) = (good, reply);
            a[at] ^= 1 << bit;
            b[at] ^= 1 << bit;
            for error in [
                Hello::decode(&a).unwrap_err(),
                HelloReply::decode(&b, &hello).unwrap_err(),
            ] {
                match error {
                    WireError::NotPageferry { .. } => assert!(at < 8),
                    WireError::Checksum { .. } => assert!(at >= 8),
                    other => panic!("byte {at}: {other:?}"),
                }
            }
        }
    }
}

#[test]
fn each_field_of_a_reply_is_checked() {
    let hello = Hello::ours(Role::Stream, SessionId([7; 16]));
    let reply = |at, bytes: &[u8]| {
        let message = put(HelloReply::accept(&hello).encode(), at, bytes);
        HelloReply::decode(&message, &hello).unwrap_err()
    };
    for status in [8, 255, u16::MAX] {
        assert_eq!(bad_field(reply(10, &status.to_le_bytes())), "status");
    }
    assert_eq!(bad_field(reply(12, &[1])), "reserved");
    assert_eq!(bad_field(reply(15, &[1])), "reserved");
    assert_eq!(bad_field(reply(16, &[8])), "session");
    assert_eq!(bad_field(reply(31, &[8])), "session");
    for bits in [0, 1, 2, 7, u64::MAX] {
        assert_eq!(
            bad_field(reply(32, &u64::to_le_bytes(bits))),
            "capabilities"
        );
    }
    assert_eq!(bad_field(reply(40, &[1])), "padding");
    assert_eq!(bad_field(reply(55, &[1])), "padding");
    for version in [0u16, 1, 3] {
        let error = WireError::Version {
            version,
            minimum: version,
        };
        assert_eq!(reply(8, &version.to_le_bytes()), error);
    }
    // A peer that echoes the preamble.
    let echo = HelloReply::decode(&hello.encode(), &hello);
    assert!(matches!(echo, Err(WireError::BadField { .. })));
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
    for kind in [0, 2, 3, 5, 255] {
        let error = error(resealed(kind, 0, 1), Side::Destination);
        assert_eq!(bad_field(error), "kind");
    }
    for kind in [0, 1, 5, 255] {
        assert_eq!(bad_field(error(resealed(kind, 0, 1), Side::Source)), "kind");
    }
    assert_eq!(
        bad_field(error(resealed(1, 1, 1), Side::Destination)),
        "reserved"
    );
    assert_eq!(bad_field(error(resealed(4, 0, 1), Side::Source)), "page");
    for page in [MEMORY_PAGES, u64::MAX] {
        for (kind, from) in [(1, Side::Destination), (2, Side::Source), (3, Side::Source)] {
            assert_eq!(out_of_range(error(resealed(kind, 0, page), from)), "page");
        }
    }
    let none = UrgentMessage::decode(&resealed(1, 0, 0), Side::Destination, 0);
    assert_eq!(bad_field(none.unwrap_err()), "page");
    for at in 0..URGENT_BYTES {
        let (mut request, mut end) = (UrgentMessage::request(RamPage(9)), UrgentMessage::end());
        request[at] ^= 1;
        end[at] ^= 1;
        error(request, Side::Destination);
        error(end, Side::Source);
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
        number in 1u16..=15,
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
        let hello = Hello::ours(Role::Stream, SessionId([7; 16]));
        let preamble: &[u8; HELLO_BYTES] = bytes[..].try_into().unwrap();
        prop_assert!(Hello::decode(preamble).is_err());
        prop_assert!(HelloReply::decode(preamble, &hello).is_err());
        prop_assert!(parse(&bytes, Side::Source, u64::MAX).is_err());
        let urgent = bytes.first_chunk().unwrap();
        let _ = UrgentMessage::decode(urgent, Side::Source, u64::MAX);
    }
}
