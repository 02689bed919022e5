//! Two doubles of Firecracker, and a move between them over loopback.

use crate::ch::Directory;
use pageferry_bridge::FIRECRACKER;
use pageferry_bridge::foreign::{
    Departure, ForeignVmm as _, Overrides, Pause, ReceiveError, ReceiverOptions, SourceError,
    SourceOptions, VmmError, receive,
};
use pageferry_migration::{
    Destination, DestinationConfig, DestinationReport, Listener, Observer, PlainPolicy, Route,
    SourceConfig, SourceReport, SourceSession, Switch, Unobserved,
};
use pageferry_testkit::firecracker::{Config, Double, Quirk};
use pageferry_testkit::shaper::{Plan, Shaper};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The longest move of a test.
const LIMIT: Duration = Duration::from_secs(120);
/// 12 MiB in two regions. No real VM of this size has two, so they are not found in its process.
const REGIONS: [u64; 2] = [8 << 20, 4 << 20];
pub(crate) const PAGES: u64 = (12 << 20) / 4096;

/// Two doubles, and what moves a VM from one to the other.
pub(crate) struct Hosts {
    pub(crate) source: Double,
    pub(crate) target: Double,
    pub(crate) session: SourceSession,
    pub(crate) destination: Arc<Destination>,
    /// The end of pre-copy.
    pub(crate) switch: Switch,
    /// The API sockets of both.
    pub(crate) apis: [PathBuf; 2],
    pub(crate) directory: Directory,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Places {
    /// Both have the root of the test.
    Beside,
    /// Each has a root of its own.
    Jails,
}

/// What both ends say about a move.
pub(crate) struct Moved {
    pub(crate) sent: Result<SourceReport, SourceError>,
    pub(crate) received: Result<DestinationReport, ReceiveError>,
    /// Firecracker's parts of the pause.
    pub(crate) pause: Option<Pause>,
}

/// What a test may touch while a move is under way.
pub(crate) struct Beside<'a> {
    pub(crate) source: &'a mut Double,
    pub(crate) session: &'a SourceSession,
    pub(crate) destination: &'a Arc<Destination>,
}

pub(crate) fn source_at(api: &Path) -> SourceOptions {
    SourceOptions {
        api: api.into(),
        preserve: false,
        keeper: None,
    }
}

pub(crate) fn take(mut options: SourceOptions) -> Result<Departure, VmmError> {
    FIRECRACKER.depart(&mut options, &|| false)
}

pub(crate) fn route_by(shaper: &Shaper) -> Route {
    Route::To(shaper.addr().to_string().parse().unwrap())
}

impl Hosts {
    /// Starts both. The VM runs.
    pub(crate) fn start(source: Quirk, target: Quirk) -> Option<Self> {
        Self::with(&REGIONS, None, [source, target])
    }

    pub(crate) fn with(
        regions: &[u64],
        balloon_us: Option<u64>,
        quirks: [Quirk; 2],
    ) -> Option<Self> {
        Self::at(Places::Beside, regions, balloon_us, quirks)
    }

    /// As [`Self::with`], with each process in a jail.
    pub(crate) fn in_jails(regions: &[u64], quirks: [Quirk; 2]) -> Option<Self> {
        Self::at(Places::Jails, regions, None, quirks)
    }

    fn at(
        places: Places,
        regions: &[u64],
        balloon_us: Option<u64>,
        [source, target]: [Quirk; 2],
    ) -> Option<Self> {
        let directory = Directory::new();
        let jail = |name: &str| {
            let jail = directory.join(name);
            (places == Places::Jails).then(|| {
                std::fs::create_dir(&jail).unwrap();
                jail
            })
        };
        let jails = [jail("source"), jail("target")];
        let apis = ["source", "target"].map(|name| match places {
            Places::Beside => directory.join(name),
            Places::Jails => directory.join(name).join("api"),
        });
        let mut sending = Double::start(&Config {
            api: Some(apis[0].clone()),
            seed: 1,
            regions: regions.to_vec(),
            vcpus: 2,
            balloon_us,
            quirk: source,
            jail: jails[0].clone(),
            ..Config::default()
        })?;
        let receiving = Double::start(&Config {
            api: Some(apis[1].clone()),
            quirk: target,
            jail: jails[1].clone(),
            ..Config::default()
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
            switch: Switch::Auto,
            apis,
            directory,
        })
    }

    pub(crate) fn source_options(&self) -> SourceOptions {
        source_at(&self.apis[0])
    }

    pub(crate) fn target_as_source(&self) -> SourceOptions {
        source_at(&self.apis[1])
    }

    pub(crate) fn receiver_options(&self) -> ReceiverOptions {
        ReceiverOptions {
            api: self.apis[1].clone(),
            keeper: None,
            any_version: false,
            overrides: Overrides::default(),
        }
    }

    /// A link on which 12 MiB take 3 s.
    pub(crate) fn slow_link(&self) -> Shaper {
        let to = self.destination.local_addrs()[0].to_string();
        let to: SocketAddr = to.trim_start_matches("tcp:").parse().unwrap();
        let plan = Plan {
            rate: Some(4 << 20),
            ..Plan::default()
        };
        Shaper::start(to, plan).unwrap()
    }

    pub(crate) fn route(&self) -> Route {
        Route::To(self.destination.local_addrs()[0].clone())
    }

    /// Moves the VM. `beside` runs meanwhile.
    pub(crate) fn migrate(&mut self, route: &Route, beside: impl FnOnce(Beside<'_>)) -> Moved {
        let mut target = self.receiver_options();
        self.migrate_to(&mut target, route, beside)
    }

    pub(crate) fn migrate_to(
        &mut self,
        target: &mut ReceiverOptions,
        route: &Route,
        beside: impl FnOnce(Beside<'_>),
    ) -> Moved {
        self.migrate_told(target, route, &Unobserved, beside)
    }

    /// As [`Self::migrate_to`], with an observer of the source.
    pub(crate) fn migrate_told(
        &mut self,
        target: &mut ReceiverOptions,
        route: &Route,
        observer: &dyn Observer,
        beside: impl FnOnce(Beside<'_>),
    ) -> Moved {
        let mut config = SourceConfig {
            plain: PlainPolicy::Anywhere,
            ..SourceConfig::default()
        };
        config.settings.switch = self.switch;
        let began = Instant::now();
        let late = || began.elapsed() > LIMIT;
        let over = AtomicBool::new(false);
        let source = take(self.source_options()).unwrap();
        let (session, destination) = (&self.session, &self.destination);
        let beside_it = Beside {
            source: &mut self.source,
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
                let (report, arrival) = receive(
                    &FIRECRACKER,
                    target,
                    destination,
                    incoming,
                    &late,
                    &Unobserved,
                )?;
                arrival.serve(&late).expect("it has all pages");
                Ok(report)
            });
            let sent = scope.spawn(|| source.migrate(route, &config, session, observer));
            beside(beside_it);
            let (sent, received) = (sent.join(), received.join());
            over.store(true, Ordering::Release);
            Moved {
                sent: sent.unwrap(),
                received: received.unwrap(),
                pause: source.pause(),
            }
        })
    }
}
