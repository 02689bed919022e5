//! The VMM's side of the handshake, for VMMs in Rust.

use crate::regions::Region;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Asks the pager at `socket` to serve memory, as Firecracker does. Keep the stream as long as the
/// VM lives. `page_bytes` is 4096, or 2 MiB for pages of a pool.
///
/// The answer to a refusal is one JSON object with the key `error`. A pager that serves says
/// nothing.
///
/// # Errors
/// When the socket cannot be reached, or does not take the handshake.
pub fn connect(
    socket: &Path,
    regions: &[Region],
    page_bytes: u64,
    uffd: BorrowedFd<'_>,
) -> io::Result<UnixStream> {
    let regions = regions.iter().map(|region| {
        json!({
            "base_host_virt_addr": region.address,
            "size": region.size,
            "offset": region.offset,
            "page_size": page_bytes,
        })
    });
    let text = Value::from_iter(regions).to_string();
    let stream = UnixStream::connect(socket)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let descriptors = [uffd];
    ancillary.push(SendAncillaryMessage::ScmRights(&descriptors));
    let parts = [IoSlice::new(text.as_bytes())];
    // A handshake is smaller than a socket's buffer.
    match sendmsg(&stream, &parts, &mut ancillary, SendFlags::NOSIGNAL)? {
        sent if sent == text.len() => Ok(stream),
        _ => Err(io::ErrorKind::WriteZero.into()),
    }
}
