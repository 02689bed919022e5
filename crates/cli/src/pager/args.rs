//! The flags of `pageferry pager`.

use crate::size;
use clap::{Args, Subcommand, ValueEnum};
use pageferry_pager::{Background, Format, Name, OnLoss, Owner, Restore};
use std::num::NonZeroU64;
use std::path::PathBuf;

/// `pageferry pager`.
#[derive(Debug, Args)]
pub(crate) struct PagerArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: PagerCommand,
}

/// The commands of the page server.
#[derive(Debug, Subcommand)]
pub(crate) enum PagerCommand {
    /// Serve the memory of one VM of Firecracker that starts from a snapshot
    ///
    /// Makes the socket and waits for Firecracker's `PUT /snapshot/load` with the backend `Uffd`
    /// and this socket. The command ends when the VM ends. If it is ended before, the VM waits: the
    /// same command takes it up again.
    Run(RunArgs),
    /// Serve the memory of many VMs, as requests over a socket say
    ///
    /// Requests are HTTP over the API socket: see docs/pager-api.json. `pageferry pager restore`,
    /// `status` and `end` send them. A pager that ends leaves its VMs waiting. The next one on the
    /// same state directory takes them up, and with --take-over it ends a pager that runs.
    Serve(ServeArgs),
    /// Show snapshots as files that are filled when they are read
    ///
    /// VMs map such a file privately, as Firecracker's backend `File` and Cloud Hypervisor's
    /// `copyonwrite` do. All VMs of a snapshot share its clean pages in the page cache, and none
    /// needs a userfaultfd. A read that fails is repeated until it succeeds, and the VM waits. The
    /// command ends by a signal, once no VM uses the files. Where a service manager keeps its
    /// descriptor, the same command goes on after a restart.
    Mount(MountArgs),
    /// Let a VM start from a snapshot: ask the pager for a socket
    Restore(RestoreArgs),
    /// Show the restores of the pager
    Status(StatusArgs),
    /// End a restore
    ///
    /// It ends at once if no VM has come, or if its VM has all its memory, and then needs no pager.
    End(EndArgs),
}

/// A snapshot and how its pages are served.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The socket to make, for Firecracker's `backend_path`
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// The memory file of the snapshot
    #[arg(long, value_name = "FILE")]
    pub(crate) memory: PathBuf,
    /// The file is a snapshot packed by `pageferry snapshot pack`, with its bases beside it
    #[arg(long)]
    pub(crate) packed: bool,
    /// The user id that owns the socket, such as the jailer's
    #[arg(long, value_name = "UID")]
    pub(crate) owner: Option<u32>,
    /// The group id of the socket
    #[arg(long, value_name = "GID")]
    pub(crate) group: Option<u32>,
    /// The mode of the socket, in octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = mode)]
    pub(crate) mode: u32,
    /// Load all memory too: off, idle (while no fault waits), or at most this size a second
    #[arg(long, value_name = "off|idle|SIZE", default_value = "off", value_parser = background)]
    pub(crate) background: Background,
    /// The VM's fate while its memory cannot be read
    #[arg(long, value_enum, default_value_t = OnLossArg::Wait)]
    pub(crate) on_loss: OnLossArg,
    /// Write the order of first touches to this file when the VM or the pager ends
    #[arg(long, value_name = "FILE")]
    pub(crate) record: Option<PathBuf>,
    /// Load the pages of this recording ahead of the faults
    #[arg(long, value_name = "FILE")]
    pub(crate) replay: Option<PathBuf>,
}

impl SnapshotArgs {
    /// The request. Relative paths are those of this process, and the pager may have another
    /// directory.
    pub(crate) fn restore(&self) -> std::io::Result<Restore> {
        let absolute = |path: &Option<PathBuf>| path.as_ref().map(std::path::absolute).transpose();
        let mut restore = Restore::new(
            std::path::absolute(&self.memory)?,
            std::path::absolute(&self.socket)?,
        );
        if self.packed {
            restore.format = Format::Packed;
        }
        restore.owner = Owner {
            user: self.owner,
            group: self.group,
            mode: self.mode,
        };
        restore.background = self.background;
        restore.on_loss = match self.on_loss {
            OnLossArg::Wait => OnLoss::Wait,
            OnLossArg::Kill => OnLoss::Kill,
            OnLossArg::Pause => OnLoss::Pause,
        };
        restore.record = absolute(&self.record)?;
        restore.replay = absolute(&self.replay)?;
        Ok(restore)
    }
}

/// The fate of a VM that waits for a page that cannot be read.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum OnLossArg {
    /// It waits for the page, and the pager reads again
    Wait,
    /// Its VMM gets SIGKILL
    Kill,
    /// Its VMM gets SIGSTOP
    #[value(alias = "pause-by-signal")]
    Pause,
}

/// `pageferry pager run`.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) snapshot: SnapshotArgs,
    /// The directory with what outlives this process [default: the socket's path and `.pager`]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// End a pager that runs on the directory, and take up its VM
    #[arg(long)]
    pub(crate) take_over: bool,
    /// Print the figures as one JSON object when the VM has ended
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry pager mount`.
#[derive(Debug, Args)]
pub(crate) struct MountArgs {
    /// The directory to mount on, which is made if there is none
    #[arg(value_name = "DIR")]
    pub(crate) directory: PathBuf,
    /// The name of a file in DIR, and the memory file that it shows
    #[arg(long, value_name = "NAME=FILE", value_parser = named, required_unless_present = "packed")]
    pub(crate) snapshot: Vec<(Name, PathBuf)>,
    /// The same for a snapshot packed by `pageferry snapshot pack`, with its bases beside it
    #[arg(long, value_name = "NAME=FILE", value_parser = named)]
    pub(crate) packed: Vec<(Name, PathBuf)>,
    /// Load the pages of this recording when a VM opens the file of that name
    #[arg(long, value_name = "NAME=FILE", value_parser = named)]
    pub(crate) replay: Vec<(Name, PathBuf)>,
    /// The user id that owns the files, such as the jailer's
    #[arg(long, value_name = "UID")]
    pub(crate) owner: Option<u32>,
    /// The group id of the files
    #[arg(long, value_name = "GID")]
    pub(crate) group: Option<u32>,
    /// The mode of the files, in octal. Nobody can write them
    #[arg(long, value_name = "MODE", default_value = "400", value_parser = mode)]
    pub(crate) mode: u32,
    /// Print the figures as one JSON object at the end
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where the API socket of a pager is.
#[derive(Debug, Args)]
pub(crate) struct ApiArgs {
    /// The API socket [default: `pager.sock` in the user's directory for sockets]
    #[arg(long, value_name = "SOCKET")]
    pub(crate) api: Option<PathBuf>,
}

/// `pageferry pager serve`.
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// The directory with what outlives this process [default: the API socket's path and `.state`]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// End a pager that runs on the directory, and take up its VMs
    #[arg(long)]
    pub(crate) take_over: bool,
}

/// `pageferry pager restore`.
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The name of the restore
    #[arg(value_name = "NAME")]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) snapshot: SnapshotArgs,
}

/// `pageferry pager status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// The name of a restore [default: all]
    #[arg(value_name = "NAME")]
    pub(crate) name: Option<Name>,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print it as JSON: an object for a name, else an array
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry pager end`.
#[derive(Debug, Args)]
pub(crate) struct EndArgs {
    /// The name of the restore
    #[arg(value_name = "NAME")]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Kill the VM if it still needs the pager
    #[arg(long)]
    pub(crate) kill: bool,
}

fn mode(text: &str) -> Result<u32, String> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| format!("'{text}' is no mode: expected octal digits, like 660"))
}

fn named(text: &str) -> Result<(Name, PathBuf), String> {
    match text.split_once('=') {
        Some((name, file)) if !file.is_empty() => {
            let name = name.parse::<Name>().map_err(|why| why.to_string())?;
            Ok((name, file.into()))
        }
        _ => Err(format!(
            "'{text}': expected a name and a file, like web=/snapshots/web/memory"
        )),
    }
}

fn background(text: &str) -> Result<Background, String> {
    match text {
        "off" => Ok(Background::Off),
        "idle" => Ok(Background::Idle),
        _ => size::parse(text)
            .ok()
            .and_then(NonZeroU64::new)
            .map(Background::Rate)
            .ok_or_else(|| format!("'{text}': expected off, idle, or a size a second, like 100M")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_octal() {
        assert_eq!(mode("660"), Ok(0o660));
        for bad in ["", "8", "1000", "rw", "-1"] {
            assert!(mode(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_name_stands_before_its_file() {
        let found = named("web=/a=b").unwrap();
        assert_eq!((found.0.as_str(), found.1), ("web", "/a=b".into()));
        for bad in ["", "web", "web=", "=/a", "a/b=/a"] {
            assert!(named(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_background_is_a_word_or_a_rate() {
        assert_eq!(background("idle"), Ok(Background::Idle));
        let rate = NonZeroU64::new(100 << 20).unwrap();
        assert_eq!(background("100M"), Ok(Background::Rate(rate)));
        for bad in ["", "on", "0", "-1M"] {
            assert!(background(bad).is_err(), "{bad}");
        }
    }
}
