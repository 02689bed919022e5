//! The other process of a benchmark: this executable, started again in a part of its own.
//!
//! The two exchange lines. The peer writes to its standard output, and ends when its standard input
//! ends. So no peer outlives its benchmark. This module knows no part: each benchmark has its own.

use crate::BenchError;
use crate::error::os;
use pageferry_hosts::{Host, TwoHosts, netns};
use pageferry_transport::address::Address;
use pageferry_transport::channel::{Connection, Listener, Wait};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// The task of another process. It travels as its name and JSON.
pub(crate) trait Part: Serialize + DeserializeOwned {
    /// The name.
    const NAME: &'static str;

    /// Does the task to its end.
    ///
    /// # Errors
    /// If the benchmark's process goes away, or the task fails.
    fn play(&self) -> Result<(), BenchError>;
}

/// Plays the part `P` that the benchmark's process has described.
pub(crate) fn play<P: Part>(text: &str) -> Result<(), BenchError> {
    // The peer ends when its standard input does. In case that fails, the kernel kills it together
    // with its parent.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    parse::<P>(text)?.play()
}

fn json(value: &impl Serialize) -> Result<String, BenchError> {
    serde_json::to_string(value).map_err(BenchError::peer)
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, BenchError> {
    serde_json::from_str(text).map_err(|why| BenchError::Peer(format!("'{text}': {why}")))
}

/// This program's file.
pub(crate) fn executable() -> Result<PathBuf, BenchError> {
    std::env::current_exe().map_err(os("cannot find this program's own file"))
}

pub(crate) fn parse_address(line: &str) -> Result<Address, BenchError> {
    line.parse()
        .map_err(|e| BenchError::Peer(format!("'{line}': {e}")))
}

/// The sum of these counters of a file in /proc, in KiB.
pub(crate) fn kib_of(file: &str, names: &[&str]) -> Result<u64, BenchError> {
    let status = std::fs::read_to_string(file);
    let status = status.map_err(os("cannot read the kernel's counters"))?;
    let kib = |name: &&str| {
        let line = status.lines().find_map(|line| line.strip_prefix(*name));
        line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
    };
    Ok(names.iter().filter_map(kib).sum())
}

pub(crate) fn send_line(line: &str) -> Result<(), BenchError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(os("cannot write to the benchmark's process"))
}

/// Sends figures to the benchmark's process.
pub(crate) fn send(figures: &impl Serialize) -> Result<(), BenchError> {
    send_line(&json(figures)?)
}

pub(crate) fn read_line() -> Result<String, BenchError> {
    let mut line = String::new();
    let got = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(os("cannot read from the benchmark's process"))?;
    if got == 0 {
        return Err(BenchError::Peer("the benchmark's process ended".into()));
    }
    Ok(line.trim().to_owned())
}

/// Runs `work` in a host's namespace.
pub(crate) fn within<T: Send>(
    hosts: &TwoHosts,
    host: Host,
    work: impl FnOnce() -> Result<T, BenchError> + Send,
) -> Result<T, BenchError> {
    netns::within(hosts.name(host), work).map_err(os("cannot enter a network namespace"))?
}

/// The loopback address.
pub(crate) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A listener on a port of `host` that the kernel chooses.
pub(crate) fn listen(host: IpAddr) -> Result<Listener, BenchError> {
    let address = Address::Tcp {
        host: host.to_string(),
        port: 0,
    };
    Ok(Listener::bind(&address).map_err(pageferry_transport::channel::ChannelError::from)?)
}

pub(crate) fn accept_one(host: IpAddr) -> Result<Connection, BenchError> {
    let listener = listen(host)?;
    send_line(&listener.local_addr().to_string())?;
    Ok(listener.accept(&Wait::block("the benchmark").within(Duration::from_secs(20)))?)
}

/// The other process. Dropping this kills it and reaps it.
pub(crate) struct Peer {
    child: Child,
    input: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts the process.
    ///
    /// # Errors
    /// If the executable cannot be run.
    pub(crate) fn start(part: &impl Part) -> Result<Self, BenchError> {
        Self::start_by(Command::new(executable()?), part)
    }

    /// As [`Peer::start`], in the network namespace `namespace`.
    pub(crate) fn start_in(namespace: &str, part: &impl Part) -> Result<Self, BenchError> {
        Self::start_by(netns::command(namespace, executable()?), part)
    }

    fn start_by<P: Part>(mut command: Command, part: &P) -> Result<Self, BenchError> {
        let mut child = command
            .args(["peer", P::NAME, &json(part)?])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(os("cannot start the benchmark's other process"))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (input, output) = pipes.ok_or_else(|| BenchError::peer("it has no pipes"))?;
        Ok(Self {
            child,
            input,
            lines: BufReader::new(output).lines(),
        })
    }

    /// A function that kills the process. It serves only as long as the peer lives.
    pub(crate) fn killer(&self) -> impl Fn() + Sync + use<> {
        let pid = Pid::from_child(&self.child);
        move || {
            // It may have ended already, and its id is its own until the peer is dropped.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// The next line from the peer.
    pub(crate) fn next_line(&mut self) -> Result<String, BenchError> {
        match self.lines.next() {
            Some(Ok(line)) => Ok(line),
            Some(Err(e)) => Err(BenchError::peer(e)),
            // The peer shares this process' stderr, so its own message is there already.
            None => Err(BenchError::Peer(
                "it ended before it had sent all lines".into(),
            )),
        }
    }

    /// Takes the next line, which must be this one.
    pub(crate) fn expect(&mut self, expected: &str) -> Result<(), BenchError> {
        let line = self.next_line()?;
        match line == expected {
            true => Ok(()),
            false => Err(BenchError::Peer(format!("'{line}': expected '{expected}'"))),
        }
    }

    pub(crate) fn send_line(&mut self, line: &str) -> Result<(), BenchError> {
        writeln!(self.input, "{line}").map_err(BenchError::peer)
    }

    /// Connects to the address in the peer's next line.
    pub(crate) fn connect(&mut self) -> Result<Connection, BenchError> {
        let address = parse_address(&self.next_line()?)?;
        Ok(Connection::connect(
            &address,
            &Wait::block("peer").within(Duration::from_secs(10)),
        )?)
    }

    /// The figures in the peer's next line.
    pub(crate) fn figures<T: DeserializeOwned>(&mut self) -> Result<T, BenchError> {
        parse(&self.next_line()?)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Values that travel by their names.
pub(crate) mod by_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub(crate) fn serialize<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(crate) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}
