//! The machine configuration of a Firecracker VM, which is also the description in its offer.

use pageferry_bridge::fc::parse_config;

pub(crate) fn run(bytes: &[u8]) {
    if let Ok((memory, _)) = parse_config(bytes) {
        assert!(memory > 0 && memory.is_multiple_of(1 << 20));
    }
}
