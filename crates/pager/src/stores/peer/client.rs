//! A file at a peer.
//!
//! **Guarantee.** A read ends within the limit of its store. It returns the bytes of the file that
//! was opened first, or an error.
//!
//! **Mechanism.** A pool of connections, each for one read at a time. A connection that fails takes
//! the idle ones with it, since their peer is probably gone, and the read tries a new one. A peer
//! that cannot be reached is tried again after a pause, which doubles.

use super::error::PeerError;
use super::talk::Talk;
use super::wire::{Code, MAX_BODY, Opened};
use crate::source::{Kept, Source, SourceError};
use crate::vm::locked;
use pageferry_transport::address::Address;
use pageferry_transport::handshake::{Identity, dial};
use pageferry_transport::wire::{ChannelKey, Role};
use pageferry_transport::{PlainPolicy, Protection, Stream, Tls};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most connections for one file.
pub const MAX_CONNECTIONS: usize = 16;

/// The time for a connection with its handshakes.
const CONNECT: Duration = Duration::from_secs(5);
/// The time after which an idle connection is not used again. The server waits longer.
const IDLE: Duration = Duration::from_secs(20);
/// The pauses between trials to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// The bytes that one read of pages brings, by the round trip. See docs/decisions/pager.md.
const LEAST_BLOCK: u64 = 32 << 10;
const MOST_BLOCK: u64 = 128 << 10;
/// The bytes a second of which each of 16 connections carries its part: 1 Gbit/s.
const RATE: f64 = 125e6;
/// A read up to this length brings a whole block.
const SMALL: usize = 16 << 10;
/// The bytes of blocks that are kept.
const KEPT: u64 = 8 << 20;
/// The time for which holes count after the peer has read the file and found it unchanged. Behind
/// it, a page of a hole is read like others.
const HOLES: Duration = Duration::from_secs(1);

/// The place of every connection: each is a session of its own.
const KEY: ChannelKey = ChannelKey {
    role: Role::Share,
    index: 0,
    generation: 1,
    incarnation: 1,
};

/// A host that shares files.
#[derive(Debug)]
pub(super) struct Peer {
    host: Address,
    tls: Option<Tls>,
    plain: PlainPolicy,
    /// The time for a read, its connection included.
    limit: Duration,
    trouble: Mutex<Option<Trouble>>,
}

/// The peer could not be reached.
#[derive(Clone, Debug)]
struct Trouble {
    next: Instant,
    pause: Duration,
    why: String,
}

impl Peer {
    pub(super) fn new(
        host: Address,
        tls: Option<Tls>,
        plain: PlainPolicy,
        limit: Duration,
    ) -> Self {
        Self {
            host,
            tls,
            plain,
            limit,
            trouble: Mutex::default(),
        }
    }

    /// Connects, unless a trial failed a moment ago. Tries again where another trial may pass.
    pub(super) fn connect_patiently(&self, until: Instant) -> Result<Talk<Stream>, PeerError> {
        loop {
            match self.connect(until) {
                Err(why) if why.may_pass() && Instant::now() < until => self.pause(until),
                tried => return tried,
            }
        }
    }

    /// Connects, unless a trial failed a moment ago.
    fn connect(&self, until: Instant) -> Result<Talk<Stream>, PeerError> {
        if let Some(trouble) = &*locked(&self.trouble)
            && trouble.next > Instant::now()
        {
            return Err(PeerError::Unreachable(trouble.why.clone()));
        }
        let connected = self.dial(until);
        let mut trouble = locked(&self.trouble);
        *trouble = connected.as_ref().err().map(|why| {
            let pause = trouble.as_ref().map_or(FIRST_PAUSE, |before| {
                // Trials at the same time count as one.
                match before.next > Instant::now() {
                    true => before.pause,
                    false => (before.pause * 2).min(LAST_PAUSE),
                }
            });
            Trouble {
                next: Instant::now() + pause,
                pause,
                why: why.to_string(),
            }
        });
        connected
    }

    /// Waits for the next trial to connect.
    fn pause(&self, until: Instant) {
        let next = locked(&self.trouble).as_ref().map(|trouble| trouble.next);
        if let Some(next) = next {
            std::thread::sleep(next.min(until).saturating_duration_since(Instant::now()));
        }
    }

    fn dial(&self, until: Instant) -> Result<Talk<Stream>, PeerError> {
        let protection = Protection::load(self.tls.as_ref(), self.plain)?;
        let identity = Identity::random()?;
        let left = until.saturating_duration_since(Instant::now());
        let limits = [left.min(CONNECT); 2];
        let opened = dial(&self.host, &protection, &identity, KEY, limits, &|| false)?;
        Ok(Talk::new(Stream::new(Arc::new(opened.connection), left)))
    }
}

/// A file at a peer.
#[derive(Debug)]
pub(super) struct PeerSource {
    peer: Arc<Peer>,
    address: String,
    name: String,
    opened: Opened,
    /// The parts with data, in order.
    extents: Vec<(u64, u64)>,
    /// The last time at which the peer found the file unchanged.
    unchanged: Mutex<Instant>,
    block: u64,
    kept: Kept,
    pool: Mutex<Pool>,
    /// A connection is free, or may be made.
    free: Condvar,
}

#[derive(Debug, Default)]
struct Pool {
    idle: Vec<(Talk<Stream>, Instant)>,
    /// Idle ones and those in use.
    all: usize,
}

impl PeerSource {
    /// A file that was opened, over a link with this round trip.
    pub(super) fn new(
        peer: Arc<Peer>,
        address: String,
        name: String,
        opened: Opened,
        extents: Vec<(u64, u64)>,
        round_trip: Duration,
    ) -> Self {
        let block = block_for(round_trip);
        Self {
            block,
            peer,
            address,
            name,
            opened,
            extents,
            unchanged: Mutex::new(Instant::now()),
            kept: Kept::new(block, KEPT),
            pool: Mutex::default(),
            free: Condvar::new(),
        }
    }

    pub(super) const fn opened(&self) -> &Opened {
        &self.opened
    }

    /// Adds a connection that has opened the file, if there is room.
    pub(super) fn add(&self, talk: Talk<Stream>) {
        let mut pool = locked(&self.pool);
        if pool.all < MAX_CONNECTIONS {
            pool.all += 1;
            pool.idle.push((talk, Instant::now()));
        }
    }

    fn fetch(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        let until = Instant::now() + self.peer.limit;
        loop {
            let (mut talk, fresh) = match self.take(until) {
                Ok(taken) => taken,
                Err(why)
                    if Instant::now() < until
                        && (why.may_pass() || matches!(why, PeerError::Unreachable(_))) =>
                {
                    self.peer.pause(until);
                    continue;
                }
                Err(why) => return Err(self.failed(why)),
            };
            talk.stream()
                .limit(until.saturating_duration_since(Instant::now()));
            let parts = buffer.chunks_mut(MAX_BODY as usize);
            let mut at = offset;
            let read = parts.into_iter().try_for_each(|part| {
                let len = part.len() as u64;
                talk.read(at, part).inspect(|()| at += len)
            });
            match read {
                Ok(()) => {
                    *locked(&self.unchanged) = Instant::now();
                    self.give_back(Some(talk));
                    return Ok(());
                }
                Err(why) if why.is_answer() => {
                    self.give_back(Some(talk));
                    return Err(self.failed(why));
                }
                Err(why) => {
                    self.give_back(None);
                    if fresh || Instant::now() >= until {
                        return Err(self.failed(why));
                    }
                    self.forget_idle();
                }
            }
        }
    }

    /// Takes an idle connection, or makes one. Returns also whether it was made now.
    fn take(&self, until: Instant) -> Result<(Talk<Stream>, bool), PeerError> {
        let mut pool = locked(&self.pool);
        loop {
            if let Some((talk, since)) = pool.idle.pop() {
                if since.elapsed() < IDLE {
                    return Ok((talk, false));
                }
                pool.all -= 1;
            } else if pool.all < MAX_CONNECTIONS {
                pool.all += 1;
                break;
            } else {
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(PeerError::TimedOut);
                }
                let woken = self.free.wait_timeout(pool, left);
                (pool, _) = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
        drop(pool);
        let talk = self.connect(until);
        if talk.is_err() {
            self.give_back(None);
        }
        Ok((talk?, true))
    }

    /// Opens the same file over another connection.
    fn connect(&self, until: Instant) -> Result<Talk<Stream>, PeerError> {
        let mut talk = self.peer.connect(until)?;
        let now = talk.open(&self.name)?;
        match now == self.opened {
            true => Ok(talk),
            false => Err(PeerError::Refused {
                code: Code::Changed,
                sentence: now.identity,
            }),
        }
    }

    /// Gives a connection back, or its place.
    fn give_back(&self, talk: Option<Talk<Stream>>) {
        let mut pool = locked(&self.pool);
        match talk {
            Some(talk) => pool.idle.push((talk, Instant::now())),
            None => pool.all -= 1,
        }
        drop(pool);
        self.free.notify_one();
    }

    fn forget_idle(&self) {
        let mut pool = locked(&self.pool);
        pool.all -= pool.idle.len();
        let idle = std::mem::take(&mut pool.idle);
        drop(pool);
        drop(idle);
        self.free.notify_all();
    }

    fn failed(&self, why: PeerError) -> SourceError {
        let what = self.address.clone();
        match why {
            PeerError::Refused {
                code: Code::Changed,
                sentence,
            } => SourceError::Changed {
                what,
                before: self.opened.identity.clone(),
                now: sentence,
            },
            why => SourceError::Failed {
                what,
                why: why.into_io(),
            },
        }
    }

    fn short(&self, end: u64) -> SourceError {
        SourceError::Short {
            what: self.address.clone(),
            end,
        }
    }
}

impl Source for PeerSource {
    fn bytes(&self) -> u64 {
        self.opened.bytes
    }

    fn block(&self) -> u64 {
        self.block
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        let Some(end) = offset
            .checked_add(len)
            .filter(|&end| end <= self.opened.bytes)
        else {
            return false;
        };
        let behind = self.extents.partition_point(|&(_, end)| end <= offset);
        let extent = self.extents.get(behind);
        extent.is_none_or(|&(start, _)| end <= start) && locked(&self.unchanged).elapsed() < HOLES
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        Ok(self.kept.read_now(offset, buffer, |_| None))
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        let end = offset.saturating_add(buffer.len() as u64);
        if end > self.opened.bytes {
            return Err(self.short(end));
        }
        // A block for faults, or a small part such as that of an index: others will ask for its
        // neighbours. All else is exact already, as a packed chunk is.
        let is_block = offset.is_multiple_of(self.block)
            && buffer.len() as u64 == self.block.min(self.opened.bytes - offset);
        if !is_block && buffer.len() > SMALL {
            return self.read_once(offset, buffer);
        }
        let whole = self.kept.read(offset, buffer, |run| {
            let start = run.start * self.block;
            let end = (run.end * self.block).min(self.opened.bytes);
            let mut bytes = vec![0; (end - start) as usize];
            self.fetch(start, &mut bytes)?;
            let blocks = bytes.chunks(self.block as usize);
            Ok(blocks.map(Arc::from).collect::<Vec<_>>())
        })?;
        match whole {
            true => Ok(()),
            false => Err(self.short(end)),
        }
    }

    fn read_once(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        match self.kept.read_now(offset, buffer, |_| None) {
            true => Ok(()),
            false => self.fetch(offset, buffer),
        }
    }

    fn identity(&self) -> String {
        format!("{}: {}", self.address, self.opened.identity)
    }
}

/// 16 connections with a block each fill a link of 1 Gbit/s, within bounds.
fn block_for(round_trip: Duration) -> u64 {
    let part = round_trip.as_secs_f64() * RATE / MAX_CONNECTIONS as f64;
    (part as u64)
        .next_power_of_two()
        .clamp(LEAST_BLOCK, MOST_BLOCK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_longer_way_has_larger_blocks() {
        for (ms, kib) in [(0, 32), (1, 32), (3, 32), (6, 64), (20, 128), (10_000, 128)] {
            assert_eq!(block_for(Duration::from_millis(ms)), kib << 10, "{ms} ms");
        }
    }
}
