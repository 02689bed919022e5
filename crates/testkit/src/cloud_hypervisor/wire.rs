//! The double's own messages, written from the facts of the protocol.

use crate::double::Done;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

pub(super) const START: u16 = 1;
pub(super) const CONFIG: u16 = 2;
pub(super) const STATE: u16 = 3;
pub(super) const MEMORY: u16 = 4;
pub(super) const COMPLETE: u16 = 5;
pub(super) const ABANDON: u16 = 6;
pub(super) const MEMORY_FD: u16 = 7;
pub(super) const COMPLETE_PAUSED: u16 = 8;
pub(super) const PAGE_FAULT: u16 = 9;

pub(super) fn header(command: u16, version: u16, length: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..2].copy_from_slice(&command.to_le_bytes());
    bytes[2..4].copy_from_slice(&version.to_le_bytes());
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

/// Reads a header: a command or a status, and a length.
pub(super) fn read_header(mut stream: &UnixStream) -> io::Result<(u16, u64)> {
    let mut bytes = [0; 16];
    stream.read_exact(&mut bytes)?;
    let number = u16::from_le_bytes([bytes[0], bytes[1]]);
    let mut length = [0; 8];
    length.copy_from_slice(&bytes[8..]);
    Ok((number, u64::from_le_bytes(length)))
}

pub(super) fn read_payload(mut stream: &UnixStream, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

pub(super) fn respond(mut stream: &UnixStream, ok: bool) -> io::Result<()> {
    stream.write_all(&header(if ok { 1 } else { 2 }, 0, 0))
}

/// Waits for a response. The error says what was refused.
pub(super) fn expect_ok(stream: &UnixStream, what: &str) -> Done {
    match read_header(stream).map_err(|why| format!("{what}: {why}"))? {
        (1, 0) => Ok(()),
        (status, _) => Err(format!("{what}: status {status}").into()),
    }
}

/// Sends a request, and waits for its response.
pub(super) fn request(mut raw: &UnixStream, command: u16, payload: &[u8], what: &str) -> Done {
    raw.write_all(&header(command, 0, payload.len() as u64))?;
    raw.write_all(payload)?;
    expect_ok(raw, what)
}

/// Sends the request MemoryFd, without waiting.
pub(super) fn send_memory_fd(
    mut stream: &UnixStream,
    slot: u32,
    fd: Option<&OwnedFd>,
) -> io::Result<()> {
    stream.write_all(&header(MEMORY_FD, 0, 4))?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let slot = slot.to_le_bytes();
    let parts = [IoSlice::new(&slot)];
    rustix::net::sendmsg(stream, &parts, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Reads the payload of MemoryFd.
pub(super) fn read_memory_fd(stream: &UnixStream) -> io::Result<(u32, OwnedFd)> {
    let mut slot = [0; 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut slot)];
    let got = rustix::net::recvmsg(stream, parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    match (got.bytes, fd) {
        (4, Some(fd)) => Ok((u32::from_le_bytes(slot), fd)),
        _ => Err(io::Error::other("MemoryFd came without a slot or a memfd")),
    }
}
