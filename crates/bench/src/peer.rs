//! The other process of a benchmark: this executable, started again in a role.
//!
//! The two exchange lines of text. The peer writes to its standard output, and ends when its
//! standard input ends. So no peer outlives its benchmark.

use crate::restore::{Paced, Restarted, Restored};
use crate::vm::{Faults, Vm, create_on, fill, isa_of, toucher};
use crate::{BenchError, Setting};
use pageferry_addr::PAGE_SIZE;
use pageferry_guest::{TouchOrder, Workload};
use pageferry_machine::{Backing, Engine, MachineSpec};
use pageferry_migration::address::Address;
use pageferry_migration::channel::{Connection, Listener, Wait};
use pageferry_migration::{
    PlainPolicy, Resolver, Route, SourceConfig, SourceReport, SourceSession, Switch, TlsFiles,
    Unobserved, migrate,
};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
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
    /// Runs Linux under load, and moves it as `Source` does.
    Linux {
        /// The kernel's file.
        kernel: PathBuf,
        /// The file of its initrd.
        initrd: PathBuf,
    },
}

/// The VM of a source, and how it moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceVm {
    /// The VM's engine.
    pub engine: Engine,
    /// The number of vCPUs.
    pub vcpus: u32,
    /// Guest memory, in bytes.
    pub memory_bytes: u64,
    /// The memory behind the guest.
    pub backing: Backing,
    /// The part of it that the guest uses, in bytes.
    pub used_bytes: u64,
    /// The number of pre-copy passes.
    pub passes: u32,
    /// Whether the source pushes pages in the background.
    pub push: bool,
    /// Whether requested pages have a way of their own.
    pub preempt: bool,
    /// Whether requests guide the push.
    pub prefetch: bool,
    /// The guest program.
    pub guest: Guest,
    /// The channels for pages.
    pub channels: Channels,
}

/// The channels of a migration that is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Channels {
    /// The number of bulk channels.
    pub bulk: u16,
    /// The files for TLS, the same at both ends. `None`: without TLS.
    pub tls: Option<TlsFiles>,
}

impl Default for Channels {
    fn default() -> Self {
        Self { bulk: 1, tls: None }
    }
}

impl Channels {
    /// The files as arguments: no arguments without TLS.
    fn to_words(&self) -> Vec<String> {
        let mut words = vec![self.bulk.to_string()];
        if let Some(tls) = &self.tls {
            let paths = [&tls.cert, &tls.key, &tls.ca];
            words.extend(paths.map(|path| path.display().to_string()));
            words.extend(tls.peer_name.clone());
        }
        words
    }

    fn from_words(words: &[&str]) -> Option<Self> {
        let tls = match words.get(1..)? {
            [] => None,
            [cert, key, ca, name @ ..] => Some(TlsFiles {
                cert: cert.into(),
                key: key.into(),
                ca: ca.into(),
                peer_name: name.first().map(|name| (*name).to_owned()),
            }),
            _ => return None,
        };
        let bulk = words.first()?.parse().ok()?;
        Some(Self { bulk, tls })
    }
}

/// The guest program of a source's VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
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

impl Guest {
    const ALL: [Self; 4] = [Self::Workload, Self::Toucher, Self::InOrder, Self::Quiet];

    const fn name(self) -> &'static str {
        match self {
            Self::Workload => "workload",
            Self::Toucher => "toucher",
            Self::InOrder => "in-order",
            Self::Quiet => "quiet",
        }
    }
}

impl Role {
    /// The command line arguments for this role.
    #[must_use]
    pub fn to_words(&self) -> Vec<String> {
        match self {
            Self::Pong { host, page_bytes } => {
                vec!["pong".into(), host.to_string(), page_bytes.to_string()]
            }
            Self::Bulk => vec!["bulk".into()],
            Self::Restored(vm) => {
                let first = ["restored".to_owned()];
                first.into_iter().chain(vm.to_words()).collect()
            }
            Self::Paced(vm) => {
                let first = ["paced".to_owned()];
                first.into_iter().chain(vm.to_words()).collect()
            }
            Self::Restarted(pager) => {
                let paths = [&pager.directory, &pager.memory];
                let paths = paths.map(|path| path.display().to_string());
                ["restarted".to_owned()].into_iter().chain(paths).collect()
            }
            Self::Linux { kernel, initrd } => {
                let paths = [kernel, initrd].map(|path| path.display().to_string());
                ["linux".to_owned()].into_iter().chain(paths).collect()
            }
            Self::Source(vm) => [
                "source".to_owned(),
                vm.engine.to_string(),
                vm.vcpus.to_string(),
                vm.memory_bytes.to_string(),
                vm.backing.name().to_owned(),
                vm.used_bytes.to_string(),
                vm.passes.to_string(),
                vm.push.to_string(),
                vm.preempt.to_string(),
                vm.prefetch.to_string(),
                vm.guest.name().to_owned(),
            ]
            .into_iter()
            .chain(vm.channels.to_words())
            .collect(),
        }
    }

    /// Parses command line arguments.
    ///
    /// # Errors
    /// If `words` are not the arguments of a role.
    pub fn from_words(words: &[String]) -> Result<Self, BenchError> {
        let bad = || BenchError::Peer(format!("unknown role {words:?}"));
        fn value<T: FromStr>(word: &str) -> Result<T, BenchError> {
            word.parse()
                .map_err(|_| BenchError::Peer(format!("invalid value '{word}'")))
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["pong", host, page_bytes] => Ok(Self::Pong {
                host: value(host)?,
                page_bytes: value(page_bytes)?,
            }),
            ["bulk"] => Ok(Self::Bulk),
            ["restored", vm @ ..] => Restored::from_words(vm).map(Self::Restored).ok_or_else(bad),
            ["paced", vm @ ..] => Paced::from_words(vm).map(Self::Paced).ok_or_else(bad),
            ["restarted", directory, memory] => Ok(Self::Restarted(Restarted {
                directory: directory.into(),
                memory: memory.into(),
            })),
            ["linux", kernel, initrd] => Ok(Self::Linux {
                kernel: kernel.into(),
                initrd: initrd.into(),
            }),
            [
                "source",
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
                channels @ ..,
            ] => Ok(Self::Source(SourceVm {
                engine: match *engine {
                    "kvm" => Engine::Kvm,
                    "soft" => Engine::Soft,
                    _ => return Err(bad()),
                },
                vcpus: value(vcpus)?,
                memory_bytes: value(memory_bytes)?,
                backing: value(backing)?,
                used_bytes: value(used_bytes)?,
                passes: value(passes)?,
                push: value(push)?,
                preempt: value(preempt)?,
                prefetch: value(prefetch)?,
                guest: Guest::ALL
                    .into_iter()
                    .find(|known| known.name() == *guest)
                    .ok_or_else(bad)?,
                channels: Channels::from_words(channels).ok_or_else(bad)?,
            })),
            _ => Err(bad()),
        }
    }

    /// Runs the role to its end.
    ///
    /// # Errors
    /// If the benchmark's process goes away, or the VM or its migration fails.
    pub fn play(&self) -> Result<(), BenchError> {
        end_with_parent();
        match self {
            &Self::Pong { host, page_bytes } => pong(host, page_bytes),
            Self::Bulk => bulk(),
            Self::Source(vm) => source(vm),
            Self::Restored(vm) => {
                let line = vm.play(|| {
                    send_line("ready")?;
                    read_line().map(drop)
                })?;
                send_line(&line)
            }
            Self::Paced(vm) => vm.play(),
            Self::Restarted(pager) => pager.play(),
            Self::Linux { kernel, initrd } => {
                let vm = crate::linux::source(kernel, initrd)?;
                send(&vm, &SourceConfig::default(), 1)
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
    send(&vm, &config, passes)
}

/// Moves a VM to the address on the standard input, and reports it.
fn send(vm: &Vm, config: &SourceConfig, passes: u32) -> Result<(), BenchError> {
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
    send_line(&figures_line(&report))?;
    send_line(&format!("overhead {}", overhead_bytes()?))
}

fn parse_address(line: &str) -> Result<Address, BenchError> {
    line.parse()
        .map_err(|e| BenchError::Peer(format!("'{line}': {e}")))
}

/// The source's report as a line for the parent process.
fn figures_line(report: &SourceReport) -> String {
    format!(
        "sent {} {} {} {} {}",
        report.last_stop.as_nanos(),
        report.missing_at_start,
        report.background_bytes,
        report.background_took.as_nanos(),
        report.total.as_nanos()
    )
}

/// The figures that a source reports to the parent process.
#[derive(Clone, Copy, Debug)]
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
    let status = std::fs::read_to_string("/proc/self/status").map_err(|source| BenchError::Os {
        what: "cannot read /proc/self/status",
        source,
    })?;
    let kib = |name: &str| {
        status
            .lines()
            .find_map(|line| {
                line.strip_prefix(name)?
                    .trim()
                    .strip_suffix(" kB")?
                    .trim()
                    .parse::<u64>()
                    .ok()
            })
            .unwrap_or(0)
    };
    Ok((kib("RssAnon:") + kib("RssFile:") + kib("VmPTE:")) << 10)
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
        .map_err(|source| BenchError::Os {
            what: "cannot write to the benchmark's process",
            source,
        })
}

pub(crate) fn read_line() -> Result<String, BenchError> {
    let mut line = String::new();
    let got = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|source| BenchError::Os {
            what: "cannot read from the benchmark's process",
            source,
        })?;
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
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts the process.
    ///
    /// # Errors
    /// If the executable cannot be run.
    pub fn start(setting: &Setting, role: &Role) -> Result<Self, BenchError> {
        Self::start_by(Command::new(&setting.executable), role)
    }

    /// As [`Peer::start`], by a command that runs the executable with further arguments.
    pub(crate) fn start_by(mut command: Command, role: &Role) -> Result<Self, BenchError> {
        let mut child = command
            .args(["bench", "peer"])
            .args(role.to_words())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| BenchError::Os {
                what: "cannot start the benchmark's other process",
                source,
            })?;
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

    /// Reads the figures of a source.
    pub(crate) fn read_figures(&mut self) -> Result<SourceFigures, BenchError> {
        let line = self.next_line()?;
        let overhead = self.next_line()?;
        let numbers = |line: &str, word: &str| -> Option<Vec<u64>> {
            line.strip_prefix(word)?
                .split_whitespace()
                .map(|w| w.parse().ok())
                .collect()
        };
        match (
            numbers(&line, "sent").as_deref(),
            numbers(&overhead, "overhead").as_deref(),
        ) {
            (
                Some(
                    [
                        last_stop_ns,
                        missing_at_start,
                        background_bytes,
                        background_ns,
                        total_ns,
                    ],
                ),
                Some([overhead_bytes]),
            ) => Ok(SourceFigures {
                last_stop: Duration::from_nanos(*last_stop_ns),
                missing_at_start: *missing_at_start,
                background_bytes: *background_bytes,
                background_took: Duration::from_nanos(*background_ns),
                total: Duration::from_nanos(*total_ns),
                overhead_bytes: *overhead_bytes,
            }),
            _ => Err(BenchError::Peer(format!(
                "unexpected lines '{line}', '{overhead}'"
            ))),
        }
    }
}

impl Peer {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_survives_its_words() {
        let files = TlsFiles {
            cert: "c".into(),
            key: "k".into(),
            ca: "a".into(),
            peer_name: Some("n".into()),
        };
        let source = |guest, tls| {
            Role::Source(SourceVm {
                engine: Engine::Soft,
                vcpus: 3,
                memory_bytes: 4 << 20,
                backing: Backing::Hugetlb2M,
                used_bytes: 2 << 20,
                passes: 1,
                push: true,
                preempt: false,
                prefetch: false,
                guest,
                channels: Channels { bulk: 2, tls },
            })
        };
        let pong = Role::Pong {
            host: LOOPBACK,
            page_bytes: 4096,
        };
        let sources = Guest::ALL.map(|guest| source(guest, None));
        let secure = source(Guest::Toucher, Some(files));
        let linux = Role::Linux {
            kernel: "Image".into(),
            initrd: "initrd.gz".into(),
        };
        let others = [pong, Role::Bulk, linux, secure];
        for role in sources.into_iter().chain(others) {
            let words = role.to_words();
            assert_eq!(Role::from_words(&words).expect("a role"), role);
        }
        assert!(Role::from_words(&["pong".into()]).is_err());
    }
}
