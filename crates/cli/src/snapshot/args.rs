//! The flags of `pageferry snapshot`.

use clap::{Args, Subcommand};
use pageferry_harness::size;
use pageferry_snapshot::Compression;
use std::path::{Path, PathBuf};

/// `pageferry snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// The command.
    #[command(subcommand)]
    pub(crate) command: SnapshotCommand,
}

/// The commands on snapshots.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Pack the memory file of a snapshot into one file of checksummed chunks
    ///
    /// The memory file is one of Firecracker, full or diff, or `memory-ranges` of Cloud Hypervisor.
    /// It must not change meanwhile. With --base it is a diff: holes of the file mean "as in the
    /// base". Use `snapshot diff` if its holes mean zeros.
    ///
    /// Pack a diff where the VMM wrote it: many copies change its holes, and so its meaning. cat,
    /// scp, object stores and cp --sparse=never fill them with zeros, which would replace pages of
    /// the base. Such files are refused as far as they can be told. cp --sparse=always, rsync -S,
    /// tar -S and fallocate -d dig holes, so that pages of zeros become those of the base: nothing
    /// in the file tells that.
    #[command(after_help = crate::args::EXIT_CODES)]
    Pack(PackArgs),
    /// Give the files back that were packed
    ///
    /// The memory file has the same bytes. Pages of zeros become holes. A diff gives the whole
    /// memory, or with --diff a sparse file of its own pages.
    #[command(after_help = crate::args::EXIT_CODES)]
    Unpack(UnpackArgs),
    /// Read and check every byte that a packed snapshot needs, also in its bases
    #[command(after_help = crate::args::EXIT_CODES)]
    Verify(ReadArgs),
    /// Say what a packed snapshot is, what it has, and what it needs
    #[command(after_help = crate::args::EXIT_CODES)]
    Info(ReadArgs),
    /// Pack the difference of a whole memory to a packed snapshot
    ///
    /// Only the pages that differ belong to the diff. Holes of the memory file mean zeros.
    #[command(after_help = crate::args::EXIT_CODES)]
    Diff(DiffArgs),
}

/// `pageferry snapshot pack`.
#[derive(Debug, Args)]
pub(crate) struct PackArgs {
    /// The memory file
    pub(crate) memory: PathBuf,
    /// The packed snapshot to write. Nothing may be there yet
    pub(crate) output: PathBuf,
    /// Pack a diff on this packed snapshot. Its name and id are recorded
    #[arg(long, value_name = "FILE")]
    pub(crate) base: Option<PathBuf>,
    /// The zeros of the diff are the guest's. Without this flag, a diff that has no hole, or more
    /// than 4 MiB of zeros in a row over pages of the base, is refused
    #[arg(long, requires = "base")]
    pub(crate) zeros_are_data: bool,
    #[command(flatten)]
    pub(crate) how: HowArgs,
}

/// `pageferry snapshot diff`.
#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// The packed snapshot that the diff is made on
    pub(crate) base: PathBuf,
    /// The memory: a memory file, or with --packed a packed snapshot
    pub(crate) memory: PathBuf,
    /// The packed diff to write. Nothing may be there yet
    pub(crate) output: PathBuf,
    /// The memory is a packed snapshot. It is never guessed: a guest chooses the bytes of its
    /// memory
    #[arg(long)]
    pub(crate) packed: bool,
    #[command(flatten)]
    pub(crate) how: HowArgs,
}

/// How to pack.
#[derive(Debug, Args)]
pub(crate) struct HowArgs {
    /// Compression of chunks: none, lz4, zstd or zstd:LEVEL (1 to 19). zstd is smaller, and slower
    /// to read
    #[arg(long, default_value = "lz4", value_name = "none|lz4|zstd[:LEVEL]", value_parser = compression)]
    pub(crate) compression: Compression,
    /// Size of chunks: a power of two from 4K to 1M [default: as the base, or 64K]
    #[arg(long, value_name = "SIZE", value_parser = chunk)]
    pub(crate) chunk: Option<u32>,
    /// Pack this file too, as opaque bytes: a VMM's state of at most 16 MiB. NAME is the name of
    /// the file unless told otherwise. May be given several times
    #[arg(long = "state", value_name = "[NAME=]FILE", value_parser = state)]
    pub(crate) states: Vec<(String, PathBuf)>,
    /// Record the VMM that made the snapshot, such as firecracker
    #[arg(long, value_name = "NAME")]
    pub(crate) vmm: Option<String>,
    /// Record its version
    #[arg(long, value_name = "TEXT")]
    pub(crate) vmm_version: Option<String>,
    /// Record the CPU that the snapshot needs
    #[arg(long, value_name = "TEXT")]
    pub(crate) cpu: Option<String>,
    #[command(flatten)]
    pub(crate) bases: BaseArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where bases are.
#[derive(Debug, Args)]
pub(crate) struct BaseArgs {
    /// Look for bases in this directory too, after that of the snapshot. May be given several times
    #[arg(long = "base-dir", value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
}

impl BaseArgs {
    /// The directories.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        self.directories.iter().map(PathBuf::as_path).collect()
    }
}

/// `pageferry snapshot verify` and `info`.
#[derive(Debug, Args)]
pub(crate) struct ReadArgs {
    /// The packed snapshot
    pub(crate) snapshot: PathBuf,
    #[command(flatten)]
    pub(crate) bases: BaseArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `pageferry snapshot unpack`.
#[derive(Debug, Args)]
pub(crate) struct UnpackArgs {
    /// The packed snapshot
    pub(crate) snapshot: PathBuf,
    /// The memory file to write, with mode 0600. Nothing may be there yet
    #[arg(required_unless_present = "states")]
    pub(crate) memory: Option<PathBuf>,
    /// Write the pages of the diff only, as data of a sparse file
    #[arg(long, requires = "memory")]
    pub(crate) diff: bool,
    /// Write the state files into this directory, by their names, with mode 0600. None of them may
    /// be there yet
    #[arg(long, value_name = "DIR")]
    pub(crate) states: Option<PathBuf>,
    /// Refuse a snapshot of another VMM
    #[arg(long, value_name = "NAME")]
    pub(crate) expect_vmm: Option<String>,
    /// Refuse a snapshot of another version of the VMM
    #[arg(long, value_name = "TEXT")]
    pub(crate) expect_version: Option<String>,
    /// Refuse a snapshot that needs another CPU
    #[arg(long, value_name = "TEXT")]
    pub(crate) expect_cpu: Option<String>,
    #[command(flatten)]
    pub(crate) bases: BaseArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

fn compression(text: &str) -> Result<Compression, String> {
    let (name, level) = match text.split_once(':') {
        Some((name, level)) => (
            name,
            level.parse().ok().filter(|level| (1..=19).contains(level)),
        ),
        None => (text, Some(3)),
    };
    match (name, level) {
        ("none", _) if text == name => Ok(Compression::None),
        ("lz4", _) if text == name => Ok(Compression::Lz4),
        ("zstd", Some(level)) => Ok(Compression::Zstd(level)),
        _ => Err(format!(
            "unknown compression '{text}': expected none, lz4, zstd, or zstd:1 to zstd:19"
        )),
    }
}

fn chunk(text: &str) -> Result<u32, String> {
    let bytes = size::parse(text)
        .ok()
        .and_then(|bytes| u32::try_from(bytes).ok());
    bytes
        .filter(|bytes| bytes.is_power_of_two() && (4 << 10..=1 << 20).contains(bytes))
        .ok_or_else(|| {
            format!("'{text}' is no size of chunks: expected 4K, 8K, 16K, and so on, up to 1M")
        })
}

/// Parses `NAME=FILE`, or `FILE`. A name has no slash.
fn state(text: &str) -> Result<(String, PathBuf), String> {
    if let Some((name, file)) = text.split_once('=').filter(|(name, _)| !name.contains('/')) {
        return Ok((name.to_owned(), file.into()));
    }
    let file = PathBuf::from(text);
    let name = file.file_name().and_then(|name| name.to_str());
    let name =
        name.ok_or_else(|| format!("'{text}' names no file: expected FILE, or NAME=FILE"))?;
    Ok((name.to_owned(), file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_for_compression_are_read() {
        assert_eq!(compression("none"), Ok(Compression::None));
        assert_eq!(compression("lz4"), Ok(Compression::Lz4));
        assert_eq!(compression("zstd"), Ok(Compression::Zstd(3)));
        assert_eq!(compression("zstd:19"), Ok(Compression::Zstd(19)));
        for text in [
            "", "zip", "zstd:0", "zstd:20", "zstd:", "lz4:1", "none:", "zstd:x",
        ] {
            assert!(
                compression(text).unwrap_err().contains("expected none"),
                "{text}"
            );
        }
    }

    #[test]
    fn sizes_of_chunks_are_powers_of_two() {
        assert_eq!(chunk("4K"), Ok(4096));
        assert_eq!(chunk("1M"), Ok(1 << 20));
        for text in ["0", "2K", "12K", "2M", "4G", "x"] {
            assert!(chunk(text).unwrap_err().contains("expected 4K"), "{text}");
        }
    }

    #[test]
    fn states_have_the_name_of_their_file_or_one_of_their_own() {
        let of = |text| state(text).map(|(name, file)| (name, file.display().to_string()));
        let pair = |name: &str, file: &str| Ok((name.to_owned(), file.to_owned()));
        assert_eq!(of("dir/vmstate"), pair("vmstate", "dir/vmstate"));
        assert_eq!(of("cpu=dir/x"), pair("cpu", "dir/x"));
        assert_eq!(of("./a=b"), pair("a=b", "./a=b"));
        assert!(of("..").is_err());
    }
}
