//! The other process of a benchmark: this executable, started again in a role.
//!
//! The two exchange lines of text. The peer writes to its standard output, and ends when its
//! standard input ends. So no peer outlives its benchmark.

use crate::channels::Channels;
use crate::error::os;
use crate::restore::{Paced, Restarted, Restored};
use crate::tunnel::TunnelEnd;
use crate::vm::{Faults, Vm, create_on, fill, isa_of, toucher};
use crate::{BenchError, Setting};
use pageferry_addr::PAGE_SIZE;
use pageferry_guest::{TouchOrder, Workload};
use pageferry_machine::{Backing, Engine, MachineSpec};
use pageferry_migration::address::Address;
use pageferry_migration::channel::{Connection, Listener, Wait};
use pageferry_migration::{
    PlainPolicy, Resolver, Route, SourceConfig, SourceSession, Switch, Unobserved, migrate,
};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The size of a request on the urgent connection, in bytes.
pub(crate) const REQUEST_BYTES: usize = 16;
/// The size of a reply's header, in bytes. The page follows.
pub(crate) const HEADER_BYTES: usize = 16;
/// The size of a write to the bulk connection, in bytes.
pub(crate) const BULK_BYTES: usize = 256 << 10;

/// The time that a workload runs before the move.
const WARM_UP: Duration = Duration::from_millis(400);

/// The task of the other process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Role {
    /// Answers each 16 bytes with 16 bytes and a page, as a source's urgent thread does, without
    /// decoding them.
    Pong {
        /// The address to listen on.
        host: IpAddr,
        /// The size of the page, in bytes.
        page_bytes: usize,
    },
    /// Sends bytes as fast as the benchmark reads them.
    Bulk,
    /// Touches memory that comes from a snapshot.
    Restored(Restored),
    /// Touches such memory slowly.
    Paced(Paced),
    /// Serves memory from a snapshot.
    Restarted(Restarted),
    /// Creates a VM and moves it to the address on its standard input.
    Source(SourceVm),
    /// Carries QEMU's streams.
    Tunnel(TunnelEnd),
    /// Runs Linux under load, and moves it as `Source` does.
    Linux {
        /// The kernel's file.
        kernel: PathBuf,
        /// The file of its initrd.
        initrd: PathBuf,
    },
}

/// The VM of a source, and how it moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SourceVm {
    /// The VM's engine.
    #[serde(with = "by_name")]
    pub(crate) engine: Engine,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// Guest memory, in bytes.
    pub(crate) memory_bytes: u64,
    /// The memory behind the guest.
    #[serde(with = "by_name")]
    pub(crate) backing: Backing,
    /// The part of it that the guest uses, in bytes.
    pub(crate) used_bytes: u64,
    /// The number of pre-copy passes.
    pub(crate) passes: u32,
    /// Whether the source pushes pages in the background.
    pub(crate) push: bool,
    /// Whether requested pages have a way of their own.
    pub(crate) preempt: bool,
    /// Whether requests guide the push.
    pub(crate) prefetch: bool,
    /// The guest program.
    pub(crate) guest: Guest,
    /// The channels for pages.
    pub(crate) channels: Channels,
}

/// The guest program of a source's VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Guest {
    /// The demo's workload. It starts before the move.
    Workload,
    /// A program whose vCPUs store to all data pages, each in a random order of its own. It starts
    /// when the VM has moved.
    Toucher,
    /// As `Toucher`, but each vCPU stores to its own part of the pages, in ascending order.
    InOrder,
    /// A program that touches one page. It starts when the VM has moved, and leaves the cores to
    /// the migration.
    Quiet,
}

impl Role {
    /// The role that the benchmark's process has named.
    pub(crate) fn from_json(text: &str) -> Result<Self, BenchError> {
        serde_json::from_str(text).map_err(|why| BenchError::Peer(format!("'{text}': {why}")))
    }

    /// Runs the role to its end.
    ///
    /// # Errors
    /// If the benchmark's process goes away, or the VM or its migration fails.
    pub(crate) fn play(&self) -> Result<(), BenchError> {
        end_with_parent();
        match self {
            &Self::Pong { host, page_bytes } => pong(host, page_bytes),
            Self::Bulk => bulk(),
            Self::Source(vm) => source(vm),
            Self::Restored(vm) => send(&vm.play(|| {
                send_line("ready")?;
                read_line().map(drop)
            })?),
            Self::Paced(vm) => vm.play(),
            Self::Tunnel(end) => end.play(),
            Self::Restarted(pager) => pager.play(),
            Self::Linux { kernel, initrd } => {
                let vm = crate::linux::source(kernel, initrd)?;
                send_vm(&vm, &SourceConfig::default(), 1)
            }
        }
    }
}

fn source(source: &SourceVm) -> Result<(), BenchError> {
    let &SourceVm {
        engine,
        vcpus,
        memory_bytes,
        backing,
        used_bytes,
        passes,
        push,
        preempt,
        prefetch,
        guest,
        ref channels,
    } = source;
    let faults = Resolver::new() as Arc<dyn Faults>;
    let spec = MachineSpec {
        backing,
        ..MachineSpec::new(vcpus, memory_bytes)
    };
    let vm = create_on(engine, spec, faults)?;
    match guest {
        Guest::Workload => {
            let program = Workload::new(isa_of(engine), vcpus, used_bytes)?;
            vm.load(program.program())?;
            vm.threads.resume();
            std::thread::sleep(WARM_UP);
        }
        Guest::Toucher | Guest::InOrder | Guest::Quiet => {
            let pages = if guest == Guest::Quiet { 1 } else { u64::MAX };
            let order = if guest == Guest::InOrder {
                TouchOrder::Ascending
            } else {
                TouchOrder::Random
            };
            let program = toucher(engine, vcpus, used_bytes, pages, order)?;
            fill(&vm, 0..used_bytes / PAGE_SIZE)?;
            vm.load(program.program())?;
        }
    }
    let config = SourceConfig {
        push_background: push,
        preempt,
        prefetch,
        bulk_channels: channels.bulk,
        tls: channels.tls.clone().map(Into::into),
        ..SourceConfig::default()
    };
    send_vm(&vm, &config, passes)
}

/// Moves a VM to the address on the standard input, and reports it.
fn send_vm(vm: &Vm, config: &SourceConfig, passes: u32) -> Result<(), BenchError> {
    send_line("ready")?;
    let to = parse_address(&read_line()?)?;
    let config = SourceConfig {
        settings: Switch::AfterPasses(passes).into(),
        // The other end is on this machine, also where it has an address of its own.
        plain: PlainPolicy::Anywhere,
        ..config.clone()
    };
    let failed = |e: &dyn std::fmt::Display| BenchError::Migration(e.to_string());
    let session = SourceSession::new().map_err(|e| failed(&e))?;
    let report = migrate(
        &vm.running(),
        &Route::To(to),
        b"bench",
        &config,
        &session,
        &Unobserved,
    )
    .map_err(|e| failed(&e))?;
    send(&SourceFigures {
        last_stop: report.last_stop,
        missing_at_start: report.missing_at_start,
        background_bytes: report.background_bytes,
        background_took: report.background_took,
        total: report.total,
        overhead_bytes: overhead_bytes()?,
    })
}

fn parse_address(line: &str) -> Result<Address, BenchError> {
    line.parse()
        .map_err(|e| BenchError::Peer(format!("'{line}': {e}")))
}

/// The figures that a source reports to the parent process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct SourceFigures {
    pub(crate) last_stop: Duration,
    pub(crate) missing_at_start: u64,
    pub(crate) background_bytes: u64,
    pub(crate) background_took: Duration,
    pub(crate) total: Duration,
    pub(crate) overhead_bytes: u64,
}

/// The memory of this process beyond guest memory, in bytes: private pages, files, page tables.
/// Guest memory is a memfd and counts as shared memory.
pub(crate) fn overhead_bytes() -> Result<u64, BenchError> {
    Ok(kib_of(&["RssAnon:", "RssFile:", "VmPTE:"])? << 10)
}

/// The sum of these counters of this process, in KiB.
pub(crate) fn kib_of(names: &[&str]) -> Result<u64, BenchError> {
    let status = std::fs::read_to_string("/proc/self/status");
    let status = status.map_err(os("cannot read /proc/self/status"))?;
    let kib = |name: &&str| {
        let line = status.lines().find_map(|line| line.strip_prefix(*name));
        line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok())
    };
    Ok(names.iter().filter_map(kib).sum())
}

fn end_with_parent() {
    // The peer ends when its standard input does. In case that fails, the kernel kills it together
    // with its parent.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
}

pub(crate) fn send_line(line: &str) -> Result<(), BenchError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(os("cannot write to the benchmark's process"))
}

/// Sends figures to the benchmark's process.
pub(crate) fn send(figures: &impl Serialize) -> Result<(), BenchError> {
    let line = serde_json::to_string(figures);
    send_line(&line.map_err(|why| BenchError::Peer(why.to_string()))?)
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

/// The loopback address.
pub(crate) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A listener on a port of `host` that the kernel chooses.
pub(crate) fn listen(host: IpAddr) -> Result<Listener, BenchError> {
    let address = Address::Tcp {
        host: host.to_string(),
        port: 0,
    };
    Ok(Listener::bind(&address).map_err(pageferry_migration::channel::ChannelError::from)?)
}

fn accept_one(host: IpAddr) -> Result<Connection, BenchError> {
    let listener = listen(host)?;
    send_line(&listener.local_addr().to_string())?;
    Ok(listener.accept(&Wait::block("the benchmark").within(Duration::from_secs(20)))?)
}

fn pong(host: IpAddr, page_bytes: usize) -> Result<(), BenchError> {
    let connection = accept_one(host)?;
    let mut request = [0; REQUEST_BYTES];
    let reply = vec![0x5a; HEADER_BYTES + page_bytes];
    let wait = Wait::block("request").spinning(pageferry_migration::URGENT_SPIN.as_micros() as u32);
    while connection.read_exact(&mut request, &wait).is_ok() {
        connection.write_all(&reply, &Wait::block("reply"))?;
    }
    Ok(())
}

fn bulk() -> Result<(), BenchError> {
    let connection = accept_one(LOOPBACK)?;
    let bytes = vec![0x5a; BULK_BYTES];
    while connection.write_all(&bytes, &Wait::block("bulk")).is_ok() {}
    Ok(())
}

/// The other process. Dropping this kills it and reaps it.
pub(crate) struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts the process.
    ///
    /// # Errors
    /// If the executable cannot be run.
    pub(crate) fn start(setting: &Setting, role: &Role) -> Result<Self, BenchError> {
        Self::start_by(Command::new(&setting.executable), role)
    }

    /// As [`Peer::start`], by a command that runs the executable with further arguments.
    pub(crate) fn start_by(mut command: Command, role: &Role) -> Result<Self, BenchError> {
        let role = serde_json::to_string(role).map_err(|why| BenchError::Peer(why.to_string()))?;
        let mut child = command
            .arg("peer")
            .arg(role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(os("cannot start the benchmark's other process"))?;
        let input = child.stdin.take();
        let output = child
            .stdout
            .take()
            .ok_or_else(|| BenchError::Peer("its standard output is not a pipe".into()))?;
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
            Some(Err(e)) => Err(BenchError::Peer(e.to_string())),
            // The peer shares this process' stderr, so its own message is there already.
            None => Err(BenchError::Peer(
                "it ended before it had sent all lines".into(),
            )),
        }
    }

    pub(crate) fn send_line(&mut self, line: &str) -> Result<(), BenchError> {
        let input = self
            .input
            .as_mut()
            .ok_or_else(|| BenchError::Peer("its standard input is closed".into()))?;
        writeln!(input, "{line}").map_err(|e| BenchError::Peer(e.to_string()))
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
        let line = self.next_line()?;
        serde_json::from_str(&line).map_err(|why| BenchError::Peer(format!("'{line}': {why}")))
    }

    /// Kills the process, at whatever it is.
    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Values that travel by their names.
mod by_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use std::fmt::Display;
    use std::str::FromStr;

    pub(super) fn serialize<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(value)
    }

    pub(super) fn deserialize<'de, T, D>(from: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_survives_its_way_to_the_other_process() {
        let source = Role::Source(SourceVm {
            engine: Engine::Soft,
            vcpus: 3,
            memory_bytes: 4 << 20,
            backing: Backing::Hugetlb2M,
            used_bytes: 2 << 20,
            passes: 1,
            push: true,
            preempt: false,
            prefetch: false,
            guest: Guest::Toucher,
            channels: Channels::default(),
        });
        let text = serde_json::to_string(&source).expect("JSON");
        assert_eq!(Role::from_json(&text).expect("a role"), source);
        assert!(Role::from_json("pong").is_err());
    }
}
