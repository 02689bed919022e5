//! A pair of tunnels, one in each host.

use super::TunnelSetting;
use crate::BenchError;
use crate::qemu::Streams;
use crate::scratch::Scratch;
use pageferry_hosts::{Host, TwoHosts, netns};
use pageferry_migration::TlsFiles;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

/// The port between the tunnels.
const PORT: u16 = 4445;
/// The longest time from the start of a tunnel until it listens.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two tunnels, which are ready. Dropping this ends both and removes their sockets.
pub(super) struct Ends {
    /// The source's, then the destination's.
    tunnels: [Tunnel; 2],
    folder: Scratch,
}

impl Ends {
    pub(super) fn start(
        setting: &TunnelSetting,
        hosts: &TwoHosts,
        tls: Option<&TlsFiles>,
    ) -> Result<Self, BenchError> {
        let folder = Scratch::new()?;
        let address = format!("{}:{PORT}", hosts.address(Host::B));
        let start = |host, ends: [&str; 4]| {
            let mut command = netns::command(hosts.name(host), &setting.executable);
            command.arg("tunnel").args(ends).arg("--json");
            command
                .arg("--control")
                .arg(folder.path(&format!("control-{host:?}")));
            command.args(["--window", &setting.window_bytes.to_string()]);
            protect(&mut command, tls);
            Tunnel::start(command)
        };
        let [a, b] = sockets(&folder);
        // The destination's first: the other one connects to it.
        let destination = start(Host::B, ["--accept", &address, "--connect", &b])?;
        let source = start(Host::A, ["--listen", &a, "--to", &address])?;
        Ok(Self {
            tunnels: [source, destination],
            folder,
        })
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
    pub(super) fn grown_bytes(&self) -> Result<[u64; 2], BenchError> {
        let grown = |tunnel: &Tunnel| {
            let peak = peak_bytes(tunnel.child.id())?;
            Ok::<_, BenchError>(peak.saturating_sub(tunnel.at_start))
        };
        Ok([grown(&self.tunnels[0])?, grown(&self.tunnels[1])?])
    }
}

/// Where QEMU's ends connect to, and listen.
fn sockets(folder: &Scratch) -> [String; 2] {
    ["a", "b"].map(|name| format!("unix:{}", folder.path(name).display()))
}

fn protect(command: &mut Command, tls: Option<&TlsFiles>) {
    let Some(files) = tls else {
        command.arg("--insecure");
        return;
    };
    command.arg("--tls-cert").arg(&files.cert);
    command.arg("--tls-key").arg(&files.key);
    command.arg("--tls-ca").arg(&files.ca);
    if let Some(name) = &files.peer_name {
        command.args(["--peer-name", name]);
    }
}

/// A process. Dropping this kills it and reaps it.
struct Tunnel {
    child: Child,
    /// Its memory when it was ready, in bytes.
    at_start: u64,
}

impl Tunnel {
    fn start(mut command: Command) -> Result<Self, BenchError> {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let child = child.map_err(|source| BenchError::Os {
            what: "cannot start a tunnel",
            source,
        })?;
        let mut tunnel = Self { child, at_start: 0 };
        let errors = tunnel.child.stderr.take();
        let (send, lines) = channel();
        // It ends with the process.
        std::thread::spawn(move || {
            let lines = errors
                .into_iter()
                .flat_map(|from| BufReader::new(from).lines());
            for line in lines.map_while(Result::ok) {
                // Later lines are of no use, but the tunnel must be able to write them.
                let _ = send.send(line);
            }
        });
        let line = lines.recv_timeout(PATIENCE).unwrap_or_default();
        if !line.contains("listening at ") {
            let why = format!("a tunnel says '{line}' instead of where it listens");
            return Err(BenchError::Peer(why));
        }
        tunnel.at_start = peak_bytes(tunnel.child.id())?;
        Ok(tunnel)
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The most memory that a process has had, in bytes.
fn peak_bytes(pid: u32) -> Result<u64, BenchError> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    let kib = kib.ok_or_else(|| BenchError::Peer("a tunnel has ended".into()))?;
    Ok(kib << 10)
}
