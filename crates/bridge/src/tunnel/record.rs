//! The bytes of a connection between two tunnels, after the handshake.
//!
//! **Guarantee.** For any bytes, the decoder returns records with every field in its range, or an
//! error that names the offending value. It keeps at most one record's bytes.
//!
//! **Mechanism.** A record is a header of 32 bytes and a payload. docs/bridge.md has the table.
//! The checksum is the xxh3-64 of the header before it and the payload.

use bytes::{Bytes, BytesMut};
use pageferry_migration::wire::{MAX_NAME_BYTES, in_range};
use pageferry_migration::{Name, WireError};
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3Default;
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first four bytes of every record: the letters `PGFT`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"PGFT");
/// The version of these bytes. Both sides have the same one.
pub const VERSION: u16 = 1;
/// The length of a header, in bytes.
pub const HEADER_BYTES: usize = size_of::<Header>();
/// The longest payload, in bytes.
pub const MAX_PAYLOAD: usize = 256 << 10;
/// The most streams of one session: QEMU opens at most 255 of multifd and two more.
pub const MAX_STREAMS: u32 = 260;
/// The longest reason for an end, in bytes of UTF-8.
pub const MAX_REASON: usize = 1024;

const FINISHED: u8 = 1;
const BROKEN: u8 = 2;
const STOPPED: u8 = 4;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy)]
#[repr(C)]
struct Header {
    magic: U32,
    kind: u8,
    flags: u8,
    reserved: U16,
    stream: U32,
    length: U32,
    value: U64,
    checksum: U64,
}

/// The way in which one direction of a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// The VMM closed it, or ended sending.
    Finished,
    /// The VMM's socket failed.
    Broken,
}

/// A message between two tunnels.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Record {
    /// The first record of each side on each connection.
    Start(Start),
    /// Bytes of a stream.
    Data {
        /// The stream, from 1, in the order of opening.
        stream: u32,
        /// The position of the first byte in its direction.
        at: u64,
        /// The bytes.
        bytes: Bytes,
        /// The end behind the bytes, if it is known.
        end: Option<Ending>,
    },
    /// The VMM has taken bytes of a stream.
    Delivered(Delivered),
    /// Says which records have arrived, and that this side lives.
    Received {
        /// The records of the other side that have arrived on this connection.
        records: u64,
        /// The streams that this side's VMM has opened so far. 0 where the other side's VMM does.
        streams: u32,
    },
    /// The session is over. Without a reason, all streams ended by themselves.
    Bye {
        /// The reason, for people.
        reason: String,
    },
}

/// The first record of each side on each connection.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Start {
    /// The route of the session. The other side answers with the same.
    pub route: Name,
    /// The most bytes that this side keeps.
    pub window: u64,
    /// The silence after which this side leaves a connection.
    pub dead_after: Duration,
}

/// What the VMM has taken of one direction of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Delivered {
    /// The stream.
    pub stream: u32,
    /// The bytes that the VMM has taken, counted from the start.
    pub until: u64,
    /// Whether it has got the end too.
    pub ended: bool,
    /// Whether it takes no more: its end is closed.
    pub stopped: bool,
}

impl Record {
    /// The name, for errors.
    const fn what(kind: u8) -> &'static str {
        match kind {
            1 => "tunnel Start",
            2 => "tunnel Data",
            3 => "tunnel Delivered",
            4 => "tunnel Received",
            5 => "tunnel Bye",
            _ => "tunnel record",
        }
    }

    /// Returns the header's bytes. Those of [`payload`](Self::payload) follow.
    #[must_use]
    pub fn header(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        let (kind, flags, stream, value) = match self {
            Self::Start(start) => {
                let ms = u64::try_from(start.dead_after.as_millis()).unwrap_or(u64::MAX);
                (1, 0, u32::from(VERSION), ms)
            }
            Self::Data {
                stream, at, end, ..
            } => {
                let flags = match end {
                    None => 0,
                    Some(Ending::Finished) => FINISHED,
                    Some(Ending::Broken) => BROKEN,
                };
                (2, flags, *stream, *at)
            }
            Self::Delivered(delivered) => {
                let ended = if delivered.ended { FINISHED } else { 0 };
                let stopped = if delivered.stopped { STOPPED } else { 0 };
                (3, ended | stopped, delivered.stream, delivered.until)
            }
            Self::Received { records, streams } => (4, 0, *streams, *records),
            Self::Bye { .. } => (5, 0, 0, 0),
        };
        let mut header = Header {
            magic: MAGIC.into(),
            kind,
            flags,
            reserved: U16::ZERO,
            stream: stream.into(),
            length: U32::new(payload.len() as u32),
            value: value.into(),
            checksum: U64::ZERO,
        };
        header.checksum = checksum(&header, payload).into();
        zerocopy::transmute!(header)
    }

    /// Returns the payload.
    #[must_use]
    pub fn payload(&self) -> Bytes {
        match self {
            Self::Start(start) => {
                let mut bytes = BytesMut::from(&start.window.to_le_bytes()[..]);
                bytes.extend_from_slice(start.route.as_str().as_bytes());
                bytes.freeze()
            }
            Self::Data { bytes, .. } => bytes.clone(),
            Self::Bye { reason } => {
                let end = (0..=MAX_REASON.min(reason.len()))
                    .rev()
                    .find(|&end| reason.is_char_boundary(end));
                Bytes::copy_from_slice(&reason.as_bytes()[..end.unwrap_or(0)])
            }
            Self::Delivered(_) | Self::Received { .. } => Bytes::new(),
        }
    }
}

fn checksum(header: &Header, payload: &[u8]) -> u64 {
    let mut hasher = Xxh3Default::new();
    hasher.update(&header.as_bytes()[..HEADER_BYTES - 8]);
    hasher.update(payload);
    hasher.digest()
}

/// The bytes of a connection that are no whole record yet.
#[derive(Debug, Default)]
pub struct Decoder {
    bytes: BytesMut,
}

impl Decoder {
    /// Adds bytes that have arrived.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Takes the next record, or `None` if more bytes must come first.
    ///
    /// # Errors
    /// [`WireError`] with the offending value. The connection is of no more use then.
    pub fn take(&mut self) -> Result<Option<Record>, WireError> {
        let Some(head) = self.bytes.first_chunk::<HEADER_BYTES>() else {
            return Ok(None);
        };
        let header: Header = zerocopy::transmute!(*head);
        let what = Record::what(header.kind);
        if header.magic.get() != MAGIC {
            let value = header.magic.get().into();
            return Err(bad(what, "magic", value));
        }
        let length = header.length.get();
        let (least, most) = match header.kind {
            1 => (9, 8 + MAX_NAME_BYTES),
            2 => (0, MAX_PAYLOAD),
            3 | 4 => (0, 0),
            5 => (0, MAX_REASON),
            kind => return Err(bad(what, "kind", kind.into())),
        };
        in_range(what, "length", length.into(), least as u64, most as u64)?;
        let whole = HEADER_BYTES + length as usize;
        if self.bytes.len() < whole {
            self.bytes.reserve(whole - self.bytes.len());
            return Ok(None);
        }
        let mut record = self.bytes.split_to(whole);
        let payload = record.split_off(HEADER_BYTES).freeze();
        let computed = checksum(&header, &payload);
        if header.checksum.get() != computed {
            return Err(WireError::Checksum {
                what,
                found: header.checksum.get(),
                computed,
            });
        }
        header.read(what, payload).map(Some)
    }

    /// Whether a record has begun and is not whole.
    #[must_use]
    pub fn is_mid_record(&self) -> bool {
        !self.bytes.is_empty()
    }
}

impl Header {
    fn read(&self, what: &'static str, payload: Bytes) -> Result<Record, WireError> {
        if self.reserved.get() != 0 {
            return Err(bad(what, "reserved", self.reserved.get().into()));
        }
        let (stream, value) = (self.stream.get(), self.value.get());
        let known = match self.kind {
            2 => FINISHED | BROKEN,
            3 => FINISHED | STOPPED,
            _ => 0,
        };
        if self.flags & !known != 0 {
            return Err(bad(what, "flags", self.flags.into()));
        }
        if matches!(self.kind, 2 | 3) {
            in_range(what, "stream", stream.into(), 1, MAX_STREAMS.into())?;
        }
        Ok(match self.kind {
            1 => {
                in_range(
                    what,
                    "version",
                    stream.into(),
                    VERSION.into(),
                    VERSION.into(),
                )?;
                let (window, route) = payload.split_first_chunk::<8>().expect("its least length");
                let route = std::str::from_utf8(route).map_err(|_| bad(what, "route", 0))?;
                in_range(what, "dead_after", value, 1, u32::MAX.into())?;
                Record::Start(Start {
                    route: route.parse()?,
                    window: u64::from_le_bytes(*window),
                    dead_after: Duration::from_millis(value),
                })
            }
            2 => {
                let end = match self.flags {
                    0 => None,
                    FINISHED => Some(Ending::Finished),
                    BROKEN => Some(Ending::Broken),
                    flags => return Err(bad(what, "flags", flags.into())),
                };
                if payload.is_empty() && end.is_none() {
                    return Err(bad(what, "length", 0));
                }
                in_range(what, "at", value, 0, u64::MAX - MAX_PAYLOAD as u64)?;
                Record::Data {
                    stream,
                    at: value,
                    bytes: payload,
                    end,
                }
            }
            3 => Record::Delivered(Delivered {
                stream,
                until: value,
                ended: self.flags & FINISHED != 0,
                stopped: self.flags & STOPPED != 0,
            }),
            4 => {
                in_range(what, "streams", stream.into(), 0, MAX_STREAMS.into())?;
                Record::Received {
                    records: value,
                    streams: stream,
                }
            }
            _ => Record::Bye {
                reason: String::from_utf8_lossy(&payload).into_owned(),
            },
        })
    }
}

const fn bad(what: &'static str, field: &'static str, value: u64) -> WireError {
    WireError::BadField { what, field, value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(record: &Record) -> Vec<u8> {
        let payload = record.payload();
        [&record.header(&payload)[..], &payload].concat()
    }

    fn ending() -> impl Strategy<Value = Option<Ending>> {
        prop_oneof![
            Just(None),
            Just(Some(Ending::Finished)),
            Just(Some(Ending::Broken))
        ]
    }

    fn record() -> impl Strategy<Value = Record> {
        prop_oneof![
            ("[!-~]{1,64}", any::<u64>(), 1..=u64::from(u32::MAX)).prop_map(
                |(route, window, ms)| {
                    Record::Start(Start {
                        route: route.parse().unwrap(),
                        window,
                        dead_after: Duration::from_millis(ms),
                    })
                }
            ),
            (
                1..=MAX_STREAMS,
                0..=u64::MAX >> 1,
                prop::collection::vec(any::<u8>(), 1..99),
                ending()
            )
                .prop_map(|(stream, at, bytes, end)| Record::Data {
                    stream,
                    at,
                    bytes: bytes.into(),
                    end
                }),
            (1..=MAX_STREAMS, any::<u64>(), any::<bool>(), any::<bool>()).prop_map(
                |(stream, until, ended, stopped)| Record::Delivered(Delivered {
                    stream,
                    until,
                    ended,
                    stopped
                })
            ),
            (any::<u64>(), 0..=MAX_STREAMS)
                .prop_map(|(records, streams)| Record::Received { records, streams }),
            ".{0,80}".prop_map(|reason| Record::Bye { reason }),
        ]
    }

    proptest! {
        #[test]
        fn records_come_out_as_they_went_in_however_they_are_cut(
            records in prop::collection::vec(record(), 1..8),
            piece in 1..200usize,
        ) {
            let bytes: Vec<u8> = records.iter().flat_map(encode).collect();
            let mut decoder = Decoder::default();
            let mut found = Vec::new();
            for piece in bytes.chunks(piece) {
                decoder.push(piece);
                while let Some(record) = decoder.take().unwrap() {
                    found.push(record);
                }
            }
            prop_assert_eq!(found, records);
            prop_assert!(!decoder.is_mid_record());
        }

        #[test]
        fn one_wrong_byte_is_found(record in record(), at in any::<prop::sample::Index>(), flip in 1..=255u8) {
            let mut bytes = encode(&record);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            // A length may have grown: then the rest is awaited.
            prop_assert!(!matches!(decoder.take(), Ok(Some(_))));
        }
    }

    #[test]
    fn fields_out_of_range_are_told() {
        let told = |record: Record, change: fn(&mut Header)| {
            let payload = record.payload();
            let mut header: Header = zerocopy::transmute!(record.header(&payload));
            change(&mut header);
            header.checksum = checksum(&header, &payload).into();
            let mut decoder = Decoder::default();
            decoder.push(header.as_bytes());
            decoder.push(&payload);
            decoder.take().unwrap_err().to_string()
        };
        let received = Record::Received {
            records: 1,
            streams: 0,
        };
        let data = Record::Data {
            stream: 1,
            at: 0,
            bytes: Bytes::from_static(b"x"),
            end: None,
        };
        let start = Record::Start(Start {
            route: "r".parse().unwrap(),
            window: 1,
            dead_after: Duration::from_secs(1),
        });
        for (record, change, part) in [
            (
                &received,
                (|h| h.magic = 7.into()) as fn(&mut Header),
                "magic",
            ),
            (&received, |h| h.kind = 9, "kind"),
            (&received, |h| h.length = 1.into(), "length"),
            (&received, |h| h.flags = 1, "flags"),
            (&received, |h| h.reserved = 1.into(), "reserved"),
            (&received, |h| h.stream = 261.into(), "streams"),
            (&data, |h| h.stream = 0.into(), "stream"),
            (&data, |h| h.stream = 261.into(), "stream"),
            (&data, |h| h.flags = 3, "flags"),
            (&data, |h| h.value = u64::MAX.into(), "at"),
            (
                &data,
                |h| h.length = (MAX_PAYLOAD as u32 + 1).into(),
                "length",
            ),
            (&start, |h| h.stream = 2.into(), "version"),
            (&start, |h| h.value = 0.into(), "dead_after"),
        ] {
            let why = told(record.clone(), change);
            assert!(why.contains(part), "{part}: {why}");
        }
        let nothing = Record::Data {
            stream: 1,
            at: 0,
            bytes: Bytes::new(),
            end: None,
        };
        assert!(told(nothing, |_| ()).contains("length"));
    }
}
