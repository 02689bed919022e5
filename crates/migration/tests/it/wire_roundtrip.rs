//! A decoded message equals the encoded one, and the bytes are those of docs/wire-format.md.

use crate::wire_common::*;
use pageferry_addr::{Gfn, RamPage};
use pageferry_migration::wire::*;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64;

fn any_name() -> impl Strategy<Value = Name> {
    "[!-~]{1,64}".prop_map(|name| name.parse().unwrap())
}

/// Regions of up to 40 Mi pages of memory, with gaps between them.
fn any_setup() -> impl Strategy<Value = Setup> {
    let regions = vec((0u64..1000, 1u64..1_000_000), 1..=MAX_REGIONS);
    (
        regions,
        (any_name(), any_name(), any_name()),
        1u32..=MAX_VCPUS,
        vec(any::<u8>(), 0..=MAX_DESCRIPTION_BYTES),
        (1..=MAX_CHANNELS, 1..=MAX_CHANNELS),
        vec((any_name(), any::<u32>()), 0..=MAX_DEVICES),
    )
        .prop_map(
            |(parts, (engine, isa, state_format), vcpus, description, channels, devices)| {
                let (mut gfn, mut pages) = (0, 0);
                let mut regions = Vec::new();
                for (slot, (gap, len)) in parts.into_iter().enumerate() {
                    gfn += gap;
                    regions.push(Region {
                        slot: 1000 - slot as u32,
                        gfn: Gfn(gfn),
                        pages: len,
                    });
                    gfn += len;
                    pages += len;
                }
                Setup {
                    bulk_channels: channels.0,
                    urgent_channels: channels.1,
                    kind: Kind {
                        engine,
                        isa,
                        state_format,
                    },
                    vcpus,
                    memory_bytes: pages * PAGE_BYTES as u64,
                    regions,
                    devices: devices
                        .into_iter()
                        .map(|(name, version)| DeviceEntry { name, version })
                        .collect(),
                    description,
                }
            },
        )
}

/// Runs that do not touch.
fn any_missing() -> impl Strategy<Value = MissingRuns> {
    let runs = vec((1u64..1 << 30, 1u64..1 << 30), 1..200);
    (0u64..1 << 33, runs).prop_map(|(base, parts)| {
        let (mut end, mut runs) = (base, Vec::new());
        for (gap, length) in parts {
            // The first gap may be 0.
            let first = end + gap - u64::from(runs.is_empty());
            end = first + length;
            runs.push(first..end);
        }
        MissingRuns { base, runs }
    })
}

fn any_channel() -> impl Strategy<Value = ChannelId> {
    let role = prop::sample::select([Role::Urgent, Role::Bulk].as_slice());
    (role, 0..MAX_CHANNELS, 1u32..).prop_map(|(role, index, incarnation)| ChannelId {
        role,
        index,
        incarnation,
    })
}

/// Any frame except Pages, with the side that may send it and a memory size that it fits.
fn any_frame() -> impl Strategy<Value = (Frame, Side, u64)> {
    use Side::{Destination, Source};
    let code = prop::sample::select(ErrorCode::ALL.as_slice());
    let error = (code, any::<String>()).prop_map(|(c, text)| ErrorMessage::new(c, &text));
    let pass = (1u32.., any::<u64>()).prop_map(|(pass, pages)| Pass { pass, pages });
    let state = prop::sample::select(SourceStage::ALL.as_slice());
    let stage = prop::sample::select(DestinationStage::ALL.as_slice());
    let ended = (any_channel(), any::<u64>());
    let vcpu = (0..MAX_VCPUS, vec(any::<u8>(), 1..=MAX_VCPU_STATE_BYTES))
        .prop_map(|(vcpu, state)| VcpuState { vcpu, state });
    let device = (any_name(), any::<u32>(), vec(any::<u8>(), 0..10_000)).prop_map(
        |(name, version, state)| DeviceState {
            name,
            version,
            state,
        },
    );
    let devices = 0..=MAX_DEVICES as u32;
    let switch_over = (
        any::<u64>(),
        1..=MAX_VCPUS,
        devices,
        any::<u64>(),
        any::<bool>(),
    )
        .prop_map(
            |(missing_pages, vcpus, devices, stopped_at_ns, paused)| SwitchOver {
                missing_pages,
                vcpus,
                devices,
                stopped_at_ns,
                paused,
            },
        );
    prop_oneof![
        any_setup().prop_map(|s| (Frame::Setup(s), Source, 0)),
        any::<bool>().prop_map(|keeps| (Frame::SetupAck { keeps }, Destination, 0)),
        (0..=MEMORY_PAGES, any::<bool>()).prop_map(|(pages, ready)| {
            let progress = SetupProgress { pages, ready };
            (Frame::SetupProgress(progress), Destination, MEMORY_PAGES)
        }),
        prop::sample::select(
            [
                (Frame::Cancel, Destination, 0),
                (Frame::Ready, Destination, 0),
                (Frame::Go, Source, 0),
                (Frame::Complete, Source, 0),
                (Frame::Alive, Source, 0),
                (Frame::Alive, Destination, 0),
                (Frame::DiscardHeard, Source, 0),
                (Frame::Again, Source, 0),
            ]
            .as_slice()
        ),
        error.prop_map(|e| (Frame::Error(e), Source, 0)),
        any::<String>().prop_map(|t| (Frame::Discarded(Text::new(&t)), Destination, 0)),
        pass.prop_map(|p| (Frame::Pass(p), Source, p.pages)),
        any_missing().prop_map(|m| {
            let memory = m.runs.last().unwrap().end;
            (Frame::Missing(m), Destination, memory)
        }),
        (1u64..).prop_map(|frames| (Frame::Receipt { frames }, Destination, 0)),
        state.prop_map(|s| (Frame::Resume(s), Source, 0)),
        (stage, any::<u64>()).prop_map(|(stage, missing)| {
            (Frame::Resumed { stage, missing }, Destination, missing)
        }),
        any_channel().prop_map(|c| (Frame::CloseChannel(c), Source, 0)),
        ended.prop_map(|(channel, placed)| {
            (Frame::ChannelEnded { channel, placed }, Destination, 0)
        }),
        any::<u64>().prop_map(|missing| (Frame::Drained { missing }, Source, missing)),
        any::<u64>().prop_map(|missing| (Frame::DrainAck { missing }, Destination, missing)),
        vcpu.prop_map(|v| (Frame::VcpuState(v), Source, 0)),
        device.prop_map(|d| (Frame::DeviceState(d), Source, 0)),
        switch_over.prop_map(|s| (Frame::SwitchOver(s), Source, s.missing_pages)),
        any::<u64>().prop_map(|started_at_ns| (Frame::Running { started_at_ns }, Destination, 0)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_frame_comes_back((frame, from, memory) in any_frame()) {
        let bytes = encode(&frame);
        prop_assert_eq!(parse(&bytes, from, memory), Ok(Parsed::Frame(frame)));
    }

    #[test]
    fn pages_come_back(
        pages in btree_set(0u64..2000, 1..100),
        kinds in any::<u64>(),
        seed in any::<u8>(),
    ) {
        let mut list = RunList::new(2000);
        for &page in &pages {
            let kind = match kinds >> (page % 32 * 2) & 3 {
                0 | 1 => RunKind::Data,
                2 => RunKind::Zero,
                _ => RunKind::Confirmed,
            };
            list.push(RamPage(page), kind).unwrap();
        }
        let covered: Vec<u64> =
            list.runs().iter().flat_map(|run| run.first.0..run.end()).collect();
        prop_assert_eq!(covered, pages.iter().copied().collect::<Vec<_>>());
        let with_bytes = list.data_pages() + list.confirmed_pages();
        prop_assert_eq!(u64::from(with_bytes) + list.zero_pages(), pages.len() as u64);
        let data = vec![seed; list.data_bytes()];
        let bytes = encode_pages(&list, &data);
        prop_assert_eq!(parse(&bytes, Side::Source, 2000), Ok(Parsed::Pages(list, data)));
    }

    #[test]
    fn a_payload_hashes_the_same_in_any_pieces(cuts in vec(0usize..=3 * PAGE_BYTES, 0..20)) {
        let (list, data) = pages();
        let mut cuts = cuts;
        cuts.extend([0, data.len()]);
        cuts.sort_unstable();
        let mut head = Vec::new();
        let mut hasher = list.encode_head(&mut head);
        for pair in cuts.windows(2) {
            hasher.update(&data[pair[0]..pair[1]]);
        }
        hasher.seal(&mut head);
        prop_assert_eq!(&head[..], &encode_pages(&list, &data)[..head.len()]);
    }

    #[test]
    fn urgent_messages_come_back(page in 0u64..1 << 34, fill in any::<u8>()) {
        let page = RamPage(page);
        let memory = page.0 + 1;
        let request = UrgentMessage::decode(&UrgentMessage::request(page), Side::Destination, memory);
        prop_assert_eq!(request.map(|m| (m.kind, m.page)), Ok((UrgentKind::Request, page)));
        let zero = UrgentMessage::decode(&urgent_reply_zero(page), Side::Source, memory);
        prop_assert_eq!(zero.map(|m| (m.kind, m.page)), Ok((UrgentKind::Zero, page)));
        let bytes = [fill; PAGE_BYTES];
        let reply =
            UrgentMessage::decode(&urgent_reply_page(page, &bytes), Side::Source, memory).unwrap();
        prop_assert_eq!((reply.kind, reply.page), (UrgentKind::Page, page));
        prop_assert_eq!(reply.verify_page(&bytes), Ok(()));
        for units in [1u64, u64::from(fill) + 1, (1 << 24) - 1, 1 << 24, u64::MAX >> 8] {
            let took = Duration::from_nanos(units.saturating_mul(64) - 63);
            let seen = Some(Duration::from_nanos(units.min((1 << 24) - 1) * 64));
            let zero = urgent_reply(page, None, Some(took));
            let zero = UrgentMessage::decode(&zero, Side::Source, memory);
            prop_assert_eq!(zero.map(|m| (m.kind, m.at_source)), Ok((UrgentKind::Zero, seen)));
            let reply = urgent_reply(page, Some(&bytes), Some(took));
            let reply = UrgentMessage::decode(&reply, Side::Source, memory).unwrap();
            prop_assert_eq!((reply.kind, reply.at_source), (UrgentKind::Page, seen));
            prop_assert_eq!(reply.verify_page(&bytes), Ok(()));
        }
        let confirmed = urgent_reply_confirmed(page, &bytes, None);
        let confirmed = UrgentMessage::decode(&confirmed, Side::Source, memory).unwrap();
        prop_assert_eq!((confirmed.kind, confirmed.page), (UrgentKind::Confirmed, page));
        prop_assert_eq!(confirmed.verify_page(&bytes), Ok(()));
        // Neither other bytes nor the answer with the bytes pass for it.
        prop_assert!(confirmed.verify_page(&[!fill; PAGE_BYTES]).is_err());
        let confirmed = urgent_reply_confirmed(page, &bytes, None);
        let whole = urgent_reply_page(page, &bytes);
        prop_assert_ne!(&confirmed[4..8], &whole[4..8]);
        for side in [Side::Source, Side::Destination] {
            let alive = UrgentMessage::decode(&UrgentMessage::alive(), side, memory);
            prop_assert_eq!(alive.map(|m| m.kind), Ok(UrgentKind::Alive));
        }
        for placed in [memory, u64::MAX - page.0] {
            let receipt = UrgentMessage::receipt(placed);
            let receipt = UrgentMessage::decode(&receipt, Side::Destination, memory);
            let seen = receipt.map(|m| (m.kind, m.page, m.placed));
            prop_assert_eq!(seen, Ok((UrgentKind::Receipt, RamPage(0), placed)));
        }
    }

    #[test]
    fn any_text_becomes_a_message_that_is_accepted(text in "\\PC*|[\\x00-\\x20é\u{202e}]{0,2000}") {
        let error = ErrorMessage::new(ErrorCode::Internal, &text);
        prop_assert!(error.message().len() <= MAX_ERROR_BYTES);
        let bytes = encode(&Frame::Error(error.clone()));
        prop_assert_eq!(parse(&bytes, Side::Source, 0), Ok(Parsed::Frame(Frame::Error(error))));
    }
}

#[test]
fn every_sample_comes_back_and_every_type_has_one() {
    let mut seen = vec![FrameType::Pages];
    for (frame, from) in samples() {
        seen.push(frame.frame_type());
        let bytes = encode(&frame);
        assert_eq!(parse(&bytes, from, MEMORY_PAGES), Ok(Parsed::Frame(frame)));
    }
    for known in FrameType::ALL {
        assert!(seen.contains(&known), "{known}");
    }
}

/// A state of the most bytes fits with the longest name, and with the shortest.
#[test]
fn the_longest_device_state_fits() {
    for len in [1, MAX_NAME_BYTES] {
        let frame = Frame::DeviceState(DeviceState {
            name: "n".repeat(len).parse().unwrap(),
            version: 0,
            state: vec![0x5a; MAX_DEVICE_STATE_BYTES],
        });
        let bytes = encode(&frame);
        assert_eq!(bytes.len(), HEADER_BYTES + len + MAX_DEVICE_STATE_BYTES);
        assert_eq!(parse(&bytes, Side::Source, 0), Ok(Parsed::Frame(frame)));
    }
}

/// The largest frame of a type is as long as its bound.
#[test]
fn the_longest_pages_frame_fits() {
    let mut list = RunList::new(1 << 30);
    for run in 0..MAX_RUNS as u64 {
        list.push(RamPage(run * 100), RunKind::Data).unwrap();
        list.push(RamPage(run * 100 + 1), RunKind::Data).unwrap();
    }
    assert_eq!(list.data_pages() as usize, MAX_DATA_PAGES);
    let last = list.runs().last().unwrap().end();
    assert_eq!(
        list.push(RamPage(last), RunKind::Data),
        Err(RunRefused::Full)
    );
    assert_eq!(
        list.push(RamPage(last), RunKind::Zero),
        Err(RunRefused::Full)
    );
    let bytes = encode_pages(&list, &vec![1; list.data_bytes()]);
    assert_eq!(bytes.len(), HEADER_BYTES + MAX_PAGES_BYTES);
    assert!(parse(&bytes, Side::Source, 1 << 30).is_ok());
}

#[test]
fn runs_are_refused_out_of_order_and_outside_memory() {
    let mut list = RunList::new(100);
    list.push(RamPage(5), RunKind::Data).unwrap();
    for page in [5, 0, 100, u64::MAX] {
        let refused = RunRefused::OutOfOrder {
            page,
            min: 6,
            max: 99,
        };
        assert_eq!(list.push(RamPage(page), RunKind::Zero), Err(refused));
    }
    assert_eq!(list.runs().len(), 1);
    list.clear();
    assert!(list.is_empty() && list.data_bytes() == 0);
    list.push(RamPage(0), RunKind::Zero).unwrap();
}

/// The layouts of docs/wire-format.md, byte for byte and without the library.
#[test]
fn the_bytes_are_those_of_the_document() {
    let frame = |number: u8, count: u32, arg: u64, payload: &[u8]| {
        let mut bytes = Vec::new();
        bytes.extend(b"PGFR");
        bytes.extend([number, 0, 0, 0]); // type, flags
        bytes.extend((payload.len() as u32).to_le_bytes());
        bytes.extend(count.to_le_bytes());
        bytes.extend(arg.to_le_bytes());
        bytes.extend(xxh3_64(&[&bytes, payload].concat()).to_le_bytes());
        bytes.extend(payload);
        bytes
    };
    let channel = ChannelId {
        role: Role::Urgent,
        index: 5,
        incarnation: 0x0102,
    };
    let (pass, pages, missing, placed) = (2, 777, 0x1234, 9);
    let stage = DestinationStage::Running;
    let switch_over = SwitchOver {
        missing_pages: 3,
        vcpus: 4,
        devices: 6,
        stopped_at_ns: 5,
        paused: false,
    };
    let paused = SwitchOver {
        paused: true,
        ..switch_over
    };
    let vcpu = VcpuState {
        vcpu: 6,
        state: vec![7, 8],
    };
    // Pages 100 to 399, 401, and 20 000, counted from page 100.
    let runs = MissingRuns {
        base: 100,
        runs: vec![100..400, 401..402, 20_000..20_001],
    };
    let gaps = [0, 0xac, 2, 1, 1, 0x8e, 0x99, 1, 1];
    let switch = [
        3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 6, 0, 0, 0,
    ];
    let device = DeviceState {
        name: "tty".parse().unwrap(),
        version: 0x0102,
        state: vec![7, 8],
    };
    let of_channel = 5 | 0x0102 << 32;
    let nine = [9, 0, 0, 0, 0, 0, 0, 0];
    let busy = ErrorMessage::new(ErrorCode::Busy, "no");
    let ready = SetupProgress { pages, ready: true };
    for (sent, bytes) in [
        (Frame::SetupAck { keeps: false }, frame(2, 0, 0, &[])),
        (Frame::SetupAck { keeps: true }, frame(2, 1, 0, &[])),
        (Frame::Error(busy), frame(3, 0, 7, b"no")),
        (Frame::Cancel, frame(4, 0, 0, &[])),
        (Frame::Pass(Pass { pass, pages }), frame(6, 2, 777, &[])),
        (Frame::Missing(runs), frame(7, 3, 100, &gaps)),
        (Frame::VcpuState(vcpu), frame(8, 0, 6, &[7, 8])),
        (Frame::SwitchOver(switch_over), frame(9, 0, 0, &switch)),
        (Frame::SwitchOver(paused), frame(9, 1, 0, &switch)),
        (Frame::Ready, frame(10, 0, 0, &[])),
        (Frame::Go, frame(11, 0, 0, &[])),
        (Frame::Running { started_at_ns: 8 }, frame(12, 0, 8, &[])),
        (Frame::Drained { missing }, frame(13, 0, missing, &[])),
        (Frame::DrainAck { missing }, frame(14, 0, missing, &[])),
        (Frame::Complete, frame(15, 0, 0, &[])),
        (Frame::SetupProgress(ready), frame(16, 1, 777, &[])),
        (Frame::Receipt { frames: 9 }, frame(17, 0, 9, &[])),
        (Frame::Alive, frame(18, 0, 0, &[])),
        (Frame::Resume(SourceStage::HandedOver), frame(19, 1, 0, &[])),
        (
            Frame::Resumed { stage, missing },
            frame(20, 2, missing, &[]),
        ),
        (Frame::Discarded(Text::new("no")), frame(21, 0, 0, b"no")),
        (Frame::DiscardHeard, frame(22, 0, 0, &[])),
        (Frame::CloseChannel(channel), frame(23, 1, of_channel, &[])),
        (
            Frame::ChannelEnded { channel, placed },
            frame(24, 1, of_channel, &nine),
        ),
        (Frame::Again, frame(25, 0, 0, &[])),
        (
            Frame::DeviceState(device),
            frame(26, 0x0102, 3, b"tty\x07\x08"),
        ),
    ] {
        assert_eq!(encode(&sent), bytes, "{sent:?}");
    }
    let setup = encode(&Frame::Setup(setup()));
    assert_eq!(setup, frame(1, 4, 2, &setup[HEADER_BYTES..]));
    let devices = &setup[HEADER_BYTES + 224 + 2 * 24..];
    for (at, name) in [(0, "soft\0"), (64, "riscv64\0"), (128, "soft-riscv64/1\0")] {
        assert_eq!(&setup[HEADER_BYTES + at..][..name.len()], name.as_bytes());
    }
    assert_eq!(setup[HEADER_BYTES + 216..][..8], [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(devices[..12], *b"\x02\0\0\0uart.0\0\0");
    assert_eq!(devices[68..][..10], *b"\xff\xff\xff\xffrng.0\0");
    assert_eq!(devices[2 * 68..], *b"workload");

    let mut head = Vec::new();
    head.extend(b"PGFR");
    head.extend([5, 0, 0, 0, 0x20, 0x10, 0, 0, 2, 0, 0, 0]); // 2 descriptors, 1 page
    let mut descriptors = Vec::new();
    descriptors.extend([5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    descriptors.extend([6, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0]);
    head.extend(xxh3_64(&[&head[..], &descriptors[..]].concat()).to_le_bytes());
    let page = [0x5a; PAGE_BYTES];
    head.extend(xxh3_64(&[&head[..], &descriptors, &page].concat()).to_le_bytes());
    let mut list = RunList::new(9);
    list.push(RamPage(5), RunKind::Data).unwrap();
    (6..9).for_each(|page| list.push(RamPage(page), RunKind::Zero).unwrap());
    let expected = [&head[..], &descriptors, &page].concat();
    assert_eq!(encode_pages(&list, &page), expected);

    let mut covered = [0; 12];
    (covered[0], covered[4], covered[5]) = (1, 0x34, 0x12);
    let check = (xxh3_64(&covered) as u32).to_le_bytes();
    let request = [&[1, 0, 0, 0], &check[..], &[0x34, 0x12, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(UrgentMessage::request(RamPage(0x1234))[..], request[..]);
    covered[0] = 5;
    let check = (xxh3_64(&covered) as u32).to_le_bytes();
    let receipt = [&[5, 0, 0, 0], &check[..], &[0x34, 0x12, 0, 0, 0, 0, 0, 0]].concat();
    assert_eq!(UrgentMessage::receipt(0x1234)[..], receipt[..]);
    let check = (xxh3_64(&[6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]) as u32).to_le_bytes();
    let alive = [&[6, 0, 0, 0], &check[..], &[0; 8]].concat();
    assert_eq!(UrgentMessage::alive()[..], alive[..]);
    covered[0] = 2;
    let check = xxh3_64(&[&covered[..], &page[..]].concat()) as u32;
    let reply = urgent_reply_page(RamPage(0x1234), &page);
    assert_eq!(reply[4..8], check.to_le_bytes());

    // Confirmed pages have no bytes in a message, and are in its checksum.
    let mut head = Vec::new();
    head.extend(b"PGFR");
    head.extend([5, 0, 0, 0, 0x10, 0, 0, 0, 1, 0, 0, 0]); // 1 descriptor
    let descriptor = [5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0];
    head.extend(xxh3_64(&[&head[..], &descriptor].concat()).to_le_bytes());
    head.extend(xxh3_64(&[&head[..], &descriptor, &page].concat()).to_le_bytes());
    let mut list = RunList::new(9);
    list.push(RamPage(5), RunKind::Confirmed).unwrap();
    let mut sent = Vec::new();
    let mut hasher = list.encode_head(&mut sent);
    hasher.update_unsent(&page);
    hasher.seal(&mut sent);
    assert_eq!(sent, [&head[..], &descriptor].concat());
    covered[0] = 7;
    let check = xxh3_64(&[&covered[..], &page[..]].concat()) as u32;
    let reply = [
        &[7, 0, 0, 0],
        &check.to_le_bytes()[..],
        &[0x34, 0x12, 0, 0, 0, 0, 0, 0],
    ]
    .concat();
    let confirmed = urgent_reply_confirmed(RamPage(0x1234), &page, None);
    assert_eq!(confirmed[..], reply[..]);
}
