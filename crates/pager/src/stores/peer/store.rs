//! The store of files at peers.

use super::address::Address;
use super::client::{Peer, PeerSource};
use super::error::PeerError;
use crate::vm::locked;
use crate::{Source, SourceError, Store};
use pageferry_transport::address::Address as Host;
use pageferry_transport::{PlainPolicy, Tls};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

/// The time for opening a file, and for a read.
const LIMIT: Duration = Duration::from_secs(10);
/// The most extents of a file that are kept: 16 MiB. The rest of a file with more counts as data.
const MAX_EXTENTS: usize = 1 << 20;

/// The peers beyond which those without an open file are forgotten.
const MAX_PEERS: usize = 256;

/// Files at peers, by addresses such as `pageferry://store.example:7440/web/memory`.
///
/// VMs that start from the same file share its connections and the blocks that were read last.
#[derive(Debug)]
pub struct PeerStore {
    tls: Option<Tls>,
    plain: PlainPolicy,
    limit: Duration,
    /// With what is known of those that cannot be reached.
    peers: Mutex<BTreeMap<String, Arc<Peer>>>,
    sources: Mutex<BTreeMap<String, Weak<PeerSource>>>,
}

impl PeerStore {
    /// A store whose connections use TLS, or `plain`. Files of certificates are read anew for each
    /// connection. Opening a file ends within 10 seconds, and so does a read.
    #[must_use]
    pub fn new(tls: Option<Tls>, plain: PlainPolicy) -> Self {
        Self::with_limit(tls, plain, LIMIT)
    }

    /// [`Self::new`], with another limit for opening and for a read.
    #[must_use]
    pub fn with_limit(tls: Option<Tls>, plain: PlainPolicy, limit: Duration) -> Self {
        Self {
            tls,
            plain,
            limit,
            peers: Mutex::default(),
            sources: Mutex::default(),
        }
    }

    fn peer(&self, host: &Host) -> Arc<Peer> {
        let mut peers = locked(&self.peers);
        if peers.len() >= MAX_PEERS {
            peers.retain(|_, peer| Arc::strong_count(peer) > 1);
        }
        let new = || {
            let tls = self.tls.clone();
            Arc::new(Peer::new(host.clone(), tls, self.plain, self.limit))
        };
        peers.entry(host.authority()).or_insert_with(new).clone()
    }

    fn find(&self, text: &str) -> Result<Arc<PeerSource>, PeerError> {
        let address = Address::parse(text)?;
        let until = Instant::now() + self.limit;
        let peer = self.peer(&address.host);
        let mut talk = peer.connect_patiently(until)?;
        let asked = Instant::now();
        let opened = talk.open(&address.name)?;
        let round_trip = asked.elapsed();
        let known = locked(&self.sources).get(text).and_then(Weak::upgrade);
        if let Some(source) = known.filter(|source| *source.opened() == opened) {
            source.add(talk);
            return Ok(source);
        }
        let extents = talk.extents(opened.bytes, MAX_EXTENTS)?;
        let source = PeerSource::new(
            peer,
            text.to_owned(),
            address.name,
            opened,
            extents,
            round_trip,
        );
        source.add(talk);
        let source = Arc::new(source);
        let mut sources = locked(&self.sources);
        sources.retain(|_, source| source.strong_count() > 0);
        sources.insert(text.to_owned(), Arc::downgrade(&source));
        Ok(source)
    }
}

impl Store for PeerStore {
    fn schemes(&self) -> &[&str] {
        &["pageferry"]
    }

    fn open(&self, address: &str) -> Result<Arc<dyn Source>, SourceError> {
        match self.find(address) {
            Ok(source) => Ok(source),
            Err(why) => Err(SourceError::Failed {
                what: address.to_owned(),
                why: why.into_io(),
            }),
        }
    }
}
