//! The VM's side of its control socket.

use super::line::{LineReader, NoLine};
use super::protocol::{Event, Line, Request, parse_request};
use super::{MAX_ATTACHED, MAX_REQUEST_BYTES, attached};
use crate::exit::{Exit, Failure};
use pageferry_hostfs::{ListenError, Owner, SocketFile, listen_at};
use pageferry_machine::Console;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The interval at which threads here check whether they should end.
const POLL: Duration = Duration::from_millis(50);
/// The time limit for a client to read an answer, before it is dropped.
pub(super) const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// The maximum number of clients served at once.
const MAX_CLIENTS: usize = 16;
/// A client that has been idle for this long may be dropped in favour of another.
const MIN_IDLE: Duration = Duration::from_millis(50);

/// Answers requests. Called on the connection's thread; may block.
pub(crate) trait Service: Send + Sync {
    /// Carries out `request`. Passes events to `event` meanwhile.
    ///
    /// # Errors
    /// The failure for the client, with the class of its exit.
    fn serve(&self, request: Request, event: &mut dyn FnMut(Event)) -> Result<Value, Failure>;

    /// The console of the guest that is here now.
    ///
    /// # Errors
    /// The failure for the client, if there is none.
    fn console(&self) -> Result<Arc<Console>, Failure>;
}

/// A listener that is served until this is dropped. Dropping removes the socket's file, if there is
/// one, after current answers are finished.
pub(crate) struct Server {
    stop: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
    _file: Option<SocketFile>,
}

impl Server {
    /// Runs `accept` on a thread called `name`. It ends soon after its flag is set.
    pub(crate) fn spawn(
        name: &str,
        file: Option<SocketFile>,
        accept: impl FnOnce(&Arc<AtomicBool>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopping = Arc::clone(&stop);
        let acceptor = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || accept(&stopping))?;
        Ok(Self {
            stop,
            acceptor: Some(acceptor),
            _file: file,
        })
    }

    /// Creates the control socket and serves it.
    ///
    /// # Errors
    /// [`Exit::Address`] when `path` is taken or cannot be created.
    pub(crate) fn start(path: &Path, service: Arc<dyn Service>) -> Result<Self, Failure> {
        let (listener, file) = bind("control", path)?;
        let cannot = |e| Failure::os("cannot serve the control socket", e);
        Self::spawn("control", Some(file), move |stop| {
            accept(&listener, &service, stop);
        })
        .map_err(cannot)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
    }
}

/// Creates a listening socket of mode 0600. `purpose` is for its errors. It replaces a socket file
/// on which nobody listens any more.
pub(crate) fn bind(purpose: &str, path: &Path) -> Result<(UnixListener, SocketFile), Failure> {
    listen_at(path, &Owner::default()).map_err(|why| {
        let why = match why {
            ListenError::InUse(_) => "another VM listens there; choose another path".into(),
            ListenError::NoSocket(_) => "a file of that name exists".into(),
            ListenError::TooLong(_) => "a socket's path has at most 107 bytes".into(),
            ListenError::Refused { why, .. } => why.to_string(),
            other => other.to_string(),
        };
        Failure::new(
            Exit::Address,
            format!("cannot make the {purpose} socket {}: {why}", path.display()),
        )
    })
}

/// A connected client.
pub(crate) struct Client {
    pub(crate) thread: JoinHandle<()>,
    pub(crate) idle: Arc<Idle>,
}

/// The start of a client's idle time; `None` while a request of it is served.
pub(crate) struct Idle {
    since: Mutex<Option<Instant>>,
    /// The client's connection, to end it.
    stream: OwnedFd,
}

impl Idle {
    /// A client that has just connected.
    pub(crate) fn new(stream: &impl AsFd) -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            since: Mutex::new(Some(Instant::now())),
            stream: stream.as_fd().try_clone_to_owned()?,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Option<Instant>> {
        self.since.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, since: Option<Instant>) {
        *self.lock() = since;
    }

    /// Ends the connection, unless a request of it is being served.
    fn end(&self) -> bool {
        let since = self.lock();
        if since.is_some() {
            self.shutdown();
        }
        since.is_some()
    }

    pub(crate) fn shutdown(&self) {
        // It may have ended already.
        let _ = rustix::net::shutdown(&self.stream, rustix::net::Shutdown::Both);
    }
}

fn accept(listener: &UnixListener, service: &Arc<dyn Service>, stop: &Arc<AtomicBool>) {
    let mut clients: Vec<Client> = Vec::new();
    let attached = Arc::new(AtomicUsize::new(0));
    while !stop.load(Ordering::Acquire) {
        let Ok((stream, _)) = listener.accept() else {
            // No client, or no free descriptor at the moment: poll again later.
            std::thread::sleep(POLL.min(Duration::from_millis(10)));
            continue;
        };
        if !make_room(&mut clients, MAX_CLIENTS) {
            refuse_client(stream);
            continue;
        }
        let (service, stop) = (Arc::clone(service), Arc::clone(stop));
        let attached = Arc::clone(&attached);
        let Ok(idle) = Idle::new(&stream) else {
            continue;
        };
        let ours = Arc::clone(&idle);
        let thread = std::thread::Builder::new()
            .name("client".into())
            .spawn(move || {
                serve_client(stream, service.as_ref(), &ours, &stop, &attached);
                // `Idle` has the connection too, and outlives this thread.
                ours.shutdown();
            });
        if let Ok(thread) = thread {
            clients.push(Client { thread, idle });
        }
    }
    for client in clients {
        let _ = client.thread.join();
    }
}

/// Makes room for another client. If all `most` places are taken, the client that has been idle the
/// longest is dropped. Returns whether there is room.
pub(crate) fn make_room(clients: &mut Vec<Client>, most: usize) -> bool {
    clients.retain(|client| !client.thread.is_finished());
    if clients.len() < most {
        return true;
    }
    let longest = clients
        .iter()
        .enumerate()
        .filter_map(|(at, client)| Some((at, (*client.idle.lock())?)))
        .min_by_key(|(_, since)| *since);
    let Some((at, since)) = longest else {
        return false;
    };
    // A client that has just connected is about to send a request.
    std::thread::sleep(MIN_IDLE.saturating_sub(since.elapsed()));
    if !clients[at].idle.end() {
        return false;
    }
    let _ = clients.swap_remove(at).thread.join();
    true
}

fn refuse_client(mut stream: UnixStream) {
    let failure = Failure::new(
        Exit::Declined,
        format!("requests of {MAX_CLIENTS} clients are being served; try again later"),
    );
    let _ = stream.set_write_timeout(Some(POLL));
    let _ = stream.write_all(&Line::Error((&failure).into()).to_bytes());
}

/// Writes all of `bytes` within `limit`. A client that reads a byte from time to time gets no more.
pub(super) fn write_within(
    mut stream: &UnixStream,
    mut bytes: &[u8],
    limit: Duration,
) -> std::io::Result<()> {
    let deadline = Instant::now() + limit;
    while !bytes.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(bytes) {
            Ok(taken) => bytes = &bytes[taken..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Serves one client until it leaves, violates the protocol, or the server ends.
fn serve_client(
    stream: UnixStream,
    service: &dyn Service,
    idle: &Idle,
    stop: &AtomicBool,
    attached: &AtomicUsize,
) {
    let prepared = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(POLL)))
        .and_then(|()| stream.try_clone());
    let Ok(writer) = prepared else { return };
    let mut lines = LineReader::new(stream, MAX_REQUEST_BYTES);
    loop {
        let line = match lines.next(&|| stop.load(Ordering::Acquire)) {
            Ok(line) => line,
            Err(NoLine::TooLong) => {
                let message = format!(
                    "a request has at most {MAX_REQUEST_BYTES} bytes; the connection is closed"
                );
                let failure = Failure::new(Exit::Usage, message);
                let line = Line::Error((&failure).into()).to_bytes();
                let _ = write_within(&writer, &line, WRITE_LIMIT);
                return;
            }
            Err(NoLine::Closed | NoLine::CutOff | NoLine::Stopped | NoLine::Io(_)) => return,
        };
        idle.set(None);
        // A vanished client gets no more events. Its request is carried out nevertheless.
        let mut there = true;
        let mut tell = |line: Line| {
            there = there && write_within(&writer, &line.to_bytes(), WRITE_LIMIT).is_ok();
        };
        let request = parse_request(&line);
        if matches!(request, Ok(Request::Console {})) {
            match Attached::begin(service, attached) {
                Ok(console) => {
                    tell(Line::Result(serde_json::json!({"state": "attached"})));
                    console.serve(&writer, lines.into_rest(), service, stop);
                    return;
                }
                Err(failure) => tell(Line::Error((&failure).into())),
            }
            idle.set(Some(Instant::now()));
            continue;
        }
        let outcome =
            request.and_then(|request| service.serve(request, &mut |e| tell(Line::Event(e))));
        tell(match outcome {
            Ok(value) => Line::Result(value),
            Err(failure) => Line::Error((&failure).into()),
        });
        if !there {
            return;
        }
        idle.set(Some(Instant::now()));
    }
}

/// A place among the clients that are attached to the console.
struct Attached<'a> {
    console: Arc<Console>,
    number: &'a AtomicUsize,
}

impl<'a> Attached<'a> {
    fn begin(service: &dyn Service, number: &'a AtomicUsize) -> Result<Self, Failure> {
        let console = service.console()?;
        let attached = Self { console, number };
        // A counter alone, which orders nothing else.
        if number.fetch_add(1, Ordering::Relaxed) >= MAX_ATTACHED {
            let message = format!(
                "{MAX_ATTACHED} clients are attached to the console already; detach one by Ctrl-]"
            );
            return Err(Failure::new(Exit::Declined, message));
        }
        Ok(attached)
    }

    /// Serves the client until it leaves, the server ends, or the VM is another one.
    fn serve(&self, stream: &UnixStream, keys: Vec<u8>, service: &dyn Service, stop: &AtomicBool) {
        let is_over = || {
            let now = service.console();
            stop.load(Ordering::Acquire) || !now.is_ok_and(|now| Arc::ptr_eq(&now, &self.console))
        };
        attached::serve(stream, &self.console, keys, &is_over);
    }
}

impl Drop for Attached<'_> {
    fn drop(&mut self) {
        self.number.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_hostfs::Folder;
    use pageferry_testkit::{LIMIT, wait_until};
    use std::io::{BufRead, BufReader};
    use std::sync::Barrier;
    use std::sync::atomic::AtomicUsize;

    /// Answers when all clients that a test counts on have sent requests.
    struct Blocking {
        begun: AtomicUsize,
        all: Barrier,
    }

    impl Service for Blocking {
        fn serve(&self, _: Request, _: &mut dyn FnMut(Event)) -> Result<Value, Failure> {
            self.begun.fetch_add(1, Ordering::SeqCst);
            self.all.wait();
            Ok(Value::Null)
        }

        fn console(&self) -> Result<Arc<Console>, Failure> {
            Err(Failure::new(Exit::Declined, "no console"))
        }
    }

    #[test]
    fn a_client_that_reads_a_byte_from_time_to_time_is_dropped_in_time() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(300);
        let reader = std::thread::spawn(move || {
            while matches!(std::io::Read::read(&mut theirs, &mut [0; 4096]), Ok(1..)) {
                std::thread::sleep(limit / 6);
            }
        });
        let began = Instant::now();
        let error = write_within(&ours, &vec![b'x'; 64 << 20], limit).unwrap_err();
        let expected = [ErrorKind::TimedOut, ErrorKind::WouldBlock];
        assert!(expected.contains(&error.kind()), "{error}");
        assert!(began.elapsed() >= limit && began.elapsed() < LIMIT);
        drop(ours);
        reader.join().unwrap();
    }

    fn connect(path: &Path) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream
    }

    fn answer(stream: UnixStream) -> String {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn more_requests_at_once_than_are_served_are_told() {
        let dir = Folder::within(&std::env::temp_dir()).unwrap();
        let path = dir.path().join("socket");
        let service = Arc::new(Blocking {
            begun: AtomicUsize::new(0),
            all: Barrier::new(MAX_CLIENTS + 1),
        });
        let server = Server::start(&path, Arc::clone(&service) as _).unwrap();
        let clients: Vec<_> = (0..MAX_CLIENTS)
            .map(|_| {
                let mut stream = connect(&path);
                stream.write_all(b"{\"command\":\"status\"}\n").unwrap();
                stream
            })
            .collect();
        let all_ask = || service.begun.load(Ordering::SeqCst) == MAX_CLIENTS;
        wait_until("all requests to be served", all_ask);
        let refused = answer(connect(&path));
        assert!(refused.contains("try again later"), "{refused}");
        service.all.wait();
        for client in clients {
            assert!(answer(client).contains("result"));
        }
        drop(server);
    }
}
