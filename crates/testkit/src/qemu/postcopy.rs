//! The move of a guest that begins at the destination: all its pages come in post-copy.
//!
//! **Mechanism.** Pre-copy is slowed down, so it sends next to nothing; post-copy has no limit. The
//! destination's trace points have the stalls. QEMU leaves TCP's Nagle algorithm on. On request,
//! this process borrows the sockets of both ends and sets the option.

use super::{Error, Machine, Qemu, Traced, failed};
use pageferry_guest::Program;
use pageferry_hosts::{Host, TwoHosts};
use serde_json::json;
use std::time::{Duration, Instant};

/// The port of the destination. Its namespace is its own.
const PORT: u16 = 4444;
/// The rate of pre-copy, in bytes a second.
const PRECOPY_RATE: u64 = 100_000;
/// The time between two looks at a migration.
const POLL: Duration = Duration::from_millis(10);

/// Where the streams of a migration go, as URIs of QEMU.
#[derive(Clone, Debug)]
pub struct Streams {
    /// The source connects to it.
    pub from: String,
    /// The destination listens there.
    pub to: String,
    /// Whether the sockets of QEMU get TCP_NODELAY.
    pub no_delay: bool,
}

impl Streams {
    /// From host to host.
    pub fn direct(hosts: &TwoHosts, no_delay: bool) -> Self {
        let uri = format!("tcp:{}:{PORT}", hosts.address(Host::B));
        Self {
            from: uri.clone(),
            to: uri,
            no_delay,
        }
    }
}

/// Two machines, and the wait for a migration between them.
pub struct Pair<'a> {
    /// The machine with the program.
    pub source: Machine,
    /// The machine that receives it.
    pub destination: Machine,
    /// The streams of its post-copy.
    streams: usize,
    deadline: Instant,
    stop: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Pair<'a> {
    /// Starts both machines. The source has the program. The migration ends within `limit`, or when
    /// `stop` returns true.
    pub fn start(
        qemu: &Qemu,
        hosts: &TwoHosts,
        program: &Program,
        capabilities: &[&str],
        limit: Duration,
        stop: &'a (dyn Fn() -> bool + Sync),
    ) -> Result<Self, Error> {
        let mut source = qemu.source(hosts.name(Host::A), program)?;
        let mut destination = qemu.destination(hosts.name(Host::B), program)?;
        source.turn_on(capabilities)?;
        destination.turn_on(capabilities)?;
        Ok(Self {
            source,
            destination,
            streams: 1 + usize::from(capabilities.contains(&"postcopy-preempt")),
            deadline: Instant::now() + limit,
            stop,
        })
    }

    /// Starts the migration.
    pub fn migrate(&mut self, streams: &Streams) -> Result<(), Error> {
        let to = json!({ "uri": streams.to });
        self.destination.call("migrate-incoming", to)?;
        self.source
            .call("migrate", json!({ "uri": streams.from }))?;
        Ok(())
    }

    /// Waits until both ends have completed. `each` sees the state of the source meanwhile.
    pub fn finish(
        &mut self,
        poll: Duration,
        each: &mut dyn FnMut(&mut Self, &str) -> Result<(), Error>,
    ) -> Result<(), Error> {
        loop {
            let states = [self.source.migration()?, self.destination.migration()?];
            if states.iter().all(|state| state == "completed") {
                return Ok(());
            }
            each(self, &states[0])?;
            if (self.stop)() {
                return Err(failed("cancelled"));
            }
            if Instant::now() > self.deadline {
                return Err(failed("its migration does not end"));
            }
            std::thread::sleep(poll);
        }
    }

    /// Moves the guest in post-copy. Returns the stalls.
    pub fn postcopy(mut self, streams: &Streams) -> Result<Traced, Error> {
        // A limit of 0 is none.
        let limits = json!({ "max-bandwidth": PRECOPY_RATE, "max-postcopy-bandwidth": 0 });
        self.source.call("migrate-set-parameters", limits)?;
        self.migrate(streams)?;
        let (mut asked, mut undelayed) = (false, 0);
        self.finish(POLL, &mut |pair, state| {
            if streams.no_delay {
                // The source listens on none, so all are connections.
                undelayed = undelayed.max(pair.source.set_no_delay()?);
                pair.destination.set_no_delay()?;
            }
            if state == "active" && !asked {
                pair.source.call("migrate-start-postcopy", json!({}))?;
                asked = true;
            }
            Ok(())
        })?;
        if streams.no_delay && undelayed < self.streams {
            return Err(failed("it had no connections to set TCP_NODELAY on"));
        }
        let traced = self.destination.traced(self.deadline)?;
        if traced.stalls.is_empty() {
            return Err(failed("its trace has no stall: did the guest run?"));
        }
        Ok(traced)
    }
}
