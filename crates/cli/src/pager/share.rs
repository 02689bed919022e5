//! Snapshots of other hosts: `pageferry pager share`, and the store of a pager that reads them.

use super::args::ShareArgs;
use super::{POLL, asked_to_end, service};
use crate::args::TlsArgs;
use crate::control::options::plain;
use crate::exit::{Exit, Failure, of_listen, of_tls};
use crate::output;
use crate::signals::Interrupts;
use pageferry_pager::stores::peer::{PeerStore, ServeError, Server, Shares};
use pageferry_pager::{FileSource, Store};
use pageferry_transport::{Listener, Tls};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time after which a host that shares reads its certificates again.
const RENEW: Duration = Duration::from_secs(60);

/// The store of other hosts. Without certificates it reads from this host alone.
///
/// # Errors
/// When the certificates do not serve.
pub(super) fn store(args: &TlsArgs) -> Result<Arc<dyn Store>, Failure> {
    let tls = certificates(args);
    if let Some(tls) = &tls {
        // Each connection reads them anew. A wrong file must not wait for the first one.
        tls.load()
            .map_err(|why| Failure::new(of_tls(&why), why.to_string()))?;
    }
    Ok(Arc::new(PeerStore::new(tls, plain(args.insecure))))
}

fn certificates(args: &TlsArgs) -> Option<Tls> {
    args.options().map(|options| Tls::from(&options))
}

/// `pageferry pager share`.
pub(super) fn share(args: &ShareArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let usage = |why: &dyn std::fmt::Display| Failure::new(Exit::Usage, why.to_string());
    let shares = match &args.directory {
        Some(directory) => Shares::of_directory(directory),
        None => {
            for (_, path) in &args.files {
                // A name that is mistyped must not wait for the first VM.
                FileSource::open(path).map_err(|why| usage(&why))?;
            }
            Shares::of_files(args.files.iter().cloned())
        }
    };
    let shares = shares.map_err(|why| usage(&why))?;
    let listener = Listener::bind(&args.listen).map_err(|why| of_listen(&why))?;
    let (tls, plain) = (certificates(&args.tls), plain(args.tls.insecure));
    let server = Server::start(listener, shares, tls, plain).map_err(|why| {
        let exit = match &why {
            ServeError::Tls(why) => of_tls(why),
            ServeError::Plain(_) => Exit::Usage,
            _ => Exit::Internal,
        };
        let hint = match why {
            ServeError::Plain(_) => " (--tls-cert, --tls-key and --tls-ca, or --insecure)",
            _ => "",
        };
        Failure::new(exit, format!("{why}{hint}"))
    })?;
    let about = format!("sharing at {}", server.address().authority());
    output::result(&format!("{about}\n"));
    service::ready(&about);
    let mut watchdog = service::Watchdog::new();
    let mut renewed = Instant::now();
    while !asked_to_end(interrupts) {
        watchdog.live();
        if renewed.elapsed() >= RENEW {
            renewed = Instant::now();
            if let Err(why) = server.read_certificates() {
                tracing::warn!("the certificates of before stay in use: {why}");
            }
        }
        std::thread::sleep(POLL);
    }
    service::stopping();
    Ok(())
}
