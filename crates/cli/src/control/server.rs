//! The VM's side of its control socket.

use super::line::{LineReader, NoLine};
use super::protocol::{Event, Line, Request, parse_request};
use super::{MAX_ATTACHED, MAX_REQUEST_BYTES, attached};
use crate::exit::{Exit, Failure};
use pageferry_machine::Console;
use pageferry_transport::address::Address;
use pageferry_transport::{Connection, Guest, Listener, OpenError, Room, Stream, Wait};
use serde_json::Value;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The interval at which threads here check whether they should end.
const POLL: Duration = Duration::from_millis(50);
/// The time limit for a client to read an answer, before it is dropped.
pub(super) const WRITE_LIMIT: Duration = Duration::from_secs(2);
/// The maximum number of clients served at once.
const MAX_CLIENTS: usize = 16;

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
}

impl Server {
    /// Serves `most` clients at once, each by `work` on a thread called `name`. A client that is
    /// idle makes room for a new one. If none is, the new one gets `refusal`.
    ///
    /// # Errors
    /// When the host has no room for a thread.
    pub(crate) fn spawn(
        name: &'static str,
        listener: Listener,
        most: usize,
        refusal: Vec<u8>,
        work: impl Fn(&Guest, &AtomicBool) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopping, work) = (Arc::clone(&stop), Arc::new(work));
        let acceptor = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                let room = Room::new(name, most, most);
                let stops = || stopping.load(Ordering::Acquire);
                while !stops() {
                    let Ok(client) = listener.accept(&Wait::block("client").unless(&stops)) else {
                        // No free descriptor at the moment, or the end.
                        std::thread::sleep(POLL);
                        continue;
                    };
                    if !room.wait_for_room(client.origin()) {
                        // It is small, so it fits. A client that is gone needs none.
                        let _ = client.try_send(&refusal, "refusal");
                        continue;
                    }
                    let (work, stop) = (Arc::clone(&work), Arc::clone(&stopping));
                    // Without a thread the client sees the end of its connection.
                    let _ = room.serve(client, move |guest| work(guest, &stop));
                }
            })?;
        Ok(Self {
            stop,
            acceptor: Some(acceptor),
        })
    }

    /// Creates the control socket and serves it.
    ///
    /// # Errors
    /// [`Exit::Address`] when `path` is taken or cannot be created.
    pub(crate) fn start(path: &Path, service: Arc<dyn Service>) -> Result<Self, Failure> {
        let listener = bind("control", path)?;
        let failure = Failure::new(
            Exit::Declined,
            format!("requests of {MAX_CLIENTS} clients are being served; try again later"),
        );
        let refusal = Line::Error((&failure).into()).to_bytes();
        let attached = AtomicUsize::new(0);
        Self::spawn(
            "control",
            listener,
            MAX_CLIENTS,
            refusal,
            move |guest, stop| {
                serve_client(guest, service.as_ref(), stop, &attached);
            },
        )
        .map_err(|e| Failure::os("cannot serve the control socket", e))
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
pub(crate) fn bind(purpose: &str, path: &Path) -> Result<Listener, Failure> {
    let bound = Address::unix(path).map_err(|why| why.to_string());
    bound
        .and_then(|address| {
            Listener::bind(&address).map_err(|why| match why {
                OpenError::InUse { .. } => {
                    "another VM listens there; choose another path".to_owned()
                }
                OpenError::NotASocket { .. } => "a file of that name exists".to_owned(),
                other => other.to_string(),
            })
        })
        .map_err(|why| {
            let at = path.display();
            let message = format!("cannot make the {purpose} socket {at}: {why}");
            Failure::new(Exit::Address, message)
        })
}

/// The requests of a client. A read ends after [`POLL`], so that the end of the server is seen.
struct Requests(Stream);

impl Read for Requests {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        self.0.limit(POLL);
        self.0.read(buffer)
    }
}

/// Serves one client until it leaves, violates the protocol, or the server ends.
fn serve_client(guest: &Guest, service: &dyn Service, stop: &AtomicBool, attached: &AtomicUsize) {
    let stream = || Stream::new(Arc::clone(guest.connection()), WRITE_LIMIT);
    let write = |line: &Line| stream().write_all(&line.to_bytes());
    let mut lines = LineReader::new(Requests(stream()), MAX_REQUEST_BYTES);
    loop {
        let line = match lines.next(&|| stop.load(Ordering::Acquire)) {
            Ok(line) => line,
            Err(NoLine::TooLong) => {
                let message = format!(
                    "a request has at most {MAX_REQUEST_BYTES} bytes; the connection is closed"
                );
                let failure = Failure::new(Exit::Usage, message);
                let _ = write(&Line::Error((&failure).into()));
                return;
            }
            Err(NoLine::Closed | NoLine::CutOff | NoLine::Stopped | NoLine::Io(_)) => return,
        };
        guest.busy();
        // A vanished client gets no more events. Its request is carried out nevertheless.
        let mut there = true;
        let mut tell = |line: Line| {
            there = there && write(&line).is_ok();
        };
        let request = parse_request(&line);
        if matches!(request, Ok(Request::Console {})) {
            match Attached::begin(service, attached) {
                Ok(console) => {
                    tell(Line::Result(serde_json::json!({"state": "attached"})));
                    console.serve(guest.connection(), lines.into_rest(), service, stop);
                    return;
                }
                Err(failure) => tell(Line::Error((&failure).into())),
            }
            guest.idle();
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
        guest.idle();
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
    fn serve(
        &self,
        client: &Arc<Connection>,
        keys: Vec<u8>,
        service: &dyn Service,
        stop: &AtomicBool,
    ) {
        let is_over = || {
            let now = service.console();
            stop.load(Ordering::Acquire) || !now.is_ok_and(|now| Arc::ptr_eq(&now, &self.console))
        };
        attached::serve(client, &self.console, keys, &is_over);
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
    use std::os::unix::net::UnixStream;
    use std::sync::Barrier;

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
