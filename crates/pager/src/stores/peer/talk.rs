//! The client's side of the protocol.

use super::error::PeerError;
use super::wire::{
    HEADER_BYTES, Kind, MAX_BODY, MAX_EXTENTS, MAX_IDENTITY, Opened, Reply, Request, check_len,
    decode_extents,
};
use pageferry_transport::wire::in_range;
use std::io::{Read, Write};

/// A conversation over a stream. After an error that is no answer of the peer it is of no use.
#[derive(Debug)]
pub struct Talk<S> {
    stream: S,
    number: u32,
}

impl<S: Read + Write> Talk<S> {
    /// A conversation over a connection that is open at both sides.
    pub const fn new(stream: S) -> Self {
        Self { stream, number: 0 }
    }

    /// The stream.
    pub fn stream(&mut self) -> &mut S {
        &mut self.stream
    }

    /// Opens a file.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn open(&mut self, name: &str) -> Result<Opened, PeerError> {
        let reply = self.ask(Kind::Open, 0, name.len() as u32, name.as_bytes())?;
        check_len(reply.len, 9, (8 + MAX_IDENTITY) as u32)?;
        let mut body = vec![0; reply.len as usize];
        self.body(&reply, &mut body)?;
        Ok(Opened::decode(&body)?)
    }

    /// The parts with data of the open file of `bytes`: at most `most`. The rest counts as data.
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn extents(&mut self, bytes: u64, most: usize) -> Result<Vec<(u64, u64)>, PeerError> {
        let mut extents: Vec<(u64, u64)> = Vec::new();
        loop {
            let from = extents.last().map_or(0, |&(_, end)| end);
            if extents.len() >= most && from < bytes {
                extents.push((from, bytes));
            }
            if from >= bytes || extents.len() > most {
                return Ok(extents);
            }
            let reply = self.ask(Kind::Extents, from, MAX_EXTENTS, &[])?;
            let mut body = vec![0; reply.len as usize];
            self.body(&reply, &mut body)?;
            let more = decode_extents(&body, from, bytes)?;
            if more.is_empty() {
                return Ok(extents);
            }
            extents.extend(more);
        }
    }

    /// Reads bytes of the open file, at most [`MAX_BODY`].
    ///
    /// # Errors
    /// [`PeerError`].
    pub fn read(&mut self, offset: u64, buffer: &mut [u8]) -> Result<(), PeerError> {
        let len = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        check_len(len, 1, MAX_BODY)?;
        let reply = self.ask(Kind::Read, offset, len, &[])?;
        check_len(reply.len, len, len)?;
        self.body(&reply, buffer)
    }

    /// Sends a request, and receives the header of its reply.
    fn ask(&mut self, kind: Kind, offset: u64, len: u32, name: &[u8]) -> Result<Reply, PeerError> {
        self.number = self.number.wrapping_add(1);
        let request = Request {
            kind,
            number: self.number,
            offset,
            len,
        };
        self.stream
            .write_all(&[&request.encode()[..], name].concat())?;
        self.stream.flush()?;
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header)?;
        let reply = Reply::decode(&header)?;
        let number = self.number.into();
        in_range("reply", "number", reply.number.into(), number, number)?;
        match reply.kind {
            Ok(found) => {
                let (kind, found) = (kind as u64, found as u64);
                in_range("reply", "kind", found, kind, kind)?;
                Ok(reply)
            }
            Err(code) => {
                let mut sentence = vec![0; reply.len as usize];
                self.body(&reply, &mut sentence)?;
                // It may reach a terminal.
                let sentence = String::from_utf8_lossy(&sentence).replace(char::is_control, " ");
                Err(PeerError::Refused { code, sentence })
            }
        }
    }

    fn body(&mut self, reply: &Reply, body: &mut [u8]) -> Result<(), PeerError> {
        self.stream.read_exact(body)?;
        Ok(reply.check(body)?)
    }
}
