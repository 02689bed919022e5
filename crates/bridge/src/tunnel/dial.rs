//! Opens the connections of a near end, each on a thread of its own.

use super::session::{Letter, NotDialled};
use super::status::Failure;
use super::{Config, Letters};
use pageferry_migration::{Role, Status};
use pageferry_transport::address::Address;
use pageferry_transport::channel::ChannelError;
use pageferry_transport::handshake::{HandshakeError, Identity, dial};
use pageferry_transport::wire::ChannelKey;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The pause after an attempt that failed, and the longest one.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// The least time of an attempt to connect, and of the handshake. The network may come back in the
/// middle of one, and the kernel sends the first packet again after a second. The handshake's grows
/// with the pauses, to fifteen seconds: the far end may get little of a busy host.
const LEAST_LIMIT: Duration = Duration::from_millis(1500);

/// The number of the next dialler. Letters of an older one have no effect.
static NEXT: AtomicU64 = AtomicU64::new(1);

#[derive(Clone, Copy)]
enum State {
    /// Due at this time, after a pause.
    Due(Instant, Duration),
    Dialling(Duration),
    Open,
}

pub(super) struct Dialler {
    number: u64,
    config: Arc<Config>,
    to: Address,
    letters: Letters,
    identity: Option<Identity>,
    places: Vec<Place>,
    stop: Arc<AtomicBool>,
}

struct Place {
    state: State,
    incarnation: u32,
}

impl Dialler {
    pub(super) fn new(config: &Arc<Config>, to: Address, letters: &Letters) -> Self {
        let due = || Place {
            state: State::Due(Instant::now(), FIRST_PAUSE),
            incarnation: 0,
        };
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            config: Arc::clone(config),
            to,
            letters: Arc::clone(letters),
            identity: None,
            places: (0..=config.channels).map(|_| due()).collect(),
            stop: Arc::default(),
        }
    }

    /// Whether an attempt is of this dialler.
    pub(super) const fn is_mine(&self, number: u64) -> bool {
        self.number == number
    }

    /// The id of the session.
    pub(super) fn session(&self) -> String {
        let identity = self.identity.as_ref();
        identity.map_or_else(String::new, |identity| identity.session.to_string())
    }

    fn set(&mut self, index: u16, state: State) {
        if let Some(place) = self.places.get_mut(usize::from(index)) {
            place.state = state;
        }
    }

    pub(super) fn opened(&mut self, index: u16) {
        self.set(index, State::Open);
    }

    pub(super) fn lost(&mut self, index: u16) {
        self.set(index, State::Due(Instant::now(), FIRST_PAUSE));
    }

    pub(super) fn failed(&mut self, index: u16) {
        let place = self.places.get(usize::from(index));
        let pause = match place.map(|place| place.state) {
            Some(State::Dialling(pause)) => pause,
            _ => FIRST_PAUSE,
        };
        let next = (pause * 2).min(LONGEST_PAUSE);
        self.set(index, State::Due(Instant::now() + pause, next));
    }

    /// Dials what is due. Before the first connection the session is not known to the other end, so
    /// each attempt is a session of its own. The first place opens the session.
    pub(super) fn dial(&mut self, was_connected: bool) -> Result<(), String> {
        for index in 0..self.places.len() {
            let place = &mut self.places[index];
            let State::Due(at, pause) = place.state else {
                continue;
            };
            if at > Instant::now() || index > 0 && !was_connected {
                continue;
            }
            if !was_connected || self.identity.is_none() {
                let identity = Identity::random().map_err(|e| format!("no secret: {e}"))?;
                self.identity = Some(identity);
                place.incarnation = 0;
            }
            place.incarnation += 1;
            place.state = State::Dialling(pause);
            let key = ChannelKey {
                role: Role::Tunnel,
                index: index as u16,
                generation: 1,
                incarnation: place.incarnation,
            };
            self.start(key, was_connected, pause)?;
        }
        Ok(())
    }

    fn start(&self, key: ChannelKey, was_connected: bool, pause: Duration) -> Result<(), String> {
        let (config, to) = (Arc::clone(&self.config), self.to.clone());
        let (letters, stop) = (Arc::clone(&self.letters), Arc::clone(&self.stop));
        let identity = self
            .identity
            .clone()
            .expect("made before the first attempt");
        let number = self.number;
        let growth = pause.div_duration_f64(FIRST_PAUSE);
        let limits = [LEAST_LIMIT, LEAST_LIMIT.mul_f64(growth)];
        let limits = limits.map(|limit| limit.max(config.patience.dead_after));
        let work = move || {
            let stop = || stop.load(Ordering::Relaxed);
            let protection = config.protection();
            let dialled = protection
                .map_err(HandshakeError::from)
                .and_then(|protection| dial(&to, &protection, &identity, key, limits, &stop));
            let dialled = dialled.map(|opened| opened.connection);
            let dialled = dialled.map_err(|error| not_dialled(&to, &error, was_connected));
            letters.post(Letter::Dialled(number, key.index, dialled));
        };
        let thread = std::thread::Builder::new().name("dial".into());
        let started = thread.spawn(work);
        started.map(drop).map_err(|e| format!("no thread: {e}"))
    }
}

impl Drop for Dialler {
    /// Attempts that are under way end soon, and their connections with the letters.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// What an error means. A session that was connected goes on whatever the network says. Only a far
/// end that has forgotten it ends it.
fn not_dialled(to: &Address, error: &HandshakeError, was_connected: bool) -> NotDialled {
    let why = format!("{to}: {error}");
    let refused = |why: String| Some(Failure::Refused(why));
    let failure = match error {
        HandshakeError::Refused {
            status: Status::UnknownSession,
            ..
        } if was_connected => refused(format!(
            "{to}: the tunnel there has forgotten the session: it was started again, or gave up"
        )),
        _ if was_connected => None,
        HandshakeError::Refused {
            status: Status::BadRole,
            ..
        } => refused(format!(
            "{to}: it receives VMs of Pageferry, and is no tunnel: expected `pageferry tunnel \
             --accept`"
        )),
        HandshakeError::Refused {
            status: Status::Busy,
            ..
        } => None,
        HandshakeError::Refused {
            status: Status::TlsRequired | Status::BadProof,
            ..
        }
        | HandshakeError::PlainForbidden { .. }
        | HandshakeError::BadProof
        | HandshakeError::Channel(ChannelError::Tls(_)) => Some(Failure::Untrusted(why.clone())),
        HandshakeError::Refused { .. } | HandshakeError::Wire(_) => refused(why.clone()),
        _ => None,
    };
    (why, failure)
}
