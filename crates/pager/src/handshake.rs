//! Firecracker's handshake: the layout of a VM's memory, and the userfaultfd that serves it.
//!
//! **Guarantee.** Nothing of a handshake is used before all of it is checked. A peer can cost
//! [`MAX_HANDSHAKE_BYTES`], [`LIMIT`] and a few descriptors. A refusal names the fault.
//!
//! **Mechanism.** Firecracker sends one message over a Unix stream socket: a JSON array without a
//! length or an end, and a descriptor (`src/vmm/src/persist.rs`, `GuestRegionUffdMapping`). All
//! numbers are bytes, also `page_size_kib`, which alone exists up to version 1.11. A stream may
//! split a message, so reading goes on until the text is whole. Fields that are not known are
//! passed over. Newer branches send up to three descriptors: one that this pager cannot serve is
//! refused by its name.

use crate::regions::Region;
use crate::vmm;
use pageferry_userfault::uffd::Userfaultfd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use serde::Deserialize;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// The longest text of a handshake. One of four regions has about 520 bytes.
pub const MAX_HANDSHAKE_BYTES: usize = 64 << 10;
/// The most regions of a VM.
pub const MAX_REGIONS: usize = 64;
/// The most descriptors of a handshake.
const MAX_DESCRIPTORS: usize = 3;
/// The time for a whole handshake.
pub(crate) const LIMIT: Duration = Duration::from_secs(5);
/// The first address behind user memory, with 5-level page tables.
const ADDRESSES: u64 = 1 << 56;

/// A handshake whose parts fit each other and the memory file.
#[derive(Debug)]
pub struct Handshake {
    /// The regions in the order in which they came.
    pub regions: Vec<Region>,
    /// The size of the VM's pages: 4096, or 2 MiB from a pool.
    pub page_bytes: u64,
    /// The userfaultfd of the VMM.
    pub uffd: Userfaultfd,
}

/// The refusal of a handshake.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The peer closed before the text was whole.
    #[error("the connection ended after {0} bytes: expected a JSON array of regions")]
    Ended(usize),
    /// The text was not whole in time.
    #[error(
        "the text was not whole after {LIMIT:?} and {0} bytes: expected a JSON array of regions"
    )]
    Slow(usize),
    /// Too much text.
    #[error("the text has more than {MAX_HANDSHAKE_BYTES} bytes")]
    Long,
    /// The text is no array of regions.
    #[error("the text is no JSON array of regions: {0}")]
    Text(String),
    /// The number of regions.
    #[error("there are {0} regions: expected 1 to {MAX_REGIONS}")]
    Count(usize),
    /// The size of pages.
    #[error(
        "region {region} has pages of {bytes} bytes: expected 4096 or 2097152, as in all regions"
    )]
    PageSize {
        /// The region's place in the array, from 0.
        region: usize,
        /// Its page size, 0 if it has none.
        bytes: u64,
    },
    /// A region's numbers.
    #[error("region {region} (address {address:#x}, size {size:#x}, offset {offset:#x}) {fault}")]
    Region {
        /// The region's place in the array, from 0.
        region: usize,
        /// Its address.
        address: u64,
        /// Its size.
        size: u64,
        /// Its place in the memory file.
        offset: u64,
        /// The fault.
        fault: &'static str,
    },
    /// The number of descriptors.
    #[error("{0} descriptors came: expected a userfaultfd, and at most {MAX_DESCRIPTORS} in all")]
    Descriptors(usize),
    /// More descriptors than a message may have.
    #[error("more descriptors came than there is room for: expected at most {MAX_DESCRIPTORS}")]
    TooManyDescriptors,
    /// A descriptor of a kind that this pager does not serve.
    #[error("descriptor {index} is '{kind}': expected one userfaultfd, and else memfds")]
    Kind {
        /// Its place, from 0.
        index: usize,
        /// The kernel's name of its file.
        kind: String,
    },
    /// The userfaultfd does not serve the regions.
    #[error("the userfaultfd does not serve the regions: {0}")]
    Userfaultfd(String),
    /// A system call failed.
    #[error("{call} failed: {errno}")]
    Failed {
        /// The call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
}

/// A region as Firecracker sends it.
#[derive(Deserialize)]
struct Mapping {
    base_host_virt_addr: u64,
    size: u64,
    offset: u64,
    page_size: Option<u64>,
    page_size_kib: Option<u64>,
    /// Of a branch whose memory is not private.
    #[serde(default)]
    is_guest_memfd: bool,
}

/// Whether more text may make the handshake whole.
enum Text {
    Whole(Vec<Mapping>),
    Partial,
}

impl Handshake {
    /// Receives a handshake for a memory file of `file_bytes` bytes. It waits at most 5 seconds,
    /// and no longer than until `stop` is readable.
    ///
    /// # Errors
    /// [`HandshakeError`]. All descriptors that came are closed then.
    pub fn receive(
        connection: BorrowedFd<'_>,
        file_bytes: u64,
        stop: Option<BorrowedFd<'_>>,
    ) -> Result<Self, HandshakeError> {
        let (text, descriptors) = receive(connection, stop)?;
        let (regions, page_bytes) = check(&text, file_bytes)?;
        let uffd = choose(descriptors, &regions)?;
        Ok(Self {
            regions,
            page_bytes,
            uffd,
        })
    }
}

/// Receives the text and the descriptors.
fn receive(
    connection: BorrowedFd<'_>,
    stop: Option<BorrowedFd<'_>>,
) -> Result<(Vec<Mapping>, Vec<OwnedFd>), HandshakeError> {
    let failed = |call| move |errno| HandshakeError::Failed { call, errno };
    let deadline = Instant::now() + LIMIT;
    let mut text = Vec::new();
    let mut descriptors = Vec::new();
    let mut buffer = vec![0; 16 << 10];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec::try_from(left).ok();
        let watched = stop.unwrap_or(connection);
        let mut fds = [
            PollFd::new(&connection, PollFlags::IN),
            PollFd::new(&watched, PollFlags::IN),
        ];
        let count = 1 + usize::from(stop.is_some());
        match poll(&mut fds[..count], timeout.as_ref()) {
            Ok(0) => return Err(HandshakeError::Slow(text.len())),
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(failed("poll")(errno)),
            Ok(_) if stop.is_some() && !fds[1].revents().is_empty() => {
                return Err(failed("waiting")(Errno::CANCELED));
            }
            Ok(_) => {}
        }
        // Room for more descriptors than are expected, so that too many can be told.
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(
            connection,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        );
        let received = match received {
            Ok(received) => received,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(errno) => return Err(failed("recvmsg")(errno)),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                descriptors.extend(fds);
            }
        }
        if received.flags.contains(ReturnFlags::CTRUNC) || descriptors.len() > 8 {
            return Err(HandshakeError::TooManyDescriptors);
        }
        if received.bytes == 0 {
            return Err(HandshakeError::Ended(text.len()));
        }
        text.extend_from_slice(&buffer[..received.bytes]);
        if text.len() > MAX_HANDSHAKE_BYTES {
            return Err(HandshakeError::Long);
        }
        if let Text::Whole(mappings) = parse(&text)? {
            return Ok((mappings, descriptors));
        }
    }
}

fn parse(text: &[u8]) -> Result<Text, HandshakeError> {
    match serde_json::from_slice(text) {
        Ok(mappings) => Ok(Text::Whole(mappings)),
        Err(why) if why.is_eof() => Ok(Text::Partial),
        Err(why) => Err(HandshakeError::Text(why.to_string())),
    }
}

/// Checks the regions against each other and the memory file. Returns them, and the page size.
fn check(mappings: &[Mapping], file_bytes: u64) -> Result<(Vec<Region>, u64), HandshakeError> {
    if mappings.is_empty() || mappings.len() > MAX_REGIONS {
        return Err(HandshakeError::Count(mappings.len()));
    }
    let page_bytes = |mapping: &Mapping| mapping.page_size.or(mapping.page_size_kib).unwrap_or(0);
    let common = page_bytes(&mappings[0]);
    for (region, mapping) in mappings.iter().enumerate() {
        let bytes = page_bytes(mapping);
        let other = mapping.page_size_kib.filter(|&other| other != bytes);
        if !matches!(bytes, 4096 | 0x20_0000) || bytes != common || other.is_some() {
            let bytes = if bytes == common {
                other.unwrap_or(bytes)
            } else {
                bytes
            };
            return Err(HandshakeError::PageSize { region, bytes });
        }
    }
    let mut regions: Vec<Region> = Vec::new();
    for (index, mapping) in mappings.iter().enumerate() {
        let region = Region {
            address: mapping.base_host_virt_addr,
            size: mapping.size,
            offset: mapping.offset,
        };
        if let Some(fault) = fault_of(&region, mapping, common, file_bytes, &regions) {
            return Err(HandshakeError::Region {
                region: index,
                address: region.address,
                size: region.size,
                offset: region.offset,
                fault,
            });
        }
        regions.push(region);
    }
    Ok((regions, common))
}

/// The fault of a region behind `others`.
fn fault_of(
    region: &Region,
    mapping: &Mapping,
    page_bytes: u64,
    file_bytes: u64,
    others: &[Region],
) -> Option<&'static str> {
    let Region {
        address,
        size,
        offset,
    } = *region;
    let apart = |a: u64, b: u64, b_size: u64| a + size <= b || b + b_size <= a;
    if mapping.is_guest_memfd {
        return Some("is of guest_memfd: this pager serves private memory");
    }
    if size == 0 {
        return Some("is empty");
    }
    if [address, size, offset]
        .iter()
        .any(|n| !n.is_multiple_of(page_bytes))
    {
        return Some("is not aligned to its pages");
    }
    if address.checked_add(size).is_none_or(|end| end > ADDRESSES) {
        return Some("ends behind the addresses of a process");
    }
    if offset.checked_add(size).is_none_or(|end| end > file_bytes) {
        return Some("ends behind the memory file: is it the file of this snapshot?");
    }
    if !others
        .iter()
        .all(|other| apart(address, other.address, other.size))
    {
        return Some("overlaps another in memory");
    }
    if !others
        .iter()
        .all(|other| apart(offset, other.offset, other.size))
    {
        return Some("overlaps another in the memory file");
    }
    None
}

/// Finds the userfaultfd among the descriptors, and refuses what this pager does not serve.
fn choose(descriptors: Vec<OwnedFd>, regions: &[Region]) -> Result<Userfaultfd, HandshakeError> {
    let count = descriptors.len();
    if count == 0 || count > MAX_DESCRIPTORS {
        return Err(HandshakeError::Descriptors(count));
    }
    let mut found = None;
    for (index, fd) in descriptors.into_iter().enumerate() {
        let kind = kind_of(&fd);
        match kind.as_str() {
            "anon_inode:[userfaultfd]" if found.is_none() => found = Some(fd),
            // The memory itself. It is served by its addresses, so its file is not needed.
            memory if memory.starts_with("/memfd:") => {}
            _ => return Err(HandshakeError::Kind { index, kind }),
        }
    }
    let fd = found.ok_or(HandshakeError::Descriptors(count))?;
    vmm::adopt(fd, regions).map_err(HandshakeError::Userfaultfd)
}

/// The kernel's name of a descriptor's file.
fn kind_of(fd: &OwnedFd) -> String {
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::read_link(link).map_or_else(
        |why| format!("unknown ({why})"),
        |target| target.to_string_lossy().chars().take(100).collect(),
    )
}

/// For fuzzing: what the text of a handshake means for a memory file of `file_bytes` bytes.
///
/// # Errors
/// [`HandshakeError`], also for a text that is not whole.
#[doc(hidden)]
pub fn parse_regions(text: &[u8], file_bytes: u64) -> Result<(Vec<Region>, u64), HandshakeError> {
    match parse(text)? {
        Text::Whole(mappings) => check(&mappings, file_bytes),
        Text::Partial => Err(HandshakeError::Ended(text.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: u64 = 64 << 20;

    fn refusal(text: &str) -> String {
        parse_regions(text.as_bytes(), FILE)
            .unwrap_err()
            .to_string()
    }

    fn region(fields: &str) -> String {
        format!(r#"[{{"base_host_virt_addr":2097152,"size":4096,"offset":0,{fields}}}]"#)
    }

    #[test]
    fn firecrackers_texts_are_read() {
        let text = r#"[{"base_host_virt_addr":140737488355328,"size":2097152,"offset":0,
            "page_size":4096,"page_size_kib":4096},
            {"base_host_virt_addr":70368744177664,"size":4096,"offset":2097152,
            "page_size":4096,"page_size_kib":4096,"a_new_field":{"x":[1]}}]"#;
        let (regions, page_bytes) = parse_regions(text.as_bytes(), FILE).unwrap();
        assert_eq!((regions.len(), page_bytes), (2, 4096));
        let second = Region {
            address: 70_368_744_177_664,
            size: 4096,
            offset: 2_097_152,
        };
        assert_eq!(regions[1], second);
    }

    #[test]
    fn the_old_field_is_in_bytes() {
        let text = region(r#""page_size_kib":4096"#);
        assert_eq!(parse_regions(text.as_bytes(), FILE).unwrap().1, 4096);
    }

    #[test]
    fn each_fault_has_its_own_sentence() {
        let two = |second: &str| {
            format!(
                r#"[{{"base_host_virt_addr":2097152,"size":8192,"offset":0,"page_size":4096}},
                    {{{second},"page_size":4096}}]"#
            )
        };
        for (text, part) in [
            (String::new(), "ended after 0 bytes"),
            ("[".into(), "ended after 1 bytes"),
            ("[]".into(), "there are 0 regions"),
            ("{}".into(), "no JSON array"),
            ("[1]".into(), "no JSON array"),
            ("\u{0}".into(), "no JSON array"),
            (region(r#""page_size":0"#), "pages of 0 bytes"),
            (region(r#""page_size":3"#), "pages of 3 bytes"),
            (region(r#""page_size_kib":4"#), "pages of 4 bytes"),
            (region(r#""other":4"#), "pages of 0 bytes"),
            (
                region(r#""page_size":4096,"page_size_kib":4"#),
                "pages of 4 bytes",
            ),
            (region(r#""page_size":2097152"#), "not aligned"),
            (
                region(r#""page_size":4096,"is_guest_memfd":true"#),
                "guest_memfd",
            ),
            (region(r#""page_size":-1"#), "no JSON array"),
            (region(r#""page_size":1e300"#), "no JSON array"),
            (
                two(r#""base_host_virt_addr":2097152,"size":4096,"offset":8192"#),
                "overlaps another in memory",
            ),
            (
                two(r#""base_host_virt_addr":4194304,"size":4096,"offset":4096"#),
                "overlaps another in the memory file",
            ),
            (
                two(r#""base_host_virt_addr":4194304,"size":0,"offset":8192"#),
                "region 1",
            ),
            (
                two(r#""base_host_virt_addr":4194304,"size":67108864,"offset":8192"#),
                "behind the memory file",
            ),
            (
                two(r#""base_host_virt_addr":4194304,"size":4096,"offset":18446744073709547520"#),
                "behind the memory file",
            ),
            (
                two(r#""base_host_virt_addr":18446744073709547520,"size":8192,"offset":8192"#),
                "behind the addresses",
            ),
        ] {
            let refusal = refusal(&text);
            assert!(refusal.contains(part), "{text}: {refusal}");
        }
        let one = region(r#""page_size":4096"#);
        let many = vec![&one[1..one.len() - 1]; MAX_REGIONS + 1].join(",");
        assert!(refusal(&format!("[{many}]")).contains("there are 65 regions"));
    }
}
