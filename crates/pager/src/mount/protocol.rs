//! The messages between the kernel and a FUSE file system, as far as a read-only one needs them.
//!
//! **Guarantee.** A message of any bytes is parsed within its bounds, or refused.
//!
//! **Mechanism.** Layouts, numbers and names are those of `include/uapi/linux/fuse.h`. Replies say
//! version 7.31, so nothing newer is expected of this side. Numbers have the host's byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The node of the directory.
pub(super) const ROOT: u64 = 1;
/// The bytes that hold any request. The kernel wants at least 8 KiB.
pub(super) const REQUEST_BYTES: usize = 16 << 10;
/// The most bytes of one read. Without `FUSE_MAX_PAGES` the kernel asks for 32 pages at most.
const MAX_READ: u32 = 4 << 20;

const MAJOR: u32 = 7;
const MINOR: u32 = 31;
/// `FUSE_ASYNC_READ`: a fault does not wait for the pages beside it.
const ASYNC_READ: u32 = 1 << 0;
/// `FUSE_PARALLEL_DIROPS`.
const PARALLEL_DIROPS: u32 = 1 << 18;
/// `FUSE_INIT_EXT`: there is a second word of flags.
const INIT_EXT: u32 = 1 << 30;
/// `FUSE_HAS_RESEND`, in the second word.
const HAS_RESEND: u32 = 1 << (39 - 32);
/// `FUSE_NOTIFY_RESEND`.
const NOTIFY_RESEND: i32 = 7;
/// `FOPEN_KEEP_CACHE`: pages that an earlier VM has brought stay.
const KEEP_CACHE: u32 = 1 << 1;
/// A year, in seconds: the attributes of a node never change.
const FOR_EVER: u64 = 365 * 24 * 3600;

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;

#[derive(Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InHeader {
    len: u32,
    opcode: u32,
    unique: u64,
    node: u64,
    uid: u32,
    gid: u32,
    pid: u32,
    extra: u32,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct OutHeader {
    len: u32,
    error: i32,
    unique: u64,
}

#[derive(Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct InitIn {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct InitOut {
    major: u32,
    minor: u32,
    max_readahead: u32,
    flags: u32,
    max_background: u16,
    congestion_threshold: u16,
    max_write: u32,
    time_gran: u32,
    max_pages: u16,
    map_alignment: u16,
    unused: [u32; 8],
}

#[derive(Debug, Default, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct Attr {
    node: u64,
    size: u64,
    blocks: u64,
    times: [u64; 3],
    nanoseconds: [u32; 3],
    mode: u32,
    links: u32,
    uid: u32,
    gid: u32,
    device: u32,
    block: u32,
    flags: u32,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct EntryOut {
    node: u64,
    generation: u64,
    entry_valid: u64,
    attr_valid: u64,
    nanoseconds: [u32; 2],
    attr: Attr,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct AttrOut {
    attr_valid: u64,
    nanoseconds: u32,
    dummy: u32,
    attr: Attr,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct OpenOut {
    handle: u64,
    flags: u32,
    padding: u32,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
pub(super) struct StatfsOut {
    blocks: u64,
    free: [u64; 2],
    files: u64,
    free_files: u64,
    block: u32,
    name: u32,
    fragment: u32,
    padding: u32,
    spare: [u32; 6],
}

/// The beginning of `fuse_read_in`: the rest names locks and flags.
#[derive(Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ReadIn {
    handle: u64,
    offset: u64,
    size: u32,
    flags: u32,
}

#[derive(Debug, IntoBytes, Immutable)]
#[repr(C)]
struct Dirent {
    node: u64,
    next: u64,
    name: u32,
    kind: u32,
}

#[derive(Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
struct ForgetOne {
    node: u64,
    lookups: u64,
}

// The sizes of fuse.h.
const _: () = {
    assert!(size_of::<InHeader>() == 40 && size_of::<OutHeader>() == 16);
    assert!(size_of::<InitIn>() == 16 && size_of::<InitOut>() == 64);
    assert!(size_of::<Attr>() == 88 && size_of::<EntryOut>() == 128);
    assert!(size_of::<AttrOut>() == 104 && size_of::<OpenOut>() == 16);
    assert!(size_of::<StatfsOut>() == 80 && size_of::<Dirent>() == 24);
};

/// One message of the kernel.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Message<'a> {
    /// Names the request in its reply.
    pub(super) unique: u64,
    pub(super) node: u64,
    /// The thread that asks, 0 if it has none here.
    pub(super) pid: u32,
    pub(super) request: Request<'a>,
}

/// The part of a message that depends on its kind.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Init {
        minor: u32,
        readahead: u32,
        resends: bool,
    },
    Lookup(&'a [u8]),
    Attributes,
    Open,
    OpenDirectory,
    Read {
        offset: u64,
        size: u32,
    },
    List {
        offset: u64,
        size: u32,
    },
    Statistics,
    /// The last user of a file or of the file system has gone.
    Release,
    /// The kernel has dropped nodes, with all their pages. It expects no reply.
    Forget(Vec<u64>),
    /// The thread has a signal. It expects no reply.
    Interrupt,
    /// Anything else.
    Other(u32),
}

/// Parses a message. The error is the number of a request that is to be refused, if it has one.
pub(super) fn parse(bytes: &[u8]) -> Result<Message<'_>, Option<u64>> {
    let (header, _) = InHeader::read_from_prefix(bytes).map_err(|_| None)?;
    let malformed = Some(header.unique);
    let body = bytes
        .get(size_of::<InHeader>()..header.len as usize)
        .ok_or(malformed)?;
    let request = match header.opcode {
        1 => Request::Lookup(body.split(|byte| *byte == 0).next().unwrap_or_default()),
        2 => Request::Forget(vec![header.node]),
        3 => Request::Attributes,
        14 => Request::Open,
        15 | 28 => {
            let (read, _) = ReadIn::read_from_prefix(body).map_err(|_| malformed)?;
            let (offset, size) = (read.offset, read.size);
            if size > MAX_READ || offset.checked_add(u64::from(size)).is_none() {
                return Err(malformed);
            }
            match header.opcode {
                15 => Request::Read { offset, size },
                _ => Request::List { offset, size },
            }
        }
        17 => Request::Statistics,
        18 | 29 | 38 => Request::Release,
        26 => {
            let (init, rest) = InitIn::read_from_prefix(body).map_err(|_| malformed)?;
            let flags2 = u32::read_from_prefix(rest).map_or(0, |(flags, _)| flags);
            Request::Init {
                minor: init.minor,
                readahead: init.max_readahead,
                resends: init.flags & INIT_EXT != 0 && flags2 & HAS_RESEND != 0,
            }
        }
        27 => Request::OpenDirectory,
        36 => Request::Interrupt,
        42 => {
            // A count and padding come first. The bytes bound what the count says.
            let (count, rest) = <[u32; 2]>::read_from_prefix(body).map_err(|_| malformed)?;
            let all = rest.chunks_exact(size_of::<ForgetOne>());
            let nodes = all.filter_map(|one| Some(ForgetOne::read_from_bytes(one).ok()?.node));
            Request::Forget(nodes.take(count[0] as usize).collect())
        }
        opcode => Request::Other(opcode),
    };
    Ok(Message {
        unique: header.unique,
        node: header.node,
        pid: header.pid,
        request,
    })
}

impl OutHeader {
    /// The header of a reply with so many bytes behind it.
    pub(super) fn reply(unique: u64, bytes: usize) -> Self {
        Self::with(unique, 0, bytes)
    }

    /// A refusal.
    pub(super) fn refusal(unique: u64, errno: rustix::io::Errno) -> Self {
        Self::with(unique, -errno.raw_os_error(), 0)
    }

    /// The demand that the kernel sends again what was read and not answered.
    pub(super) fn resend() -> Self {
        Self::with(0, NOTIFY_RESEND, 0)
    }

    fn with(unique: u64, error: i32, bytes: usize) -> Self {
        Self {
            len: (size_of::<Self>() + bytes) as u32,
            error,
            unique,
        }
    }
}

impl InitOut {
    /// The answer to a kernel with version 7.`minor`. It reads ahead at most `readahead` bytes.
    pub(super) fn new(minor: u32, readahead: u32) -> Self {
        Self {
            major: MAJOR,
            minor: minor.min(MINOR),
            max_readahead: readahead,
            flags: ASYNC_READ | PARALLEL_DIROPS,
            // Faults are background requests of the kernel. A slow one must not hold up others.
            max_background: u16::MAX,
            congestion_threshold: u16::MAX,
            // The least: nothing is ever written.
            max_write: 4096,
            time_gran: 1,
            max_pages: 0,
            map_alignment: 0,
            unused: [0; 8],
        }
    }
}

impl Attr {
    /// A directory that all may list.
    pub(super) fn directory() -> Self {
        Self {
            node: ROOT,
            mode: S_IFDIR | 0o555,
            links: 2,
            block: 4096,
            ..Self::default()
        }
    }

    pub(super) fn file(node: u64, size: u64, owner: (u32, u32), mode: u32) -> Self {
        Self {
            node,
            size,
            blocks: size.div_ceil(512),
            mode: S_IFREG | (mode & 0o555),
            links: 1,
            uid: owner.0,
            gid: owner.1,
            block: 4096,
            ..Self::default()
        }
    }
}

impl EntryOut {
    /// The kernel asks for a name each time, since the next pager may have another file of it.
    pub(super) fn new(attr: Attr) -> Self {
        Self {
            node: attr.node,
            generation: 0,
            entry_valid: 0,
            attr_valid: FOR_EVER,
            nanoseconds: [0; 2],
            attr,
        }
    }
}

impl AttrOut {
    pub(super) fn new(attr: Attr) -> Self {
        Self {
            attr_valid: FOR_EVER,
            nanoseconds: 0,
            dummy: 0,
            attr,
        }
    }
}

impl OpenOut {
    pub(super) fn file() -> Self {
        Self {
            flags: KEEP_CACHE,
            ..Self::directory()
        }
    }

    pub(super) fn directory() -> Self {
        Self {
            handle: 0,
            flags: 0,
            padding: 0,
        }
    }
}

impl StatfsOut {
    pub(super) fn new(bytes: u64, files: u64) -> Self {
        Self {
            blocks: bytes.div_ceil(4096),
            free: [0; 2],
            files,
            free_files: 0,
            block: 4096,
            name: 64,
            fragment: 4096,
            padding: 0,
            spare: [0; 6],
        }
    }
}

/// The entries of a directory from the place `offset` on that fit in `size` bytes.
pub(super) fn entries<'a>(
    all: impl Iterator<Item = (u64, &'a str, bool)>,
    offset: u64,
    size: u32,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    for ((node, name, is_directory), next) in all.zip(1..) {
        if next <= offset {
            continue;
        }
        let whole = (size_of::<Dirent>() + name.len()).next_multiple_of(8);
        if bytes.len() + whole > size as usize {
            break;
        }
        let entry = Dirent {
            node,
            next,
            name: name.len() as u32,
            kind: if is_directory { S_IFDIR } else { S_IFREG } >> 12,
        };
        let end = bytes.len() + whole;
        bytes.extend_from_slice(entry.as_bytes());
        bytes.extend_from_slice(name.as_bytes());
        bytes.resize(end, 0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&(40 + body.len() as u32).to_ne_bytes());
        bytes.extend_from_slice(&opcode.to_ne_bytes());
        for word in [7_u64, 9] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        for word in [0_u32, 0, 11, 0] {
            bytes.extend_from_slice(&word.to_ne_bytes());
        }
        bytes.extend_from_slice(body);
        bytes
    }

    fn read(offset: u64, size: u32) -> Vec<u8> {
        let mut body = [0; 40];
        body[8..16].copy_from_slice(&offset.to_ne_bytes());
        body[16..20].copy_from_slice(&size.to_ne_bytes());
        message(15, &body)
    }

    #[test]
    fn a_read_is_parsed_with_its_thread_and_node() {
        let expected = Message {
            unique: 7,
            node: 9,
            pid: 11,
            request: Request::Read {
                offset: 4096,
                size: 16384,
            },
        };
        assert_eq!(parse(&read(4096, 16384)), Ok(expected));
    }

    #[test]
    fn reads_out_of_bounds_are_refused_by_their_number() {
        for bytes in [read(0, u32::MAX), read(u64::MAX, 2)] {
            assert_eq!(parse(&bytes), Err(Some(7)));
        }
        assert_eq!(parse(&message(15, &[0; 23])), Err(Some(7)), "a short one");
        assert_eq!(parse(&[0; 39]), Err(None), "no whole header");
        let mut long = message(3, b"");
        long[0] = 41;
        assert_eq!(parse(&long), Err(Some(7)), "less than its length");
        long[0] = 0;
        assert_eq!(parse(&long), Err(Some(7)), "shorter than its header");
    }

    #[test]
    fn only_a_kernel_that_says_so_resends() {
        let resends = |flags: u32, flags2: &[u8]| {
            let mut body = Vec::new();
            for word in [7, 45, 131_072, flags] {
                body.extend_from_slice(&word.to_ne_bytes());
            }
            body.extend_from_slice(flags2);
            let bytes = message(26, &body);
            match parse(&bytes).expect("a message").request {
                Request::Init { resends, .. } => resends,
                other => panic!("{other:?}"),
            }
        };
        let all = u32::MAX.to_ne_bytes();
        assert!(resends(INIT_EXT, &all));
        assert!(!resends(0, &all) && !resends(INIT_EXT, &[]));
        assert!(!resends(INIT_EXT, &(!HAS_RESEND).to_ne_bytes()));
    }

    #[test]
    fn a_count_of_nodes_that_lies_costs_nothing() {
        let mut body = Vec::from(u64::MAX.to_ne_bytes());
        for word in [3_u64, 1, 4, 1] {
            body.extend_from_slice(&word.to_ne_bytes());
        }
        body.extend_from_slice(&[1; 15]);
        let bytes = message(42, &body);
        let request = parse(&bytes).expect("a message").request;
        assert_eq!(request, Request::Forget(vec![3, 4]));
    }

    #[test]
    fn entries_continue_where_the_last_ones_ended() {
        let all = || [(1, ".", true), (1, "..", true), (5, "web", false)].into_iter();
        assert_eq!(entries(all(), 0, 4096).len(), 96);
        let first = entries(all(), 0, 70);
        assert_eq!(first.len(), 64);
        let last = entries(all(), 2, 4096);
        assert_eq!((last.len(), &last[24..27]), (32, &b"web"[..]));
        assert!(entries(all(), 3, 4096).is_empty() && entries(all(), u64::MAX, 4096).is_empty());
    }

    proptest! {
        #[test]
        fn no_message_of_any_kind_is_read_beyond_its_end(
            opcode in 0_u32..60,
            len in any::<u32>(),
            body in prop::collection::vec(any::<u8>(), 0..120),
        ) {
            let mut bytes = message(opcode, &body);
            let _ = parse(&bytes);
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
            let _ = parse(&bytes);
            let _ = parse(&body);
        }
    }
}
