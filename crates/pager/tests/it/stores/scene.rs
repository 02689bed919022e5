//! A directory of files, a server that shares it, and stores that read from there.

use crate::stores::Scratch;
use pageferry_pager::stores::peer::talk::Talk;
use pageferry_pager::stores::peer::{Limits, PeerStore, Server, Shares};
use pageferry_pager::{Source, SourceError, Store};
use pageferry_testkit::certificates::{Authority, Side, Validity};
use pageferry_testkit::wait_for;
use pageferry_transport::address::Address;
use pageferry_transport::handshake::{Identity, dial};
use pageferry_transport::wire::{ChannelKey, Role};
use pageferry_transport::{HandshakeError, Listener, PlainPolicy, Protection, Stream, Tls};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// No TLS, within this host.
pub(crate) const PLAIN: (Option<Tls>, PlainPolicy) = (None, PlainPolicy::LoopbackOnly);

/// A store with the certificates of a side.
pub(crate) fn store_of(side: &Side, peer_name: Option<&str>) -> PeerStore {
    PeerStore::new(Some(side.files(peer_name).into()), PLAIN.1)
}

/// A store without TLS.
pub(crate) fn plain_store() -> PeerStore {
    PeerStore::new(None, PLAIN.1)
}

pub(crate) fn listener() -> Listener {
    Listener::bind(&"127.0.0.1:0".parse().unwrap()).expect("a socket")
}

/// A server without TLS.
pub(crate) fn plain_server(shares: Shares, limits: Limits) -> Server {
    Server::with_limits(listener(), shares, None, PLAIN.1, limits).expect("a server")
}

/// A conversation with a server without TLS.
pub(crate) fn talk(server: &Server) -> Result<Talk<Stream>, HandshakeError> {
    let key = ChannelKey {
        role: Role::Share,
        ..ChannelKey::control(1)
    };
    let limits = [Duration::from_secs(20); 2];
    let identity = Identity::random().expect("random numbers");
    let way = Protection::Plain(PLAIN.1);
    let opened = dial(server.address(), &way, &identity, key, limits, &|| false)?;
    Ok(Talk::new(Stream::new(opened.connection.into(), limits[0])))
}

/// The address of a server as the standard library takes it.
pub(crate) fn socket_address(address: &Address) -> SocketAddr {
    address.authority().parse().expect("an address of a socket")
}

/// A server of a directory, with mutual TLS.
pub(crate) struct Scene {
    pub(crate) scratch: Scratch,
    pub(crate) authority: Authority,
    server: Option<Server>,
    address: Address,
    /// The server's and the client's.
    sides: [Side; 2],
}

impl Scene {
    pub(crate) fn new(name: &str) -> Self {
        Self::with_limits(name, Limits::default())
    }

    pub(crate) fn with_limits(name: &str, limits: Limits) -> Self {
        let scratch = Scratch::new(name);
        std::fs::create_dir(scratch.path("shared")).expect("a directory");
        let authority = Authority::new("CA");
        let server = authority.issue(&["127.0.0.1"], Validity::Now);
        let client = authority.issue(&["node"], Validity::Now);
        let listener = listener();
        let address = listener.local_addr().clone();
        let shares = Shares::of_directory(&scratch.path("shared")).expect("shares");
        let files = Some(server.files(None).into());
        let started = Server::with_limits(listener, shares, files, PLAIN.1, limits);
        Self {
            server: Some(started.expect("a server")),
            scratch,
            authority,
            address,
            sides: [server, client],
        }
    }

    /// The path of a shared file.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scratch.path("shared").join(name)
    }

    pub(crate) fn socket_address(&self) -> SocketAddr {
        socket_address(&self.address)
    }

    /// The address of a shared file.
    pub(crate) fn address(&self, name: &str) -> String {
        format!("pageferry://{}/{name}", self.address.authority())
    }

    /// A store with a certificate that the server accepts.
    pub(crate) fn store(&self) -> PeerStore {
        store_of(&self.sides[1], None)
    }

    pub(crate) fn open(&self, name: &str) -> Arc<dyn Source> {
        let opened = self.store().open(&self.address(name));
        opened.unwrap_or_else(|why| panic!("{name}: {why}"))
    }

    pub(crate) fn refusal(&self, name: &str) -> String {
        self.store()
            .open(&self.address(name))
            .unwrap_err()
            .to_string()
    }

    pub(crate) fn stop(&mut self) {
        drop(self.server.take().expect("a server"));
    }

    /// Starts the server again, at the same port.
    pub(crate) fn start(&mut self) {
        let listener = wait_for("the port", || Listener::bind(&self.address).ok());
        let shares = Shares::of_directory(&self.scratch.path("shared")).expect("shares");
        let files = Some(self.sides[0].files(None).into());
        let server = Server::start(listener, shares, files, PLAIN.1);
        self.server = Some(server.expect("a server"));
    }
}

/// Bytes by a seed, with zeros in some pages.
pub(crate) fn memory(seed: u64, pages: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let mut bytes = Vec::new();
    for page in 0..pages {
        let zero = page % 7 == 3;
        bytes.extend((0..512).flat_map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let word = state ^ (state >> 29);
            if zero { [0; 8] } else { word.to_le_bytes() }
        }));
    }
    bytes
}

/// Reads all of a source, in parts of `step` bytes.
pub(crate) fn read_all(source: &dyn Source, step: usize) -> Result<Vec<u8>, SourceError> {
    let mut bytes = vec![0; source.bytes() as usize];
    for (index, part) in bytes.chunks_mut(step).enumerate() {
        source.read((index * step) as u64, part)?;
    }
    Ok(bytes)
}

/// Writes a file whose length and time do not stay.
pub(crate) fn rewrite(path: &Path, bytes: &[u8]) {
    std::fs::remove_file(path).expect("a file");
    std::fs::write(path, bytes).expect("a file");
}
