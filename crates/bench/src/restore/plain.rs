//! A page server as small as published examples: one thread that polls, reads the page from the
//! memory file, and copies it. It stands for them in `bench restore`, and says so there.

use crate::BenchError;
use crate::error::os;
use pageferry_addr::{Hva, PAGE_SIZE};
use pageferry_pager::Handshake;
use pageferry_userfault::uffd::{Event, EventReader, Wait, Wake};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixListener;
use std::time::Duration;

/// Serves one VM until its connection ends. Returns the number of its faults.
pub(super) fn serve(listener: &UnixListener, memory: &File) -> Result<u64, BenchError> {
    let (stream, _) = listener.accept().map_err(os("cannot accept a VMM"))?;
    let bytes = memory.metadata().map_err(os("the memory file"))?.len();
    let handshake = Handshake::receive(stream.as_fd(), bytes, None).map_err(BenchError::peer)?;
    let uffd = handshake.uffd;
    let region = handshake.regions[0];
    let mut reader = EventReader::new(1);
    let mut page = [0; PAGE_SIZE as usize];
    let mut faults = 0;
    loop {
        let wait = Wait {
            spin: Duration::ZERO,
            limit: None,
            stop: Some(stream.as_fd()),
        };
        let event = reader.next(&uffd, wait);
        let Some(event) = event.map_err(BenchError::peer)? else {
            return Ok(faults);
        };
        let Event::PageFault(fault) = event else {
            continue;
        };
        let at = fault.address.0 & !(PAGE_SIZE - 1);
        memory
            .read_exact_at(&mut page, region.offset + (at - region.address))
            .map_err(os("cannot read the memory file"))?;
        match uffd.copy(Hva(at), &page, Wake::Now) {
            Ok(()) => faults += 1,
            // Two threads on one page are two messages.
            Err(why) if why.is_already_there() => {
                let _ = uffd.wake(Hva(at), PAGE_SIZE);
            }
            Err(why) if why.is_process_gone() => return Ok(faults),
            Err(why) => return Err(BenchError::Peer(why.to_string())),
        }
    }
}
