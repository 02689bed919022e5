//! The kernel's source tree, patched.
//!
//! **Guarantee.** After [`prepare`], every file is the package's with the series applied. A file
//! that would not change is not written, so make compiles nothing for it.
//!
//! **Mechanism.** The files that a series names are copied as they came, before the first change.
//! A series applies to those copies in a folder of its own. The results then go into the tree. The
//! files of an earlier series that this one does not name go back to their copies.

use super::Error;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Patches and a configuration.
pub(super) struct Series {
    /// In the order of their names.
    patches: Vec<(PathBuf, String)>,
    config: String,
}

impl Series {
    /// The patches of `folder`, with its file `config` as the configuration.
    pub(super) fn read(folder: &Path, config: &str) -> Result<Self, Error> {
        let text = |file: &Path| {
            let text = std::fs::read_to_string(file);
            text.map_err(Error::io(format!("read {}", file.display())))
        };
        let config = text(&folder.join(config))?;
        let files = std::fs::read_dir(folder).map_err(Error::io("read the series"))?;
        let files = files.filter_map(|entry| Some(entry.ok()?.path()));
        let mut files: Vec<_> = files
            .filter(|file| file.extension().is_some_and(|end| end == "patch"))
            .collect();
        files.sort();
        let patches: Result<Vec<_>, _> = files
            .into_iter()
            .map(|file| text(&file).map(|text| (file, text)))
            .collect();
        let series = Self {
            patches: patches?,
            config,
        };
        for (file, text) in &series.patches {
            let mut names = names(text).peekable();
            if names.peek().is_none() || !names.all(is_inside) {
                return Err(Error::Failed(format!(
                    "{} is no patch for a kernel: 'git format-patch' in its source writes one",
                    file.display()
                )));
            }
        }
        Ok(series)
    }

    /// All that determines a kernel, if `source` stands for the source.
    pub(super) fn with(&self, source: &str) -> Vec<u8> {
        let mut all = format!("{source}\n{}", self.config);
        for (_, text) in &self.patches {
            let _ = write!(all, "{} bytes\n{text}", text.len());
        }
        all.into_bytes()
    }

    /// The lines of the configuration that set an option.
    pub(super) fn options(&self) -> impl Iterator<Item = &str> {
        let lines = self.config.lines();
        lines.filter(|line| line.starts_with("CONFIG_"))
    }
}

/// The files that a patch changes.
fn names(patch: &str) -> impl Iterator<Item = &Path> {
    let lines = patch.lines();
    lines.filter_map(|line| line.strip_prefix("+++ b/").map(Path::new))
}

fn is_inside(path: &Path) -> bool {
    path.components()
        .all(|part| matches!(part, Component::Normal(_)))
}

/// Tells one version of the source's archive from another.
pub(super) fn identity(archive: &Path) -> Result<String, Error> {
    let data = archive.metadata().map_err(Error::io("find the source"))?;
    let (bytes, seconds, nanos) = (data.size(), data.mtime(), data.mtime_nsec());
    let archive = archive.display();
    Ok(format!("{archive}, {bytes} bytes of {seconds}.{nanos:09}"))
}

/// Makes `folder/tree` the source of `archive` with the series, and `folder/config` its
/// configuration.
pub(super) fn prepare(folder: &Path, archive: &Path, series: &Series) -> Result<(), Error> {
    let (tree, stamp) = (folder.join("tree"), folder.join("source"));
    let identity = identity(archive)?;
    let unpacked = std::fs::read_to_string(&stamp);
    if !unpacked.is_ok_and(|source| source == identity) {
        eprintln!("lab: unpacking the source of the kernel");
        for old in ["tree", "pristine", "build"] {
            let _ = std::fs::remove_dir_all(folder.join(old));
        }
        std::fs::create_dir_all(&tree).map_err(Error::io("make a folder for the source"))?;
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--xz", "--strip-components=1", "--directory"])
            .arg(&tree)
            .arg("--file")
            .arg(archive);
        if let Err(why) = output(&mut tar)? {
            return Err(Error::Failed(format!(
                "cannot unpack {}: {why}; if the disk has room, the file is damaged: remove the \
                 folder source beside the folder of the kernel",
                archive.display()
            )));
        }
        std::fs::write(&stamp, identity).map_err(Error::io("store the source's version"))?;
    }
    apply(folder, series)?;
    write_if_new(&folder.join("config"), series.config.as_bytes())
}

fn apply(folder: &Path, series: &Series) -> Result<(), Error> {
    let folders = ["tree", "pristine", "work"].map(|name| folder.join(name));
    let [tree, pristine, work] = &folders;
    let _ = std::fs::remove_dir_all(work);
    let named: BTreeSet<&Path> = (series.patches.iter())
        .flat_map(|(_, text)| names(text))
        .collect();
    for name in &named {
        let copy = pristine.join(name);
        if !copy.is_file() {
            let bytes = read(&tree.join(name))?;
            write_if_new(&copy, &bytes)?;
        }
        write_if_new(&work.join(name), &read(&copy)?)?;
    }
    for (file, _) in &series.patches {
        let mut patch = Command::new("patch");
        patch.args(["--strip=1", "--fuzz=0", "--batch", "--forward"]);
        patch.arg("--directory").arg(work).arg("--input").arg(file);
        if let Err(why) = output(&mut patch)? {
            return Err(Error::Failed(format!(
                "{} does not apply to this source: {why}",
                file.display()
            )));
        }
    }
    for name in files(pristine, Path::new(""))? {
        let from = if named.contains(name.as_path()) {
            work
        } else {
            pristine
        };
        write_if_new(&tree.join(&name), &read(&from.join(&name))?)?;
    }
    std::fs::remove_dir_all(work).or_else(|why| match why.kind() {
        // A series of no patches.
        std::io::ErrorKind::NotFound => Ok(()),
        _ => Err(Error::io("remove the patched copies")(why)),
    })
}

/// The files in `root/folder`, relative to `root`.
fn files(root: &Path, folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut found = Vec::new();
    let Ok(entries) = std::fs::read_dir(root.join(folder)) else {
        return Ok(found);
    };
    for entry in entries {
        let entry = entry.map_err(Error::io("read the cache"))?;
        let name = folder.join(entry.file_name());
        if entry.path().is_dir() {
            found.extend(files(root, &name)?);
        } else {
            found.push(name);
        }
    }
    Ok(found)
}

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(file).map_err(Error::io(format!("read {}", file.display())))
}

/// Makes `bytes` the contents of `file`, whole or not at all. Its time of change stays if it has
/// them already.
fn write_if_new(file: &Path, bytes: &[u8]) -> Result<(), Error> {
    if std::fs::read(file).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    let part = file.with_extension("part");
    let above = file.parent().unwrap_or(file);
    std::fs::create_dir_all(above)
        .and_then(|()| std::fs::write(&part, bytes))
        .and_then(|()| std::fs::rename(&part, file))
        .map_err(Error::io(format!("write {}", file.display())))
}

/// Runs a command. Its first line that tells of a failure is the inner error.
fn output(command: &mut Command) -> Result<Result<(), String>, Error> {
    let name = command.get_program().display().to_string();
    let output = command.output().map_err(Error::io(format!("run {name}")))?;
    if output.status.success() {
        return Ok(Ok(()));
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let error = format!("{name}: ");
    let failed = |line: &&str| line.contains("FAILED") || line.starts_with(&error);
    let line = text.lines().find(failed).or_else(|| text.lines().next());
    Ok(Err(line.unwrap_or("no output").to_owned()))
}
