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
use crate::control::server::{Server, bind};
use crate::exit::{Exit, Failure};
use crate::output;
use pageferry_transport::address::Address;
use pageferry_transport::channel::resolve;
use pageferry_transport::{Guest, Listener, OpenError, Stream};
use request::{MAX_HEAD_BYTES, Refusal, check, head_end};
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

/// The time that a client has for its request, and again for taking the answer.
const LIMIT: Duration = Duration::from_secs(2);
/// The most clients served at once. One more takes the place of the one that has been reading its
/// request for the longest time. If all have sent theirs, it is turned away.
const MAX_CLIENTS: usize = 4;

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
    let listener = listen(address)?;
    Server::spawn(
        "metrics",
        listener,
        MAX_CLIENTS,
        Vec::new(),
        move |guest, _| answer(guest, &body),
    )
    .map(Some)
    .map_err(|e| Failure::os("cannot serve metrics", e))
}

fn listen(address: &Address) -> Result<Listener, Failure> {
    let (host, port) = match address {
        Address::Unix(path) => {
            let listener = bind("metrics", path)?;
            output::note(&format!("metrics on {address}"));
            return Ok(listener);
        }
        Address::Tcp { host, port } => (host, port),
    };
    let cannot = |why: OpenError| {
        let message = format!("cannot serve metrics on {address}: {why}");
        Failure::new(Exit::Address, message)
    };
    let found = resolve(host, *port).map_err(cannot)?;
    if let Some(other) = found.iter().find(|found| !found.ip().is_loopback()) {
        let message = format!(
            "metrics have no protection: {} is no loopback address; use 127.0.0.1:{port} or \
             unix:PATH, and a proxy with TLS in front of it",
            other.ip()
        );
        return Err(Failure::new(Exit::Usage, message));
    }
    let listener = Listener::bind(address).map_err(cannot)?;
    let bound = listener.local_addr().authority();
    output::note(&format!("metrics on http://{bound}/metrics"));
    Ok(listener)
}

/// Answers one request. An error only ends the connection.
fn answer(guest: &Guest, body: &dyn Fn() -> String) {
    let mut stream = Stream::new(Arc::clone(guest.connection()), LIMIT);
    let Ok(asked) = read_head(&mut stream) else {
        return;
    };
    guest.busy();
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
    stream.limit(LIMIT);
    if stream
        .write_all(&[head, body].concat().into_bytes())
        .is_ok()
    {
        guest.idle();
        stream.linger();
    }
}

fn read_head(stream: &mut Stream) -> std::io::Result<Result<(), Refusal>> {
    let mut head = [0; MAX_HEAD_BYTES];
    let mut filled = 0;
    loop {
        match stream.read(&mut head[filled..])? {
            0 => return Ok(Err(Refusal::BadRequest)),
            got => filled += got,
        }
        if let Some(end) = head_end(&head[..filled]) {
            return Ok(check(&head[..end]));
        }
        if filled == head.len() {
            return Ok(Err(Refusal::BadRequest));
        }
    }
}
