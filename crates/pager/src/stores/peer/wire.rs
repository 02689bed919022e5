//! The frames behind the handshake: fixed headers in little-endian. See
//! `docs/snapshot-protocol.md`.

use pageferry_transport::wire::{WireError, check, in_range, reserved_zero, xxh3_64};

/// The length of the header of a request or a reply.
pub const HEADER_BYTES: usize = 24;
/// The most bytes behind a header.
pub const MAX_BODY: u32 = 512 << 10;
/// The longest name of a file.
pub const MAX_NAME: usize = 1024;
/// The longest identity of a file.
pub const MAX_IDENTITY: usize = 256;
/// The longest sentence about an error.
pub const MAX_SENTENCE: usize = 1024;
/// The most extents in a reply.
pub const MAX_EXTENTS: u32 = MAX_BODY / EXTENT_BYTES as u32;

const EXTENT_BYTES: usize = 16;
/// The kind of a reply that says why there is no other.
const ERROR: u8 = 0xff;

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Opens the file whose name follows. It takes the place of the one that was open.
    Open = 1,
    /// The parts of the open file that have data, from an offset on.
    Extents = 2,
    /// Bytes of the open file.
    Read = 3,
}

impl Kind {
    fn of(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            1 => Self::Open,
            2 => Self::Extents,
            3 => Self::Read,
            _ => return Err(bad("kind", byte.into())),
        })
    }
}

/// The reason of an error reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// The request makes no sense.
    Malformed = 1,
    /// No file is shared under the name.
    Absent = 2,
    /// The file has changed since it was opened.
    Changed = 3,
    /// The file ends before.
    Short = 4,
    /// The server cannot read it.
    Failed = 5,
}

impl Code {
    fn of(byte: u8) -> Result<Self, WireError> {
        Ok(match byte {
            1 => Self::Malformed,
            2 => Self::Absent,
            3 => Self::Changed,
            4 => Self::Short,
            5 => Self::Failed,
            _ => return Err(bad("code", byte.into())),
        })
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked for.
    pub kind: Kind,
    /// The number that the reply has.
    pub number: u32,
    /// The first byte of the file that is meant. Zero for [`Kind::Open`].
    pub offset: u64,
    /// The bytes of the name that follows, the most extents, or the bytes to read.
    pub len: u32,
}

impl Request {
    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.kind as u8;
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Checks and takes a header apart.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let request = Self {
            kind: Kind::of(bytes[0])?,
            number: u32_at(bytes, 4),
            offset: u64_at(bytes, 8),
            len: u32_at(bytes, 16),
        };
        reserved_zero(
            "request",
            "reserved",
            &[&bytes[1..4], &bytes[20..]].concat(),
        )?;
        let most = match request.kind {
            Kind::Open => MAX_NAME as u32,
            Kind::Extents => MAX_EXTENTS,
            Kind::Read => MAX_BODY,
        };
        check_len(request.len, 1, most)?;
        match request.kind {
            Kind::Open if request.offset != 0 => Err(bad("offset", request.offset)),
            _ => Ok(request),
        }
    }
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The kind of the request, or the reason why the body is a sentence.
    pub kind: Result<Kind, Code>,
    /// The number of the request.
    pub number: u32,
    /// The length of the body.
    pub len: u32,
    /// Its xxh3.
    pub checksum: u64,
}

impl Reply {
    /// The header before a body.
    #[must_use]
    pub fn of(kind: Result<Kind, Code>, number: u32, body: &[u8]) -> Self {
        Self {
            kind,
            number,
            len: body.len() as u32,
            checksum: xxh3_64(body),
        }
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        match self.kind {
            Ok(kind) => bytes[0] = kind as u8,
            Err(code) => bytes[..2].copy_from_slice(&[ERROR, code as u8]),
        }
        bytes[4..8].copy_from_slice(&self.number.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Checks and takes a header apart.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let kind = match (bytes[0], bytes[1]) {
            (ERROR, code) => Err(Code::of(code)?),
            (kind, 0) => Ok(Kind::of(kind)?),
            (_, code) => return Err(bad("code", code.into())),
        };
        let reply = Self {
            kind,
            number: u32_at(bytes, 4),
            len: u32_at(bytes, 8),
            checksum: u64_at(bytes, 16),
        };
        reserved_zero(
            "reply",
            "reserved",
            &[&bytes[2..4], &bytes[12..16]].concat(),
        )?;
        let most = match kind {
            Err(_) => MAX_SENTENCE as u32,
            Ok(_) => MAX_BODY,
        };
        check_len(reply.len, 0, most)?;
        Ok(reply)
    }

    /// Checks the body.
    ///
    /// # Errors
    /// [`WireError::Checksum`].
    pub fn check(&self, body: &[u8]) -> Result<(), WireError> {
        check("reply", self.checksum, xxh3_64(body))
    }
}

fn bad(field: &'static str, value: u64) -> WireError {
    let what = "frame";
    WireError::BadField { what, field, value }
}

/// Refuses a length outside `least..=most`.
pub(crate) fn check_len(found: u32, least: u32, most: u32) -> Result<(), WireError> {
    in_range("frame", "length", found.into(), least.into(), most.into())
}

/// A file at a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Opened {
    /// Its length.
    pub bytes: u64,
    /// What tells it from a changed one.
    pub identity: String,
}

impl Opened {
    /// The body of the reply to [`Kind::Open`].
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        [&self.bytes.to_le_bytes(), self.identity.as_bytes()].concat()
    }

    /// Checks and takes a body apart.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(body: &[u8]) -> Result<Self, WireError> {
        check_len(body.len() as u32, 9, (8 + MAX_IDENTITY) as u32)?;
        let (bytes, identity) = body.split_at(8);
        let identity = str::from_utf8(identity)
            .map_err(|why| bad("identity", identity[why.valid_up_to()].into()))?;
        match identity.chars().find(|c| c.is_control()) {
            Some(control) => Err(bad("identity", u32::from(control).into())),
            None => Ok(Self {
                bytes: u64_at(bytes, 0),
                identity: identity.to_owned(),
            }),
        }
    }
}

/// The body of the reply to [`Kind::Extents`].
#[must_use]
pub fn encode_extents(extents: &[(u64, u64)]) -> Vec<u8> {
    let bytes = |(start, end): &(u64, u64)| [start.to_le_bytes(), end.to_le_bytes()].concat();
    extents.iter().flat_map(bytes).collect()
}

/// Checks and takes apart the extents from byte `from` of a file of `bytes`.
///
/// # Errors
/// [`WireError`].
pub fn decode_extents(body: &[u8], from: u64, bytes: u64) -> Result<Vec<(u64, u64)>, WireError> {
    let (extents, rest) = body.as_chunks::<EXTENT_BYTES>();
    let mut at = from;
    let mut checked = Vec::with_capacity(extents.len());
    for extent in extents {
        let (start, end) = (u64_at(extent, 0), u64_at(extent, 8));
        if start < at || end <= start || end > bytes {
            return Err(bad("extents", start));
        }
        checked.push((start, end));
        at = end;
    }
    match rest.is_empty() {
        true => Ok(checked),
        false => Err(bad("length", body.len() as u64)),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
