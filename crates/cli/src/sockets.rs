//! Where the control sockets of this user's VMs are, and which VM a command means.
//!
//! **Guarantee.** A VM without `--control` has its socket in one directory of the user, that nobody
//! else may enter. Commands find it there by its name. With one VM they need no name.
//!
//! **Mechanism.** The directory is `pageferry` in `$XDG_RUNTIME_DIR`, for root without that
//! variable in `/run`, and else `pageferry-UID` in the directory for temporary files. A directory
//! of another owner is refused. A socket on which nobody listens belongs to a process that was
//! killed: it counts as no VM.
//!
//! **Neighbours.** `run` and `receive` make sockets here; all commands with `--vm` look here.

use crate::args::{ListArgs, VmArgs};
use crate::control::client::ask;
use crate::control::protocol::Request;
use crate::exit::{Exit, Failure};
use crate::output;
use crate::signals::Interrupts;
use pageferry_harness::size::human;
use pageferry_hostfs::own_directory;
use serde_json::{Value, json};
use std::fmt::Write;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The longest wait for one VM's answer to `list`.
const LIMIT: Duration = Duration::from_secs(2);

/// The directory, whether it exists or not.
pub(crate) fn directory() -> PathBuf {
    let user = rustix::process::geteuid();
    match std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| Path::new(dir).is_absolute()) {
        Some(dir) => Path::new(&dir).join("pageferry"),
        None if user.is_root() => "/run/pageferry".into(),
        None => std::env::temp_dir().join(format!("pageferry-{}", user.as_raw())),
    }
}

/// Checks the name of a VM: it is a file's name in the directory.
///
/// # Errors
/// One sentence.
pub(crate) fn name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if text.is_empty() || text.len() > 64 || text.starts_with('.') || !text.chars().all(plain) {
        return Err(format!(
            "'{text}' is no name: expected 1 to 64 letters, digits, '-', '_' or '.', and no '.' first"
        ));
    }
    Ok(text.to_owned())
}

/// The path of a new VM's control socket: `control`, or in the directory, which is created.
///
/// # Errors
/// [`Exit::Address`] when the directory cannot be used.
pub(crate) fn path_for(control: Option<&Path>, name: Option<&str>) -> Result<PathBuf, Failure> {
    if let Some(path) = control {
        return Ok(path.to_owned());
    }
    let default = || format!("vm-{}", std::process::id());
    Ok(made()?.join(name.map_or_else(default, str::to_owned)))
}

/// The directory, which is created.
///
/// # Errors
/// [`Exit::Address`] when it cannot be used.
pub(crate) fn made() -> Result<PathBuf, Failure> {
    let directory = directory();
    own_directory(&directory).map_err(|why| {
        Failure::new(
            Exit::Address,
            format!(
                "cannot use the directory {} for the control socket: {why}; name a socket by \
                 --control",
                directory.display()
            ),
        )
    })?;
    Ok(directory)
}

/// The names and paths of the VMs that listen in `directory`, sorted.
fn living(directory: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .filter(|entry| UnixStream::connect(entry.path()).is_ok())
        .map(|entry| {
            (
                entry.file_name().to_string_lossy().into_owned(),
                entry.path(),
            )
        })
        .collect();
    found.sort();
    found
}

impl VmArgs {
    /// The path of the VM's control socket.
    ///
    /// # Errors
    /// [`Exit::NoVm`] when none was named and this user runs no VM, or several, in the directory.
    pub(crate) fn path(&self) -> Result<PathBuf, Failure> {
        let directory = directory();
        let Some(named) = &self.vm else {
            return only(&directory);
        };
        // A path, or the name of a VM in the directory.
        let there = directory.join(named);
        let is_name = named.components().count() == 1 && !named.exists() && there.exists();
        Ok(if is_name { there } else { named.clone() })
    }
}

fn only(directory: &Path) -> Result<PathBuf, Failure> {
    let mut found = living(directory);
    if found.len() == 1 {
        return Ok(found.remove(0).1);
    }
    let names: Vec<_> = found.into_iter().map(|(name, _)| name).collect();
    Err(Failure::new(
        Exit::NoVm,
        if names.is_empty() {
            format!(
                "no VM listens in {}: start one with `pageferry run`, or name its socket by --vm",
                directory.display()
            )
        } else {
            format!(
                "several VMs run here: choose one by --vm, of {}",
                names.join(", ")
            )
        },
    ))
}

/// Lists this user's VMs.
///
/// # Errors
/// An interrupt.
pub(crate) fn list(args: &ListArgs, interrupts: &Interrupts) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for (name, path) in living(&directory()) {
        let row = match ask(&path, &Request::Status {}, LIMIT, interrupts) {
            Ok(status) => json!({ "name": name, "control": path, "status": status }),
            Err(why) if why.exit == Exit::Cancelled => return Err(why),
            // A VM that has just ended, or that does not answer, hides no other.
            Err(why) => json!({ "name": name, "control": path, "error": why.to_string() }),
        };
        rows.push(row);
    }
    if args.json {
        output::json(&json!({ "vms": rows }));
    } else {
        output::result(&table(&rows));
    }
    Ok(())
}

fn table(rows: &[Value]) -> String {
    let mut text = String::new();
    for row in rows {
        let name = row["name"].as_str().unwrap_or_default();
        let status = &row["status"];
        let about = match (status["state"].as_str(), row["error"].as_str()) {
            (_, Some(error)) => error.to_owned(),
            (state, None) => {
                let mut about = state.unwrap_or("in an unknown state").to_owned();
                if let (Some(vcpus), Some(memory), Some(engine)) = (
                    status["vcpus"].as_u64(),
                    status["memory_bytes"].as_u64(),
                    status["engine"].as_str(),
                ) {
                    let _ = write!(about, ", {vcpus} vCPUs, {}, {engine}", human(memory));
                }
                about
            }
        };
        let _ = writeln!(text, "{name:<20} {about}");
    }
    if rows.is_empty() {
        text.push_str("no VM of this user listens in its directory\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_files_in_the_directory_are_names() {
        for good in ["vm-1", "web.2", "a", "A_b"] {
            assert_eq!(name(good).as_deref(), Ok(good));
        }
        for bad in ["", ".", "..", ".hidden", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }
}
