//! QEMU as a peer: its post-copy of the same guest program over the same link.
//!
//! **Mechanism.** Two QEMU processes emulate RV64, one in each host's namespace. The source's guest
//! has not run. It starts at the destination when post-copy starts. Pre-copy is slowed down, so it
//! sends next to nothing; post-copy has no limit. The destination's trace points have the stalls.
//! QEMU leaves TCP's Nagle algorithm on. Where a row wants it off, this process borrows the sockets
//! of both and sets the option.
//!
//! **Source.** Capability and parameters: `qapi/migration.json` of QEMU. The idea to compare in
//! this way: the postcopy-preempt series.

mod boot;
mod monitor;
mod trace;

use super::round::{Conditions, Measured};
use super::setting::{Column, HostPage, QemuSwitches};
use super::stalls::Stalls;
use crate::BenchError;
use crate::qemu::Qemu;
use crate::vm::toucher;
pub(super) use boot::MAX_MEMORY;
use monitor::Monitor;
use pageferry_guest::TouchOrder;
use pageferry_hosts::{Host, netns};
use pageferry_machine::Engine;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The port of the destination. Its namespace is its own.
const PORT: u16 = 4444;
/// The rate of pre-copy, in bytes a second.
const PRECOPY_RATE: u64 = 100_000;
/// The time between two looks at a migration.
const POLL: Duration = Duration::from_millis(10);

fn failed(why: impl Into<String>) -> BenchError {
    BenchError::Peer(format!("QEMU: {}", why.into()))
}

impl Qemu {
    /// Whether a column can be measured on QEMU.
    pub(super) fn can(column: &Column) -> bool {
        column.host_page == HostPage::Size4K && !column.tls
    }

    /// Moves a guest.
    pub(super) fn measure(
        &self,
        conditions: Conditions<'_>,
        QemuSwitches { preempt, no_delay }: QemuSwitches,
    ) -> Result<Measured, BenchError> {
        let Conditions {
            setting,
            hosts,
            column,
            stop,
            ..
        } = conditions;
        let program = toucher(
            Engine::Soft,
            column.vcpus,
            setting.memory_bytes,
            u64::MAX,
            TouchOrder::Random,
        )?;
        let (memory, mut trace) = (memfd("guest")?, memfd("trace")?);
        boot::write(&memory, program.program())?;
        let bytes = boot::ram_bytes(setting.memory_bytes);
        let backed = format!(
            "memory-backend-file,id=ram,size={bytes},share=on,mem-path={}",
            path(&memory)
        );
        let mut source = self.start(hosts.name(Host::A), column, bytes, |command| {
            command.args(["-S", "-object", &backed]);
        })?;
        let anonymous = format!("memory-backend-ram,id=ram,size={bytes}");
        let mut destination = self.start(hosts.name(Host::B), column, bytes, |command| {
            command.args(["-incoming", "defer", "-object", &anonymous]);
            command.args(["-D", &path(&trace), "-msg", "timestamp=on"]);
            for event in trace::EVENTS {
                command.args(["-trace", event]);
            }
        })?;
        let capabilities: Vec<Value> = [("postcopy-ram", true), ("postcopy-preempt", preempt)]
            .into_iter()
            .map(|(name, on)| json!({ "capability": name, "state": on }))
            .collect();
        for end in [&mut source, &mut destination] {
            let capabilities = json!({ "capabilities": capabilities });
            end.call("migrate-set-capabilities", capabilities)?;
        }
        let uri = format!("tcp:{}:{PORT}", hosts.address(Host::B));
        destination.call("migrate-incoming", json!({ "uri": uri }))?;
        // A limit of 0 is none.
        let limits = json!({ "max-bandwidth": PRECOPY_RATE, "max-postcopy-bandwidth": 0 });
        source.call("migrate-set-parameters", limits)?;
        let sent_before = hosts.sent_bytes(Host::A)?;
        source.call("migrate", json!({ "uri": uri }))?;
        let deadline = Instant::now() + conditions.limit(setting.memory_bytes);
        let mut asked = false;
        let mut undelayed = 0;
        loop {
            if no_delay {
                // The source listens on none, so all are connections.
                undelayed = undelayed.max(set_no_delay(&source)?);
                set_no_delay(&destination)?;
            }
            let states = [source.migration()?, destination.migration()?];
            if states.iter().all(|state| state == "completed") {
                break;
            }
            if states[0] == "active" && !asked {
                source.call("migrate-start-postcopy", json!({}))?;
                asked = true;
            }
            if stop() {
                return Err(BenchError::Cancelled);
            }
            if Instant::now() > deadline {
                return Err(failed("its migration does not end"));
            }
            std::thread::sleep(POLL);
        }
        if no_delay && undelayed < if preempt { 2 } else { 1 } {
            return Err(failed("it had no connections to set TCP_NODELAY on"));
        }
        let sent = hosts.sent_bytes(Host::A)? - sent_before;
        // It writes the last lines of its trace.
        destination.quit(deadline)?;
        drop(source);
        let traced = read(&mut trace)?;
        if traced.stalls.is_empty() {
            return Err(failed("its trace has no stall: did the guest run?"));
        }
        let total_s = traced.total_s;
        Ok(Measured {
            stalls: Stalls::of(traced.stalls.into_iter().map(|ns| (ns, 1))),
            link_busy_percent: total_s.map(|seconds| conditions.link_busy_percent(sent, seconds)),
            total_s,
            delivery: None,
        })
    }

    /// Starts a machine in a namespace, with what `more` adds.
    fn start(
        &self,
        namespace: &str,
        column: &Column,
        ram_bytes: u64,
        more: impl FnOnce(&mut Command),
    ) -> Result<Monitor, BenchError> {
        let mut command = netns::command(namespace, self.file());
        command
            .args(["-machine", "virt,memory-backend=ram", "-cpu", "rv64"])
            .args(["-accel", "tcg,thread=multi", "-bios", "none"])
            .args(["-smp", &column.vcpus.to_string()])
            .args(["-m", &format!("{}M", ram_bytes >> 20)])
            .args(["-display", "none", "-nodefaults"])
            .stderr(Stdio::inherit());
        more(&mut command);
        Monitor::start(command)
    }
}

/// A file without a name.
fn memfd(name: &str) -> Result<File, BenchError> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC).map_err(|source| BenchError::Os {
        what: "cannot make a file in memory",
        source: source.into(),
    })?;
    Ok(File::from(fd))
}

/// The path by which another process opens a file of this one.
fn path(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn read(trace: &mut File) -> Result<trace::Traced, BenchError> {
    let mut bytes = Vec::new();
    let done = trace.rewind().and_then(|()| trace.read_to_end(&mut bytes));
    done.map_err(|source| BenchError::Os {
        what: "cannot read QEMU's trace",
        source,
    })?;
    Ok(trace::read(&String::from_utf8_lossy(&bytes)))
}

/// Sets TCP_NODELAY on all sockets of TCP that a process has. Returns their number.
fn set_no_delay(monitor: &Monitor) -> Result<usize, BenchError> {
    let os = |what| {
        move |source: rustix::io::Errno| BenchError::Os {
            what,
            source: source.into(),
        }
    };
    let pid = monitor.pid();
    let process = pidfd_open(pid, PidfdFlags::empty()).map_err(os("cannot open QEMU's process"))?;
    let files = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    let files = files.map_err(|source| BenchError::Os {
        what: "cannot list the files of QEMU",
        source,
    })?;
    let mut set = 0;
    for file in files.flatten() {
        let number = file.file_name().to_str().and_then(|name| name.parse().ok());
        let is_socket = std::fs::read_link(file.path())
            .is_ok_and(|to| to.to_string_lossy().starts_with("socket:"));
        let Some(number) = number.filter(|_| is_socket) else {
            continue;
        };
        let socket = match pidfd_getfd(process.as_fd(), number, PidfdGetfdFlags::empty()) {
            Ok(socket) => socket,
            // QEMU has closed it meanwhile.
            Err(rustix::io::Errno::BADF) => continue,
            Err(why) => return Err(os("cannot borrow a socket of QEMU")(why)),
        };
        if is_tcp(&socket) {
            sockopt::set_tcp_nodelay(&socket, true).map_err(os("cannot set TCP_NODELAY"))?;
            set += 1;
        }
    }
    Ok(set)
}

fn is_tcp(socket: &OwnedFd) -> bool {
    let internet = [AddressFamily::INET, AddressFamily::INET6];
    sockopt::socket_domain(socket).is_ok_and(|domain| internet.contains(&domain))
        && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
}
