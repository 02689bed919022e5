//! Running code inside a named network namespace.
//!
//! **Guarantee.** Only the child process or the new thread enters the namespace. The caller stays
//! where it is.
//!
//! **Mechanism.** A child is started by `ip netns exec`. A thread calls `setns`. A socket belongs
//! to the namespace in which it was made, and any thread of the process may use it afterwards.
//!
//! **Neighbours.** [`TwoHosts`](crate::TwoHosts) makes the namespaces.

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where iproute2 keeps named namespaces.
pub(crate) const FOLDER: &str = "/run/netns";

/// A command that runs `program` in the namespace `name`. Its process id is that of `program`.
#[must_use]
pub fn command(name: &str, program: impl AsRef<OsStr>) -> Command {
    // Without iproute2 there is no such namespace either: starting the command then says so.
    let mut command = Command::new(tool("ip").unwrap_or_else(|| PathBuf::from("ip")));
    command.args(["netns", "exec", name]).arg(program);
    command
}

/// Calls `work` on a new thread in the namespace `name`, or in that of an absolute path such as
/// `/proc/PID/ns/net`. Threads and processes that `work` starts are there too.
///
/// # Errors
/// If the namespace does not exist, or the process may not enter it.
///
/// # Panics
/// If `work` panics.
pub fn within<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let namespace = File::open(Path::new(FOLDER).join(name))?;
    let entered = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let kind = Some(LinkNameSpaceType::Network);
            move_into_link_name_space(namespace.as_fd(), kind).map_err(io::Error::from)?;
            Ok(work())
        });
        thread.join()
    });
    entered.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The path of a program of iproute2. The search path of a user often lacks its folder.
pub(crate) fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut folders = std::env::split_paths(&path).chain(usual);
    folders.find_map(|folder| Some(folder.join(name)).filter(|file| file.is_file()))
}
