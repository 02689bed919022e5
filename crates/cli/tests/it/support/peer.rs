//! A destination that speaks the bare wire format and misbehaves as a test wants.

use pageferry_migration::wire::{
    ChannelKey, Frame, FrameHeader, FrameType, HEADER_BYTES, Hello, Role, SetupProgress, Side,
    Status,
};
use pageferry_testkit::{LIMIT, wait_for};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{Connection, Listener, OpenError, Wait};
use pageferry_transport::handshake::{
    Acceptor, Arrival, Expected, PlainPolicy, Protection, Router, Secret, Stranger,
};
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
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
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, socket_with};
    let (kind, flags) = (SocketType::STREAM, SocketFlags::CLOEXEC);
    let taken = socket_with(AddressFamily::INET, kind, flags, None).unwrap();
    let any = std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0);
    bind(&taken, &any).unwrap();
    let address = std::net::SocketAddr::try_from(getsockname(&taken).unwrap()).unwrap();
    (taken, address.to_string())
}

/// Takes every channel of one session, and passes it on.
struct Doorkeeper {
    secret: Mutex<Option<Secret>>,
    channels: Mutex<Sender<(ChannelKey, Connection)>>,
}

impl Router for Doorkeeper {
    fn route(&self, _: &Hello, opens: bool) -> Result<Expected, Status> {
        let secret = self.secret.lock().unwrap().clone();
        match secret {
            None if opens => Ok(Expected::New),
            Some(secret) if !opens => Ok(Expected::Known(secret)),
            _ => Err(Status::UnknownSession),
        }
    }

    fn accepted(&self, arrival: Arrival) -> Result<(), Box<(Arrival, Status)>> {
        *self.secret.lock().unwrap() = Some(arrival.secret().clone());
        let key = arrival.agreed().key;
        if let Ok(connection) = arrival.welcome() {
            let _ = self.channels.lock().unwrap().send((key, connection));
        }
        Ok(())
    }

    fn stranger(&self, _: Stranger) {}

    fn cannot_accept(&self, _: &OpenError) {}
}

/// A destination whose source has opened the control channel.
pub(crate) struct Peer {
    pub(crate) control: Connection,
    channels: Receiver<(ChannelKey, Connection)>,
    /// The bulk and urgent channels. Their bytes are read and dropped, with receipts for bulk.
    open: Vec<Arc<Connection>>,
    _acceptor: Acceptor,
}

fn wait() -> Wait<'static> {
    Wait::block("test").within(LIMIT)
}

/// Reads and drops the frames of a bulk channel, and confirms each.
fn confirm(connection: &Connection) {
    let mut frames = 0;
    let mut head = [0; HEADER_BYTES];
    while connection.read_exact(&mut head, &wait()).is_ok() {
        let header = FrameHeader::decode(&head, Side::Source, Role::Bulk).unwrap();
        let mut payload = vec![0; header.payload_len as usize];
        if !payload.is_empty() && connection.read_exact(&mut payload, &wait()).is_err() {
            return;
        }
        if header.frame_type == FrameType::Pages {
            frames += 1;
            let mut bytes = Vec::new();
            Frame::Receipt { frames }.encode(&mut bytes).unwrap();
            let _ = connection.write_all(&bytes, &wait());
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        for connection in &self.open {
            connection.shutdown();
        }
    }
}

impl Peer {
    /// Listens, takes the control channel of a source, and calls `act`.
    pub(crate) fn start(act: impl FnOnce(Peer) + Send + 'static) -> (String, JoinHandle<()>) {
        let any = Address::Tcp {
            host: "127.0.0.1".into(),
            port: 0,
        };
        let listener = Listener::bind(&any).unwrap();
        let address = listener.local_addr().to_string();
        let address = address.trim_start_matches("tcp:").to_owned();
        let (sender, channels) = channel();
        let doorkeeper = Arc::new(Doorkeeper {
            secret: Mutex::default(),
            channels: Mutex::new(sender),
        });
        let plain = Protection::Plain(PlainPolicy::LoopbackOnly);
        let acceptor = Acceptor::start(listener, plain, doorkeeper).unwrap();
        let thread = std::thread::spawn(move || {
            let (key, control) = channels.recv_timeout(LIMIT).unwrap();
            assert_eq!(key.role, Role::Control);
            act(Peer {
                control,
                channels,
                open: Vec::new(),
                _acceptor: acceptor,
            });
        });
        (address, thread)
    }

    /// The header of the next frame on the control channel. Its payload is read and dropped. `None`
    /// when the source closed.
    pub(crate) fn skip_frame(&mut self) -> Option<FrameHeader> {
        loop {
            let mut head = [0; HEADER_BYTES];
            self.control.read_exact(&mut head, &wait()).ok()?;
            let header = FrameHeader::decode(&head, Side::Source, Role::Control).unwrap();
            let mut payload = vec![0; header.payload_len as usize];
            if !payload.is_empty() {
                self.control.read_exact(&mut payload, &wait()).ok()?;
            }
            if header.frame_type != FrameType::Alive {
                return Some(header);
            }
        }
    }

    /// Writes bytes on the control channel. The source may be gone already.
    pub(crate) fn write(&self, bytes: &[u8]) {
        let _ = self.control.write_all(bytes, &wait());
    }

    pub(crate) fn send(&self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).unwrap();
        self.write(&bytes);
    }

    /// Receives the set-up, and takes a bulk and an urgent channel.
    pub(crate) fn set_up(&mut self) {
        self.set_up_with(true);
    }

    /// As [`Self::set_up`], but takes no page: pre-copy never ends.
    pub(crate) fn set_up_and_take_no_page(&mut self) {
        self.set_up_with(false);
    }

    fn set_up_with(&mut self, confirms: bool) {
        assert_eq!(self.skip_frame().unwrap().frame_type, FrameType::Setup);
        self.send(&Frame::SetupAck { keeps: true });
        for _ in 0..2 {
            let (key, connection) = self.channels.recv_timeout(LIMIT).unwrap();
            let connection = Arc::new(connection);
            self.open.push(Arc::clone(&connection));
            if confirms && key.role == Role::Bulk {
                std::thread::spawn(move || confirm(&connection));
            }
        }
        // There is nothing to allocate.
        self.send(&Frame::SetupProgress(SetupProgress {
            pages: 0,
            ready: true,
        }));
    }

    /// Answers the source until the switch-over is announced.
    pub(crate) fn until_switch_over(&mut self) {
        self.set_up();
        while self.skip_frame().expect("the source goes on").frame_type != FrameType::SwitchOver {}
    }

    /// Answers the source until it has handed the VM over.
    pub(crate) fn until_handed_over(&mut self) {
        self.until_switch_over();
        self.send(&Frame::Ready);
        while self.skip_frame().expect("the source goes on").frame_type != FrameType::Go {}
    }

    /// Reads until the source closes.
    pub(crate) fn until_closed(&mut self) {
        while self.skip_frame().is_some() {}
    }
}
