//! Two ends of a tunnel in this process, and VMMs at both of them.

use pageferry_bridge::tunnel::{
    Config, Event, Failure, Far, Limits, Near, Observer, Route, SessionState,
};
use pageferry_migration::Listener;
use pageferry_testkit::Random;
use pageferry_testkit::shaper::{Plan, Shaper};
use pageferry_transport::address::Address;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The longest that anything may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// A directory that ends with its test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageferry-bridge-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What has happened at one end.
#[derive(Default)]
pub(crate) struct Log(Mutex<Vec<(Event, Option<SessionState>)>>);

impl Observer for Log {
    fn event(&self, session: Option<&SessionState>, event: &Event) {
        self.0
            .lock()
            .unwrap()
            .push((event.clone(), session.cloned()));
    }
}

impl Log {
    pub(crate) fn events(&self) -> Vec<Event> {
        self.0
            .lock()
            .unwrap()
            .iter()
            .map(|(event, _)| event.clone())
            .collect()
    }

    /// Waits for the `n`-th end of a session, from 1.
    pub(crate) fn end(&self, n: usize) -> (Result<(), Failure>, SessionState) {
        let until = Instant::now() + LIMIT;
        loop {
            let ended = |(event, state): &(Event, Option<SessionState>)| {
                let result = match event {
                    Event::Ended => Ok(()),
                    Event::Failed(failure) => Err(failure.clone()),
                    _ => return None,
                };
                Some((result, state.clone().unwrap()))
            };
            if let Some(end) = self.0.lock().unwrap().iter().filter_map(ended).nth(n - 1) {
                return end;
            }
            assert!(Instant::now() < until, "no end: {:?}", self.events());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub(crate) fn wait_for(&self, wanted: impl Fn(&Event) -> bool) {
        let until = Instant::now() + LIMIT;
        while !self.events().iter().any(&wanted) {
            assert!(Instant::now() < until, "not seen: {:?}", self.events());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A tunnel with one route.
pub(crate) struct Scene {
    pub(crate) near: Near,
    pub(crate) far: Far,
    pub(crate) near_log: Arc<Log>,
    pub(crate) far_log: Arc<Log>,
    /// Where the far VMM listens.
    pub(crate) vmm: UnixListener,
    pub(crate) near_path: PathBuf,
    pub(crate) scratch: Scratch,
}

/// Limits that fit tests with faults of milliseconds. A busy machine is such a fault, too.
pub(crate) fn quick() -> Config {
    dead_after(Duration::from_millis(400))
}

/// Limits with which a busy machine loses no connection.
pub(crate) fn calm() -> Config {
    dead_after(LIMIT)
}

fn dead_after(limit: Duration) -> Config {
    let mut config = Config::default();
    config.patience.dead_after = limit;
    config
}

pub(crate) fn window(bytes: u64) -> Config {
    Config {
        limits: Limits {
            window: bytes,
            urgent: None,
        },
        ..calm()
    }
}

pub(crate) fn route(name: &str, path: &Path) -> Route {
    Route {
        name: name.parse().unwrap(),
        address: Address::unix(path).unwrap(),
    }
}

pub(crate) fn loopback() -> Listener {
    Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap()
}

pub(crate) fn socket_of(address: &Address) -> SocketAddr {
    match address {
        Address::Tcp { host, port } => SocketAddr::new(host.parse().unwrap(), *port),
        Address::Unix(_) => panic!("a tunnel over TCP"),
    }
}

impl Scene {
    /// `between` says where the near end connects instead of to the far one.
    pub(crate) fn new(config: &Config, between: impl FnOnce(SocketAddr) -> SocketAddr) -> Self {
        Self::with(config, config, between)
    }

    pub(crate) fn with(
        near: &Config,
        far: &Config,
        between: impl FnOnce(SocketAddr) -> SocketAddr,
    ) -> Self {
        let scratch = Scratch::new();
        let (near_path, far_path) = (scratch.path("near"), scratch.path("far"));
        let vmm = UnixListener::bind(&far_path).unwrap();
        let (near_log, far_log) = (Arc::new(Log::default()), Arc::new(Log::default()));
        let routes = [route("vm", &far_path)];
        let far = Far::listen(loopback(), &routes, far.clone(), far_log.clone()).unwrap();
        let to = between(socket_of(far.address()))
            .to_string()
            .parse()
            .unwrap();
        let routes = [route("vm", &near_path)];
        let near = Near::listen(&routes, to, near.clone(), near_log.clone()).unwrap();
        Self {
            near,
            far,
            near_log,
            far_log,
            vmm,
            near_path,
            scratch,
        }
    }

    /// A tunnel through a network that fails on demand.
    pub(crate) fn through_shaper(near: &Config, far: &Config) -> (Self, Shaper) {
        let mut shaper = None;
        let scene = Self::with(near, far, |far| {
            let made = Shaper::start(far, Plan::default()).unwrap();
            let address = made.addr();
            shaper = Some(made);
            address
        });
        (scene, shaper.unwrap())
    }

    /// Opens a stream of the near VMM.
    pub(crate) fn open(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.near_path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        stream
    }

    /// Accepts a stream at the far VMM.
    pub(crate) fn accept(&self) -> UnixStream {
        let until = Instant::now() + LIMIT;
        self.vmm.set_nonblocking(true).unwrap();
        loop {
            if let Ok((stream, _)) = self.vmm.accept() {
                stream.set_nonblocking(false).unwrap();
                stream.set_read_timeout(Some(LIMIT)).unwrap();
                stream.set_write_timeout(Some(LIMIT)).unwrap();
                return stream;
            }
            let events = (self.near_log.events(), self.far_log.events());
            assert!(Instant::now() < until, "no stream comes: {events:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Opens a stream, and returns its two ends. Nothing may be under way to open.
    pub(crate) fn pair(&self) -> (UnixStream, UnixStream) {
        (self.open(), self.accept())
    }
}

/// The byte of a stream at a place.
fn byte(seed: u64, at: usize) -> u8 {
    ((at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed).to_le_bytes()[5]
}

/// Writes `length` bytes in pieces of random lengths, then ends the direction.
pub(crate) fn write(mut stream: &UnixStream, seed: u64, length: usize) {
    let mut random = Random::new(seed);
    let mut at = 0;
    while at < length {
        let piece = (1 + random.below(100_000) as usize).min(length - at);
        let bytes: Vec<u8> = (at..at + piece).map(|at| byte(seed, at)).collect();
        stream.write_all(&bytes).unwrap();
        at += piece;
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

/// Reads to the end, and checks each byte.
pub(crate) fn read(mut stream: &UnixStream, seed: u64, length: usize) {
    let mut at = 0;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let got = stream.read(&mut buffer).unwrap();
        if got == 0 {
            break;
        }
        for (offset, found) in buffer[..got].iter().enumerate() {
            assert_eq!(*found, byte(seed, at + offset), "byte {}", at + offset);
        }
        at += got;
    }
    assert_eq!(at, length, "the length of the stream");
}

/// Moves bytes in both directions, and checks them.
pub(crate) fn exchange(pair: &(UnixStream, UnixStream), seed: u64, lengths: (usize, usize)) {
    std::thread::scope(|scope| {
        scope.spawn(|| write(&pair.0, seed, lengths.0));
        scope.spawn(|| write(&pair.1, seed + 1, lengths.1));
        scope.spawn(|| read(&pair.1, seed, lengths.0));
        scope.spawn(|| read(&pair.0, seed + 1, lengths.1));
    });
}
