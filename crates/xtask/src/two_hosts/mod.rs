//! `cargo xtask two-hosts`: a command beside two hosts that a shaped link joins.
//!
//! **Guarantee.** The command's output and exit code are this command's own. The hosts and all
//! processes in them are gone afterwards, also when a signal ends the run. SIGKILL leaves the hosts
//! behind. The next run removes them.
//!
//! **Mechanism.** The crate `hosts` makes them of network namespaces. The command runs in the
//! machine's own namespace and finds the names and addresses of the hosts in its environment.
//!
//! **Neighbours.** [`command`] runs the command. Tests use `pageferry_testkit::two_hosts` directly.

mod command;

use pageferry_hosts::{Error, Host, Link, Queue, Rate, TwoHosts};
use std::ffi::OsString;
use std::process::ExitCode;

/// The exit code where this machine cannot make the hosts. Test tools take it for a skip.
const UNUSABLE: u8 = 77;

/// The exit code of a run that failed before the command.
const FAILED: u8 = 125;

/// Run a command beside two network namespaces that a shaped link joins
///
/// COMMAND finds the names of the namespaces in PAGEFERRY_HOST_A and PAGEFERRY_HOST_B, and their
/// addresses in PAGEFERRY_ADDR_A and PAGEFERRY_ADDR_B. `ip netns exec $PAGEFERRY_HOST_A ...` runs a
/// program in the first. This needs root and Debian's package iproute2.
#[derive(clap::Args)]
#[command(
    after_help = "Exit codes: those of COMMAND; 77 if this machine cannot make the namespaces; \
                  125 if making them failed; 126 or 127 if COMMAND cannot run; 128 and the signal \
                  if a signal ended it."
)]
pub(crate) struct Args {
    /// The rate of each direction: a number with bit, kbit, mbit or gbit
    #[arg(long, value_name = "RATE", default_value = "1gbit")]
    rate: Rate,
    /// How packets wait for the link
    #[arg(long, value_enum, default_value = "one-fifo")]
    queue: QueueName,
    /// The most that one TCP flow gets, with --queue per-flow
    #[arg(long, value_name = "RATE", required_if_eq("queue", "per-flow"))]
    flow_rate: Option<Rate>,
    /// Bytes that may pass at once after an idle time; 128k and 1m are understood
    #[arg(long, value_name = "BYTES", default_value = "128k", value_parser = bytes)]
    burst: u32,
    /// Bytes that a queue holds
    #[arg(long, value_name = "BYTES", default_value = "1m", value_parser = bytes)]
    limit: u32,
    /// The congestion control of TCP in both namespaces, such as cubic
    #[arg(long, value_name = "NAME")]
    congestion: Option<String>,
    /// The command and its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum QueueName {
    /// All packets wait in one queue
    OneFifo,
    /// Each TCP flow has a queue, and the flows share the rate evenly
    Fair,
    /// As fair, and no flow gets more than --flow-rate
    PerFlow,
}

/// A number of bytes, with k for KiB or m for MiB.
fn bytes(text: &str) -> Result<u32, String> {
    let lower = text.to_ascii_lowercase();
    let (digits, shift) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 10),
        Some(b'm') => (&lower[..lower.len() - 1], 20),
        _ => (&lower[..], 0),
    };
    let number: Option<u32> = digits.parse().ok();
    let bytes = number.and_then(|number| number.checked_mul(1 << shift));
    // The least holds one packet of Ethernet.
    bytes.filter(|bytes| *bytes >= 2048).ok_or_else(|| {
        format!("'{text}': expected bytes from 2k to 4095m, such as 131072, 128k or 1m")
    })
}

impl Args {
    fn link(&self) -> Result<Link, String> {
        let queue = match (self.queue, self.flow_rate) {
            (QueueName::OneFifo, None) => Queue::OneFifo,
            (QueueName::Fair, None) => Queue::Fair,
            (QueueName::PerFlow, Some(rate)) => Queue::PerFlow(rate),
            _ => return Err("--flow-rate and --queue per-flow need each other".to_owned()),
        };
        Ok(Link {
            queue,
            burst: self.burst,
            limit: self.limit,
            congestion: self.congestion.clone(),
            ..Link::new(self.rate)
        })
    }
}

/// Runs the command. Returns its exit code, or what the help says.
pub(crate) fn run(args: &Args) -> ExitCode {
    let (code, why) = match between(args) {
        Ok(code) => return ExitCode::from(code),
        Err(Error::Unusable(why)) => (UNUSABLE, why),
        Err(Error::Failed(why)) => (FAILED, why),
    };
    eprintln!("two-hosts: {why}");
    ExitCode::from(code)
}

fn between(args: &Args) -> Result<u8, Error> {
    let link = args.link().map_err(Error::Failed)?;
    // Before the hosts: a signal that arrives while they are made must not end this process.
    let mut supervisor = command::Supervisor::new()
        .map_err(|why| Error::Failed(format!("cannot watch for signals: {why}")))?;
    let hosts = TwoHosts::start(&link)?;
    let mut environment = Vec::new();
    for (host, side) in [(Host::A, "A"), (Host::B, "B")] {
        let (name, address) = (hosts.name(host), hosts.address(host));
        environment.push((format!("PAGEFERRY_HOST_{side}"), name.to_owned()));
        environment.push((format!("PAGEFERRY_ADDR_{side}"), address.to_string()));
    }
    Ok(supervisor.run(&args.command, environment))
}
