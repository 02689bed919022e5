//! A destination that speaks the bare wire format and misbehaves as a test wants.

use pageferry_migration::wire::{
    Frame, FrameHeader, FrameType, HEADER_BYTES, HELLO_BYTES, Hello, HelloReply, SetupProgress,
    Side,
};
use pageferry_testkit::{LIMIT, wait_for};
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;

/// Listens on a port and lets `act` serve the first caller.
pub(crate) fn once(act: impl FnOnce(TcpStream) + Send + 'static) -> (String, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let thread = std::thread::spawn(move || act(accept(&listener)));
    (address, thread)
}

/// Takes the next connection. Neither this nor a read or write of the stream waits without a limit.
fn accept(listener: &TcpListener) -> TcpStream {
    listener.set_nonblocking(true).unwrap();
    let stream = wait_for("a connection", || match listener.accept() {
        Ok((stream, _)) => Some(stream),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(error) => panic!("{error}"),
    });
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.set_write_timeout(Some(LIMIT)).unwrap();
    stream
}

/// A port on which nobody listens. Nobody else gets it before the descriptor is dropped.
pub(crate) fn nobody() -> (OwnedFd, String) {
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let taken = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    let any = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0);
    bind(&taken, &any).unwrap();
    let address = std::net::SocketAddr::try_from(getsockname(&taken).unwrap()).unwrap();
    (taken, address.to_string())
}

fn shake(stream: &mut TcpStream) {
    let mut hello = [0; HELLO_BYTES];
    stream.read_exact(&mut hello).unwrap();
    let hello = Hello::decode(&hello).unwrap();
    stream
        .write_all(&HelloReply::accept(&hello).encode())
        .unwrap();
}

/// A destination after a good handshake.
pub(crate) struct Peer {
    pub(crate) stream: TcpStream,
    /// Kept open: the source ends when its urgent connection ends.
    pub(crate) _urgent: TcpStream,
}

impl Peer {
    /// Listens, shakes hands, and calls `act`.
    pub(crate) fn start(act: impl FnOnce(Peer) + Send + 'static) -> (String, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let [stream, urgent] = [(); 2].map(|()| {
                let mut stream = accept(&listener);
                shake(&mut stream);
                stream
            });
            act(Peer {
                stream,
                _urgent: urgent,
            });
        });
        (address, thread)
    }

    /// The header of the next frame. Its payload is read and dropped. `None` when the source
    /// closed.
    pub(crate) fn skip_frame(&mut self) -> Option<FrameHeader> {
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).ok()?;
        let header = FrameHeader::decode(&head, Side::Source).unwrap();
        let mut payload = vec![0; header.payload_len as usize];
        self.stream.read_exact(&mut payload).ok()?;
        Some(header)
    }

    pub(crate) fn send(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).unwrap();
        // The source may be gone already.
        let _ = self.stream.write_all(&bytes);
    }

    /// Receives the set-up.
    pub(crate) fn set_up(&mut self) {
        assert_eq!(self.skip_frame().unwrap().frame_type, FrameType::Setup);
        self.send(&Frame::SetupAck);
        // There is nothing to allocate.
        self.send(&Frame::SetupProgress(SetupProgress {
            pages: 0,
            ready: true,
        }));
    }

    /// Answers the source until the switch-over is announced.
    pub(crate) fn until_switch_over(&mut self) {
        self.set_up();
        loop {
            let header = self.skip_frame().expect("the source goes on");
            match header.frame_type {
                FrameType::PassEnd => {
                    let pass = pageferry_migration::wire::Pass {
                        pass: header.count,
                        pages: header.arg,
                    };
                    self.send(&Frame::PassAck(pass));
                }
                FrameType::SwitchOver => return,
                _ => {}
            }
        }
    }

    /// Reads until the source closes.
    pub(crate) fn until_closed(&mut self) {
        while self.skip_frame().is_some() {}
    }
}
