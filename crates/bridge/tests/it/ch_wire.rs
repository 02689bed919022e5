//! The messages of Cloud Hypervisor's protocol: what is taken, and what is refused by which words.

use pageferry_bridge::ch::wire::{
    Command, MAX_CONFIG_BYTES, MAX_STATE_BYTES, Mapping, Range, Request, Status, mappings,
};
use pageferry_bridge::foreign::parse_answer;
use proptest::prelude::*;

fn header(number: u16, version: u16, length: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes[2..4].copy_from_slice(&version.to_le_bytes());
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

#[test]
fn requests_have_these_bytes() {
    for (command, number, length) in [
        (Command::Start, 1, 0),
        (Command::Config, 2, 77),
        (Command::State, 3, MAX_STATE_BYTES as u64),
        (Command::Memory, 4, 16),
        (Command::Complete, 5, 0),
        (Command::Abandon, 6, 0),
        (Command::MemoryFd, 7, 4),
        (Command::CompletePaused, 8, 0),
        (Command::PageFault, 9, 16),
    ] {
        let bytes = header(number, 0, length);
        assert_eq!(Request::encode(command, length), bytes);
        assert_eq!(Request::decode(&bytes), Ok(Request { command, length }));
    }
    assert_eq!(Status::Ok.encode(), header(1, 0, 0));
    assert_eq!(Status::Error.encode(), header(2, 0, 0));
    let range = Range {
        gpa: 0x1000,
        length: 0x2000,
    };
    assert_eq!(range.encode()[..9], [0, 0x10, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Range::decode(range.encode()), Ok(range));
}

#[test]
fn malformed_requests_are_refused_by_name() {
    for (bytes, sentence) in [
        (header(0, 0, 0), "unknown command 0: expected 1 to 9"),
        (header(10, 0, 0), "unknown command 10: expected 1 to 9"),
        (header(1, 1, 0), "migration protocol version 1: expected 0"),
        (
            header(1, 0, 1),
            "Start has a payload of 1 bytes: expected 0 to 0",
        ),
        (
            header(2, 0, MAX_CONFIG_BYTES as u64 + 1),
            "Config has a payload of 65537 bytes: expected 1 to 65536",
        ),
        (
            header(3, 0, 0),
            "State has a payload of 0 bytes: expected 1 to 16777216",
        ),
        (
            header(7, 0, 8),
            "MemoryFd has a payload of 8 bytes: expected 4 to 4",
        ),
    ] {
        let error = Request::decode(&bytes).map_err(|error| error.to_string());
        assert_eq!(error, Err(sentence.to_owned()));
    }
    assert!(Status::decode(&header(0, 0, 0)).is_err());
    assert!(Status::decode(&header(3, 0, 0)).is_err());
    assert!(Status::decode(&header(1, 0, 1)).is_err());
    for (gpa, length) in [
        (1, 4096),
        (0, 0),
        (0, 4095),
        (0, (1 << 30) + 4096),
        (u64::MAX - 4095, 4096),
    ] {
        assert!(Range::decode(Range { gpa, length }.encode()).is_err());
    }
}

fn config(mappings: &str) -> String {
    format!(
        r#"{{"vm_config":{{}},"memory_manager_data":{{"x":[],"guest_ram_mappings":[{mappings}]}}}}"#
    )
}

fn mapping(slot: u64, gpa: u64, size: u64, offset: u64) -> String {
    format!(
        r#"{{"slot":{slot},"gpa":{gpa},"size":{size},"zone_id":"z","virtio_mem":false,
        "file_offset":{offset}}}"#
    )
}

#[test]
fn mappings_are_read_in_the_order_of_addresses() {
    let text = [mapping(7, 1 << 32, 8192, 4096), mapping(3, 0, 4096, 0)].join(",");
    let expected = [(3, 0, 4096, 0), (7, 1 << 32, 8192, 4096)];
    let expected = expected.map(|(slot, gpa, size, file_offset)| Mapping {
        slot,
        gpa,
        size,
        file_offset,
    });
    assert_eq!(mappings(config(&text).as_bytes()), Ok(expected.to_vec()));
}

#[test]
fn malformed_mappings_are_refused_by_name() {
    let all: Vec<_> = (0..65).map(|i| mapping(i, i << 20, 4096, 0)).collect();
    for (text, sentence) in [
        (String::new(), "0 mappings of guest RAM: expected 1 to 64"),
        (all.join(","), "65 mappings"),
        (mapping(1, 0, 0, 0), "it is no whole pages"),
        (mapping(1, 4095, 4096, 0), "it is no whole pages"),
        (mapping(1, 0, 4097, 0), "it is no whole pages"),
        (mapping(1, 0, 4096, 1), "it is no whole pages"),
        (mapping(1, u64::MAX - 4095, 4096, 0), "it ends beyond 2^63"),
        (mapping(1, 0, 4096, (1 << 63) - 4096), "it ends beyond 2^63"),
        (
            [mapping(1, 4096, 4096, 0), mapping(2, 0, 8192, 0)].join(","),
            "slot 2 at 0x0: the next mapping begins inside it",
        ),
        (
            [mapping(1, 0, 4096, 0), mapping(1, 4096, 4096, 0)].join(","),
            "another mapping has this slot",
        ),
        (mapping(1 << 32, 0, 4096, 0), "Config is no JSON with"),
        (r#"{"slot":1}"#.into(), "Config is no JSON with"),
        (
            mapping(1, 0, 4096, 0).replace("false", "true"),
            "it is hot-pluggable (virtio-mem)",
        ),
    ] {
        let error = mappings(config(&text).as_bytes()).expect_err(sentence);
        assert!(error.to_string().contains(sentence), "{error}");
    }
    assert!(mappings(b"{}").is_err() && mappings(b"\xff").is_err() && mappings(b"").is_err());
}

#[test]
fn answers_of_an_api_are_found_in_pieces() {
    let answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nbody";
    for end in 0..answer.len() {
        assert_eq!(parse_answer(&answer[..end]).unwrap(), None, "{end} bytes");
    }
    assert_eq!(parse_answer(answer).unwrap(), Some((200, answer.len() - 4)));
    let empty = b"HTTP/1.1 204 No Content\r\nServer: x\r\n\r\n";
    assert_eq!(parse_answer(empty).unwrap(), Some((204, empty.len())));
    for wrong in [
        &b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n"[..],
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"no HTTP\r\n\r\n",
    ] {
        assert!(parse_answer(wrong).is_err());
    }
    assert!(parse_answer(&vec![b'x'; 5 << 20]).is_err());
}

proptest! {
    #[test]
    fn no_bytes_make_a_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut padded = bytes.clone();
        padded.resize(200, 0);
        let head: [u8; 16] = padded[..16].try_into().unwrap();
        if let Ok(request) = Request::decode(&head) {
            prop_assert!(request.command == Command::Memory
                || request.length <= MAX_STATE_BYTES as u64);
        }
        let _ = Status::decode(&head);
        let _ = Range::decode(head);
        let _ = mappings(&bytes);
        let _ = parse_answer(&bytes);
    }

    #[test]
    fn mappings_that_are_taken_do_not_overlap(
        raw in prop::collection::vec((0..6_u64, 0..12_u64, 0..4_u64, 0..4_u64), 1..6)
    ) {
        let text: Vec<_> = raw
            .iter()
            .map(|(slot, gpa, size, offset)| mapping(*slot, gpa << 12, size << 12, offset << 12))
            .collect();
        if let Ok(taken) = mappings(config(&text.join(",")).as_bytes()) {
            prop_assert_eq!(taken.len(), raw.len());
            for pair in taken.windows(2) {
                prop_assert!(pair[0].gpa + pair[0].size <= pair[1].gpa);
                prop_assert_ne!(pair[0].slot, pair[1].slot);
            }
        }
    }
}
