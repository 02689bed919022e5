//! The flags of all commands. Help texts, completions and man pages come from these definitions.

use crate::control::change::ChangeOptions;
use crate::control::options::{MigrateOptions, TlsOptions};
use crate::exit::TABLE;
use crate::pager::{PagerArgs, StoreArgs};
use crate::rate;
use crate::snapshot::SnapshotArgs;
use crate::tunnel::TunnelArgs;
use crate::vm::DeviceArgs;
use clap::builder::{PossibleValue, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use pageferry_bridge::foreign::Overrides;
use pageferry_guest::Doorbell;
use pageferry_harness::size;
use pageferry_hostfs::Owner;
use pageferry_machine::{ArmOptions, Backing, Delivery, EngineChoice, MAX_VCPUS};
use pageferry_migration::{CpuList, Limits, Settings, SourceConfig, Switch, Tracking};
use pageferry_pager::Background;
use pageferry_transport::address::Address;
use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;
use tracing::level_filters::LevelFilter;

/// The last line of a command's help. One table lists the codes.
pub(crate) const EXIT_CODES: &str = "`pageferry help exit-codes` says what the exit codes mean.";

/// Moves running virtual machines between processes and hosts. Their memory follows on demand.
///
/// `pageferry demo` shows it on this machine. `run`, `receive` and `migrate` do it between two
/// terminals or two hosts. `probe` says what this host can do.
#[derive(Debug, Parser)]
#[command(name = "pageferry", version, after_help = EXIT_CODES, propagate_version = true)]
pub(crate) struct Cli {
    /// Log to stderr, with times: off, error, warn, info or debug [default: PAGEFERRY_LOG, or warn]
    #[arg(long, global = true, value_name = "LEVEL", value_parser = Closed::of(&["off", "error", "warn", "info", "debug"], crate::log::level), hide_possible_values = true)]
    pub(crate) log: Option<LevelFilter>,
    /// For `--detach`: this is the process in the background
    #[arg(long, hide = true)]
    pub(crate) detached: bool,
    /// The command.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// For `receive --for ch:..`: keep descriptors until nobody needs them
    #[command(hide = true)]
    Keep,
    /// Move a running VM to another process on this machine, and check every page
    ///
    /// A second process is the destination. TCP over the loopback interface connects the two. The
    /// guest rewrites all of its memory all the time. Whenever it returns to a page, it checks
    /// the page's checksum and sequence number. After the move the guest visits every page once
    /// more. Then the host checks all pages too. The exit code is 0 only if neither finds a
    /// wrong page.
    ///
    /// With --guest linux the guest is a Linux that checks memory and files beside a timer of 1 ms.
    /// The result shows the gaps of that timer before, during and after the move. The exit code is
    /// 0 only if the guest and its kernel noticed nothing wrong, and its clock went on.
    #[command(after_help = EXIT_CODES)]
    Demo(DemoArgs),
    /// Run a VM that can be migrated from here
    ///
    /// The VM runs until it has been migrated, until `pageferry quit`, or until Ctrl-C. During a
    /// migration, Ctrl-C before the switch-over cancels the migration, and the VM runs on here.
    /// After the switch-over, Ctrl-C ends the command once all pages are sent; a second Ctrl-C
    /// gives up. While a kernel has the terminal, press Ctrl-] instead of Ctrl-C.
    ///
    /// A terminal that closes ends the VM, unless it is being migrated. With --detach, or without a
    /// terminal, the VM runs on.
    #[command(after_help = EXIT_CODES)]
    Run(RunArgs),
    /// Run a VM again that `run --snapshot-to` saved
    ///
    /// The VM runs at once. Each page of its memory is read when it is touched, by the same pager
    /// that serves Firecracker's VMs. The file stays as it is. It needs userfaultfd.
    ///
    /// With --for, a VM of Cloud Hypervisor starts from its snapshot before its memory is read.
    #[command(after_help = EXIT_CODES)]
    Restore(RestoreArgs),
    /// Wait for a VM, receive it and run it
    ///
    /// Prints the address, and listens until a VM has come. The VM runs until `pageferry quit` or
    /// Ctrl-C. If the connections break after the VM started here, it runs on and waits for missing
    /// pages only, until the source has opened new ones. A VM never runs on with wrong pages.
    ///
    /// A terminal that closes ends the command, unless a VM is on its way and runs here already.
    /// With --detach, or without a terminal, the command goes on.
    #[command(after_help = EXIT_CODES)]
    Receive(ReceiveArgs),
    /// Move a VM on this host to another process or host
    ///
    /// Shows the progress, then the result. Ctrl-C before the switch-over cancels the migration,
    /// and the VM runs on at the source.
    #[command(after_help = EXIT_CODES)]
    Migrate(MigrateArgs),
    /// List the VMs of this user on this host, and what they do
    ///
    /// It shows those whose control sockets are in the user's directory: VMs that were started
    /// without --control.
    #[command(after_help = EXIT_CODES)]
    List(ListArgs),
    /// Say what a VM on this host is doing
    #[command(after_help = EXIT_CODES)]
    Status(StatusArgs),
    /// Show what a migration of a VM on this host does, until it ends
    ///
    /// On a terminal it refreshes one line. Elsewhere it prints a line each second. Without a
    /// migration it prints the state and ends, except at a destination that waits for a VM.
    #[command(after_help = EXIT_CODES)]
    Watch(WatchArgs),
    /// Attach to the console of a VM on this host
    ///
    /// Shows the newest 64 KiB of text, then what the guest writes. Keys go to the guest.
    /// Ctrl-] detaches, and the VM runs on. If standard input is no terminal, all of it is sent.
    #[command(after_help = EXIT_CODES)]
    Console(VmArgs),
    /// Pause a VM on this host
    ///
    /// A VM that is paused can be migrated, and arrives paused. During a migration, pause it at the
    /// source before the switch-over, and at the destination after it.
    Pause(VmArgs),
    /// Let a paused VM on this host run on
    ///
    /// During a migration, resume it at the source before the switch-over, and at the destination
    /// after it.
    Resume(VmArgs),
    /// Check every page of a VM on this host against the guest's own counters
    ///
    /// The VM is paused for the check. It runs on afterwards if it ran before.
    Verify(VmArgs),
    /// Change when a migration of a VM on this host switches over, and how fast it sends
    ///
    /// Limits count at once. `--switch now` ends pre-copy, also in the middle of a pass. After the
    /// switch-over only the limits of rates can change.
    #[command(after_help = EXIT_CODES)]
    Set(SetArgs),
    /// Cancel a migration of a VM on this host
    ///
    /// The VM runs on here. It is too late once the VM is handed over. Of a tunnel, all migrations
    /// are cut, or those that the flags choose.
    Cancel(CancelArgs),
    /// Give a migration whose connections are lost another way
    ///
    /// At the source: another address of the destination. At the destination: another address to
    /// listen on. The VM runs at the destination meanwhile, and waits for missing pages only.
    #[command(after_help = EXIT_CODES)]
    Recover(RecoverArgs),
    /// End a migration whose other side is gone for good, and say what is lost
    ///
    /// At the source the VM stays paused with all its pages, unless --resume-here takes it back. A
    /// VM that had been paused before the migration stays paused also then. At the
    /// destination a VM with missing pages is paused, and cannot go on.
    #[command(after_help = EXIT_CODES)]
    Abandon(AbandonArgs),
    /// End a VM on this host
    Quit(VmArgs),
    /// Carry the migration streams of QEMU, libvirt or Cloud Hypervisor between two hosts
    ///
    /// A tunnel on each host stands between the sockets of the two VMMs: one with --listen and
    /// --to, one with --accept and --connect. A lost connection costs the VM only waiting, also in
    /// post-copy. Pages that vCPUs wait for have a connection of their own, with TLS too.
    ///
    /// It serves until Ctrl-C, which takes no new migrations and waits for those under way.
    Tunnel(TunnelArgs),
    /// Serve the memory of VMs that start from a snapshot: Firecracker's page faults
    ///
    /// A VM runs before its memory is read. The pager may be ended or killed at any moment: the
    /// next one takes its VMs over.
    #[command(after_help = EXIT_CODES)]
    Pager(PagerArgs),
    /// Pack the memory of a VM's snapshot, check it, and give it back
    Snapshot(SnapshotArgs),
    /// Say what this host can do, what that means for Pageferry, and how to get what is missing
    #[command(after_help = EXIT_CODES)]
    Probe(ProbeArgs),
    /// Print a script that completes commands and flags in a shell
    Completions(CompletionArgs),
    /// Print the manual page of pageferry or of one of its commands
    ///
    /// `pageferry man migrate | man -l -` shows it.
    Man(ManArgs),
    /// Print what the exit codes mean
    #[command(long_about = TABLE)]
    ExitCodes,
}

/// `pageferry completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// `pageferry man`.
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// The command, such as `migrate` or `pager share`; without one, pageferry itself
    #[arg(value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
    /// Write the pages of all commands into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    pub(crate) all: Option<PathBuf>,
}

/// The kinds of memory behind a guest.
const BACKINGS: &[&str] = &[
    "shmem",
    "shmem-thp",
    "hugetlb-2m",
    "hugetlb-1g",
    "anonymous",
];

/// A parser of a closed list, whose values completions offer. The errors are those of `parse`.
#[derive(Clone, Copy)]
struct Closed<T> {
    values: &'static [&'static str],
    parse: fn(&str) -> Result<T, String>,
}

impl<T> Closed<T> {
    const fn of(values: &'static [&'static str], parse: fn(&str) -> Result<T, String>) -> Self {
        Self { values, parse }
    }
}

impl<T: Clone + Send + Sync + 'static> TypedValueParser for Closed<T> {
    type Value = T;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<T, clap::Error> {
        self.parse.parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new(
            self.values.iter().map(|value| PossibleValue::new(*value)),
        ))
    }
}

/// Takes any text. The words of `--switch` are parsed together.
fn any(text: &str) -> Result<String, String> {
    Ok(text.to_owned())
}

/// The size of a machine and its engine.
#[derive(Debug, Args)]
pub(crate) struct MachineArgs {
    /// Virtual CPUs
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_VCPUS)))]
    pub(crate) vcpus: u32,
    /// Guest memory: a whole number and K, M, G or T (powers of 1024). A demo of Linux takes 256M
    /// unless told otherwise
    #[arg(long, default_value = "512M", default_value_if("guest", "linux", "256M"), value_name = "SIZE", value_parser = size::parse)]
    pub(crate) memory: u64,
    /// Engine: kvm, soft (our own hypervisor, without /dev/kvm or privileges), or auto (kvm if a
    /// probe VM runs here, else soft)
    #[arg(long, default_value = "auto", value_name = "auto|kvm|soft", value_parser = Closed::of(&["auto", "kvm", "soft"], str::parse::<EngineChoice>), hide_possible_values = true)]
    pub(crate) engine: EngineChoice,
}

/// The user's choice of the memory behind a guest.
#[derive(Debug, Args)]
pub(crate) struct BackingArgs {
    /// Host memory behind the guest: shmem; shmem-thp (huge pages requested); hugetlb-2m or
    /// hugetlb-1g (huge pages of the host's pool); anonymous (private memory; a KVM guest receives
    /// into it by --delivery missing only). Source and destination may differ
    #[arg(
        long,
        default_value_t,
        value_name = "shmem|shmem-thp|hugetlb-2m|hugetlb-1g|anonymous",
        value_parser = Closed::of(BACKINGS, str::parse::<Backing>),
        hide_possible_values = true
    )]
    pub(crate) backing: Backing,
    /// Start a VM although a limit of this host leaves it too little: memory, control groups,
    /// accounting of memory, or limits of the process. The VM may then end by a signal
    #[arg(long)]
    pub(crate) ignore_limits: bool,
}

/// The fault delivery that the user chose; `None` for `auto`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeliveryChoice(pub(crate) Option<Delivery>);

fn delivery(text: &str) -> Result<DeliveryChoice, String> {
    if text == "auto" {
        return Ok(DeliveryChoice(None));
    }
    let parsed = text
        .parse()
        .map_err(|_| format!("unknown fault delivery '{text}': {DELIVERIES}"))?;
    Ok(DeliveryChoice(Some(parsed)))
}

const DELIVERIES: &str = "expected auto, exit (soft engine), userfault, poison, minor or missing";

/// The user's choice of a fault delivery.
#[derive(Debug, Args)]
pub(crate) struct DeliveryArgs {
    /// How faults on missing pages are delivered: exit (soft engine); poison (exits, KVM on Linux
    /// 6.6), minor or missing (userfaultfd) on KVM; auto takes the best that this host has
    #[arg(long, default_value = "auto", value_name = "auto|exit|userfault|poison|minor|missing", value_parser = Closed::of(&["auto", "exit", "userfault", "poison", "minor", "missing"], delivery), hide_possible_values = true)]
    pub(crate) delivery: DeliveryChoice,
    /// userfaultfds that serve KVM guests' faults; each has an equal part of guest memory, 2 MiB at
    /// least
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(ArmOptions::MAX_USERFAULTFDS)))]
    pub(crate) userfaultfds: u32,
    /// Threads that read each userfaultfd
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(ArmOptions::MAX_READERS)))]
    pub(crate) fault_readers: u32,
}

impl DeliveryArgs {
    /// The options that arm a machine.
    pub(crate) fn options(&self) -> ArmOptions {
        ArmOptions {
            delivery: self.delivery.0,
            userfaultfds: self.userfaultfds,
            readers: self.fault_readers,
        }
    }
}

/// Options of a migration's source.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// Passes over the memory while the guest still runs at the source; with 0 all pages follow
    /// after the switch-over [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=i64::from(Switch::MAX_PASSES)))]
    pub(crate) precopy_passes: Option<u32>,
}

/// A limit that can be none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit<T>(pub(crate) Option<T>);

fn limit<T>(text: &str, parse: fn(&str) -> Result<T, String>) -> Result<Limit<T>, String> {
    match text {
        "none" => Ok(Limit(None)),
        _ => parse(text).map(|limit| Limit(Some(limit))),
    }
}

fn rate_limit(text: &str) -> Result<Limit<u64>, String> {
    limit(text, rate::parse)
}

fn time_limit(text: &str) -> Result<Limit<Duration>, String> {
    limit(text, time)
}

/// The settings that can change during a migration.
#[derive(Debug, Args)]
pub(crate) struct ChangeArgs {
    /// The end of pre-copy: auto (when little is left, or when passes do not help), after-passes N
    /// (--precopy-passes N does the same), manual (when `pageferry set` says so), or now
    #[arg(long, value_name = "auto|after-passes N|manual|now", num_args = 1..=2, value_parser = Closed::of(&["auto", "after-passes", "manual", "now"], any), hide_possible_values = true)]
    pub(crate) switch: Vec<String>,
    /// With --switch auto: no switch-over while the expected blackout is longer, such as 50ms, or
    /// none
    #[arg(long, value_name = "TIME", value_parser = time_limit)]
    pub(crate) max_blackout: Option<Limit<Duration>>,
    /// The most bytes of pages a second, such as 200M (powers of 1024), 800mbit (bits), or none.
    /// Pages that vCPUs wait for count, but they never wait
    #[arg(long, value_name = "RATE", value_parser = rate_limit)]
    pub(crate) max_bandwidth: Option<Limit<u64>>,
    /// The same for the pages that are sent in the background once the VM runs at the destination
    #[arg(long, value_name = "RATE", value_parser = rate_limit)]
    pub(crate) max_postcopy_bandwidth: Option<Limit<u64>>,
}

/// `pageferry set`.
#[derive(Debug, Args)]
#[command(group(
    clap::ArgGroup::new("what")
        .required(true)
        .multiple(true)
        .args(["switch", "max_blackout", "max_bandwidth", "max_postcopy_bandwidth"])
))]
pub(crate) struct SetArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    #[command(flatten)]
    pub(crate) change: ChangeArgs,
}

/// The protection of connections.
#[derive(Debug, Args)]
pub(crate) struct TlsArgs {
    /// This host's certificate (PEM). With the three files, both sides use TLS and prove who they
    /// are
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    pub(crate) tls_cert: Option<PathBuf>,
    /// The key of the certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// The authority that signed the other host's certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_ca: Option<PathBuf>,
    /// The name in the other host's certificate [default for a source: the host that it connects
    /// to; for a destination: any name]
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    pub(crate) peer_name: Option<String>,
    /// Allow plain TCP to other hosts: anyone on the way can read and change the VM
    #[arg(long, conflicts_with = "tls_cert")]
    pub(crate) insecure: bool,
}

impl TlsArgs {
    /// The files, with absolute paths.
    pub(crate) fn options(&self) -> Option<TlsOptions> {
        let absolute = |path: &PathBuf| std::path::absolute(path).unwrap_or_else(|_| path.clone());
        Some(TlsOptions {
            cert: absolute(self.tls_cert.as_ref()?),
            key: absolute(self.tls_key.as_ref()?),
            ca: absolute(self.tls_ca.as_ref()?),
            peer_name: self.peer_name.clone(),
        })
    }
}

/// Owner and mode of a unix socket at which a VMM connects.
#[derive(Debug, Args)]
pub(crate) struct OwnerArgs {
    /// The user id that owns the unix socket, such as the jailer's
    #[arg(long, value_name = "UID")]
    owner: Option<u32>,
    /// The group id of the unix socket
    #[arg(long, value_name = "GID")]
    group: Option<u32>,
    /// The mode of the unix socket, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    mode: u32,
}

impl OwnerArgs {
    pub(crate) fn owner(&self) -> Owner {
        Owner {
            user: self.owner,
            group: self.group,
            mode: self.mode,
        }
    }
}

/// The limits of a session.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// The silence after which a channel counts as lost, once the VM is handed over, such as 500ms
    /// or 2s; 100ms at least
    #[arg(long, value_name = "TIME", value_parser = dead_after)]
    pub(crate) dead_after: Option<Duration>,
    /// The time without a connection after which this side gives up, such as 10m [default: never]
    #[arg(long, value_name = "TIME", value_parser = time)]
    pub(crate) give_up_after: Option<Duration>,
}

/// The choices for a VM of Firecracker at its destination.
#[derive(Debug, Args)]
pub(crate) struct FirecrackerArgs {
    /// Of a VM of Firecracker, give this network interface of its configuration another tap device,
    /// such as eth0=tap7; repeat for more
    #[arg(long = "network-override", value_name = "IFACE=TAP", value_parser = network_override)]
    network: Vec<(String, String)>,
    /// Of a VM of Firecracker, the Unix socket of its vsock device here (since Firecracker 1.16)
    #[arg(long, value_name = "PATH")]
    vsock_path: Option<PathBuf>,
    /// Of a VM of Firecracker, advance the guest's clock by the time of the move (x86-64)
    #[arg(long)]
    clock_realtime: bool,
    /// Try a VM of another minor version of Firecracker, which is refused otherwise
    #[arg(long)]
    pub(crate) any_version: bool,
}

impl FirecrackerArgs {
    pub(crate) fn overrides(&self) -> Overrides {
        Overrides {
            network: self.network.clone(),
            vsock: self.vsock_path.clone(),
            clock_realtime: self.clock_realtime,
        }
    }
}

/// Parses a network interface and its tap device.
fn network_override(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((interface, tap)) if !interface.is_empty() && !tap.is_empty() => {
            Ok((interface.to_owned(), tap.to_owned()))
        }
        _ => Err(format!(
            "'{text}' is no override: expected IFACE=TAP, such as eth0=tap7"
        )),
    }
}

/// The CPUs of a migration's threads.
#[derive(Debug, Args)]
pub(crate) struct CpuArgs {
    /// Run this side's threads of the migration on these CPUs only, such as 0-3,8
    ///
    /// vCPUs keep their own. [default: all CPUs]
    #[arg(long, value_name = "LIST")]
    pub(crate) cpus: Option<CpuList>,
}

/// Parses a time: a whole number and us, ms, s, m or h.
fn time(text: &str) -> Result<Duration, String> {
    let wrong = || format!("'{text}' is no time: expected a whole number and us, ms, s, m or h");
    let (digits, unit) = size::split(text).ok_or_else(wrong)?;
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let unit = match unit {
        "us" => 1,
        "ms" => 1000,
        "s" => 1_000_000,
        "m" => 60_000_000,
        "h" => 3_600_000_000,
        _ => return Err(wrong()),
    };
    number
        .checked_mul(unit)
        .map(Duration::from_micros)
        .ok_or_else(wrong)
}

fn rest(text: &str) -> Result<Duration, String> {
    let time = time(text)?;
    if time > Doorbell::MAX_REST || time.as_micros() % Doorbell::REST_UNIT.as_micros() != 0 {
        let most = Doorbell::MAX_REST;
        return Err(format!(
            "a rest has steps of 100us, and is {most:?} at most"
        ));
    }
    Ok(time)
}

fn dead_after(text: &str) -> Result<Duration, String> {
    let time = time(text)?;
    if time < Limits::MIN_DEAD_AFTER {
        return Err(format!(
            "a busy host may be silent for {text}: choose 100ms at least"
        ));
    }
    Ok(time)
}

/// Options of a session at its source.
#[derive(Debug, Args)]
pub(crate) struct ChannelArgs {
    /// Channels for pages in the background
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(SourceConfig::MAX_CHANNELS)))]
    pub(crate) channels: u16,
    /// Channels for pages that vCPUs wait for
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(SourceConfig::MAX_CHANNELS)))]
    pub(crate) urgent_channels: u16,
    /// How long pages in the background may keep the link busy beyond a round trip, such as 100us:
    /// about the longest wait of urgent pages behind them; 50us at least
    #[arg(long, default_value = "100us", value_name = "TIME", value_parser = queue)]
    pub(crate) queue: Duration,
    /// How changed pages are found: by the engine's dirty log, or by hashes of what was sent.
    /// Hashes confirm unchanged pages after the switch-over
    #[arg(long, default_value = "log", value_name = "log|hash", value_parser = track)]
    pub(crate) track: String,
}

fn track(text: &str) -> Result<String, String> {
    text.parse::<Tracking>().map(|_| text.to_owned())
}

pub(crate) fn mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("'{text}' is no mode: expected octal digits, like 660"))
}

pub(crate) fn queue(text: &str) -> Result<Duration, String> {
    crate::control::options::check_queue(time(text)?)
}

/// `pageferry recover`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("way").required(true)))]
pub(crate) struct RecoverArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// At the source: reach the destination by this address from now on
    #[arg(long, value_name = "ADDR", group = "way")]
    pub(crate) to: Option<Address>,
    /// At the destination: listen on this address too
    #[arg(long, value_name = "ADDR", group = "way")]
    pub(crate) listen: Option<Address>,
}

/// `pageferry abandon`.
#[derive(Debug, Args)]
pub(crate) struct AbandonArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// At the source: run the VM here, or take it back paused if it was paused. Do so only if the
    /// destination never runs it again: what it did there is lost, and else it runs twice
    #[arg(long)]
    pub(crate) resume_here: bool,
}

/// `pageferry demo`.
#[derive(Debug, Args)]
pub(crate) struct DemoArgs {
    /// The guest: workload (the test program, whose every page is checked), or linux (a Linux under
    /// load, which checks itself and says what it noticed; build it by `cargo xtask guest-linux`)
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        default_value_t,
        value_name = "workload|linux"
    )]
    pub(crate) guest: DemoGuest,
    /// With --guest linux: its kernel, a bzImage for KVM or a riscv64 Image for the soft engine
    /// [default: x86_64/bzImage or Image in the folder PAGEFERRY_GUEST_LINUX, or in
    /// target/guest-linux. KVM comes first, where it runs kernels]
    #[arg(long, value_name = "FILE", requires = "initrd")]
    pub(crate) kernel: Option<PathBuf>,
    /// With --guest linux: its initial RAM disk [default: initrd.gz in the same folder]
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    #[command(flatten)]
    pub(crate) backing: BackingArgs,
    #[command(flatten)]
    pub(crate) delivery: DeliveryArgs,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    /// The end of pre-copy: auto (when little is left, or when passes do not help), after-passes N
    /// (--precopy-passes N does the same), or now
    #[arg(long, value_name = "auto|after-passes N|now", num_args = 1..=2, value_parser = Closed::of(&["auto", "after-passes", "now"], any), hide_possible_values = true)]
    pub(crate) switch: Vec<String>,
    #[command(flatten)]
    pub(crate) details: DetailsArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a self-contained HTML page with the stall histogram and a timeline of the guest's
    /// progress
    #[arg(long, value_name = "FILE.html")]
    pub(crate) report: Option<PathBuf>,
    /// For tests: change one byte of a page at the destination after it arrived; both
    /// verifications must find it
    #[arg(long, hide = true)]
    pub(crate) corrupt_page: bool,
}

/// How much of a result to print.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct DetailsArgs {
    /// Print all figures of the result, and a histogram of the stalls, instead of the essentials
    #[arg(short, long, conflicts_with = "json")]
    pub(crate) verbose: bool,
}

/// What a demo moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum DemoGuest {
    /// The test program.
    #[default]
    Workload,
    /// Linux.
    Linux,
}

impl DemoArgs {
    /// The settings of the migration.
    ///
    /// # Errors
    /// One sentence that names the fault of the flags.
    pub(crate) fn settings(&self) -> Result<Settings, String> {
        let options = MigrateOptions {
            settings: ChangeOptions {
                switch: switch(&self.switch),
                ..ChangeOptions::default()
            },
            ..MigrateOptions::default()
        };
        let settings = options.settings(self.source.precopy_passes)?;
        if settings.switch == Switch::Manual {
            return Err(
                "nobody can say when a demo switches over: choose auto, after-passes N or now"
                    .into(),
            );
        }
        Ok(settings)
    }
}

/// The words of `--switch` as one text.
pub(crate) fn switch(words: &[String]) -> Option<String> {
    (!words.is_empty()).then(|| words.join(" "))
}

/// `pageferry run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) machine: MachineArgs,
    #[command(flatten)]
    pub(crate) kernel: KernelArgs,
    /// How long each vCPU of the test program rests after a page, in steps of 100us. Without a rest
    /// it writes as fast as it can
    #[arg(long, default_value = "0ms", value_name = "TIME", value_parser = rest, conflicts_with = "kernel")]
    pub(crate) rest: Duration,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) backing: BackingArgs,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Go on in the background once the VM runs: print its name, and end with 0. Without --console,
    /// `pageferry console` shows its console. Messages go on only if standard error is a file
    #[arg(long)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) save: SaveArgs,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
}

/// Where a VM goes at its end.
#[derive(Debug, Default, Args)]
pub(crate) struct SaveArgs {
    /// Save the VM to this new directory when somebody asks for its end (Ctrl-C, SIGTERM, `quit`).
    /// `pageferry restore` starts it again. If that fails, the VM runs on
    #[arg(long, value_name = "DIR")]
    pub(crate) snapshot_to: Option<PathBuf>,
    /// Save the memory as it is, not packed. Its chunks have no checksums then, and `restore` reads
    /// it whole before the VM runs
    #[arg(long, requires = "snapshot_to")]
    pub(crate) raw: bool,
}

/// `pageferry restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// A directory that `run --snapshot-to` wrote. It is only read: several VMs may start from it,
    /// each with its own copy of a disk.
    /// With --for, a snapshot directory of Cloud Hypervisor, or its address, such as
    /// pageferry://HOST:PORT/NAME or s3://bucket/snapshot
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// Restore a snapshot of Cloud Hypervisor into the process with this API socket, which has no
    /// VM. The command ends when that process has all memory
    #[arg(
        long = "for",
        value_name = "ch:API_SOCKET",
        conflicts_with_all = [
            "control", "name", "detach", "snapshot_to", "raw", "changed_disk", "background",
            "record", "replay", "pager", "console", "ignore_limits", "address",
        ]
    )]
    pub(crate) for_vmm: Option<crate::bridge::Vmm>,
    /// Let the VM run once it is restored. Otherwise it stays paused, as Cloud Hypervisor saved it
    #[arg(long, requires = "for_vmm")]
    pub(crate) resume: bool,
    /// The file memory-ranges is packed by `pageferry snapshot pack`, with its bases beside it
    #[arg(long, requires = "for_vmm")]
    pub(crate) packed: bool,
    /// Print the figures as one JSON object at the end
    #[arg(long, requires = "for_vmm")]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) stores: StoreArgs,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Go on in the background once the VM runs: print its name, and end with 0
    #[arg(long)]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) save: SaveArgs,
    /// Start the VM although a disk that it may write has changed since it was saved. The guest may
    /// destroy its file systems
    #[arg(long)]
    pub(crate) changed_disk: bool,
    /// Load all memory too: off, idle (while no fault waits), or at most this size a second
    #[arg(long, value_name = "off|idle|SIZE", default_value = "off", value_parser = crate::pager::background)]
    pub(crate) background: Background,
    /// Write the order of first touches to this file at the end
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Load the pages of this recording ahead of the faults
    #[arg(long, value_name = "FILE")]
    pub(crate) replay: Option<PathBuf>,
    /// Take memory from the pager that waits at this socket, for the file DIR/memory: `pager run
    /// --packed`, without --packed for one of --raw
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["background", "record", "replay"])]
    pub(crate) pager: Option<PathBuf>,
    /// The console of a guest that has one: a file, or - for this terminal
    #[arg(long, value_name = "FILE|-", value_parser = console)]
    pub(crate) console: Option<ConsoleTarget>,
    /// Start the VM although a limit of this host leaves it too little. It may then end by a signal
    #[arg(long)]
    pub(crate) ignore_limits: bool,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
}

impl RestoreArgs {
    /// Its memory is private: a file would have a second mapping, in which pages are missing too.
    pub(crate) fn backing(&self) -> BackingArgs {
        BackingArgs {
            backing: Backing::Anonymous,
            ignore_limits: self.ignore_limits,
        }
    }
}

/// The place of a VM's control socket.
#[derive(Debug, Args)]
pub(crate) struct PlaceArgs {
    /// Path of the control socket (mode 0600) for migrate, watch, status, quit and so on [default:
    /// by the VM's name, in the directory pageferry of $XDG_RUNTIME_DIR, or of /run for root]
    #[arg(long, value_name = "SOCKET", conflicts_with = "name")]
    pub(crate) control: Option<PathBuf>,
    /// The VM's name, for --vm of other commands [default: vm- and the process id]
    #[arg(long, value_name = "NAME", value_parser = crate::sockets::name)]
    pub(crate) name: Option<String>,
}

/// Linux instead of the test program.
#[derive(Debug, Args)]
pub(crate) struct KernelArgs {
    /// Run this kernel instead of the test program. An x86-64 bzImage, or a vmlinux with
    /// CONFIG_PVH, runs on KVM; its console is the first serial port (ttyS0). An uncompressed
    /// riscv64 Image, built for RV64IMA without C and F, runs on the soft engine. Its console is
    /// that of the SBI extension DBCN (hvc0; in an early boot `earlycon=sbi`). The legacy SBI
    /// console is not served: a kernel that has no other boots in silence
    #[arg(long, value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,
    /// The kernel's initial RAM disk
    #[arg(long, value_name = "FILE", requires = "kernel")]
    pub(crate) initrd: Option<PathBuf>,
    /// The kernel's command line [default: console=ttyS0 on KVM, else console=hvc0]
    #[arg(long, value_name = "TEXT", requires = "kernel")]
    pub(crate) cmdline: Option<String>,
    /// The CPU that an x86-64 kernel sees: host, a level of the x86-64 psABI (x86-64-v2 or
    /// x86-64-v3), or a file. The host must support the level. A level hides features beyond it.
    /// SMEP, SMAP, NX, the controls of speculation and invariant TSC stay as the host has them. A
    /// file has lines `LEAF SUBLEAF EAX EBX ECX EDX` in hexadecimal, and # begins a comment. The
    /// guest sees the host's features that are in the file. The CPUID of the oldest host serves. A
    /// migration takes the result along: a destination that lacks a feature refuses. With `,poison`
    /// behind it, KVM's steal time and what relies on it is hidden: a destination with --delivery
    /// poison takes no other guest with a kernel [default: host]
    #[arg(long, value_name = "MODEL|FILE[,poison]", requires = "kernel")]
    pub(crate) cpu: Option<PathBuf>,
    /// The kernel's console: a file, or - for this terminal. All keys go to the guest, Ctrl-C
    /// too; Ctrl-] does what Ctrl-C does elsewhere. Text is dropped while its reader takes nothing
    /// for a second [default: -, or none with --detach]
    #[arg(long, value_name = "FILE|-", requires = "kernel", value_parser = console)]
    pub(crate) console: Option<ConsoleTarget>,
}

/// The place of a guest's console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConsoleTarget {
    /// Standard input and output.
    Stdio,
    /// A file that is created or emptied.
    File(PathBuf),
}

fn console(text: &str) -> Result<ConsoleTarget, String> {
    match text {
        "" => Err("expected a file's name, or - for this terminal".into()),
        "-" => Ok(ConsoleTarget::Stdio),
        path => Ok(ConsoleTarget::File(path.into())),
    }
}

/// The metrics of a process that owns a VM.
#[derive(Debug, Args)]
pub(crate) struct MetricsArgs {
    /// Serve metrics for Prometheus at /metrics: HOST:PORT of this host only (127.0.0.1:9464), or
    /// unix:PATH (mode 0600)
    #[arg(long = "metrics", value_name = "ADDR")]
    pub(crate) address: Option<Address>,
}

/// `pageferry receive`.
#[derive(Debug, Args)]
pub(crate) struct ReceiveArgs {
    /// Address to listen on: HOST:PORT (port 0 takes a free one), or unix:PATH
    #[arg(
        long,
        value_name = "ADDR",
        required_unless_present = "activated",
        conflicts_with = "activated"
    )]
    pub(crate) listen: Option<Address>,
    /// Listen on the socket that systemd's socket activation hands over (LISTEN_FDS, LISTEN_PID)
    #[arg(long)]
    pub(crate) activated: bool,
    /// Receive a VM of Cloud Hypervisor (ch) or Firecracker (fc) into the process with this API
    /// socket, which has no VM. The command ends when that process has all of it
    #[arg(long = "for", value_name = "ch:API_SOCKET|fc:API_SOCKET")]
    pub(crate) for_vmm: Option<crate::bridge::Vmm>,
    #[command(flatten)]
    pub(crate) firecracker: FirecrackerArgs,
    #[command(flatten)]
    pub(crate) place: PlaceArgs,
    /// Go on in the background once it listens: print the address and the VM's name, and end with
    /// 0. Messages go on only if standard error is a file
    #[arg(long, conflicts_with_all = ["activated", "json", "child_of"])]
    pub(crate) detach: bool,
    #[command(flatten)]
    pub(crate) metrics: MetricsArgs,
    #[command(flatten)]
    pub(crate) backing: BackingArgs,
    /// The console of a guest that has one: a file, or - for this terminal, where Ctrl-] does what
    /// Ctrl-C does elsewhere. Without it, `pageferry console` shows the newest 64 KiB of text
    #[arg(long, value_name = "FILE|-", value_parser = console)]
    pub(crate) console: Option<ConsoleTarget>,
    #[command(flatten)]
    pub(crate) devices: DeviceArgs,
    #[command(flatten)]
    pub(crate) delivery: DeliveryArgs,
    /// Allocate memory only when pages arrive. This saves memory, and makes each stall longer
    #[arg(long)]
    pub(crate) sparse: bool,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) cpus: CpuArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Refuse a VM with more memory [default: what this host has available when the VM is offered]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(crate) max_memory: Option<u64>,
    /// Refuse a VM with more vCPUs [default: 8 for each core of this host, and 64 at least]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_VCPUS)))]
    pub(crate) max_vcpus: Option<u32>,
    #[command(flatten)]
    pub(crate) details: DetailsArgs,
    /// Print what was received as one JSON object when the command ends
    #[arg(long)]
    pub(crate) json: bool,
    /// For `demo`, which has this process id: end when it ends, and print nothing but the address
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) child_of: Option<u32>,
    /// See `demo --corrupt-page`
    #[arg(long, hide = true)]
    pub(crate) corrupt_page: bool,
}

/// `pageferry migrate`.
#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// Address on which `pageferry receive` listens: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDR")]
    pub(crate) to: Address,
    /// Of a VM of Cloud Hypervisor (--vm ch:API_SOCKET), leave a paused one behind when it has
    /// moved. It keeps its locks of disks. For versions after v53
    #[arg(long)]
    pub(crate) preserve_source: bool,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) change: ChangeArgs,
    #[command(flatten)]
    pub(crate) channels: ChannelArgs,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) cpus: CpuArgs,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
    /// Check that the destination answers and both sides trust each other, and move nothing
    ///
    /// The VM is untouched, and the destination stays ready. A destination that is busy is not
    /// waited for.
    #[arg(long, conflicts_with = "events")]
    pub(crate) check: bool,
    #[command(flatten)]
    pub(crate) details: DetailsArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print each event as a line of JSON with its time, and the result as the last line
    #[arg(long, conflicts_with = "json")]
    pub(crate) events: bool,
}

/// `pageferry watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// End after this time, such as 30s or 10m [default: when the migration ends]
    #[arg(long = "for", value_name = "TIME", value_parser = time)]
    pub(crate) for_time: Option<Duration>,
    /// Print each line as a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// Print it as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// The VM, by its name or its control socket.
#[derive(Debug, Args)]
pub(crate) struct VmArgs {
    /// The VM: its name, as `pageferry list` shows it, or the path of its control socket [default:
    /// the only VM of this user]
    #[arg(long, value_name = "NAME|SOCKET")]
    pub(crate) vm: Option<PathBuf>,
}

/// `pageferry cancel`.
#[derive(Debug, Args)]
pub(crate) struct CancelArgs {
    #[command(flatten)]
    pub(crate) vm: VmArgs,
    /// Of a tunnel: only the migrations by this route
    #[arg(long, value_name = "NAME")]
    pub(crate) route: Option<String>,
    /// Of a tunnel: only the migration with this id
    #[arg(long, value_name = "ID")]
    pub(crate) session: Option<String>,
    /// Of a tunnel: cut also a migration whose VM may run at the destination. QEMU may then run the
    /// VM here too
    #[arg(long)]
    pub(crate) force: bool,
}

/// `pageferry list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print it as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry probe`.
#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Print it as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// For `probe` itself: make its system calls, from this one on
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) calls_from: Option<usize>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn defaults_are_the_documented_ones() {
        let Command::Demo(demo) = Cli::parse_from(["pageferry", "demo"]).command else {
            panic!("demo is not demo");
        };
        assert_eq!((demo.machine.vcpus, demo.machine.memory), (4, 512 << 20));
        assert_eq!(demo.guest, DemoGuest::Workload);
        assert_eq!(demo.machine.engine, EngineChoice::Auto);
        assert_eq!(demo.delivery.delivery, DeliveryChoice(None));
        assert_eq!(demo.backing.backing, Backing::Shmem);
        assert_eq!(demo.settings(), Ok(Settings::default()));
        assert_eq!(Settings::default().switch, Switch::AfterPasses(1));
    }

    #[test]
    fn a_demo_of_linux_takes_less_memory_unless_told_otherwise() {
        let memory = |more: &[&str]| {
            let args = [&["pageferry", "demo", "--guest", "linux"], more].concat();
            let Command::Demo(demo) = Cli::parse_from(args).command else {
                panic!("demo is not demo");
            };
            demo.machine.memory
        };
        assert_eq!(memory(&[]), 256 << 20);
        assert_eq!(memory(&["--memory", "1G"]), 1 << 30);
        let alone = ["pageferry", "demo", "--guest", "linux", "--kernel", "x"];
        assert!(Cli::try_parse_from(alone).is_err(), "no initrd");
    }
}
