//! A message of the kernel to a FUSE file system. A header that fits is also put before the input.

use pageferry_pager::parse_fuse;

pub(crate) fn run(bytes: &[u8]) {
    parse_fuse(bytes);
    let Some((opcode, body)) = bytes.split_first() else {
        return;
    };
    let mut message = vec![0; 40];
    message[..4].copy_from_slice(&(40 + body.len() as u32).to_ne_bytes());
    message[4] = *opcode;
    message.extend_from_slice(body);
    parse_fuse(&message);
}
