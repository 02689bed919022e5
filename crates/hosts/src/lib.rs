//! How does one machine act as two hosts?
//!
//! **Guarantee.** Dropping [`TwoHosts`] ends the processes in both hosts and removes the hosts,
//! also by a panic. A process that is killed leaves them behind. The next start removes them.
//! Dropping [`HugePages`] gives the pool its size back.
//!
//! **Mechanism.** A host is a network namespace. A veth pair joins the two, or threads of this
//! process if packets take time ([`Link::delayed`]). `tc` shapes what each side sends, see
//! [`Link`]. Names hold the process id of the maker, so runs do not collide, and a
//! name whose process is gone is stale.
//!
//! **Neighbours.** [`netns`] runs code in a host. `bench` measures between two hosts, `testkit`
//! skips a test that cannot have them, and `cargo xtask two-hosts` is this crate as a command.

mod delay;
mod huge_pages;
mod link;
pub mod netns;
mod tools;

pub use huge_pages::{HugePages, lock};
pub use link::{Link, Queue, Rate};
pub use tools::Error;

use link::DEVICE;
use rustix::process::{Pid, Signal, kill_process};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// What all names of hosts start with.
const PREFIX: &str = "pageferry-";

/// The addresses at the start. 198.18.0.0/15 is for tests of networks (RFC 2544).
const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(198, 18, 0, 1), Ipv4Addr::new(198, 18, 0, 2)];

/// One of the two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The first.
    A,
    /// The second.
    B,
}

/// Two hosts and the link between them.
#[derive(Debug)]
pub struct TwoHosts {
    names: [String; 2],
    /// How often the link was shaped.
    shapes: AtomicU16,
    delayed: Option<delay::Delayed>,
}

impl TwoHosts {
    /// Makes two hosts.
    ///
    /// # Errors
    /// [`Error::Unusable`] if this machine cannot. Nothing is left behind.
    pub fn start(link: &Link) -> Result<Self, Error> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        tools::check_privilege()?;
        remove_stale();
        let (pid, n) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        // From here on a failure drops the hosts.
        let mut hosts = Self {
            names: ["a", "b"].map(|side| format!("{PREFIX}{pid}-{n}-{side}")),
            shapes: AtomicU16::new(0),
            delayed: None,
        };
        let [a, b] = &hosts.names;
        tools::run("ip", &["netns", "add", a])?;
        tools::run("ip", &["netns", "add", b])?;
        // Both ends are made in place: the machine's own namespace never sees them.
        if link.delay + link.jitter > Duration::ZERO {
            let delayed = delay::Delayed::start([a, b].map(String::as_str), link)?;
            hosts.delayed = Some(delayed);
        } else {
            let pair = ["link", "add", DEVICE, "netns", a, "type", "veth"];
            let peer = ["peer", "name", DEVICE, "netns", b];
            tools::run("ip", &[&pair[..], &peer[..]].concat())?;
        }
        hosts.reshape(link)?;
        for (host, address) in [Host::A, Host::B].into_iter().zip(ADDRESSES) {
            hosts.set_congestion(host, link)?;
            hosts.ip(host, &format!("addr add {address}/24 dev {DEVICE}"))?;
            let up = format!("link set lo up\nlink set {DEVICE} mtu {} up", link.mtu);
            hosts.ip(host, &up)?;
        }
        Ok(hosts)
    }

    /// The name of a host's namespace, for [`netns::command`] and [`netns::within`].
    #[must_use]
    pub fn name(&self, host: Host) -> &str {
        &self.names[host as usize]
    }

    /// The address that a host has at the start.
    #[must_use]
    pub const fn address(&self, host: Host) -> Ipv4Addr {
        ADDRESSES[host as usize]
    }

    /// Gives a host one more address of 198.18.0.0/24. Connections are not affected.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn add_address(&self, host: Host, address: Ipv4Addr) -> Result<(), Error> {
        self.ip(host, &format!("addr add {address}/24 dev {DEVICE}"))
    }

    /// Takes an address from a host. Connections that use it live, but nothing passes until the
    /// host has the address again.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn remove_address(&self, host: Host, address: Ipv4Addr) -> Result<(), Error> {
        // Without promotion, the first address would take the later ones of its network with it.
        let sysctl = format!("/proc/sys/net/ipv4/conf/{DEVICE}/promote_secondaries");
        self.write(host, &sysctl, "1")?;
        self.ip(host, &format!("addr del {address}/24 dev {DEVICE}"))
    }

    /// Plugs or unplugs the link. Connections live, but nothing passes while it is unplugged.
    ///
    /// # Errors
    /// If `ip` fails.
    pub fn plug(&self, plugged: bool) -> Result<(), Error> {
        let state = if plugged { "up" } else { "down" };
        self.ip(Host::B, &format!("link set {DEVICE} {state}"))
    }

    /// Shapes the link anew. Packets that wait are lost, and none passes unshaped meanwhile. The
    /// congestion control, the MTU and the delay stay.
    ///
    /// # Errors
    /// If `tc` fails.
    pub fn reshape(&self, link: &Link) -> Result<(), Error> {
        // The kernel's own queues have handles from 0x8000 on. That of the shape before is another.
        let handle = 1 + self.shapes.fetch_add(1, Ordering::Relaxed) % 0x7fff;
        let program = link.program(handle);
        [Host::A, Host::B]
            .into_iter()
            .try_for_each(|host| tools::batch("tc", self.name(host), &program))
    }

    fn ip(&self, host: Host, commands: &str) -> Result<(), Error> {
        tools::batch("ip", self.name(host), commands)
    }

    /// The bytes that a host has put on the link so far, headers included. Packets that its queue
    /// still holds are not among them.
    ///
    /// # Errors
    /// If `tc` fails, or does not say.
    pub fn sent_bytes(&self, host: Host) -> Result<u64, Error> {
        let name = self.name(host);
        let text = tools::run(
            "tc",
            &["-netns", name, "-s", "qdisc", "show", "dev", DEVICE],
        )?;
        root_bytes(&text)
            .ok_or_else(|| Error::Failed(format!("'tc -s qdisc show' has no count: {text}")))
    }

    /// Sets the congestion control of a host. A namespace may only have one that every user may
    /// choose, so the machine allows the wanted one to every user meanwhile.
    fn set_congestion(&self, host: Host, link: &Link) -> Result<(), Error> {
        let Some(name) = &link.congestion else {
            return Ok(());
        };
        let file = "/proc/sys/net/ipv4/tcp_congestion_control";
        if self.write(host, file, name).is_ok() {
            return Ok(());
        }
        let cannot = || {
            let available = "/proc/sys/net/ipv4/tcp_available_congestion_control";
            let available = std::fs::read_to_string(available).unwrap_or_default();
            Error::Unusable(format!(
                "a namespace cannot have the congestion control '{name}': this kernel has {}",
                available.trim()
            ))
        };
        // Another process that did the same meanwhile would take the permission away too early.
        let _turn = lock(netns::FOLDER).map_err(|_| cannot())?;
        let allowed = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
        let before = std::fs::read_to_string(allowed).map_err(|_| cannot())?;
        let more = format!("{} {name}", before.trim());
        std::fs::write(allowed, more).map_err(|_| cannot())?;
        let set = self.write(host, file, name);
        // The namespace keeps its congestion control.
        let _ = std::fs::write(allowed, before);
        set
    }

    fn write(&self, host: Host, file: &str, value: &str) -> Result<(), Error> {
        let done = netns::within(self.name(host), || std::fs::write(file, value));
        done.and_then(|written| written)
            .map_err(|why| Error::Failed(format!("cannot write {file}: {why}")))
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        self.names.iter().for_each(|name| remove(name));
    }
}

/// Removes the hosts of processes that are gone.
fn remove_stale() {
    let Ok(entries) = std::fs::read_dir(netns::FOLDER) else {
        return;
    };
    for name in entries.flatten().map(|entry| entry.file_name()) {
        let Some(name) = name.to_str() else { continue };
        let maker = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split('-').next());
        let maker = maker.filter(|pid| pid.parse::<u32>().is_ok());
        if maker.is_some_and(|pid| !Path::new("/proc").join(pid).exists()) {
            remove(name);
        }
    }
}

/// Removes a host, after it has killed the processes there. Another process may do the same.
fn remove(name: &str) {
    if !Path::new(netns::FOLDER).join(name).exists() {
        return;
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(5) {
        // This lists a process by its first thread, so it must not hold this one: a thread may be
        // there by mistake.
        let listed = tools::run("ip", &["netns", "pids", name]).unwrap_or_default();
        let own = std::process::id().to_string();
        let others = listed.split_whitespace().filter(|pid| *pid != own);
        let pids: Vec<Pid> = others
            .filter_map(|pid| pid.parse().ok().and_then(Pid::from_raw))
            .collect();
        if pids.is_empty() {
            break;
        }
        for pid in pids {
            // It may have ended already.
            let _ = kill_process(pid, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = tools::run("ip", &["netns", "del", name]);
}

/// The bytes that the outermost queue has sent, in the output of `tc -s qdisc show`.
fn root_bytes(text: &str) -> Option<u64> {
    let after = text.split_once(" root ")?.1.split_once("Sent ")?.1;
    after.split_whitespace().next()?.parse().ok()
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_the_outermost_queue_count() {
        let text = "qdisc tbf 1: root refcnt 5 rate 1Gbit burst 128Kb lat 7.3ms \n \
                    Sent 4711 bytes 12 pkt (dropped 0, overlimits 0 requeues 0) \n \
                    backlog 0b 0p requeues 0\n\
                    qdisc bfifo 2: parent 1:1 limit 1Mb\n Sent 99 bytes 1 pkt\n";
        assert_eq!(root_bytes(text), Some(4711));
        assert_eq!(root_bytes("qdisc noqueue 0: root"), None);
    }
}
