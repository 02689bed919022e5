//! The server's side of the protocol.

use super::error::PeerError;
use super::shares::Shares;
use super::wire::{
    Code, HEADER_BYTES, Kind, MAX_IDENTITY, MAX_SENTENCE, Opened, Reply, Request, encode_extents,
};
use crate::{FileSource, Source, SourceError};
use std::io::{self, Read, Write};
use std::sync::Arc;

/// The largest buffer that is kept for the next request.
const KEPT_BYTES: usize = 256 << 10;

/// What a server waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Awaits {
    /// The next request.
    Request,
    /// The rest of a request, and that the peer takes the reply.
    Exchange,
}

/// A stream whose waits have limits.
pub trait Limited: Read + Write {
    /// All reads and writes until the next call belong to this.
    fn limit(&mut self, what: Awaits);
}

/// Answers requests until the peer ends.
///
/// # Errors
/// [`PeerError`].
pub fn answer(stream: &mut impl Limited, shares: &Shares) -> Result<(), PeerError> {
    let mut open: Option<Arc<FileSource>> = None;
    let mut header = [0; HEADER_BYTES];
    let mut frame = Vec::new();
    loop {
        stream.limit(Awaits::Request);
        match stream.read(&mut header[..1]) {
            Ok(0) => return Ok(()),
            // Without a farewell of TLS. Nothing is lost between two requests.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            result => result?,
        };
        stream.limit(Awaits::Exchange);
        stream.read_exact(&mut header[1..])?;
        let request = match Request::decode(&header) {
            Ok(request) => request,
            Err(why) => {
                // The number is at its place in every version of the header.
                let number = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
                let refusal = (Code::Malformed, why.to_string());
                reply(stream, &mut frame, number, Err(refusal))?;
                return Err(why.into());
            }
        };
        if frame.capacity() > KEPT_BYTES {
            frame = Vec::new();
        }
        frame.clear();
        frame.resize(HEADER_BYTES, 0);
        let result = match (request.kind, &open) {
            (Kind::Open, _) => {
                let mut name = vec![0; request.len as usize];
                stream.read_exact(&mut name)?;
                self::open(shares, &name).map(|file| {
                    let opened = Opened {
                        bytes: file.bytes(),
                        identity: identity(&file),
                    };
                    frame.extend(opened.encode());
                    open = Some(file);
                })
            }
            (_, None) => Err((
                Code::Malformed,
                "no file is open: open one first".to_owned(),
            )),
            (Kind::Extents, Some(file)) => file.extents().map_err(refusal).map(|extents| {
                let first = extents.partition_point(|&(_, end)| end <= request.offset);
                let extents = extents[first..].iter().take(request.len as usize);
                let clipped = |&(start, end): &(u64, u64)| (start.max(request.offset), end);
                frame.extend(encode_extents(&extents.map(clipped).collect::<Vec<_>>()));
            }),
            (Kind::Read, Some(file)) => read(file, &request, &mut frame),
        };
        reply(
            stream,
            &mut frame,
            request.number,
            result.map(|()| request.kind),
        )?;
    }
}

/// The reason for a peer.
type Refusal = (Code, String);

fn open(shares: &Shares, name: &[u8]) -> Result<Arc<FileSource>, Refusal> {
    let name = str::from_utf8(name).map_err(|_| {
        (
            Code::Malformed,
            "a name is UTF-8, and this one is not".to_owned(),
        )
    })?;
    shares.open(name).map_err(|why| {
        // The path at this host is no matter of the peer's.
        tracing::debug!("'{}' was asked for: {why}", name.escape_debug());
        match why {
            SourceError::Failed { why, .. } if why.kind() == io::ErrorKind::NotFound => {
                (Code::Absent, "no file is shared under this name".to_owned())
            }
            SourceError::Failed { why, .. } => (Code::Failed, why.to_string()),
            why => (Code::Failed, why.to_string()),
        }
    })
}

fn read(file: &FileSource, request: &Request, frame: &mut Vec<u8>) -> Result<(), Refusal> {
    let end = request.offset.checked_add(request.len.into());
    if end.is_none_or(|end| end > file.bytes()) {
        let why = format!("the file ends at byte {}", file.bytes());
        return Err((Code::Short, why));
    }
    frame.resize(HEADER_BYTES + request.len as usize, 0);
    file.read(request.offset, &mut frame[HEADER_BYTES..])
        .map_err(refusal)
}

fn refusal(why: SourceError) -> Refusal {
    match why {
        SourceError::Changed { now, .. } => (Code::Changed, shortened(now, MAX_IDENTITY)),
        SourceError::Short { end, .. } => (
            Code::Short,
            format!("the file was cut off before byte {end}"),
        ),
        SourceError::Failed { why, .. } => (Code::Failed, why.to_string()),
        why => (Code::Failed, why.to_string()),
    }
}

/// The sum of what tells a file from others, whose text is long. Another file with the same bytes
/// is another one: its samples are no proof.
fn identity(file: &FileSource) -> String {
    let sum = xxhash_rust::xxh3::xxh3_128(file.identity().as_bytes());
    format!("{} bytes with the sum {sum:032x}", file.bytes())
}

/// Sends the frame, whose body is behind room for the header, or a refusal instead.
fn reply(
    stream: &mut impl Write,
    frame: &mut Vec<u8>,
    number: u32,
    result: Result<Kind, Refusal>,
) -> io::Result<()> {
    let kind = result.map_err(|(code, why)| {
        frame.clear();
        frame.resize(HEADER_BYTES, 0);
        frame.extend(shortened(why, MAX_SENTENCE).into_bytes());
        code
    });
    let header = Reply::of(kind, number, &frame[HEADER_BYTES..]).encode();
    frame[..HEADER_BYTES].copy_from_slice(&header);
    stream.write_all(frame)?;
    stream.flush()
}

fn shortened(mut text: String, most: usize) -> String {
    let mut end = most.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}
