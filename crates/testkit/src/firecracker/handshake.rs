//! The handshake that Firecracker sends to a page server.
//!
//! **Guarantee.** [`handshake_text`] has the bytes that Firecracker sends for the same regions.
//! [`send_handshake`] sends any bytes with any descriptors, as one message.

use crate::double::memory::Region;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};
use std::fmt::Write as _;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The most descriptors that one message of a test has.
const MOST_DESCRIPTORS: usize = 8;

/// The fields that a handshake has in each region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fields {
    /// Those of releases after 1.11: `page_size` and `page_size_kib`, both in bytes.
    Both,
    /// Those of releases up to 1.11: only `page_size_kib`, in bytes.
    KibOnly,
    /// Those of [`Fields::Both`], and fields that no released version has.
    Unknown,
}

/// The JSON text of a handshake. It has no terminator and no length.
///
/// ```
/// use pageferry_testkit::firecracker::{Fields, Region, handshake_text};
///
/// let region = Region { base: 0x7f00_0020_0000, size: 2 << 20, offset: 0 };
/// assert_eq!(
///     handshake_text(&[region], 4096, Fields::Both),
///     r#"[{"base_host_virt_addr":139637978824704,"size":2097152,"offset":0,"page_size":4096,"page_size_kib":4096}]"#
/// );
/// ```
#[must_use]
pub fn handshake_text(regions: &[Region], page_size: u64, fields: Fields) -> String {
    let mut text = String::from("[");
    for (number, region) in regions.iter().enumerate() {
        let Region { base, size, offset } = region;
        let comma = if number == 0 { "" } else { "," };
        write!(
            text,
            r#"{comma}{{"base_host_virt_addr":{base},"size":{size},"offset":{offset},"#
        )
        .expect("a string takes all");
        text += &match fields {
            Fields::Both => format!(r#""page_size":{page_size},"page_size_kib":{page_size}}}"#),
            Fields::KibOnly => format!(r#""page_size_kib":{page_size}}}"#),
            Fields::Unknown => format!(
                r#""page_size":{page_size},"page_size_kib":{page_size},"gpa_start":0,"is_guest_memfd":false,"more":{{"a":[1,null,"}}]"]}}}}"#
            ),
        };
    }
    text + "]"
}

/// Connects to a page server's socket, and sends `bytes` with `descriptors` as one message.
///
/// Firecracker leaks its socket: the connection ends when the process ends. Here it ends when the
/// returned stream is dropped.
///
/// # Errors
/// Those of connecting and sending.
///
/// # Panics
/// If there are more than 8 descriptors, or the kernel takes a part of `bytes` only.
pub fn send_handshake(
    socket: &Path,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        let fits = ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
        assert!(fits, "more than {MOST_DESCRIPTORS} descriptors");
    }
    let sent = sendmsg(
        &stream,
        &[IoSlice::new(bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    assert_eq!(sent, bytes.len(), "the message was not sent whole");
    Ok(stream)
}
