//! Cloud Hypervisor's messages, its Config, and the answers of its API.

use pageferry_bridge::foreign::parse_answer;
use pageferry_bridge::ch::wire::{
    Command, MAX_FAULT_BYTES, MAX_STATE_BYTES, Range, Request, Status, mappings,
};

pub(crate) fn run(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else {
        return;
    };
    match kind % 3 {
        0 => {
            for head in rest.as_chunks::<16>().0 {
                if let Ok(request) = Request::decode(head) {
                    let bounded = request.length <= MAX_STATE_BYTES as u64;
                    assert!(bounded || request.command == Command::Memory);
                    if request.command != Command::Memory {
                        let again = Request::encode(request.command, request.length);
                        assert_eq!(Request::decode(&again), Ok(request));
                    }
                }
                let _ = Status::decode(head);
                if let Ok(range) = Range::decode(*head) {
                    assert_eq!(range.encode(), *head);
                    assert!(range.length <= MAX_FAULT_BYTES);
                }
            }
        }
        1 => {
            if let Ok(mappings) = mappings(rest) {
                for pair in mappings.windows(2) {
                    assert!(pair[0].gpa + pair[0].size <= pair[1].gpa);
                }
            }
        }
        _ => {
            if let Ok(Some((_, body))) = parse_answer(rest) {
                assert!(body <= rest.len());
            }
        }
    }
}
