//! A process between two: it passes on what a sender says, as the bridge does.

use super::wire::{
    COMPLETE, COMPLETE_PAUSED, MEMORY_FD, STATE, expect_ok, read_header, read_memory_fd,
    read_payload, request, respond, send_memory_fd,
};
use crate::double::Done;
use rustix::fs::FallocateFlags;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Brings the VM of the sender behind `source` to the receiver at `target`. The answer to its first
/// page comes after `hold`. Returns the pages that were answered before State was.
///
/// # Errors
/// The refusal of the receiver, or that of a connection, with those pages.
pub fn relay(source: &UnixStream, target: &Path, hold: Duration) -> (u64, Done) {
    let answered = Arc::new(AtomicU64::new(0));
    let mut before = 0;
    let mut pass = || -> Done {
        let main = UnixStream::connect(target)?;
        loop {
            let (command, length) = read_header(source)?;
            let step = if command == MEMORY_FD {
                let (slot, fd) = read_memory_fd(source)?;
                // All of its pages are in the page cache, as an answer says.
                let bytes = rustix::fs::fstat(&fd)?.st_size as u64;
                rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, bytes)?;
                send_memory_fd(&main, slot, Some(&fd))?;
                expect_ok(&main, "MemoryFd")
            } else {
                let payload = read_payload(source, length)?;
                if command == STATE {
                    let mut faults = UnixStream::connect(target)?;
                    faults.write_all(&2_u16.to_le_bytes())?;
                    let answered = Arc::clone(&answered);
                    std::thread::spawn(move || answer(&faults, hold, &answered));
                }
                request(&main, command, &payload, "the request")
            };
            before = match command {
                STATE => answered.load(Ordering::SeqCst),
                _ => before,
            };
            respond(source, step.is_ok())?;
            step?;
            if [COMPLETE, COMPLETE_PAUSED].contains(&command) {
                return Ok(());
            }
        }
    };
    let done = pass();
    (before, done)
}

/// Answers all page faults. The bytes are in the memfds, which are the sender's own.
fn answer(faults: &UnixStream, hold: Duration, answered: &AtomicU64) -> Done {
    loop {
        let (_, length) = read_header(faults)?;
        read_payload(faults, length)?;
        if answered.load(Ordering::SeqCst) == 0 {
            std::thread::sleep(hold);
        }
        answered.fetch_add(1, Ordering::SeqCst);
        respond(faults, true)?;
    }
}
