//! The messages that open a channel: every field is checked, and every valid message comes back.

use pageferry_transport::wire::*;
use proptest::prelude::*;
use xxhash_rust::xxh3::xxh3_64;

const NONCE: [u8; 16] = [0xa5; 16];

fn hello() -> Hello {
    Hello::ours(ChannelKey::control(1), SessionId([7; 16]))
}

fn bad_field(error: WireError) -> &'static str {
    match error {
        WireError::BadField { field, .. } => field,
        other => panic!("{other:?}"),
    }
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
    put(hello().encode(), at, bytes)
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
    assert_eq!(refused(8, &[2, 0, 1, 0]), (version(2, 1), unsupported));
    assert_eq!(refused(8, &[9, 0, 8, 0]), (version(9, 8), unsupported));
    assert_eq!(refused(10, &[8, 0]), (version(7, 8), unsupported));
    // The version is checked before the fields that a later one may use.
    assert_eq!(refused(8, &[8, 0, 8, 0, 9, 1, 1, 1]).1, unsupported);
    let field = |at, bytes: &[u8]| {
        let (error, answer) = refused(at, bytes);
        (bad_field(error), answer)
    };
    let malformed = Some(Status::Malformed);
    assert_eq!(field(12, &[5]), ("role", Some(Status::BadRole)));
    assert_eq!(field(13, &[1]), ("reserved", malformed));
    let range = |at, bytes: &[u8]| match refused(at, bytes) {
        (WireError::OutOfRange { field, value, .. }, status) => (field, value, status),
        other => panic!("{other:?}"),
    };
    assert_eq!(range(14, &[1, 0]), ("index", 1, malformed));
    assert_eq!(range(44, &[0]), ("generation", 0, malformed));
    assert_eq!(range(48, &[0]), ("incarnation", 0, malformed));
    for at in 52..56 {
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
    let hello = hello();
    let good = hello.encode();
    let reply = HelloReply::accept(&hello, NONCE).encode();
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
    let hello = hello();
    let reply = |at, bytes: &[u8]| {
        let message = put(HelloReply::accept(&hello, NONCE).encode(), at, bytes);
        HelloReply::decode(&message, &hello).unwrap_err()
    };
    for status in [15, 255, u16::MAX] {
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
    for at in [40, 55] {
        let refusal = HelloReply::refuse(hello.session, Status::Busy);
        let message = put(refusal.encode(), at, &[1]);
        let error = HelloReply::decode(&message, &hello).unwrap_err();
        assert_eq!(bad_field(error), "nonce");
    }
    for version in [0u16, 6, 8] {
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

/// The layouts of docs/wire-format.md, byte for byte and without the library.
#[test]
fn the_bytes_of_a_preamble_are_those_of_the_document() {
    let session = SessionId([0xab; 16]);
    let key = ChannelKey {
        role: Role::Bulk,
        index: 7,
        generation: 5,
        incarnation: 6,
    };
    let mut hello = Vec::new();
    hello.extend(b"PGFERRY\0");
    hello.extend([7, 0, 7, 0]); // version, minimum
    hello.extend([2, 0, 7, 0]); // role, reserved, index
    hello.extend([0xab; 16]);
    hello.extend([3, 0, 0, 0, 0, 0, 0, 0]); // capabilities
    hello.extend([0, 0x10, 0, 0]); // page size
    hello.extend([5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]); // generation, incarnation, reserved
    hello.extend(xxh3_64(&hello).to_le_bytes());
    assert_eq!(Hello::ours(key, session).encode()[..], hello[..]);

    let mut reply = Vec::new();
    reply.extend(b"PGFERRY\0");
    reply.extend([7, 0, 2, 0, 0, 0, 0, 0]); // version, status, reserved
    reply.extend([0xab; 16]);
    reply.extend([0; 8 + 16]); // capabilities, nonce
    reply.extend(xxh3_64(&reply).to_le_bytes());
    let busy = HelloReply::refuse(session, Status::Busy);
    assert_eq!(busy.encode()[..], reply[..]);
}

proptest! {
    #[test]
    fn preambles_come_back(
        session in any::<[u8; 16]>(),
        nonce in any::<[u8; 16]>(),
        more in any::<u64>(),
        newer in VERSION..,
        role in 0..3u8,
        index in any::<u16>(),
        generation in 1u32..,
        incarnation in 1u32..,
    ) {
        let role = Role::of_number(role).unwrap();
        let key = ChannelKey {
            role,
            index: if role == Role::Control { 0 } else { index },
            generation,
            incarnation,
        };
        let mut hello = Hello::ours(key, SessionId(session));
        hello.version = newer;
        hello.capabilities = Capabilities::from_bits(more | Capabilities::REQUIRED.bits());
        prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        let accept = HelloReply::accept(&hello, nonce);
        prop_assert_eq!(HelloReply::decode(&accept.encode(), &hello), Ok(accept));
        prop_assert_eq!(accept.version, VERSION);
        let chosen = accept.capabilities;
        prop_assert_eq!(chosen, Capabilities::SUPPORTED, "unknown bits are not accepted");
        for status in Status::ALL {
            let refusal = HelloReply::refuse(SessionId(session), status);
            if status != Status::Accepted {
                prop_assert_eq!(HelloReply::decode(&refusal.encode(), &hello), Ok(refusal));
            }
        }
    }

    #[test]
    fn proofs_come_back(secret in any::<Option<[u8; 32]>>(), proof in any::<[u8; 32]>()) {
        let credentials = Credentials { secret, proof };
        prop_assert_eq!(Credentials::decode(&credentials.encode()), Ok(credentials));
        let welcome = Welcome::accept(proof);
        prop_assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    }

    #[test]
    fn garbage_is_no_preamble(bytes in any::<[u8; 64]>(), more in any::<[u8; 16]>()) {
        prop_assert!(Hello::decode(&bytes).is_err());
        prop_assert!(HelloReply::decode(&bytes, &hello()).is_err());
        prop_assert!(Welcome::decode(bytes.first_chunk().unwrap()).is_err());
        let long = [&bytes[..], &more].concat();
        prop_assert!(Credentials::decode(long[..].try_into().unwrap()).is_err());
    }
}
