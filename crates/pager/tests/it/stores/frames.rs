//! Frames are taken apart as they were put together, and nothing else is.

use pageferry_pager::stores::peer::wire::{
    Code, HEADER_BYTES, Kind, MAX_BODY, Opened, Reply, Request, decode_extents, encode_extents,
};
use proptest::prelude::*;

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::Open), Just(Kind::Extents), Just(Kind::Read)]
}

fn codes() -> impl Strategy<Value = Code> {
    prop_oneof![
        Just(Code::Malformed),
        Just(Code::Absent),
        Just(Code::Changed),
        Just(Code::Short),
        Just(Code::Failed)
    ]
}

/// `docs/snapshot-protocol.md` has each of these.
#[test]
fn the_bytes_are_those_of_the_document() {
    let request = Request {
        kind: Kind::Read,
        number: 0x0102_0304,
        offset: 0x1122_3344_5566_7788,
        len: 0x2000,
    };
    let bytes = b"\x03\0\0\0\x04\x03\x02\x01\x88\x77\x66\x55\x44\x33\x22\x11\0\x20\0\0\0\0\0\0";
    assert_eq!(request.encode(), *bytes);
    // The XXH3 of no bytes is 0x2d06800538d394c2.
    let checksum = b"\xc2\x94\xd3\x38\x05\x80\x06\x2d";
    let reply = Reply::of(Ok(Kind::Extents), 7, &[]).encode();
    assert_eq!(reply[..16], *b"\x02\0\0\0\x07\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!(reply[16..], *checksum);
    let refusal = Reply::of(Err(Code::Changed), 7, b"no").encode();
    assert_eq!(refusal[..16], *b"\xff\x03\0\0\x07\0\0\0\x02\0\0\0\0\0\0\0");
    let opened = Opened {
        bytes: 4096,
        identity: "8:1".to_owned(),
    };
    assert_eq!(opened.encode(), *b"\0\x10\0\0\0\0\0\x008:1");
    let extents = encode_extents(&[(1, 2)]);
    assert_eq!(extents, *b"\x01\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0");
}

proptest! {
    #[test]
    fn a_request_comes_back(kind in kinds(), number: u32, offset: u64, len in 1..=1024_u32) {
        let offset = if kind == Kind::Open { 0 } else { offset };
        let request = Request { kind, number, offset, len };
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
    }

    #[test]
    fn a_reply_comes_back(
        kind in prop_oneof![kinds().prop_map(Ok), codes().prop_map(Err)],
        number: u32,
        body in prop::collection::vec(any::<u8>(), 0..1024),
    ) {
        let reply = Reply::of(kind, number, &body);
        prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
        prop_assert_eq!(reply.check(&body), Ok(()));
    }

    /// Each header that is taken has one meaning.
    #[test]
    fn headers_are_refused_or_come_back(
        mut bytes: [u8; HEADER_BYTES],
        kind in 0..5_u8,
        plain: bool,
    ) {
        bytes[0] = kind;
        if plain {
            bytes[1..4].fill(0);
            bytes[18..].fill(0);
        }
        if let Ok(request) = Request::decode(&bytes) {
            prop_assert_eq!(request.encode(), bytes);
            prop_assert!((1..=MAX_BODY).contains(&request.len));
        }
        if let Ok(reply) = Reply::decode(&bytes) {
            prop_assert_eq!(reply.encode(), bytes);
            prop_assert!(reply.len <= MAX_BODY);
        }
    }

    #[test]
    fn an_opened_file_comes_back(bytes: u64, identity in "[ -~]{1,64}") {
        let opened = Opened { bytes, identity };
        prop_assert_eq!(Opened::decode(&opened.encode()), Ok(opened));
    }

    #[test]
    fn extents_come_back_if_they_are_in_order(
        steps in prop::collection::vec((0..9_u64, 0..9_u64), 0..20),
        from in 0..4_u64,
        bytes in 0..200_u64,
    ) {
        let mut at = 0;
        let extents: Vec<_> = steps.iter().map(|(hole, data)| {
            let start = at + hole;
            at = start + data;
            (start, at)
        }).collect();
        let right = steps.iter().all(|(_, data)| *data > 0)
            && extents.first().is_none_or(|&(start, _)| start >= from)
            && at <= bytes;
        let decoded = decode_extents(&encode_extents(&extents), from, bytes);
        prop_assert_eq!(decoded.ok(), (right || extents.is_empty()).then_some(extents));
    }
}
