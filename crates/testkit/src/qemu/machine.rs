//! A machine of QEMU, which runs a program.

use super::monitor::Monitor;
use super::trace::{self, Traced};
use super::{Error, Qemu, boot, failed};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_guest::{Control, PageBytes, Program};
use pageferry_hosts::netns;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::Instant;

/// A machine that runs a program, or will receive one.
#[derive(Debug)]
pub struct Machine {
    monitor: Monitor,
    program: Program,
    memory: File,
    /// The trace. Only a machine that receives has one.
    trace: File,
}

impl Qemu {
    /// A machine in the namespace `namespace` with a program in its memory, which does not run yet:
    /// `cont` starts it.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn source(&self, namespace: &str, program: &Program) -> Result<Machine, Error> {
        let machine = self.start(namespace, program, |command, _, memory| {
            command.arg("-S");
            boot::write(memory, program)
        })?;
        Ok(machine)
    }

    /// A machine in the namespace `namespace` that waits for the call `migrate-incoming`.
    ///
    /// # Errors
    /// If QEMU does not start.
    pub fn destination(&self, namespace: &str, program: &Program) -> Result<Machine, Error> {
        self.start(namespace, program, |command, trace, memory| {
            command.args(["-incoming", "defer"]);
            command.args(["-D", &path(trace), "-msg", "timestamp=on"]);
            for event in trace::EVENTS {
                command.args(["-trace", event]);
            }
            let bytes = boot::ram_bytes(program.memory_map().memory_bytes());
            let made = memory.set_len(bytes);
            made.map_err(os("cannot give its guest memory"))
        })
    }

    fn start(
        &self,
        namespace: &str,
        program: &Program,
        prepare: impl FnOnce(&mut Command, &File, &File) -> Result<(), Error>,
    ) -> Result<Machine, Error> {
        let (memory, trace) = (memfd("guest")?, memfd("trace")?);
        let map = program.memory_map();
        let bytes = boot::ram_bytes(map.memory_bytes());
        let mut command = netns::command(namespace, self.file());
        command
            .args(["-machine", "virt,memory-backend=ram", "-cpu", "rv64"])
            .args(["-accel", "tcg,thread=multi", "-bios", "none"])
            .args(["-smp", &map.vcpus().to_string()])
            .args(["-m", &format!("{}M", bytes >> 20)])
            .args(["-display", "none", "-nodefaults"])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=ram,size={bytes},share=on,mem-path={}",
                path(&memory)
            ))
            .stderr(Stdio::inherit());
        prepare(&mut command, &trace, &memory)?;
        Ok(Machine {
            monitor: Monitor::start(command)?,
            program: program.clone(),
            memory,
            trace,
        })
    }
}

impl Machine {
    /// The process id.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.monitor.pid()
    }

    /// Calls a command of QEMU. Events that come before its answer are dropped.
    ///
    /// # Errors
    /// If QEMU refuses, has ended, or does not answer.
    pub fn call(&mut self, name: &str, arguments: Value) -> Result<Value, Error> {
        self.monitor.call(name, arguments)
    }

    /// Turns capabilities of migrations on.
    ///
    /// # Errors
    /// As [`Machine::call`].
    pub fn turn_on(&mut self, capabilities: &[&str]) -> Result<(), Error> {
        self.monitor.turn_on(capabilities)
    }

    /// The state of the migration, with QEMU's word for it. It is empty before there is one.
    ///
    /// # Errors
    /// If the migration has failed, and as [`Machine::call`].
    pub fn migration(&mut self) -> Result<String, Error> {
        let state = self.monitor.migration()?;
        Ok(state["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Ends QEMU and waits for its end, until `deadline`.
    ///
    /// # Errors
    /// If it does not end.
    pub fn quit(&mut self, deadline: Instant) -> Result<(), Error> {
        self.monitor.quit(deadline)
    }

    /// Reads a page of the program's memory, also while the guest runs.
    ///
    /// # Errors
    /// If there is no such page.
    pub fn read_page(&self, page: RamPage, bytes: &mut PageBytes) -> Result<(), Error> {
        let read = boot::read_page(&self.memory, page, bytes);
        read.map_err(os("cannot read its guest's memory"))
    }

    /// The control page of a vCPU. `None` if it has not arrived, or is being written.
    ///
    /// # Errors
    /// As [`Machine::read_page`].
    pub fn control(&self, vcpu: u32) -> Result<Option<Control>, Error> {
        let mut bytes = [0; PAGE_SIZE as usize];
        self.read_page(self.program.control_page(vcpu), &mut bytes)?;
        Ok(Control::parse(&bytes).ok())
    }

    /// The progress of a vCPU, for another thread.
    ///
    /// # Errors
    /// If this process has too many files.
    pub fn progress(&self, vcpu: u32) -> Result<Progress, Error> {
        let memory = self.memory.try_clone();
        Ok(Progress {
            memory: memory.map_err(os("cannot open its guest's memory again"))?,
            page: self.program.control_page(vcpu),
        })
    }

    /// Ends QEMU, and reads what it has traced.
    ///
    /// # Errors
    /// If it does not end until `deadline`.
    pub fn traced(mut self, deadline: Instant) -> Result<Traced, Error> {
        // It writes the last lines at its end.
        self.quit(deadline)?;
        let mut bytes = Vec::new();
        let rewound = self.trace.rewind();
        rewound
            .and_then(|()| self.trace.read_to_end(&mut bytes))
            .map_err(os("cannot read its trace"))?;
        Ok(trace::read(&String::from_utf8_lossy(&bytes)))
    }

    /// Sets TCP_NODELAY on all sockets of TCP that QEMU has. Returns their number.
    pub fn set_no_delay(&self) -> Result<usize, Error> {
        let errno = |what| move |source: rustix::io::Errno| os(what)(source.into());
        let pid = self.pid();
        let process = pidfd_open(pid, PidfdFlags::empty());
        let process = process.map_err(errno("cannot open its process"))?;
        let files = std::fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
        let files = files.map_err(os("cannot list its files"))?;
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
                Err(why) => return Err(errno("cannot borrow a socket of it")(why)),
            };
            if is_tcp(&socket) {
                let done = sockopt::set_tcp_nodelay(&socket, true);
                done.map_err(errno("cannot set TCP_NODELAY"))?;
                set += 1;
            }
        }
        Ok(set)
    }
}

/// The progress of a vCPU.
pub struct Progress {
    memory: File,
    page: RamPage,
}

impl Progress {
    /// The pages it has done. It is 0 while its control page has not arrived.
    pub fn done(&self) -> u64 {
        let mut bytes = [0; PAGE_SIZE as usize];
        let read = boot::read_page(&self.memory, self.page, &mut bytes);
        let control = read.ok().and_then(|()| Control::parse(&bytes).ok());
        control.map_or(0, |control| control.done)
    }
}

fn os(what: &str) -> impl FnOnce(std::io::Error) -> Error {
    move |why| failed(format!("{what}: {why}"))
}

/// A file without a name.
fn memfd(name: &str) -> Result<File, Error> {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC);
    let fd = fd.map_err(|source| os("cannot make a file in memory")(source.into()))?;
    Ok(File::from(fd))
}

/// The path by which another process opens a file of this one.
fn path(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

fn is_tcp(socket: &OwnedFd) -> bool {
    let internet = [AddressFamily::INET, AddressFamily::INET6];
    sockopt::socket_domain(socket).is_ok_and(|domain| internet.contains(&domain))
        && sockopt::socket_type(socket) == Ok(SocketType::STREAM)
}
