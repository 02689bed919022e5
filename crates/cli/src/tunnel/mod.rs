//! `pageferry tunnel`: carries the migration streams of other VMMs.
//!
//! **Guarantee.** The end of this command never cuts a migration unasked: the first Ctrl-C or
//! SIGTERM takes no new ones, and waits for those under way. The second cuts them, but those whose
//! VM may run at the destination. The third cuts these too.
//!
//! **Mechanism.** The crate `bridge` carries. The control socket answers `status`, `watch`, `list`,
//! `cancel` and `quit`, as that of a VM does.

mod args;
mod metrics;
mod routes;
mod service;
mod text;

use crate::control::server::Server;
use crate::exit::{Exit, Failure, of_listen, of_tls};
use crate::output;
use crate::pager::service as manager;
use crate::signals::Interrupts;
use crate::{sockets, wall_clock};
pub(crate) use args::TunnelArgs;
use metrics::Totals;
use pageferry_bridge::tunnel::{
    Config, Event, Failure as Cut, Far, Near, Observer, Route, SessionState, StartError,
};
use pageferry_migration::Listener;
use pageferry_transport::address::Address;
use routes::Routes;
use serde_json::json;
use service::TunnelService;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
pub(crate) use text::{line, table};

/// The time after which the files of certificates are read again.
const RENEW: Duration = Duration::from_secs(60);

/// One end of a tunnel.
enum End {
    Near(Near),
    Far(Far),
}

impl End {
    fn sessions(&self) -> Vec<SessionState> {
        match self {
            Self::Near(near) => near.sessions(),
            Self::Far(far) => far.sessions(),
        }
    }

    fn close(&self) {
        match self {
            Self::Near(near) => near.close(),
            Self::Far(far) => far.close(),
        }
    }

    fn cancel(&self, force: bool, which: impl Fn(&SessionState) -> bool) {
        match self {
            Self::Near(near) => near.cancel(force, which),
            Self::Far(far) => far.cancel(force, which),
        }
    }

    /// Reads the certificates of a far end again. A near end does so for each connection.
    fn renew(&self) {
        if let Self::Far(far) = self
            && let Err(why) = far.read_certificates()
        {
            tracing::warn!("the certificates of before stay in use: {why}");
        }
    }

    fn set_routes(&self, routes: &[Route]) {
        match self {
            Self::Near(near) => near.set_routes(routes),
            Self::Far(far) => far.set_routes(routes),
        }
    }

    /// What it does, in one line.
    fn about(&self) -> String {
        let list = |addresses: &[Address]| match addresses {
            [] => "no route yet".to_owned(),
            some => {
                let texts: Vec<String> = some.iter().map(ToString::to_string).collect();
                texts.join(", ")
            }
        };
        match self {
            Self::Near(near) => {
                format!("listening at {}, to {}", list(&near.addresses()), near.to())
            }
            Self::Far(far) => {
                format!(
                    "listening at {}, to {}",
                    far.address(),
                    list(&far.addresses())
                )
            }
        }
    }
}

/// A migration that has ended.
struct Ended {
    state: SessionState,
    failure: Option<Cut>,
}

/// Tells what happens, and passes ends on.
struct Tells {
    events: bool,
    totals: Arc<Totals>,
    ended: Mutex<Sender<Ended>>,
}

impl Observer for Tells {
    fn event(&self, session: Option<&SessionState>, event: &Event) {
        if self.events {
            let value = json!({
                "at": wall_clock::now(),
                "event": text::event(event),
                "session": session.map(text::json),
            });
            output::json_line(&value);
        } else if let Some(told) = text::told(session, event) {
            output::note(&told);
        }
        let failure = match event {
            Event::Ended => None,
            Event::Failed(failure) => Some(failure.clone()),
            _ => return,
        };
        // A session without streams is a near end that has dialled again, or a stranger.
        if let Some(state) = session.filter(|state| !state.streams.is_empty()) {
            self.totals.add(state, failure.is_some());
            let ended = Ended {
                state: state.clone(),
                failure,
            };
            let sender = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
            // The command may have ended.
            let _ = sender.send(ended);
        }
    }
}

/// Carries streams until the user asks for the end, or one migration has ended.
///
/// # Errors
/// Why it cannot listen; with `--once`, why the migration failed.
pub(crate) fn tunnel(args: &TunnelArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    args.check().map_err(|why| Failure::new(Exit::Usage, why))?;
    let (sender, ended) = channel();
    let totals = Arc::new(Totals::default());
    let observer = Arc::new(Tells {
        events: args.events,
        totals: Arc::clone(&totals),
        ended: Mutex::new(sender),
    });
    let end = Arc::new(start(args, args.config(), observer)?);
    let service = Arc::new(TunnelService::new(Arc::clone(&end)));
    let _control = control(args, &service)?;
    let metrics = Arc::clone(&end);
    let _metrics = crate::metrics::serve(&args.metrics, move || totals.page(&metrics.sessions()))?;
    let about = end.about();
    if args.json || args.events {
        output::note(&about);
    } else {
        output::result(&format!("{about}\n"));
    }
    manager::ready(&about);
    let result = serve(args, &end, &service, &ended, interrupts);
    manager::stopping();
    end.close();
    result
}

fn start(args: &TunnelArgs, config: Config, observer: Arc<Tells>) -> Result<End, Failure> {
    if let Some(tls) = &config.tls {
        // A near end reads them anew for each connection. A wrong file must not wait for the first.
        tls.load()
            .map_err(|why| Failure::new(of_tls(&why), why.to_string()))?;
    }
    let failed = |why: StartError| match &why {
        StartError::Listen(why) => of_listen(why),
        StartError::Tls(tls) => Failure::new(of_tls(tls), why.to_string()),
        _ => Failure::new(Exit::Internal, why.to_string()),
    };
    let routes = args.routes();
    if let Some(accept) = &args.accept {
        let listener = Listener::bind(accept).map_err(|why| of_listen(&why))?;
        return Far::listen(listener, &routes, config, observer)
            .map(End::Far)
            .map_err(failed);
    }
    let Some(to) = args.to.clone() else {
        return Err(Failure::new(Exit::Usage, "give --to or --accept"));
    };
    Near::listen(&routes, to, config, observer)
        .map(End::Near)
        .map_err(failed)
}

/// The control socket. Without a name from the user, the tunnel works without one too.
fn control(args: &TunnelArgs, service: &Arc<TunnelService>) -> Result<Option<Server>, Failure> {
    let (control, name) = (args.control.as_deref(), args.name.as_deref());
    let own = format!("tunnel-{}", std::process::id());
    let chosen = control.is_some() || name.is_some();
    let path = sockets::path_for(control, name.or((!chosen).then_some(&own)));
    let service = Arc::clone(service) as _;
    match path.and_then(|path| Server::start(&path, service)) {
        Ok(server) => Ok(Some(server)),
        Err(why) if chosen => Err(why),
        Err(why) => {
            output::note(&format!("no control socket: {why}"));
            Ok(None)
        }
    }
}

fn serve(
    args: &TunnelArgs,
    end: &End,
    service: &TunnelService,
    ended: &Receiver<Ended>,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let mut watchdog = manager::Watchdog::new();
    let mut renewed = Instant::now();
    let mut routes = Routes::new(args);
    let mut asked = 0;
    loop {
        if let Some(routes) = routes.changed() {
            end.set_routes(routes);
        }
        if renewed.elapsed() >= RENEW {
            renewed = Instant::now();
            end.renew();
        }
        match ended.recv_timeout(Interrupts::POLL) {
            Ok(ended) => {
                show(args, &ended);
                if args.once {
                    return ended.failure.map_or(Ok(()), |cut| Err(failure(&cut)));
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Failure::new(Exit::Internal, "the tunnel has ended"));
            }
        }
        watchdog.live();
        let now = interrupts.count() + u32::from(service.quits()) + u32::from(interrupts.hung_up());
        let busy = end.sessions().len();
        if now > 0 && asked == 0 {
            end.close();
            if now == 1 && busy > 0 {
                let s = if busy == 1 { "" } else { "s" };
                output::note(&format!(
                    "waiting for {busy} migration{s} (again: cut them)"
                ));
            }
        }
        if now > 1 && now > asked {
            if now == 2 && end.sessions().iter().any(|one| one.in_doubt) {
                output::note(&format!("{} (again: cut them all)", text::IN_DOUBT));
            }
            end.cancel(now > 2, |_| true);
        }
        asked = now;
        if asked > 0 && busy == 0 {
            // The results of the last ones.
            while let Ok(ended) = ended.try_recv() {
                show(args, &ended);
            }
            return Ok(());
        }
    }
}

fn show(args: &TunnelArgs, ended: &Ended) {
    if args.json {
        output::json_line(&text::result(&ended.state, ended.failure.as_ref()));
    } else if !args.events {
        output::result(&text::summary(&ended.state, ended.failure.as_ref()));
    }
}

fn failure(cut: &Cut) -> Failure {
    let exit = match cut {
        Cut::Unreachable(_) => Exit::Unreachable,
        Cut::Untrusted(_) => Exit::Untrusted,
        Cut::Refused(_) | Cut::Told(_) => Exit::Refused,
        Cut::GaveUp { .. } => Exit::BrokenOff,
        Cut::Protocol(_) => Exit::Protocol,
        Cut::NoVmm(_) => Exit::NoVm,
        Cut::Cancelled => Exit::Cancelled,
        _ => Exit::Internal,
    };
    Failure::new(exit, cut.to_string())
}
