//! The benchmarks' other process: this executable, started again in a role.
//!
//! The two talk in lines: the peer prints what it has to say on its standard output and ends when
//! its standard input ends, so that none is left behind.

use crate::vm::{Faults, create, fill, isa_of, toucher};
use crate::{BenchError, Setting};
use pageferry_guest::Workload;
use pageferry_machine::Engine;
use pageferry_migration::address::Address;
use pageferry_migration::channel::{Connection, Listener, Wait};
use pageferry_migration::{Resolver, SourceConfig, SourceReport, Unobserved, migrate};
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// A request's size on the urgent connection.
pub(crate) const REQUEST_BYTES: usize = 16;
/// A reply's: header and page.
pub(crate) const REPLY_BYTES: usize = 16 + 4096;
/// How the bulk link is written.
pub(crate) const BULK_BYTES: usize = 256 << 10;

/// How long a workload runs before it is moved.
const WARM_UP: Duration = Duration::from_millis(400);

/// What the other process does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// Answers 16 bytes with 4112, as a source's urgent thread does, without looking at them.
    Pong,
    /// Sends bytes as fast as they are taken.
    Bulk,
    /// Has a VM and moves it to the address it reads from its standard input.
    Source {
        /// Its engine.
        engine: Engine,
        /// Its vCPUs.
        vcpus: u32,
        /// Its memory.
        memory_bytes: u64,
        /// Pre-copy passes.
        passes: u32,
        /// Whether pages are pushed from the start.
        push: bool,
        /// What runs in it.
        guest: Guest,
    },
}

/// What runs in a source's VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guest {
    /// The demo's workload, from before the move on.
    Workload,
    /// A toucher of every data page, started by the move.
    Toucher,
    /// A toucher of one page, started by the move: it leaves the machine to the migration.
    Quiet,
}

impl Guest {
    const ALL: [Self; 3] = [Self::Workload, Self::Toucher, Self::Quiet];

    const fn name(self) -> &'static str {
        match self {
            Self::Workload => "workload",
            Self::Toucher => "toucher",
            Self::Quiet => "quiet",
        }
    }
}

impl Role {
    /// The words that make this role from a command line.
    #[must_use]
    pub fn to_words(&self) -> Vec<String> {
        match self {
            Self::Pong => vec!["pong".into()],
            Self::Bulk => vec!["bulk".into()],
            Self::Source {
                engine,
                vcpus,
                memory_bytes,
                passes,
                push,
                guest,
            } => vec![
                "source".into(),
                engine.to_string(),
                vcpus.to_string(),
                memory_bytes.to_string(),
                passes.to_string(),
                push.to_string(),
                guest.name().into(),
            ],
        }
    }

    /// The role these words name.
    ///
    /// # Errors
    /// When they name none.
    pub fn from_words(words: &[String]) -> Result<Self, BenchError> {
        let bad = || BenchError::Peer(format!("{words:?} is no role"));
        fn number<T: FromStr>(word: &str) -> Result<T, BenchError> {
            word.parse()
                .map_err(|_| BenchError::Peer(format!("'{word}' is no value")))
        }
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        match words.as_slice() {
            ["pong"] => Ok(Self::Pong),
            ["bulk"] => Ok(Self::Bulk),
            ["source", engine, vcpus, memory_bytes, passes, push, guest] => Ok(Self::Source {
                engine: match *engine {
                    "kvm" => Engine::Kvm,
                    "soft" => Engine::Soft,
                    _ => return Err(bad()),
                },
                vcpus: number(vcpus)?,
                memory_bytes: number(memory_bytes)?,
                passes: number(passes)?,
                push: number(push)?,
                guest: Guest::ALL
                    .into_iter()
                    .find(|known| known.name() == *guest)
                    .ok_or_else(bad)?,
            }),
            _ => Err(bad()),
        }
    }

    /// Plays the role until it is over.
    ///
    /// # Errors
    /// What went wrong.
    pub fn play(&self) -> Result<(), BenchError> {
        end_with_parent();
        match self {
            Self::Pong => pong(),
            Self::Bulk => bulk(),
            Self::Source { .. } => self.source(),
        }
    }

    fn source(&self) -> Result<(), BenchError> {
        let Self::Source {
            engine,
            vcpus,
            memory_bytes,
            passes,
            push,
            guest,
        } = self
        else {
            return Err(BenchError::Peer("not a source".into()));
        };
        let vm = create(
            *engine,
            *vcpus,
            *memory_bytes,
            Resolver::new() as Arc<dyn Faults>,
        )?;
        match guest {
            Guest::Workload => {
                let program = Workload::new(isa_of(*engine), *vcpus, *memory_bytes)?;
                vm.load(program.program())?;
                vm.threads.resume();
                std::thread::sleep(WARM_UP);
            }
            Guest::Toucher | Guest::Quiet => {
                let pages = if *guest == Guest::Quiet { 1 } else { u64::MAX };
                let program = toucher(*engine, *memory_bytes, pages)?;
                fill(&vm, 0..vm.machine.ram().pages());
                vm.load(program.program())?;
            }
        }
        say("ready")?;
        let to = read_line()?;
        let to: Address = to
            .parse()
            .map_err(|e| BenchError::Peer(format!("'{to}': {e}")))?;
        let config = SourceConfig {
            precopy_passes: *passes,
            push_background: *push,
            ..SourceConfig::default()
        };
        let report = migrate(
            &vm.running(),
            &to,
            b"bench",
            &config,
            &AtomicBool::new(false),
            &Unobserved,
        )
        .map_err(|e| BenchError::Migration(e.to_string()))?;
        say(&sent_words(&report))?;
        say(&format!("overhead {}", overhead_bytes()?))
    }
}

/// What the parent wants to know of the source's report, in words.
fn sent_words(report: &SourceReport) -> String {
    format!(
        "sent {} {} {} {}",
        report.last_stop_ns, report.missing_at_start, report.background_bytes, report.background_ns
    )
}

/// A source's account, as the parent reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    pub(crate) last_stop_ns: u64,
    pub(crate) missing_at_start: u64,
    pub(crate) background_bytes: u64,
    pub(crate) background_ns: u64,
    pub(crate) overhead_bytes: u64,
}

/// The memory of this process that is not guest memory: private pages, files, page tables. Guest
/// memory is a memfd and counts as shared.
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
    // Where the parent dies without closing our input (it cannot), the kernel ends us.
    let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
}

fn say(line: &str) -> Result<(), BenchError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .map_err(|source| BenchError::Os {
            what: "cannot talk to the benchmark",
            source,
        })
}

fn read_line() -> Result<String, BenchError> {
    let mut line = String::new();
    let got = std::io::stdin()
        .lock()
        .read_line(&mut line)
        .map_err(|source| BenchError::Os {
            what: "cannot hear the benchmark",
            source,
        })?;
    if got == 0 {
        return Err(BenchError::Peer("the benchmark ended".into()));
    }
    Ok(line.trim().to_owned())
}

/// A listener on a loopback port of the system's choice.
pub(crate) fn listen() -> Result<Listener, BenchError> {
    let address = Address::Tcp {
        host: "127.0.0.1".into(),
        port: 0,
    };
    Ok(Listener::bind(&address).map_err(pageferry_migration::channel::ChannelError::from)?)
}

fn accept_one() -> Result<Connection, BenchError> {
    let listener = listen()?;
    say(&listener.local_addr().to_string())?;
    Ok(listener.accept(&Wait::block("the benchmark").within(Duration::from_secs(20)))?)
}

fn pong() -> Result<(), BenchError> {
    let connection = accept_one()?;
    let mut request = [0; REQUEST_BYTES];
    let reply = [0x5a; REPLY_BYTES];
    let wait = Wait::block("request").spinning(pageferry_migration::URGENT_SPIN_MICROS);
    while connection.read_exact(&mut request, &wait).is_ok() {
        connection.write_all(&reply, &Wait::block("reply"))?;
    }
    Ok(())
}

fn bulk() -> Result<(), BenchError> {
    let connection = accept_one()?;
    let bytes = vec![0x5a; BULK_BYTES];
    while connection.write_all(&bytes, &Wait::block("bulk")).is_ok() {}
    Ok(())
}

/// The other process, ended and waited for when this is dropped.
pub struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts it.
    ///
    /// # Errors
    /// When the executable cannot be run.
    pub fn start(setting: &Setting, role: &Role) -> Result<Self, BenchError> {
        let mut child = Command::new(&setting.executable)
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
            .ok_or_else(|| BenchError::Peer("it has no output".into()))?;
        Ok(Self {
            child,
            input,
            lines: BufReader::new(output).lines(),
        })
    }

    /// What it says next.
    pub(crate) fn hear(&mut self) -> Result<String, BenchError> {
        match self.lines.next() {
            Some(Ok(line)) => Ok(line),
            Some(Err(e)) => Err(BenchError::Peer(e.to_string())),
            None => {
                let mut said = String::new();
                if let Some(mut stderr) = self.child.stderr.take() {
                    let _ = stderr.read_to_string(&mut said);
                }
                Err(BenchError::Peer(format!(
                    "it ended before it had said all {said}"
                )))
            }
        }
    }

    pub(crate) fn tell(&mut self, line: &str) -> Result<(), BenchError> {
        let input = self
            .input
            .as_mut()
            .ok_or_else(|| BenchError::Peer("it hears nothing".into()))?;
        writeln!(input, "{line}").map_err(|e| BenchError::Peer(e.to_string()))
    }

    /// Connects to the address it says.
    pub(crate) fn connect(&mut self) -> Result<Connection, BenchError> {
        let line = self.hear()?;
        let address: Address = line
            .parse()
            .map_err(|e| BenchError::Peer(format!("'{line}': {e}")))?;
        Ok(Connection::connect(
            &address,
            &Wait::block("peer").within(Duration::from_secs(10)),
        )?)
    }

    /// A source's account.
    pub(crate) fn hear_sent(&mut self) -> Result<Sent, BenchError> {
        let line = self.hear()?;
        let overhead = self.hear()?;
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
                    ],
                ),
                Some([overhead_bytes]),
            ) => Ok(Sent {
                last_stop_ns: *last_stop_ns,
                missing_at_start: *missing_at_start,
                background_bytes: *background_bytes,
                background_ns: *background_ns,
                overhead_bytes: *overhead_bytes,
            }),
            _ => Err(BenchError::Peer(format!("it said '{line}', '{overhead}'"))),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
