//! Virtio devices on virtio-mmio.
//!
//! [`MmioTransport`] has the registers, and one worker thread that serves the queues in order. A
//! request leaves its queue when its answer is there. So a worker that stops in between leaves the
//! request where it was, and the other end serves it.
//!
//! Sources: Virtual I/O Device (VIRTIO) Version 1.2, sections 2.7 (split virtqueues), 4.2
//! (virtio-mmio), 5.1 (network), 5.2 (block), 5.4 (entropy).

mod block;
mod chain;
mod entropy;
mod lock;
mod net;
mod registers;
mod tap;
mod transport;

pub use block::Block;
pub use chain::{Chain, Fault};
pub use entropy::Entropy;
pub use net::{Mac, Net};
pub use tap::Tap;
pub use transport::MmioTransport;

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// A device behind a transport.
pub trait VirtioDevice: Send {
    /// Its type, a number of the specification's section 5.
    fn id(&self) -> u32;

    /// The number of its queues.
    fn queues(&self) -> usize {
        1
    }

    /// The features of its type that it offers.
    fn features(&self) -> u64 {
        0
    }

    /// Its configuration.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Serves a request of `queue`. Returns the number of bytes that it wrote, or `None` if it has
    /// nothing for the request yet: the request stays in its queue.
    ///
    /// # Errors
    /// [`Fault`]. After [`Fault::Later`] the request is served once more, from its start.
    fn serve(&mut self, queue: usize, chain: &Chain) -> Result<Option<u32>, Fault>;

    /// A file that is readable when the device has something for a request in queue 0.
    fn input(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Does what is due at times of its own. Returns after how long to call it again.
    fn tick(&mut self) -> Option<Duration> {
        None
    }

    /// Makes all its work durable, and lets another host use what it used.
    ///
    /// # Errors
    /// When it cannot.
    fn pause(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Lets it work again. `arrived`: its state came from another host.
    fn resume(&mut self, _arrived: bool) {}

    /// Its own state, which travels.
    fn state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Whether a state is one of this device.
    ///
    /// # Errors
    /// The words say what was wrong, and what would be right.
    fn check(&self, state: &[u8]) -> Result<(), String> {
        match state.len() {
            0 => Ok(()),
            more => Err(format!("{more} bytes too many")),
        }
    }

    /// Takes a state that was checked.
    fn apply(&mut self, _state: &[u8]) {}
}
