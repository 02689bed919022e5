//! Metrics for Prometheus over HTTP.
//!
//! **Guarantee.** Only processes of this host reach them: the address is a loopback address or a
//! unix socket of mode 0600. A client holds up no other thread, and is dropped after [`LIMIT`]. At
//! most [`MAX_CLIENTS`] are served at once, and those that send nothing keep no other out.
//!
//! **Mechanism.** One thread accepts connections, and each gets a thread for one answer.
//! [`request`] checks the bytes of clients. [`text`] writes the figures.

mod request;
mod text;

pub(crate) use text::{Page, of};

use crate::args::MetricsArgs;
use crate::control::server::{Client, Idle, Server, bind, make_room};
use crate::exit::{Exit, Failure};
use crate::output;
use pageferry_hostfs::SocketFile;
use pageferry_transport::address::Address;
use request::{MAX_HEAD_BYTES, Refusal, check, head_end};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The interval at which the accepting thread looks for clients and for its end.
const POLL: Duration = Duration::from_millis(20);
/// The time that a client has for its request, and again for taking the answer.
const LIMIT: Duration = Duration::from_secs(2);
/// The most clients served at once. One more takes the place of the one that has been reading its
/// request for the longest time. If all have sent theirs, it is turned away.
const MAX_CLIENTS: usize = 4;

/// Writes the figures as they are now.
type Body = Arc<dyn Fn() -> String + Send + Sync>;

/// Serves the metrics that `body` writes until the result is dropped, if the user asked for them.
///
/// # Errors
/// [`Exit::Usage`] for an address of another host, [`Exit::Address`] for one that is taken.
pub(crate) fn serve(
    args: &MetricsArgs,
    body: impl Fn() -> String + Send + Sync + 'static,
) -> Result<Option<Server>, Failure> {
    let Some(address) = &args.address else {
        return Ok(None);
    };
    let (listener, file) = listen(address)?;
    let body = Arc::new(body) as Body;
    Server::spawn("metrics", file, move |stop| accept(&listener, &body, stop))
        .map(Some)
        .map_err(|e| Failure::os("cannot serve metrics", e))
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

fn listen(address: &Address) -> Result<(Listener, Option<SocketFile>), Failure> {
    let cannot = |e: std::io::Error| {
        let message = format!("cannot serve metrics on {address}: {e}");
        Failure::new(Exit::Address, message)
    };
    match address {
        Address::Unix(path) => {
            let (listener, file) = bind("metrics", path)?;
            output::note(&format!("metrics on {address}"));
            Ok((Listener::Unix(listener), Some(file)))
        }
        Address::Tcp { host, port } => {
            let found = (host.as_str(), *port).to_socket_addrs().map_err(cannot)?;
            let found: Vec<SocketAddr> = found.collect();
            if let Some(other) = found.iter().find(|found| !found.ip().is_loopback()) {
                let message = format!(
                    "metrics have no protection: {} is no loopback address; use 127.0.0.1:{port} or \
                     unix:PATH, and a proxy with TLS in front of it",
                    other.ip()
                );
                return Err(Failure::new(Exit::Usage, message));
            }
            let listener = TcpListener::bind(&found[..]).map_err(cannot)?;
            listener.set_nonblocking(true).map_err(cannot)?;
            let bound = listener.local_addr().map_err(cannot)?;
            output::note(&format!("metrics on http://{bound}/metrics"));
            Ok((Listener::Tcp(listener), None))
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Listener {
    fn accept(&self) -> std::io::Result<Stream> {
        match self {
            Self::Tcp(listener) => listener.accept().map(|(stream, _)| Stream::Tcp(stream)),
            Self::Unix(listener) => listener.accept().map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

impl Stream {
    /// Sets the time that the next calls may take.
    fn set_limit(&self, limit: Duration) -> std::io::Result<()> {
        match self {
            Self::Tcp(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            }
            Self::Unix(stream) => {
                stream.set_nonblocking(false)?;
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            }
        }
    }

    fn read(&mut self, room: &mut [u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.read(room),
            Self::Unix(stream) => stream.read(room),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.write(bytes),
            Self::Unix(stream) => stream.write(bytes),
        }
    }

    fn shutdown(&self, how: Shutdown) {
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        };
    }
}

fn accept(listener: &Listener, body: &Body, stop: &AtomicBool) {
    let mut clients: Vec<Client> = Vec::new();
    while !stop.load(Ordering::Acquire) {
        let Ok(stream) = listener.accept() else {
            // No client, or no free descriptor at the moment.
            std::thread::sleep(POLL);
            continue;
        };
        if !make_room(&mut clients, MAX_CLIENTS) {
            continue;
        }
        let Ok(idle) = Idle::new(&stream) else {
            continue;
        };
        let (body, ours) = (Arc::clone(body), Arc::clone(&idle));
        let thread = std::thread::Builder::new()
            .name("metrics-client".into())
            .spawn(move || {
                answer(stream, &body, &ours);
                // `Idle` has the connection too, and outlives this thread.
                ours.shutdown();
            });
        clients.extend(thread.map(|thread| Client { thread, idle }));
    }
    for client in clients {
        let _ = client.thread.join();
    }
}

/// The time until `deadline`, unless it is over.
fn left(deadline: Instant) -> std::io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(ErrorKind::TimedOut.into());
    }
    Ok(left)
}

/// Answers one request. An error only ends the connection.
fn answer(mut stream: Stream, body: &Body, idle: &Idle) {
    let asked = read_head(&mut stream);
    idle.set(None);
    let Ok(asked) = asked else {
        return;
    };
    let (status, more, body) = match asked {
        Ok(()) => ("200 OK", "", body()),
        Err(refusal @ Refusal::MethodNotAllowed) => {
            (refusal.status(), "Allow: GET\r\n", String::new())
        }
        Err(refusal) => (refusal.status(), "", String::new()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\n{more}Connection: close\r\n\r\n",
        body.len()
    );
    let _ = write_all(&mut stream, &[head, body].concat().into_bytes());
    stream.shutdown(Shutdown::Write);
    // Closing with unread bytes would drop the answer.
    let _ = stream.set_limit(POLL);
    let _ = stream.read(&mut [0; MAX_HEAD_BYTES]);
}

fn read_head(stream: &mut Stream) -> std::io::Result<Result<(), Refusal>> {
    let deadline = Instant::now() + LIMIT;
    let mut head = [0; MAX_HEAD_BYTES];
    let mut filled = 0;
    loop {
        stream.set_limit(left(deadline)?)?;
        match stream.read(&mut head[filled..]) {
            Ok(0) => return Ok(Err(Refusal::BadRequest)),
            Ok(got) => filled += got,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        }
        if let Some(end) = head_end(&head[..filled]) {
            return Ok(check(&head[..end]));
        }
        if filled == head.len() {
            return Ok(Err(Refusal::BadRequest));
        }
    }
}

fn write_all(stream: &mut Stream, mut bytes: &[u8]) -> std::io::Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !bytes.is_empty() {
        stream.set_limit(left(deadline)?)?;
        match stream.write(bytes) {
            Ok(taken) => bytes = &bytes[taken..],
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}
