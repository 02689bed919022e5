//! The messages that open a channel: no panic on any bytes, and what is accepted encodes to the
//! same bytes.

use pageferry_migration::wire::{
    CREDENTIALS_BYTES, ChannelKey, Credentials, HELLO_BYTES, Hello, HelloReply, PATH_CHECK_BYTES,
    SessionId, WELCOME_BYTES, Welcome, check_magic, path_check, verify_path_check,
};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) fn run(data: &[u8]) {
    let _ = check_magic(data);
    if let Some(bytes) = data.first_chunk::<HELLO_BYTES>() {
        with_and_without_checksum(bytes, try_hellos);
    }
    if let Some(bytes) = data.first_chunk::<CREDENTIALS_BYTES>() {
        with_and_without_checksum(bytes, |bytes| match Credentials::decode(bytes) {
            Ok(credentials) => assert_eq!(credentials.encode(), *bytes),
            Err(error) => drop(error.to_string()),
        });
    }
    // A part of a PathCheck, wherever it begins.
    if let Some((at, part)) = data.split_first_chunk() {
        let at = usize::from(u16::from_le_bytes(*at)) % PATH_CHECK_BYTES;
        let part = &part[..part.len().min(PATH_CHECK_BYTES - at)];
        let same = path_check()[at..].starts_with(part);
        assert_eq!(verify_path_check(at, part).is_ok(), same);
    }
    if let Some(bytes) = data.first_chunk::<WELCOME_BYTES>() {
        with_and_without_checksum(bytes, |bytes| match Welcome::decode(bytes) {
            Ok(welcome) => assert_eq!(welcome.encode(), *bytes),
            Err(error) => drop(error.to_string()),
        });
    }
}

/// Tries the bytes as they are, and with a checksum that fits, so that every field's check is
/// reached.
fn with_and_without_checksum<const N: usize>(bytes: &[u8; N], run: impl Fn(&[u8; N])) {
    run(bytes);
    let mut sealed = *bytes;
    let checksum = xxh3_64(&sealed[..N - 8]);
    sealed[N - 8..].copy_from_slice(&checksum.to_le_bytes());
    run(&sealed);
}

fn try_hellos(bytes: &[u8; HELLO_BYTES]) {
    match Hello::decode(bytes) {
        Ok(hello) => {
            assert_eq!(hello.encode(), *bytes);
            let reply = HelloReply::accept(&hello, *bytes.first_chunk().expect("long enough"));
            assert_eq!(HelloReply::decode(&reply.encode(), &hello), Ok(reply));
        }
        Err(error) => {
            let _ = HelloReply::refusal_of(bytes, &error);
            let _ = error.to_string();
        }
    }
    // The session must be the one asked for; take it from the bytes.
    let session = bytes[16..32].try_into().expect("sixteen bytes");
    let hello = Hello::ours(ChannelKey::control(1), SessionId(session));
    match HelloReply::decode(bytes, &hello) {
        Ok(reply) => assert_eq!(reply.encode(), *bytes),
        Err(error) => drop(error.to_string()),
    }
}
