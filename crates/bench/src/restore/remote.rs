//! The other host of `bench restore`: it shares the memory file over a shaped link.

use crate::BenchError;
use crate::peer::within;
use pageferry_hosts::{Error, Host, Link, Rate, TwoHosts};
use pageferry_pager::Store;
use pageferry_pager::stores::peer::{PeerStore, Server, Shares};
use pageferry_transport::{Listener, PlainPolicy};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The rate of the link in bits a second.
pub(super) const BITS: u64 = 1_000_000_000;
/// The address of the other host.
const ADDRESS: &str = "198.18.0.1:0";

/// Two hosts, of which the first shares a file.
pub(super) struct Remote {
    pub(super) hosts: TwoHosts,
    server: Server,
}

impl Remote {
    /// Shares a file. `None` if this machine cannot have two hosts.
    pub(super) fn start(memory: &Path) -> Result<Option<Self>, BenchError> {
        let hosts = match TwoHosts::start(&Link::new(Rate::bits(BITS))) {
            Err(Error::Unusable(_)) => return Ok(None),
            hosts => hosts?,
        };
        let shares = Shares::of_files([("memory".to_owned(), memory.to_owned())]);
        let shares = shares.map_err(BenchError::peer)?;
        let server = within(&hosts, Host::A, || {
            let address = ADDRESS.parse().expect("an address");
            let listener = Listener::bind(&address).map_err(BenchError::peer)?;
            // Without certificates: the benchmark is of the protocol and the link.
            Server::start(listener, shares, None, PlainPolicy::Anywhere).map_err(BenchError::peer)
        })?;
        Ok(Some(Self { hosts, server }))
    }

    /// The address of the file.
    pub(super) fn memory(&self) -> PathBuf {
        format!("pageferry://{}/memory", self.server.address().authority()).into()
    }

    /// A new store, which has read nothing yet.
    pub(super) fn store() -> Arc<dyn Store> {
        Arc::new(PeerStore::new(None, PlainPolicy::Anywhere))
    }
}
