//! Frames are taken apart as they were put together, and nothing else is.

use pageferry_remote::peer::wire::{
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
