//! The flags of `pageferry pager`.

use super::stores::StoreArgs;
#[cfg(feature = "peers")]
use crate::args::TlsArgs;
use crate::args::{OwnerArgs, mode};
use clap::{Args, Subcommand, ValueEnum};
use pageferry_harness::size;
use pageferry_pager::{Background, Format, Name, OnLoss, Restore};
#[cfg(feature = "peers")]
use pageferry_transport::address::Address;
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
    #[cfg(feature = "peers")]
    /// Share snapshots with the pagers of other hosts, read-only
    ///
    /// A pager there reads them as pageferry://HOST:PORT/NAME, with the three --tls files of its
    /// own. A packed snapshot needs its bases beside it: share the directory, or each under its
    /// file name.
    Share(ShareArgs),
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
    /// Set how the rest of a VM's memory is loaded, also while it runs
    Set(SetArgs),
    /// End a restore
    ///
    /// It ends at once if no VM has come, or if its VM has all its memory. Such a VM needs no pager
    /// any more.
    End(EndArgs),
    /// Show what all restores do, every second, until Ctrl-C
    ///
    /// On a terminal the table is refreshed. With --json, events come instead, one JSON object a
    /// line: waiting, refused, serving, replayed, loaded, lost, found, failed, ended.
    Watch(WatchArgs),
    /// Write a restore as an HTML page: when its pages came, and how long its faults took
    Report(ReportArgs),
    /// Look into recordings of working sets, and merge them
    Recording(RecordingArgs),
}

/// A snapshot and how its pages are served.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The socket to make, for Firecracker's `backend_path`
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: PathBuf,
    /// The memory file of the snapshot, pageferry://HOST:PORT/NAME if another host shares it, or an
    /// address in an object store, such as s3://bucket/memory
    #[arg(long, value_name = "FILE")]
    pub(crate) memory: PathBuf,
    /// The file is a snapshot packed by `pageferry snapshot pack`, with its bases beside it
    #[arg(long)]
    pub(crate) packed: bool,
    #[command(flatten)]
    pub(crate) owner: OwnerArgs,
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
        let mut restore = Restore::new(&self.memory, &self.socket);
        if self.packed {
            restore.format = Format::Packed;
        }
        restore.owner = self.owner.owner();
        restore.background = self.background;
        restore.on_loss = match self.on_loss {
            OnLossArg::Wait => OnLoss::Wait,
            OnLossArg::Kill => OnLoss::Kill,
            OnLossArg::Pause => OnLoss::Pause,
        };
        restore.record.clone_from(&self.record);
        restore.replay.clone_from(&self.replay);
        restore.absolute()
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
    #[command(flatten)]
    pub(crate) stores: StoreArgs,
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
    /// The name of a file in DIR, and the memory file that it shows, or its address in a store
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
    #[command(flatten)]
    pub(crate) stores: StoreArgs,
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
    #[command(flatten)]
    pub(crate) stores: StoreArgs,
    /// The directory with what outlives this process [default: the API socket's path and `.state`]
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
    /// End a pager that runs on the directory, and take up its VMs
    #[arg(long)]
    pub(crate) take_over: bool,
}

/// `pageferry pager share`.
#[cfg(feature = "peers")]
#[derive(Debug, Args)]
pub(crate) struct ShareArgs {
    /// The files, each with the name that other hosts know
    #[arg(value_name = "NAME=FILE", value_parser = shared, required_unless_present = "directory")]
    pub(crate) files: Vec<(String, PathBuf)>,
    /// Share all files in this directory and below, by their paths in it
    #[arg(long, value_name = "DIR", conflicts_with = "files")]
    pub(crate) directory: Option<PathBuf>,
    /// Where to listen: HOST:PORT, with port 0 for any
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Address,
    #[command(flatten)]
    pub(crate) tls: TlsArgs,
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
    /// Load all memory of the VM first, and wait for it. Without --background of its own, a VM is
    /// loaded while no fault waits. Ctrl-C ends the wait, and the loading goes on
    #[arg(long, conflicts_with = "kill")]
    pub(crate) when_loaded: bool,
}

/// `pageferry pager set`.
#[derive(Debug, Args)]
pub(crate) struct SetArgs {
    /// The name of the restore
    #[arg(value_name = "NAME")]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Load all memory: off, idle (while no fault waits), or at most this size a second
    #[arg(long, value_name = "off|idle|SIZE", value_parser = background)]
    pub(crate) background: Background,
}

/// `pageferry pager watch`.
#[derive(Debug, Args)]
pub(crate) struct WatchArgs {
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// Print events as they come, one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry pager report`.
#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// The name of the restore
    #[arg(value_name = "NAME")]
    pub(crate) name: Name,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    /// The file to write [default: standard output]
    #[arg(long, short, value_name = "FILE.html")]
    pub(crate) output: Option<PathBuf>,
}

/// `pageferry pager recording`.
#[derive(Debug, Args)]
pub(crate) struct RecordingArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: RecordingCommand,
}

/// The commands on recordings.
#[derive(Debug, Subcommand)]
pub(crate) enum RecordingCommand {
    /// Show how much of the memory a VM touched
    Info {
        /// A file that `--record` wrote
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Print it as one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Merge recordings of the same snapshot
    ///
    /// The pages of the first come in its order, and behind them what others touched.
    Merge {
        /// The file to write, or to replace as a whole
        #[arg(value_name = "OUTPUT")]
        output: PathBuf,
        /// Files that `--record` wrote
        #[arg(value_name = "FILE", required = true)]
        files: Vec<PathBuf>,
    },
}

#[cfg(feature = "peers")]
fn shared(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, path)) if !name.is_empty() && !path.is_empty() => {
            Ok((name.to_owned(), path.into()))
        }
        _ => Err("expected a name and a file, like web/memory=/snapshots/web.mem".to_owned()),
    }
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

pub(crate) fn background(text: &str) -> Result<Background, String> {
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

    #[cfg(feature = "peers")]
    #[test]
    fn a_shared_file_has_a_name() {
        let pair = ("web/memory".to_owned(), "/a=b".into());
        assert_eq!(shared("web/memory=/a=b"), Ok(pair));
        for bad in ["", "=", "a", "a=", "=a"] {
            assert!(shared(bad).is_err(), "{bad}");
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
