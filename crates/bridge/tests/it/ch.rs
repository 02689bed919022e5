//! Two doubles of Cloud Hypervisor, and a move between them over loopback.

use pageferry_bridge::CLOUD_HYPERVISOR;
use pageferry_bridge::foreign::{
    Arrival, Departure, ForeignVmm as _, Overrides, ReceiveError, ReceiverOptions, SourceError,
    SourceOptions, VmmError, receive,
};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationReport, Listener, PlainPolicy, Route, Settings,
    SourceConfig, SourceReport, SourceSession, Switch, Unobserved,
};
use pageferry_testkit::cloud_hypervisor::{Config, Double, Quirk};
use pageferry_testkit::wait_until;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The longest move of a test.
const LIMIT: Duration = Duration::from_secs(120);
/// 12 MiB in two regions.
pub(crate) const REGIONS: [u64; 2] = [8 << 20, 4 << 20];
pub(crate) const PAGES: u64 = (12 << 20) / 4096;

/// A directory that is removed on drop.
pub(crate) struct Directory(PathBuf);

impl Directory {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pf-ch-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl AsRef<Path> for Directory {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Two doubles, and what moves a VM from one to the other.
pub(crate) struct Hosts {
    pub(crate) source: Double,
    pub(crate) target: Double,
    pub(crate) session: SourceSession,
    pub(crate) destination: Arc<Destination>,
    pub(crate) preserve: bool,
    /// All pages come by post-copy, unless a test chooses.
    pub(crate) switch: Switch,
    directory: Directory,
}

/// Calls a double's API.
fn call(api: &Path, endpoint: &str, body: &str) {
    let mut stream = UnixStream::connect(api).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    let length = body.len();
    let request =
        format!("PUT /api/v1/{endpoint} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 204"), "{answer}");
}

/// The ends of a move.
pub(crate) struct Moved {
    pub(crate) sent: Result<SourceReport, SourceError>,
    pub(crate) received: Result<(DestinationReport, Arrival), ReceiveError>,
}

pub(crate) fn options(directory: &Directory, preserve: bool) -> SourceOptions {
    SourceOptions {
        api: directory.join("source"),
        preserve,
        keeper: None,
    }
}

pub(crate) fn take(
    mut options: SourceOptions,
    stop: &dyn Fn() -> bool,
) -> Result<Departure, VmmError> {
    CLOUD_HYPERVISOR.depart(&mut options, stop)
}

pub(crate) fn sender(directory: &Directory, quirk: Quirk) -> Option<Double> {
    Double::start(&Config {
        api: directory.join("source"),
        seed: 1,
        regions: REGIONS.to_vec(),
        vcpus: 2,
        quirk,
    })
}

fn source_config(switch: Switch) -> SourceConfig {
    SourceConfig {
        settings: Settings {
            switch,
            ..Settings::default()
        },
        plain: PlainPolicy::Anywhere,
        ..SourceConfig::default()
    }
}

impl Hosts {
    /// Starts both. The VM runs.
    pub(crate) fn start(source: Quirk, target: Quirk) -> Option<Self> {
        let directory = Directory::new();
        let mut sending = sender(&directory, source)?;
        let receiving = Double::start(&Config {
            api: directory.join("target"),
            seed: 0,
            regions: Vec::new(),
            vcpus: 0,
            quirk: target,
        })?;
        sending.run();
        let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
        let config = DestinationConfig::default();
        let destination = Destination::listen(listener, config, |_| ()).unwrap();
        Some(Self {
            source: sending,
            target: receiving,
            session: SourceSession::new().unwrap(),
            destination: Arc::new(destination),
            preserve: false,
            switch: Switch::NOW,
            directory,
        })
    }

    /// The receiver, as if it were asked for a VM.
    pub(crate) fn target_as_source(&self) -> SourceOptions {
        SourceOptions {
            api: self.directory.join("target"),
            preserve: false,
            keeper: None,
        }
    }

    /// Moves the VM from one process to the other, without Pageferry.
    pub(crate) fn move_locally(&mut self) {
        let socket = format!("unix:{}", self.directory.join("m").display());
        let target = self.directory.join("target");
        let receive = format!(r#"{{"receiver_url":"{socket}"}}"#);
        std::thread::scope(|scope| {
            scope.spawn(|| call(&target, "vm.receive-migration", &receive));
            wait_until("the receiver's socket", || {
                self.directory.join("m").exists()
            });
            // It listens right behind its bind, and the sender connects once.
            std::thread::sleep(Duration::from_millis(100));
            let send = format!(r#"{{"destination_url":"{socket}","local":true}}"#);
            call(&self.directory.join("source"), "vm.send-migration", &send);
        });
        assert_eq!(self.source.outcome().outcome, "sent");
    }

    /// Sends the VM to a destination that is none of these hosts.
    pub(crate) fn send(&self, route: &Route) -> Result<SourceReport, SourceError> {
        let began = Instant::now();
        let late = || began.elapsed() > LIMIT;
        let source = take(options(&self.directory, false), &late).unwrap();
        source.migrate(
            route,
            &source_config(self.switch),
            &self.session,
            &Unobserved,
        )
    }

    pub(crate) fn route(&self) -> Route {
        Route::To(self.destination.local_addrs()[0].clone())
    }

    /// Moves the VM. `beside` runs meanwhile.
    pub(crate) fn migrate(&mut self, route: &Route, beside: impl FnOnce(Beside<'_>)) -> Moved {
        let config = source_config(self.switch);
        let began = Instant::now();
        let late = || began.elapsed() > LIMIT;
        let over = AtomicBool::new(false);
        let (session, destination) = (&self.session, &self.destination);
        let taken = take(options(&self.directory, self.preserve), &late);
        let source = taken.unwrap();
        let mut target = ReceiverOptions {
            api: self.directory.join("target"),
            keeper: None,
            any_version: false,
            overrides: Overrides::default(),
        };
        let beside_it = Beside {
            source: &mut self.source,
            target: &mut self.target,
            session,
            destination,
        };
        std::thread::scope(|scope| {
            // A move that hangs fails its test, and does not hang it.
            scope.spawn(|| {
                while !over.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_millis(10));
                    if late() {
                        session.cancel();
                        session.give_up();
                        destination.give_up();
                    }
                }
            });
            let received = scope.spawn(|| {
                let incoming = destination.accept(&late).unwrap();
                let vmm = &CLOUD_HYPERVISOR;
                receive(vmm, &mut target, destination, incoming, &late, &Unobserved)
            });
            let sent = scope.spawn(|| source.migrate(route, &config, session, &Unobserved));
            beside(beside_it);
            let (sent, received) = (sent.join(), received.join());
            over.store(true, Ordering::Release);
            Moved {
                sent: sent.unwrap(),
                received: received.unwrap(),
            }
        })
    }
}

/// What a test may touch while a move is under way.
pub(crate) struct Beside<'a> {
    pub(crate) source: &'a mut Double,
    pub(crate) target: &'a mut Double,
    pub(crate) session: &'a SourceSession,
    pub(crate) destination: &'a Arc<Destination>,
}

/// Serves the pages of an arrived VM until the process has asked for all.
pub(crate) fn serve((_, arrival): (DestinationReport, Arrival)) -> Result<(), VmmError> {
    let began = Instant::now();
    arrival.serve(&|| began.elapsed() > LIMIT)
}
