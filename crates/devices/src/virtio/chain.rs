//! The requests of a queue, by `virtio-queue`.

use pageferry_addr::PAGE_SIZE;
use pageferry_machine::{AccessError, DeviceView};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::guest_memory::Error;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

/// Why a request is not answered now.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// It stays in its queue, and is served later.
    Later,
    /// The guest broke the rules of the queue.
    Broken,
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error {
            // A page that may still come. Bytes outside RAM give another error.
            Error::IOError(why) if why.get_ref().is_some_and(|why| why.is::<AccessError>()) => {
                Self::Later
            }
            _ => Self::Broken,
        }
    }
}

/// The most bytes of a request.
const MOST: u64 = 64 << 20;
const NO_INTERRUPT: u16 = 1;

fn read(memory: &DeviceView, at: u64, into: &mut [u8]) -> Result<(), Fault> {
    let place = memory.to_region_addr(GuestAddress(at));
    let (region, at) = place.ok_or(Fault::Broken)?;
    Ok(region.read_slice(into, at)?)
}

fn write(memory: &DeviceView, at: u64, from: &[u8]) -> Result<(), Fault> {
    let place = memory.to_region_addr(GuestAddress(at));
    let (region, at) = place.ok_or(Fault::Broken)?;
    Ok(region.write_slice(from, at)?)
}

/// Waits for the pages of `bytes` bytes. They stay present while `memory` is held.
fn bring(memory: &DeviceView, start: u64, bytes: u64) -> Result<(), Fault> {
    let Some(last) = bytes.checked_sub(1) else {
        return Ok(());
    };
    let last = start.checked_add(last).ok_or(Fault::Broken)?;
    let mut at = start;
    loop {
        read(memory, at, &mut [0])?;
        match at == last {
            true => return Ok(()),
            false => at = at.saturating_add(PAGE_SIZE).min(last),
        }
    }
}

/// The result of a step.
pub(super) enum Step {
    /// There is none.
    Empty,
    /// The device has nothing for it.
    Idle,
    /// It is answered.
    Done {
        /// Whether the guest wants an interrupt.
        interrupt: bool,
    },
}

/// Serves the next request of `queue`, which moves on when the answer is there. `stop` tells
/// whether waits for pages end.
///
/// # Errors
/// [`Fault`]. The queue is as it was.
pub(super) fn step(
    memory: &Arc<DeviceView>,
    queue: &mut QueueState,
    features: u64,
    stop: impl Fn() -> bool,
    serve: impl FnOnce(&Chain) -> Result<Option<u32>, Fault>,
) -> Result<Step, Fault> {
    // Then a request that is served can also be answered.
    let size = u64::from(queue.size);
    bring(memory, queue.desc_table, 16 * size)?;
    bring(memory, queue.avail_ring, 6 + 2 * size)?;
    bring(memory, queue.used_ring, 6 + 8 * size)?;
    let broken = |_| Fault::Broken;
    let mut all = Queue::try_from(*queue).map_err(broken)?;
    let Some(chain) = all.iter(Arc::clone(memory)).map_err(broken)?.next() else {
        return Ok(Step::Empty);
    };
    let head = chain.head_index();
    let chain = Chain::new(memory, chain, features).map_err(|fault| match stop() {
        true => Fault::Later, // The page of an indirect table is missing.
        false => fault,
    })?;
    let Some(bytes) = serve(&chain)? else {
        return Ok(Step::Idle);
    };
    all.add_used(&**memory, head, bytes).map_err(broken)?;
    *queue = all.state();
    // The guest sets the flag, and then looks for answers.
    fence(Ordering::SeqCst);
    let mut flags = [0; 2];
    read(memory, queue.avail_ring, &mut flags)?;
    Ok(Step::Done {
        interrupt: u16::from_le_bytes(flags) & NO_INTERRUPT == 0,
    })
}

/// A request: pieces of guest memory that the device reads, and those that it writes.
pub struct Chain {
    memory: Arc<DeviceView>,
    /// The features that the driver took.
    pub(super) features: u64,
    readable: Vec<(u64, u64)>,
    writable: Vec<(u64, u64)>,
}

impl Chain {
    fn new(
        memory: &Arc<DeviceView>,
        chain: DescriptorChain<Arc<DeviceView>>,
        features: u64,
    ) -> Result<Self, Fault> {
        let mut new = Self {
            memory: Arc::clone(memory),
            features,
            readable: Vec::new(),
            writable: Vec::new(),
        };
        let (mut total, mut is_whole) = (0, false);
        for piece in chain {
            let part = (piece.addr().0, u64::from(piece.len()));
            total += part.1;
            // Readable pieces are in front.
            let is_late = !piece.is_write_only() && !new.writable.is_empty();
            if total > MOST || is_late {
                return Err(Fault::Broken);
            }
            match piece.is_write_only() {
                true => new.writable.push(part),
                false => new.readable.push(part),
            }
            is_whole = !piece.has_next();
        }
        // A loop, or a next one that does not exist, ends early.
        is_whole.then_some(new).ok_or(Fault::Broken)
    }

    /// The number of bytes that the device may read.
    #[must_use]
    pub fn readable(&self) -> u64 {
        self.readable.iter().map(|piece| piece.1).sum()
    }

    /// The number of bytes that the device may write.
    #[must_use]
    pub fn writable(&self) -> u64 {
        self.writable.iter().map(|piece| piece.1).sum()
    }

    /// Reads from byte `offset` of the request on.
    ///
    /// # Errors
    /// [`Fault`], also when the request is shorter.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), Fault> {
        parts(&self.readable, offset, into.len(), |at, part| {
            read(&self.memory, at, &mut into[part])
        })
    }

    /// Writes from byte `offset` of the answer on.
    ///
    /// # Errors
    /// [`Fault`], also when the request has less room.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<(), Fault> {
        parts(&self.writable, offset, from.len(), |at, part| {
            write(&self.memory, at, &from[part])
        })
    }

    /// Waits for the pages of all that the device reads and writes. Then a device that does its
    /// work can also tell the guest.
    ///
    /// # Errors
    /// [`Fault`]. Nothing was done.
    pub fn bring(&self) -> Result<(), Fault> {
        let mut pieces = self.readable.iter().chain(&self.writable);
        pieces.try_for_each(|(start, bytes)| bring(&self.memory, *start, *bytes))
    }
}

/// Calls `each` for the parts of `len` bytes from `offset` on.
fn parts(
    pieces: &[(u64, u64)],
    mut offset: u64,
    len: usize,
    mut each: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut done = 0;
    for (start, bytes) in pieces {
        if offset >= *bytes {
            offset -= bytes;
            continue;
        }
        let part = (bytes - offset).min((len - done) as u64) as usize;
        if part > 0 {
            let at = start.checked_add(offset).ok_or(Fault::Broken)?;
            each(at, done..done + part)?;
        }
        (done, offset) = (done + part, 0);
    }
    match done == len {
        true => Ok(()),
        false => Err(Fault::Broken),
    }
}
