//! The thread of a session: it moves bytes between the VMM's sockets and the connections.
//!
//! **Mechanism.** One thread serves all sockets of a session with calls that do not wait, and
//! sleeps in poll(2). What it does follows from [`End`] alone. The near end opens connections, by
//! threads that send a letter; the far end gets them from the acceptor.

use super::end::{End, Side};
use super::flow::Link;
use super::link::{LinkIo, Local, Lost};
use super::record::Start;
use super::status::{Event, Failure, Observer, SessionState};
use super::{Config, Letters, Route, dial::Dialler};
use pageferry_migration::{Connection, Silence};
use pageferry_transport::channel::Wait;
use pageferry_transport::sleep_on;
use rustix::event::{PollFd, PollFlags};
use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The interval of what is due at a time.
const INTERVAL: Duration = Duration::from_millis(20);
/// The interval at which the state is published.
const PUBLISH_INTERVAL: Duration = Duration::from_millis(50);
/// The longest wait for the VMM's listener.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// How often a side says something in the time after which the other one would leave.
const SIGNS_OF_LIFE: u32 = 5;
/// The longest that the last words of a failed session may take.
const PARTING: Duration = Duration::from_secs(1);
/// The silence after which a VMM has sent all that it has for now. QEMU pauses for 100 ms at most
/// to keep to a bandwidth.
const QUIET: Duration = Duration::from_secs(1);

/// Something that a session's thread must hear.
pub(super) enum Letter {
    /// The VMM has opened a stream.
    Opened(Connection),
    /// A connection to the other end is open, at a place.
    Arrived(u16, Connection),
    /// An attempt of this number to open a connection has ended.
    Dialled(u64, u16, Result<Connection, NotDialled>),
    /// The user wants the end, also of a session in doubt if it is forced.
    Cancel { force: bool },
}

/// Why a connection could not be opened. With a failure, no other attempt helps.
pub(super) type NotDialled = (String, Option<Failure>);

/// Where the streams of a far end go.
pub(super) type Routes = Mutex<Vec<Route>>;

/// The part of an end that depends on its side.
pub(super) enum Place {
    Near {
        dialler: Dialler,
    },
    Far {
        routes: Arc<Routes>,
        /// The streams that were opened.
        connected: u32,
    },
}

/// A session as others see it.
pub(super) type Board = Arc<Mutex<SessionState>>;

pub(super) struct Session {
    config: Arc<Config>,
    place: Place,
    /// Letters are of no use behind this.
    letters: Letters,
    links: Vec<LinkIo>,
    locals: Vec<Local>,
    next_link: Link,
    buffer: Vec<u8>,
    board: Board,
    observer: Arc<dyn Observer>,
    began: Instant,
    spoke: Instant,
    kept_time: Instant,
    published: Instant,
    /// The time without connections, in which this process ran.
    lost: Option<Silence>,
    last_loss: String,
    was_connected: bool,
    /// Whether the other end has said something.
    was_met: bool,
    /// Since when the end of all streams is said.
    says_end: Option<Instant>,
    /// Why the session ends, and the bytes that the VMM had sent until then.
    failure: Option<(Failure, u64)>,
    /// Whether the end of a session in doubt is the user's will, and whether it was told that it is
    /// held.
    is_forced: bool,
    is_held: bool,
    /// The bytes that the VMM had sent the last time that this was looked at, and when it sent
    /// more.
    sent: u64,
    sent_at: Instant,
    /// Streams that were opened too late for this session.
    late: Vec<Connection>,
    events: VecDeque<Event>,
}

impl Session {
    pub(super) fn new(
        config: Arc<Config>,
        place: Place,
        letters: Letters,
        board: Board,
        observer: Arc<dyn Observer>,
    ) -> Self {
        let now = Instant::now();
        Self {
            config,
            place,
            letters,
            links: Vec::new(),
            locals: Vec::new(),
            next_link: 1,
            buffer: Vec::new(),
            board,
            observer,
            began: now,
            spoke: now,
            kept_time: now,
            published: now,
            lost: Some(Silence::new()),
            last_loss: String::new(),
            was_connected: false,
            was_met: false,
            says_end: None,
            failure: None,
            is_forced: false,
            is_held: false,
            sent: 0,
            sent_at: now,
            late: Vec::new(),
            events: VecDeque::new(),
        }
    }

    /// Carries `streams`, and those that are opened meanwhile, until all have ended or the session
    /// fails. Returns streams that were opened too late.
    pub(super) fn run(mut self, streams: Vec<Connection>) -> Vec<Connection> {
        let side = match self.place {
            Place::Near { .. } => Side::Near,
            Place::Far { .. } => Side::Far,
        };
        let start = Start {
            route: self.board().route.clone(),
            window: self.config.limits.window,
            dead_after: self.config.patience.dead_after,
        };
        let mut end = End::new(side, start, self.config.limits.clone());
        self.events.push_back(Event::Began);
        for connection in streams {
            self.open(&mut end, connection);
        }
        while !self.is_cut(&end) {
            if self.is_done(&mut end) {
                self.failure = None;
                break;
            }
            self.take_letters(&mut end);
            let moved = self.move_bytes(&mut end);
            if self.kept_time.elapsed() >= INTERVAL {
                self.kept_time = Instant::now();
                self.keep_time(&mut end);
            }
            self.tell(&end);
            if !moved {
                self.sleep(&end);
            }
        }
        self.finish(end)
    }

    fn take_letters(&mut self, end: &mut End) {
        while let Some(letter) = self.letters.take() {
            match letter {
                // The other end ends its session: this stream is one of the next.
                Letter::Opened(connection) if self.says_end.is_some() => self.late.push(connection),
                Letter::Opened(connection) => self.open(end, connection),
                Letter::Arrived(index, connection) => self.link_up(end, index, connection),
                Letter::Dialled(number, index, dialled) => {
                    let Place::Near { dialler } = &mut self.place else {
                        continue;
                    };
                    if !dialler.is_mine(number) {
                        continue;
                    }
                    match dialled {
                        Ok(connection) => self.link_up(end, index, connection),
                        Err((why, failure)) => {
                            dialler.failed(index);
                            if !self.was_connected && self.last_loss != why {
                                self.events.push_back(Event::Unreached(why.clone()));
                            }
                            self.last_loss = why;
                            if let Some(failure) = failure {
                                self.fail(end, failure);
                            }
                        }
                    }
                }
                Letter::Cancel { force } => {
                    self.is_forced |= force;
                    // Any other reason comes again.
                    self.failure = None;
                    self.fail(end, Failure::Cancelled);
                }
            }
        }
    }

    /// The session ends for this reason, unless there was another.
    fn fail(&mut self, end: &End, failure: Failure) {
        if self.failure.is_none() {
            self.failure = Some((failure, end.sent()));
            self.is_held = false;
        }
    }

    /// Whether the VMM has something to say that was not read.
    fn has_unread(&self) -> bool {
        self.locals.iter().any(Local::has_unread)
    }

    fn is_in_doubt(&self, end: &End) -> bool {
        end.is_in_doubt() && self.sent_at.elapsed() >= QUIET && !self.has_unread()
    }

    /// Whether a failure cuts the streams now. It does not while the session is in doubt: the other
    /// VMM may run the VM, and this one would, too, or it has left and only these bytes are the VM.
    /// No timer decides which of the two runs it.
    fn is_cut(&mut self, end: &End) -> bool {
        let Some((failure, sent)) = &self.failure else {
            return false;
        };
        let may_come_right = matches!(failure, Failure::Cancelled | Failure::GaveUp { .. });
        let matters = may_come_right || self.locals.iter().any(Local::reads);
        let goes_on = end.sent() > *sent || self.has_unread();
        if self.is_forced || !end.is_in_doubt() || !matters || goes_on {
            return true;
        }
        if self.is_in_doubt(end) && !self.is_held {
            self.is_held = true;
            self.events.push_back(Event::Held(failure.clone()));
            if *failure == Failure::Cancelled {
                self.failure = None;
            }
        }
        false
    }

    /// The VMM has opened a stream.
    fn open(&mut self, end: &mut End, connection: Connection) {
        match end.opened() {
            Some(stream) => {
                self.locals.push(Local::new(stream, connection));
                self.events.push_back(Event::Opened(stream));
            }
            // The VMM sees a closed socket.
            None => tracing::warn!("the VMM opens too many streams"),
        }
    }

    fn link_up(&mut self, end: &mut End, index: u16, connection: Connection) {
        // A connection of the same place that still seems to work does not.
        while let Some(older) = self.links.iter().position(|link| link.index == index) {
            self.link_down(end, older, "another connection took its place");
        }
        let number = self.next_link;
        self.next_link += 1;
        end.link_up(number, index == 0);
        let mut board = locked(&self.board);
        board.peer = Some(connection.peer().to_owned());
        if let Place::Near { dialler } = &mut self.place {
            dialler.opened(index);
            board.session = dialler.session();
        }
        drop(board);
        let link = LinkIo::new(number, index, connection, self.config.queue, self.began);
        self.links.push(link);
        self.was_connected = true;
    }

    /// Ends a loss once the other end says something. A connection alone is of no use.
    fn meet(&mut self, end: &End) {
        if !end.is_greeted() {
            return;
        }
        if let Some(silence) = self.lost.take() {
            if matches!(self.failure, Some((Failure::GaveUp { .. }, _))) {
                self.failure = None;
            }
            if self.was_met {
                let lost = silence.since().elapsed();
                let mut board = self.board();
                board.longest_loss = board.longest_loss.max(lost);
                drop(board);
                self.events.push_back(Event::Back(lost));
            }
            self.was_met = true;
        }
    }

    fn link_down(&mut self, end: &mut End, at: usize, why: &str) {
        let link = self.links.remove(at);
        link.shutdown();
        end.link_down(link.number);
        tracing::debug!(index = link.index, why, "a connection is lost");
        why.clone_into(&mut self.last_loss);
        if let Place::Near { dialler } = &mut self.place {
            dialler.lost(link.index);
        }
        if self.links.is_empty() && self.lost.is_none() {
            self.lost = Some(Silence::new());
            if self.says_end.is_none() {
                self.board().losses += 1;
                self.events.push_back(Event::Lost(why.to_owned()));
            }
        }
    }

    /// Moves what can be moved without waiting. Returns whether anything moved.
    fn move_bytes(&mut self, end: &mut End) -> bool {
        let mut moved = false;
        for step in [Self::receive, Self::serve, Self::send] {
            moved |= step(self, end);
        }
        moved
    }

    fn receive(&mut self, end: &mut End) -> bool {
        let mut buffer = std::mem::take(&mut self.buffer);
        let moved = self.each_link(end, |link, end| link.receive(end, &mut buffer));
        self.buffer = buffer;
        self.meet(end);
        self.connect_streams(end);
        moved
    }

    fn send(&mut self, end: &mut End) -> bool {
        self.each_link(end, LinkIo::send)
    }

    fn each_link(
        &mut self,
        end: &mut End,
        mut act: impl FnMut(&mut LinkIo, &mut End) -> Result<bool, Lost>,
    ) -> bool {
        let mut moved = false;
        let mut at = 0;
        while let Some(link) = self.links.get_mut(at) {
            match act(link, end) {
                Ok(did) => {
                    moved |= did;
                    at += 1;
                }
                Err(Lost::Link(why)) => self.link_down(end, at, &why),
                Err(Lost::Session(why)) => {
                    self.fail(end, Failure::Protocol(why));
                    return moved;
                }
            }
        }
        moved
    }

    fn serve(&mut self, end: &mut End) -> bool {
        let mut moved = false;
        for local in &mut self.locals {
            moved |= local.serve(end, &mut self.buffer);
        }
        self.locals.retain(|local| !local.is_closed());
        moved
    }

    /// A far end opens the streams that the other VMM has opened, in their order.
    fn connect_streams(&mut self, end: &mut End) {
        let Place::Far { routes, connected } = &mut self.place else {
            return;
        };
        let Some(theirs) = end.theirs().filter(|_| *connected < end.count()) else {
            return;
        };
        let route = &theirs.route;
        let routes = locked(routes).clone();
        let Some(to) = routes.iter().find(|one| one.name == *route) else {
            let known: Vec<&str> = routes.iter().map(|one| one.name.as_str()).collect();
            let why = format!(
                "there is no route '{route}' here, only {}",
                known.join(", ")
            );
            self.fail(end, Failure::Refused(why));
            return;
        };
        locked(&self.board).route.clone_from(route);
        while *connected < end.count() {
            let stream = *connected + 1;
            let wait = Wait::block("stream").within(CONNECT_LIMIT);
            match Connection::connect(&to.address, &wait) {
                Ok(connection) => {
                    *connected = stream;
                    self.locals.push(Local::new(stream, connection));
                    self.events.push_back(Event::Opened(stream));
                }
                // Something else than the VMM may have knocked at the near end.
                Err(why) if stream > 1 => {
                    *connected = stream;
                    end.refused(stream);
                    self.events
                        .push_back(Event::Unopened(stream, why.to_string()));
                }
                Err(why) => {
                    let why = format!("stream {stream} cannot be opened: {why}");
                    self.fail(end, Failure::NoVmm(why));
                    return;
                }
            }
        }
    }

    /// Does what is due at a time.
    fn keep_time(&mut self, end: &mut End) {
        let patience = &self.config.patience;
        let theirs = end
            .theirs()
            .map_or(patience.dead_after, |start| start.dead_after);
        if self.spoke.elapsed() >= theirs / SIGNS_OF_LIFE {
            self.spoke = Instant::now();
            end.speak();
        }
        let dead_after = patience.dead_after;
        while let Some(at) = self.links.iter().position(|one| one.is_silent(dead_after)) {
            let why = format!("the other end was silent for {} ms", dead_after.as_millis());
            self.link_down(end, at, &why);
        }
        if self.sent != end.sent() {
            (self.sent, self.sent_at) = (end.sent(), Instant::now());
        }
        let may_return = match &self.failure {
            None => end.bye_came().is_none(),
            Some((failure, _)) => matches!(failure, Failure::GaveUp { .. }),
        };
        if may_return
            && let Place::Near { dialler } = &mut self.place
            && let Err(why) = dialler.dial(self.was_connected)
        {
            self.fail(end, Failure::Host(why));
        }
        let patience = &self.config.patience;
        // A near end has a stream before it has a session.
        let is_idle = end.count() == 0 && self.began.elapsed() > patience.silence;
        let Some(lost) = &self.lost else {
            if matches!(self.place, Place::Far { .. }) && is_idle {
                let why = format!("it opened no stream in {} s", patience.silence.as_secs());
                self.fail(end, Failure::Refused(why));
            }
            return;
        };
        // A VMM that waits for a far end that was never there would wait for nothing.
        let limit = match (self.was_connected, end.count()) {
            (false, _) => Some(patience.connect),
            // The near end has opened another session, or is gone.
            (true, 0) => Some(patience.silence),
            (true, _) => patience.give_up_after,
        };
        if let Some(limit) = limit.filter(|limit| lost.exceeds(*limit)) {
            let why = self.last_loss.clone();
            self.fail(
                end,
                match self.was_connected {
                    true => Failure::GaveUp { after: limit, why },
                    false => Failure::Unreachable(why),
                },
            );
        }
    }

    /// Whether the session is over at both ends.
    fn is_done(&mut self, end: &mut End) -> bool {
        let told = end.bye_came();
        if let Some(reason) = told.filter(|reason| !reason.is_empty()) {
            let failure = Failure::Told(reason.to_owned());
            self.fail(end, failure);
            return false;
        }
        let is_over = match &self.place {
            Place::Near { .. } => end.is_over(),
            // The near end has heard the end of all streams, or it would not say so.
            Place::Far { .. } => told.is_some(),
        };
        if !is_over {
            return false;
        }
        let told = told.is_some();
        if self.says_end.is_none() {
            self.says_end = Some(Instant::now());
            end.say_bye("");
            return false;
        }
        let since = self
            .says_end
            .map_or(Duration::ZERO, |since| since.elapsed());
        match &self.place {
            // The far end keeps its session until it has heard this. It gives up by itself.
            Place::Near { .. } => told || since > self.config.patience.silence,
            Place::Far { .. } => {
                let said = !self.links.is_empty() && self.links.iter().all(LinkIo::is_flushed);
                said || since > self.config.patience.dead_after
            }
        }
    }

    /// Ends the session: the other end hears why.
    fn finish(mut self, mut end: End) -> Vec<Connection> {
        // The VMM sees the end of its streams first.
        self.locals.clear();
        if let Some((failure, _)) = &self.failure {
            if !matches!(failure, Failure::Told(_)) {
                end.say_bye(&failure.to_string());
            }
            let until = Instant::now() + PARTING;
            while !self.links.is_empty() && Instant::now() < until {
                let moved = self.send(&mut end);
                if !moved && self.links.iter().all(LinkIo::is_flushed) {
                    break;
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.part();
        self.events.push_back(match self.failure.take() {
            None => Event::Ended,
            Some((failure, _)) => Event::Failed(failure),
        });
        self.publish(&end);
        self.tell(&end);
        self.late
    }

    /// Closes the connections once the other end has read what was sent, or soon.
    fn part(&self) {
        for link in &self.links {
            link.connection().shutdown_write();
        }
        let until = Instant::now() + PARTING;
        for link in &self.links {
            // Closing with unread bytes would drop what was sent.
            let mut bytes = [0; 4096];
            while let Ok(got) = link.connection().recv_pending(&mut bytes, "end") {
                if got.is_none() {
                    if Instant::now() >= until {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        }
    }

    fn board(&self) -> MutexGuard<'_, SessionState> {
        locked(&self.board)
    }

    /// Tells what has happened, and publishes the state.
    fn tell(&mut self, end: &End) {
        if !self.events.is_empty() || self.published.elapsed() >= PUBLISH_INTERVAL {
            self.publish(end);
        }
        let state = (!self.events.is_empty()).then(|| self.board().clone());
        while let Some(event) = self.events.pop_front() {
            self.observer.event(state.as_ref(), &event);
        }
    }

    fn publish(&mut self, end: &End) {
        self.published = Instant::now();
        let links = self.links.len() as u16;
        let rates = self.links.iter().filter(|link| link.index > 0);
        let rate = rates.map(LinkIo::rate).sum();
        let in_doubt = self.is_in_doubt(end);
        let mut board = locked(&self.board);
        board.in_doubt = in_doubt;
        board.streams = end.streams().collect();
        board.links = (links, 1 + self.config.channels);
        board.rate = rate;
        board.kept = end.kept();
        board.most_kept = board.most_kept.max(board.kept.0 + board.kept.1);
        board.lost_for = self.lost.as_ref().map(|lost| lost.since().elapsed());
        let why = Some(self.last_loss.clone()).filter(|why| !why.is_empty());
        board.last_loss = why;
        board.runs_for = self.began.elapsed();
    }

    fn sleep(&self, end: &End) {
        if self
            .links
            .iter()
            .any(|link| link.connection().has_pending())
        {
            return;
        }
        let links = self
            .links
            .iter()
            .map(|link| (link.connection(), link.events()));
        let locals = self.locals.iter().filter_map(|local| local.waits(end));
        let mut fds: Vec<PollFd<'_>> = links
            .chain(locals)
            .map(|(connection, events)| PollFd::from_borrowed_fd(connection.as_fd(), events))
            .collect();
        fds.push(PollFd::from_borrowed_fd(
            self.letters.as_fd(),
            PollFlags::IN,
        ));
        sleep_on(&mut fds, INTERVAL);
    }
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}
