//! A directory of files, a server that shares it, and stores that read from there.

use crate::Scratch;
use pageferry_pager::{Source, SourceError, Store};
use pageferry_remote::peer::{Limits, PeerStore, Protection, Server, Shares};
use pageferry_testkit::certificates::{Authority, Side, Validity};
use pageferry_testkit::wait_for;
use rustix::net::{Shutdown, shutdown};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The certificates of a side.
pub(crate) fn tls(side: &Side, peer_name: Option<&str>) -> Protection {
    Protection::Tls(side.files(peer_name).into())
}

pub(crate) fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").expect("a socket")
}

/// A server of a directory, with mutual TLS.
pub(crate) struct Scene {
    pub(crate) scratch: Scratch,
    pub(crate) authority: Authority,
    server: Option<Server>,
    address: SocketAddr,
    /// A copy of the server's.
    listener: TcpListener,
    _sides: [Side; 2],
    here: Protection,
    there: Protection,
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
        let (there, here) = (tls(&server, None), tls(&client, None));
        let listener = listener();
        let address = listener.local_addr().expect("an address");
        let shares = Shares::of_directory(&scratch.path("shared")).expect("shares");
        let copy = listener.try_clone().expect("a copy");
        let started = Server::with_limits(listener, shares, there.clone(), limits);
        Self {
            server: Some(started.expect("a server")),
            scratch,
            authority,
            address,
            listener: copy,
            _sides: [server, client],
            here,
            there,
        }
    }

    /// The path of a shared file.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.scratch.path("shared").join(name)
    }

    pub(crate) fn socket_address(&self) -> SocketAddr {
        self.address
    }

    /// The address of a shared file.
    pub(crate) fn address(&self, name: &str) -> String {
        format!("pageferry://{}/{name}", self.address)
    }

    /// A store with a certificate that the server accepts.
    pub(crate) fn store(&self) -> PeerStore {
        PeerStore::new(self.here.clone())
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
        // A process that a test forked has a copy too, and would keep the port.
        shutdown(&self.listener, Shutdown::Both).expect("a socket that listens");
    }

    /// Starts the server again, at the same port.
    pub(crate) fn start(&mut self) {
        let listener = wait_for("the port", || TcpListener::bind(self.address).ok());
        self.listener = listener.try_clone().expect("a copy");
        let shares = Shares::of_directory(&self.scratch.path("shared")).expect("shares");
        let server = Server::start(listener, shares, self.there.clone());
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
