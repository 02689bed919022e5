//! A pair of tunnels, one in each host.

use super::TunnelFlags;
use crate::BenchError;
use crate::error::scratch;
use crate::peer::{Part, Peer, kib_of, read_line, send, send_line};
use pageferry_bridge::tunnel::{Config, Event, Far, Near, Observer, Route, SessionState};
use pageferry_hosts::{Host, TwoHosts};
use pageferry_migration::{Listener, Tls, TlsFiles};
use pageferry_testkit::qemu::Streams;
use pageferry_transport::address::Address;
use pageferry_transport::handshake::PlainPolicy;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

/// The port between the tunnels.
const PORT: u16 = 4445;

/// The files for TLS, the same at both ends.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args, Serialize, Deserialize)]
pub(crate) struct TlsFlags {
    /// Measure with TLS too: the certificate of both ends (PEM)
    #[arg(long, value_name = "FILE", required = false, requires_all = ["tls_key", "tls_ca", "peer_name"])]
    tls_cert: PathBuf,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", required = false, requires = "tls_cert")]
    tls_key: PathBuf,
    /// The authority that signed the certificate (PEM)
    #[arg(long, value_name = "FILE", required = false, requires = "tls_cert")]
    tls_ca: PathBuf,
    /// The name in the certificate
    #[arg(long, value_name = "NAME", required = false, requires = "tls_cert")]
    peer_name: String,
}

impl From<TlsFlags> for Tls {
    fn from(flags: TlsFlags) -> Self {
        TlsFiles {
            cert: flags.tls_cert,
            key: flags.tls_key,
            ca: flags.tls_ca,
            peer_name: Some(flags.peer_name),
        }
        .into()
    }
}

/// One end of a tunnel, in a process of its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TunnelEnd {
    /// Whether it is the source's, which connects to the other one.
    near: bool,
    /// Where the VMM connects to, or listens.
    vmm: String,
    /// Where the destination's end listens for the other one.
    far: String,
    window: u64,
    tls: Option<TlsFlags>,
}

/// Nobody hears of the sessions: QEMU says how its migration ends.
struct Unheard;

impl Observer for Unheard {
    fn event(&self, _: Option<&SessionState>, _: &Event) {}
}

impl Part for TunnelEnd {
    const NAME: &'static str = "tunnel";

    /// Carries streams until standard input ends. Each line on it asks for the memory that this
    /// process has taken since it was ready.
    fn play(&self) -> Result<(), BenchError> {
        let parse = |text: &str| text.parse::<Address>().map_err(BenchError::peer);
        let config = Config {
            limits: pageferry_bridge::tunnel::Limits {
                window: self.window,
                urgent: None,
            },
            tls: self.tls.clone().map(Into::into),
            plain: PlainPolicy::Anywhere,
            ..Config::default()
        };
        let routes = [Route {
            name: "default".parse().map_err(BenchError::peer)?,
            address: parse(&self.vmm)?,
        }];
        let far = parse(&self.far)?;
        let observer = Arc::new(Unheard);
        // Both live as long as this process.
        let (near, far) = if self.near {
            let near = Near::listen(&routes, far, config, observer);
            (Some(near.map_err(BenchError::peer)?), None)
        } else {
            let listener = Listener::bind(&far).map_err(BenchError::peer)?;
            let far = Far::listen(listener, &routes, config, observer);
            (None, Some(far.map_err(BenchError::peer)?))
        };
        let before = peak_bytes()?;
        send_line("ready")?;
        while read_line().is_ok() {
            send(&peak_bytes()?.saturating_sub(before))?;
        }
        drop((near, far));
        Ok(())
    }
}

/// The most memory that this process has had, in bytes.
fn peak_bytes() -> Result<u64, BenchError> {
    Ok(kib_of("/proc/self/status", &["VmHWM:"])? << 10)
}

/// Two tunnels, which are ready. Dropping this ends both and removes their sockets.
pub(super) struct Ends {
    /// The source's, then the destination's.
    tunnels: [Peer; 2],
    folder: TempDir,
}

impl Ends {
    pub(super) fn start(
        flags: &TunnelFlags,
        hosts: &TwoHosts,
        tls: bool,
    ) -> Result<Self, BenchError> {
        let folder = scratch()?;
        let [a, b] = sockets(&folder);
        let start = |host, vmm| {
            let end = TunnelEnd {
                near: host == Host::A,
                vmm,
                far: format!("{}:{PORT}", hosts.address(Host::B)),
                window: flags.window,
                tls: flags.tls.clone().filter(|_| tls),
            };
            let mut tunnel = Peer::start_in(hosts.name(host), &end)?;
            tunnel.expect("ready")?;
            Ok::<_, BenchError>(tunnel)
        };
        // The destination's first: the other one connects to it.
        let destination = start(Host::B, b)?;
        let tunnels = [start(Host::A, a)?, destination];
        Ok(Self { tunnels, folder })
    }

    /// Where QEMU's streams go.
    pub(super) fn streams(&self) -> Streams {
        let [from, to] = sockets(&self.folder);
        Streams {
            from,
            to,
            no_delay: false,
        }
    }

    /// The memory that the source's and the destination's tunnel have taken since they were ready,
    /// at the most, in bytes.
    pub(super) fn grown_bytes(&mut self) -> Result<[u64; 2], BenchError> {
        let grown = |tunnel: &mut Peer| {
            tunnel.send_line("memory")?;
            tunnel.figures()
        };
        let [source, destination] = &mut self.tunnels;
        Ok([grown(source)?, grown(destination)?])
    }
}

/// Where QEMU's ends connect to, and listen.
fn sockets(folder: &TempDir) -> [String; 2] {
    ["a", "b"].map(|name| format!("unix:{}", folder.path().join(name).display()))
}
