//! Snapshots of other hosts: `pageferry pager share`, and the store of a pager that reads them.

use super::args::ShareArgs;
use super::{POLL, asked_to_end, service};
use crate::args::TlsArgs;
use crate::exit::{Exit, Failure, of_tls};
use crate::output;
use crate::signals::Interrupts;
use pageferry_migration::Tls;
use pageferry_pager::{FileSource, Store};
use pageferry_remote::peer::{PeerStore, Protection, ServeError, Server, Shares};
use std::net::TcpListener;
use std::sync::Arc;

/// The store of other hosts. Without certificates it reads from this host alone.
///
/// # Errors
/// When the certificates do not serve.
pub(super) fn store(tls: &TlsArgs) -> Result<Arc<dyn Store>, Failure> {
    let protection = protection(tls);
    if let Protection::Tls(tls) = &protection {
        // Each connection reads them anew. A wrong file must not wait for the first one.
        tls.load()
            .map_err(|why| Failure::new(of_tls(&why), why.to_string()))?;
    }
    Ok(Arc::new(PeerStore::new(protection)))
}

fn protection(args: &TlsArgs) -> Protection {
    match args.options() {
        Some(options) => Protection::Tls(Tls::from(&options)),
        None if args.insecure => Protection::Insecure,
        None => Protection::Loopback,
    }
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
    let listener = TcpListener::bind(&args.listen).map_err(|why| {
        let why = format!("cannot listen at {}: {why}", args.listen);
        Failure::new(Exit::Address, why)
    })?;
    let server = Server::start(listener, shares, protection(&args.tls)).map_err(|why| {
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
    output::result(&format!("sharing at {}\n", server.address()));
    service::ready(&format!("sharing at {}", server.address()));
    let mut watchdog = service::Watchdog::new();
    while !asked_to_end(interrupts) {
        watchdog.live();
        std::thread::sleep(POLL);
    }
    service::stopping();
    Ok(())
}
