//! The bad networks of the test kit, and its double of Firecracker.

mod faults;
mod firecracker;
mod schedules;
mod shaper;
mod two_hosts;

use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_testkit::wait_for;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// No call of a test on a socket takes longer.
const LIMIT: Duration = Duration::from_secs(60);

/// A process of its own for each double.
#[test]
fn firecracker_double() {
    pageferry_testkit::firecracker::entry();
}

/// A shaper before a listener of the test's own.
struct Shaped {
    target: TcpListener,
    shaper: Shaper,
}

impl Shaped {
    fn new(plan: Plan) -> Self {
        let target = TcpListener::bind("127.0.0.1:0").expect("a port");
        let to = target.local_addr().expect("an address");
        let shaper = Shaper::start(to, plan).expect("a shaper");
        Self { target, shaper }
    }

    /// Both ends of a new connection: the side that connected, and the target's.
    fn connect(&self) -> (TcpStream, TcpStream) {
        let client = connect(self.shaper.addr());
        let server = accept(&self.target);
        server.set_read_timeout(Some(LIMIT)).expect("a limit");
        (client, server)
    }
}

/// Accepts a connection, but does not wait for ever.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).expect("an option");
    let (stream, _) = wait_for("a connection", || listener.accept().ok());
    stream.set_nonblocking(false).expect("an option");
    stream
}

fn connect(to: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&to, LIMIT).expect("a connection");
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
    stream.set_nodelay(true).expect("an option");
    stream
}

/// Sends `text` and waits until it arrives.
#[track_caller]
fn pass(mut from: &TcpStream, mut to: &TcpStream, text: &[u8]) {
    from.write_all(text).expect("sent");
    let mut got = vec![0; text.len()];
    to.read_exact(&mut got).expect("received");
    assert_eq!(got, text);
}

/// Checks that nothing can be read for a short time.
#[track_caller]
fn assert_silent(mut stream: &TcpStream) {
    let short = Duration::from_millis(60);
    stream.set_read_timeout(Some(short)).expect("a limit");
    let got = stream.read(&mut [0; 16]).map_err(|why| why.kind());
    assert_eq!(got, Err(ErrorKind::WouldBlock));
    stream.set_read_timeout(Some(LIMIT)).expect("a limit");
}

/// Checks that the next read fails by RST.
#[track_caller]
fn assert_reset(mut stream: &TcpStream) {
    let got = stream.read(&mut [0; 16]).map_err(|why| why.kind());
    assert_eq!(got, Err(ErrorKind::ConnectionReset));
}

/// Checks that the next read finds the end of the stream.
#[track_caller]
fn assert_ended(mut stream: impl Read) {
    let got = stream.read(&mut [0; 16]).map_err(|why| why.kind());
    assert_eq!(got, Ok(0));
}
