//! A decoded message equals the encoded one, and the bytes are those of docs/wire-format.md.

use crate::wire_common::*;
use pageferry_addr::{Gfn, RamPage};
use pageferry_migration::wire::*;
use proptest::collection::{btree_set, vec};
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

/// Regions of up to 40 Mi pages of memory, with gaps between them.
fn any_setup() -> impl Strategy<Value = Setup> {
    let regions = vec((0u64..1000, 1u64..1_000_000), 1..=MAX_REGIONS);
    (
        regions,
        prop::bool::ANY,
        1u32..=MAX_VCPUS,
        1u16..,
        vec(any::<u8>(), 0..=MAX_DESCRIPTION_BYTES),
    )
        .prop_map(|(parts, kvm, vcpus, state_format, description)| {
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
                engine: if kvm { Engine::Kvm } else { Engine::Soft },
                isa: if kvm { Isa::X86_64 } else { Isa::Riscv64 },
                state_format,
                vcpus,
                memory_bytes: pages * PAGE_BYTES as u64,
                regions,
                description,
            }
        })
}

fn any_counts() -> impl Strategy<Value = DrainCounts> {
    (0..u64::MAX / 3, 0..u64::MAX / 3, 0..u64::MAX / 3).prop_map(|(urgent, background, zero)| {
        DrainCounts {
            urgent,
            background,
            zero,
        }
    })
}

/// Any frame except Pages, with the side that may send it and a memory size that it fits.
fn any_frame() -> impl Strategy<Value = (Frame, Side, u64)> {
    use Side::{Destination, Source};
    let code = prop::sample::select(ErrorCode::ALL.as_slice());
    let error = (code, any::<String>()).prop_map(|(c, text)| ErrorMessage::new(c, &text));
    let pass = (any::<u32>(), any::<u64>()).prop_map(|(pass, pages)| Pass { pass, pages });
    let bitmap = (0u64..1 << 40, vec(any::<u64>(), 1..600))
        .prop_map(|(first_word, words)| MissingBitmap { first_word, words });
    let vcpu = (0..MAX_VCPUS, vec(any::<u8>(), 1..=MAX_VCPU_STATE_BYTES))
        .prop_map(|(vcpu, state)| VcpuState { vcpu, state });
    let switch_over = (any::<u64>(), 1..=MAX_VCPUS, any::<u64>()).prop_map(
        |(missing_pages, vcpus, stopped_at_ns)| SwitchOver {
            missing_pages,
            vcpus,
            stopped_at_ns,
        },
    );
    prop_oneof![
        any_setup().prop_map(|s| (Frame::Setup(s), Source, 0)),
        Just((Frame::SetupAck, Destination, 0)),
        (0..=MEMORY_PAGES, any::<bool>()).prop_map(|(pages, ready)| {
            let progress = SetupProgress { pages, ready };
            (Frame::SetupProgress(progress), Destination, MEMORY_PAGES)
        }),
        Just((Frame::Cancel, Destination, 0)),
        Just((Frame::RunningAck, Source, 0)),
        Just((Frame::Complete, Source, 0)),
        error.prop_map(|e| (Frame::Error(e), Source, 0)),
        pass.clone()
            .prop_map(|p| (Frame::PassEnd(p), Source, p.pages)),
        pass.prop_map(|p| (Frame::PassAck(p), Destination, u64::MAX)),
        bitmap.prop_map(|b| {
            let memory = 64 * (b.first_word + b.words.len() as u64);
            (Frame::MissingBitmap(b), Source, memory)
        }),
        vcpu.prop_map(|v| (Frame::VcpuState(v), Source, 0)),
        switch_over.prop_map(|s| (Frame::SwitchOver(s), Source, s.missing_pages)),
        any::<u64>().prop_map(|started_at_ns| (Frame::Running { started_at_ns }, Destination, 0)),
        any_counts().prop_map(|c| (Frame::DrainEnd(c), Source, 0)),
        any_counts().prop_map(|c| (Frame::DrainAck(c), Destination, 0)),
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
        zeros in any::<u64>(),
        seed in any::<u8>(),
    ) {
        let mut list = RunList::new(2000);
        for &page in &pages {
            let kind = if zeros >> (page % 64) & 1 == 1 { RunKind::Zero } else { RunKind::Data };
            list.push(RamPage(page), kind).unwrap();
        }
        let covered: Vec<u64> =
            list.runs().iter().flat_map(|run| run.first.0..run.end()).collect();
        prop_assert_eq!(covered, pages.iter().copied().collect::<Vec<_>>());
        prop_assert_eq!(u64::from(list.data_pages()) + list.zero_pages(), pages.len() as u64);
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
    fn preambles_come_back(
        session in any::<[u8; 16]>(),
        more in any::<u64>(),
        newer in 1u16..,
        urgent in any::<bool>(),
    ) {
        let mut hello = Hello::ours(if urgent { Role::Urgent } else { Role::Stream }, SessionId(session));
        hello.version = newer;
        hello.capabilities = Capabilities::from_bits(more | Capabilities::REQUIRED.bits());
        prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let accept = HelloReply::accept(&hello);
        prop_assert_eq!(HelloReply::decode(&accept.encode(), &hello), Ok(accept));
        prop_assert_eq!(accept.version, VERSION);
        prop_assert_eq!(accept.capabilities, Capabilities::SUPPORTED, "unknown bits are not accepted");
        for status in Status::ALL {
            let refusal = HelloReply::refuse(SessionId(session), status);
            if status != Status::Accepted {
                prop_assert_eq!(HelloReply::decode(&refusal.encode(), &hello), Ok(refusal));
            }
        }
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
        for side in [Side::Source, Side::Destination] {
            let end = UrgentMessage::decode(&UrgentMessage::end(), side, memory);
            prop_assert_eq!(end.map(|m| m.kind), Ok(UrgentKind::End));
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
    assert_eq!(bytes.len(), HEADER_BYTES + MAX_PAYLOAD_BYTES);
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
    let session = SessionId([0xab; 16]);
    let mut hello = Vec::new();
    hello.extend(b"PGFERRY\0");
    hello.extend([2, 0, 2, 0]); // version, minimum
    hello.extend([1, 0, 0, 0]); // role, reserved
    hello.extend([0xab; 16]);
    hello.extend([3, 0, 0, 0, 0, 0, 0, 0]); // capabilities
    hello.extend([0, 0x10, 0, 0]); // page size
    hello.extend([0; 12]);
    hello.extend(xxh3_64(&hello).to_le_bytes());
    assert_eq!(Hello::ours(Role::Urgent, session).encode()[..], hello[..]);

    let mut reply = Vec::new();
    reply.extend(b"PGFERRY\0");
    reply.extend([2, 0, 2, 0, 0, 0, 0, 0]); // version, status, reserved
    reply.extend([0xab; 16]);
    reply.extend([0; 8 + 16]);
    reply.extend(xxh3_64(&reply).to_le_bytes());
    let busy = HelloReply::refuse(session, Status::Busy);
    assert_eq!(busy.encode()[..], reply[..]);

    let mut ack = Vec::new();
    ack.extend(b"PGFR");
    ack.extend([7, 0, 0, 0, 0, 0, 0, 0]); // type, flags, payload_len
    ack.extend([2, 0, 0, 0]); // count: the pass
    ack.extend([9, 3, 0, 0, 0, 0, 0, 0]); // arg: its pages
    ack.extend(xxh3_64(&ack).to_le_bytes());
    let pass = Pass {
        pass: 2,
        pages: 777,
    };
    assert_eq!(encode(&Frame::PassAck(pass)), ack);

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
    covered[0] = 2;
    let check = xxh3_64(&[&covered[..], &page[..]].concat()) as u32;
    let reply = urgent_reply_page(RamPage(0x1234), &page);
    assert_eq!(reply[4..8], check.to_le_bytes());
}
