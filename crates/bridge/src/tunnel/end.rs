//! One end of a session, without sockets, clocks or threads.
//!
//! **Guarantee.** Whatever is lost, repeated or late on the connections, each direction of each
//! stream arrives as the VMM wrote it. What this end keeps is bounded, also if the other end does
//! not keep its part.
//!
//! **Mechanism.** A thread tells the end what happens ([`End::opened`], [`End::bytes`],
//! [`End::record`] and so on), and asks what to send ([`End::next`]) and to pass on
//! ([`End::front`]). Records mean the same on every connection and at any time, so there is no
//! state of the connections but this: what was under way on a lost one is sent again.
//!
//! The bytes that are kept have a bound, [`Limits::window`]. Each stream may use as many bytes as
//! are free, and [`LEAST_SHARE`] in any case. So a VMM that does not read one stream never keeps
//! the others from it: QEMU reads its main stream only when its multifd channels have come.
//!
//! **Source.** The share: Choudhury and Hahne, dynamic queue length thresholds (1998), with a
//! factor of one.

use super::flow::{FlowError, Inflow, Link, Outflow, Part};
use super::recognise::{Head, Kind, SHORT};
use super::record::{Delivered, Ending, MAX_PAYLOAD, MAX_STREAMS, Record, Start};
use bytes::Bytes;
use std::collections::BTreeMap;

/// The bytes that a stream may keep however little is free.
pub const LEAST_SHARE: u64 = 64 << 10;
/// The bytes that are read from a VMM at once.
pub const READ_BYTES: usize = 64 << 10;

/// The place of an end in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// VMMs connect to it, and it connects to the other end.
    Near,
    /// It connects to VMMs.
    Far,
}

/// The choices of an end.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Limits {
    /// The most bytes that this end keeps of what its VMM has written, and of what the other end
    /// has sent: each, and [`LEAST_SHARE`] more for each stream.
    pub window: u64,
    /// Streams that are urgent by the user's word, from 1. `None`: those that are recognised.
    pub urgent: Option<Vec<u32>>,
}

/// The other end has sent what no correct tunnel sends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// A record about a stream that nobody has opened.
    #[error("a record about stream {0}, which nobody has opened")]
    NoStream(u32),
    /// The other end's VMM cannot open streams here.
    #[error("the far end says that its VMM has opened {0} streams: only the near one's does")]
    Opens(u32),
    /// Records about the bytes of a stream contradict each other.
    #[error("stream {stream}: {source}")]
    Flow {
        /// The stream.
        stream: u32,
        /// What contradicts.
        source: FlowError,
    },
    /// More bytes came than this end keeps.
    #[error("{held} bytes wait for the VMM: the window is {window} bytes")]
    Window {
        /// The bytes.
        held: u64,
        /// The window.
        window: u64,
    },
    /// A second `Start` differs from the first.
    #[error("it starts again, for another route or with other limits")]
    StartsAgain,
    /// The first record of a connection is another one.
    #[error("it sends records before its Start")]
    NoStart,
}

/// A stream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Stream {
    head: Head,
    out: Outflow,
    input: Inflow,
}

/// A connection that works.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Open {
    urgent: bool,
    /// Whether this end and the other one have sent their `Start` on it.
    started: bool,
    greeted: bool,
    /// The records with data that have come on it, and how many of them were told.
    records: u64,
    told: u64,
    told_streams: u32,
    /// Something must be said on it soon, if only that this side lives.
    speak: bool,
    said_bye: bool,
}

/// One end of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct End {
    side: Side,
    start: Start,
    limits: Limits,
    theirs: Option<Start>,
    streams: BTreeMap<u32, Stream>,
    links: BTreeMap<Link, Open>,
    /// The stream that was served last.
    served: u32,
    /// The records with urgent data that were taken.
    urgent: u64,
    kept: u64,
    held: u64,
    bye: Option<String>,
    bye_came: Option<String>,
}

/// What a stream is and has carried, for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamState {
    /// Its number, from 1, in the order of opening.
    pub number: u32,
    /// What it seems to be.
    pub kind: Kind,
    /// The bytes that this end's VMM has written.
    pub sent: u64,
    /// The bytes that it has been given.
    pub received: u64,
    /// The bytes that this end keeps until they are delivered.
    pub kept: u64,
    /// Whether both directions have ended.
    pub over: bool,
}

impl Stream {
    const fn is_over(&self) -> bool {
        self.out.is_over() && self.input.is_over()
    }
}

impl End {
    /// An end without streams and connections. `start` is what it says of itself.
    #[must_use]
    pub const fn new(side: Side, start: Start, limits: Limits) -> Self {
        Self {
            side,
            start,
            limits,
            theirs: None,
            streams: BTreeMap::new(),
            links: BTreeMap::new(),
            served: 0,
            urgent: 0,
            kept: 0,
            held: 0,
            bye: None,
            bye_came: None,
        }
    }

    /// The VMM has opened a stream. Returns its number, or `None` if there are too many.
    pub fn opened(&mut self) -> Option<u32> {
        let number = self.count() + 1;
        if number > MAX_STREAMS {
            return None;
        }
        self.streams.insert(number, Stream::default());
        Some(number)
    }

    /// The number of streams so far.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.streams.len() as u32
    }

    /// A connection has opened.
    pub fn link_up(&mut self, link: Link, urgent: bool) {
        let open = Open {
            urgent,
            started: false,
            greeted: false,
            records: 0,
            told: 0,
            told_streams: 0,
            speak: true,
            said_bye: false,
        };
        self.links.insert(link, open);
    }

    /// A connection is lost. What was under way on it, or may have been, is sent again.
    pub fn link_down(&mut self, link: Link) {
        if self.links.remove(&link).is_none() {
            return;
        }
        for stream in self.streams.values_mut() {
            stream.out.lost(link);
            stream.input.say_again();
        }
    }

    /// The bytes that may be read from a stream's VMM now. 0: none.
    #[must_use]
    pub fn wants(&self, stream: u32) -> usize {
        let Some(stream) = self.streams.get(&stream) else {
            return 0;
        };
        let window = self.theirs.as_ref().map_or(0, |theirs| theirs.window);
        let window = window.min(self.limits.window);
        let share = window.saturating_sub(self.kept).max(LEAST_SHARE);
        let out = &stream.out;
        let wants = self.theirs.is_some()
            && out.is_open()
            && out.kept() < share
            && out.unsent() < READ_BYTES as u64;
        if !wants {
            return 0;
        }
        READ_BYTES.min((share - out.kept()) as usize)
    }

    /// Whether a stream's VMM may still send.
    #[must_use]
    pub fn is_open(&self, stream: u32) -> bool {
        let stream = self.streams.get(&stream);
        stream.is_some_and(|stream| stream.out.is_open())
    }

    /// Whether a stream's VMM may not send any more, since nobody takes it.
    #[must_use]
    pub fn is_unwanted(&self, stream: u32) -> bool {
        let stream = self.streams.get(&stream);
        stream.is_some_and(|stream| stream.out.is_unwanted())
    }

    /// A stream's VMM has sent bytes.
    pub fn bytes(&mut self, number: u32, bytes: Bytes) {
        if let Some(stream) = self.streams.get_mut(&number) {
            stream.head.push(&bytes);
        }
        let urgent = match (&self.limits.urgent, self.side) {
            (_, Side::Far) => bytes.len() <= SHORT,
            (Some(urgent), Side::Near) => urgent.contains(&number),
            (None, Side::Near) => self.kind(number).is_urgent(),
        };
        self.change(number, |stream| stream.out.push(bytes, urgent));
    }

    /// What a stream seems to be.
    fn kind(&self, number: u32) -> Kind {
        let heads = self.streams.values().map(|stream| &stream.head);
        let stream = self.streams.get(&number);
        stream.map_or(Kind::Unknown, |stream| stream.head.kind(heads))
    }

    /// A stream's VMM sends nothing more.
    pub fn finished(&mut self, stream: u32, how: Ending) {
        self.change(stream, |stream| stream.out.finish(how));
    }

    /// A stream's VMM takes nothing more.
    pub fn stopped(&mut self, stream: u32) {
        self.change(stream, |stream| stream.input.stop());
    }

    /// The VMM takes no such stream: the other one sees a closed socket.
    pub fn refused(&mut self, stream: u32) {
        self.stopped(stream);
        self.finished(stream, Ending::Broken);
    }

    /// A stream's VMM has taken bytes.
    pub fn wrote(&mut self, stream: u32, bytes: usize) {
        self.change(stream, |stream| stream.input.wrote(bytes));
    }

    /// A stream's VMM has got the end.
    pub fn ended(&mut self, stream: u32) {
        self.change(stream, |stream| stream.input.ended());
    }

    /// The next bytes for a stream's VMM.
    #[must_use]
    pub fn front(&self, stream: u32) -> Option<&Bytes> {
        self.streams.get(&stream)?.input.front()
    }

    /// The end, if a stream's VMM has taken all bytes before it.
    #[must_use]
    pub fn next_end(&self, stream: u32) -> Option<Ending> {
        self.streams.get(&stream)?.input.next_end()
    }

    /// Whether a stream's VMM has something to take.
    #[must_use]
    pub fn has_more(&self, stream: u32) -> bool {
        let stream = self.streams.get(&stream);
        stream.is_some_and(|stream| stream.input.has_more())
    }

    /// Calls `change`, and counts what is kept.
    fn change<T: Default>(&mut self, number: u32, change: impl FnOnce(&mut Stream) -> T) -> T {
        let Some(stream) = self.streams.get_mut(&number) else {
            return T::default();
        };
        self.kept -= stream.out.kept();
        self.held -= stream.input.held();
        let result = change(stream);
        self.kept += stream.out.kept();
        self.held += stream.input.held();
        result
    }

    /// A record has come.
    ///
    /// # Errors
    /// [`ProtocolError`]: the session cannot go on.
    pub fn record(&mut self, link: Link, record: Record) -> Result<(), ProtocolError> {
        let Some(open) = self.links.get_mut(&link) else {
            return Ok(());
        };
        if !open.greeted && !matches!(record, Record::Start(_) | Record::Bye { .. }) {
            return Err(ProtocolError::NoStart);
        }
        if matches!(record, Record::Data { .. }) {
            open.records += 1;
        }
        match record {
            Record::Start(start) => {
                open.greeted = true;
                let known = self.theirs.get_or_insert_with(|| start.clone());
                if *known != start {
                    return Err(ProtocolError::StartsAgain);
                }
                if self.side == Side::Far {
                    self.start.route = start.route;
                }
                Ok(())
            }
            Record::Data {
                stream,
                at,
                bytes,
                end,
            } => self.data(stream, Part { at, bytes, end }),
            Record::Delivered(told) => self.delivered(&told),
            Record::Received { streams, .. } => self.streams_opened(streams),
            Record::Bye { reason } => {
                self.bye_came.get_or_insert(reason);
                Ok(())
            }
        }
    }

    fn data(&mut self, number: u32, part: Part) -> Result<(), ProtocolError> {
        self.know(number)?;
        let window = self.limits.window.max(LEAST_SHARE);
        let taken = self.change(number, |stream| Some(stream.input.take(part, window)));
        taken
            .unwrap_or(Ok(()))
            .map_err(|source| ProtocolError::Flow {
                stream: number,
                source,
            })?;
        let most = window + u64::from(self.count()) * (LEAST_SHARE + MAX_PAYLOAD as u64);
        if self.held > most {
            return Err(ProtocolError::Window {
                held: self.held,
                window,
            });
        }
        Ok(())
    }

    fn delivered(&mut self, told: &Delivered) -> Result<(), ProtocolError> {
        self.know(told.stream)?;
        let taken = self.change(told.stream, |stream| Some(stream.out.delivered(told)));
        taken
            .unwrap_or(Ok(()))
            .map_err(|source| ProtocolError::Flow {
                stream: told.stream,
                source,
            })
    }

    /// A record is about a stream. It may come before the word that the stream was opened, since
    /// that is said on every connection by itself.
    fn know(&mut self, number: u32) -> Result<(), ProtocolError> {
        if self.side == Side::Far {
            return self.streams_opened(number.max(self.count()));
        }
        match self.streams.contains_key(&number) {
            true => Ok(()),
            false => Err(ProtocolError::NoStream(number)),
        }
    }

    fn streams_opened(&mut self, count: u32) -> Result<(), ProtocolError> {
        if count > 0 && self.side == Side::Near {
            return Err(ProtocolError::Opens(count));
        }
        // A record of another connection may be older.
        for number in self.count() + 1..=count {
            self.streams.insert(number, Stream::default());
        }
        Ok(())
    }

    /// Takes the next record to send on `link`. `room` is the most bytes that it may have which
    /// nobody waits for.
    pub fn next(&mut self, link: Link, room: usize) -> Option<Record> {
        let open = self.links.get_mut(&link)?;
        if !open.started {
            // The route is the other end's choice.
            if self.side == Side::Far && !open.greeted {
                return None;
            }
            open.started = true;
            return Some(Record::Start(self.start.clone()));
        }
        let (greeted, urgent) = (open.greeted, open.urgent);
        let open = self.links.iter().filter(|(_, open)| open.greeted);
        let first = open.min_by_key(|(number, open)| (!open.urgent, **number));
        if first.is_some_and(|(number, _)| *number == link)
            && let Some(told) = self.take_due()
        {
            return Some(Record::Delivered(told));
        }
        let is_near = self.side == Side::Near;
        let streams = if is_near { self.count() } else { 0 };
        let open = self.links.get_mut(&link)?;
        if open.told < open.records || open.told_streams < streams || open.speak {
            open.speak = false;
            (open.told, open.told_streams) = (open.records, streams);
            return Some(Record::Received {
                records: open.records,
                streams,
            });
        }
        if greeted && let Some(data) = self.next_data(link, urgent, room) {
            return Some(data);
        }
        let reason = self.bye.clone()?;
        let open = self.links.get_mut(&link)?;
        let says = !std::mem::replace(&mut open.said_bye, true);
        says.then_some(Record::Bye { reason })
    }

    fn take_due(&mut self) -> Option<Delivered> {
        let mut streams = self.streams.iter_mut();
        streams.find_map(|(number, stream)| stream.input.take_due(*number))
    }

    /// Takes data for a connection: that of streams in turn, urgent data first.
    fn next_data(&mut self, link: Link, is_urgent: bool, room: usize) -> Option<Record> {
        let has = |urgent: bool| self.links.values().any(|o| o.greeted && o.urgent == urgent);
        let takes_urgent = is_urgent || !has(true);
        let takes_bulk = !is_urgent || !has(false);
        let turn = |wanted: bool| {
            let after = self.streams.range(self.served + 1..);
            let before = self.streams.range(..=self.served);
            after
                .chain(before)
                .find(|(_, stream)| stream.out.next_is_urgent() == Some(wanted))
                .map(|(number, _)| *number)
        };
        let urgent = if takes_urgent { turn(true) } else { None };
        let (number, room) = match urgent {
            Some(number) => (number, MAX_PAYLOAD),
            None if takes_bulk && room > 0 => (turn(false)?, room.min(MAX_PAYLOAD)),
            None => return None,
        };
        self.served = number;
        self.urgent += u64::from(urgent.is_some());
        let part = self.streams.get_mut(&number)?.out.next(link, room)?;
        Some(Record::Data {
            stream: number,
            at: part.at,
            bytes: part.bytes,
            end: part.end,
        })
    }

    /// The bytes that this end's VMM has written, on all streams.
    #[must_use]
    pub fn sent(&self) -> u64 {
        self.streams.values().map(|stream| stream.out.until()).sum()
    }

    /// Whether the other end has said on any connection that it is a tunnel.
    #[must_use]
    pub fn is_greeted(&self) -> bool {
        self.links.values().any(|open| open.greeted)
    }

    /// The number of records with urgent data that were taken.
    #[must_use]
    pub const fn urgent(&self) -> u64 {
        self.urgent
    }

    /// Something is said on every connection soon.
    pub fn speak(&mut self) {
        for open in self.links.values_mut() {
            open.speak = true;
        }
    }

    /// Whether there were streams, and both directions of all have ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        !self.streams.is_empty() && self.streams.values().all(Stream::is_over)
    }

    /// Whether the other VMM may have all it needs to run the VM, as far as this end knows, if its
    /// own VMM has written its last byte. The other one's last word may be under way.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        let carries = |stream: &Stream| stream.out.until() > 0 && !stream.is_over();
        self.side == Side::Near && self.streams.values().any(carries)
    }

    /// The session ends: the other end hears `reason` on a connection that works.
    pub fn say_bye(&mut self, reason: &str) {
        self.bye = Some(reason.to_owned());
    }

    /// What the other end has said of the end of the session. Empty: all streams have ended.
    #[must_use]
    pub fn bye_came(&self) -> Option<&str> {
        self.bye_came.as_deref()
    }

    /// What the other end says of itself.
    #[must_use]
    pub const fn theirs(&self) -> Option<&Start> {
        self.theirs.as_ref()
    }

    /// The bytes that are kept for the other end, and those that wait for the VMM.
    #[must_use]
    pub const fn kept(&self) -> (u64, u64) {
        (self.kept, self.held)
    }

    /// The streams, in the order of opening.
    pub fn streams(&self) -> impl Iterator<Item = StreamState> {
        self.streams.iter().map(|(number, stream)| StreamState {
            number: *number,
            kind: self.kind(*number),
            sent: stream.out.until(),
            received: stream.input.written(),
            kept: stream.out.kept(),
            over: stream.is_over(),
        })
    }
}
