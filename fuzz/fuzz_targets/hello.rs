//! The preambles: no panic on any bytes, and what is accepted encodes to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pageferry_migration::wire::{HELLO_BYTES, Hello, HelloReply, Role, SessionId, check_magic};
use xxhash_rust::xxh3::xxh3_64;

fuzz_target!(|data: &[u8]| {
    let _ = check_magic(data);
    let Some(&bytes) = data.first_chunk::<HELLO_BYTES>() else {
        return;
    };
    try_both(&bytes);
    // The same with a checksum that fits, so that every field's check is reached.
    let mut sealed = bytes;
    let checksum = xxh3_64(&sealed[..HELLO_BYTES - 8]);
    sealed[HELLO_BYTES - 8..].copy_from_slice(&checksum.to_le_bytes());
    try_both(&sealed);
});

fn try_both(bytes: &[u8; HELLO_BYTES]) {
    match Hello::decode(bytes) {
        Ok(hello) => {
            assert_eq!(hello.encode(), *bytes);
            let reply = HelloReply::accept(&hello);
            assert_eq!(HelloReply::decode(&reply.encode(), &hello), Ok(reply));
        }
        Err(error) => {
            let _ = HelloReply::refusal_of(bytes, &error);
            let _ = error.to_string();
        }
    }
    // The session must be the one asked for; take it from the bytes.
    let session = bytes[16..32].try_into().expect("sixteen bytes");
    let hello = Hello::ours(Role::Stream, SessionId(session));
    match HelloReply::decode(bytes, &hello) {
        Ok(reply) => assert_eq!(reply.encode(), *bytes),
        Err(error) => drop(error.to_string()),
    }
}
