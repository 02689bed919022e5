//! The files that `--file` names.
//!
//! **Guarantee.** A mistake in a name is found before anything is fetched or built. The archive
//! gets regular files only, under absolute paths.
//!
//! **Mechanism.** A folder stands for the files in it, at any depth. Symbolic links to folders are
//! not followed, so there are no loops.
//!
//! **Neighbours.** [`super::initrd`] packs the files.

use super::Error;
use std::path::{Component, Path, PathBuf};

/// The largest file: the format of the archive has 32 bits for its size.
const LARGEST: u64 = u32::MAX as u64;

/// A file of this machine that the emulated one gets.
#[derive(Debug, PartialEq)]
pub(crate) struct Extra {
    pub(crate) source: PathBuf,
    /// Its absolute path in the emulated machine.
    pub(crate) path: PathBuf,
}

/// The files that these arguments name.
pub(crate) fn files(arguments: &[String]) -> Result<Vec<Extra>, Error> {
    let mut found = Vec::new();
    for argument in arguments {
        let (source, path) = split(argument)?;
        add(source, path, &mut found)?;
    }
    Ok(found)
}

/// The two parts of `SRC[:DEST]`.
fn split(argument: &str) -> Result<(PathBuf, PathBuf), Error> {
    if let Ok(source) = Path::new(argument).canonicalize() {
        return Ok((source.clone(), source));
    }
    let (source, path) = argument.rsplit_once(':').unwrap_or((argument, "/"));
    let (source, path) = (Path::new(source), PathBuf::from(path));
    if !source.exists() {
        let source = source.display();
        return Err(Error::Failed(format!(
            "there is no file or folder {source}: expected SRC or SRC:DEST"
        )));
    }
    let mut parts = path.components();
    let is_absolute = parts.next() == Some(Component::RootDir);
    let mut parts = parts.peekable();
    let is_named = parts.peek().is_some();
    if !(is_absolute && is_named && parts.all(|part| matches!(part, Component::Normal(_)))) {
        return Err(Error::Failed(format!(
            "'{argument}' puts a file at '{}': expected an absolute path without '..'",
            path.display()
        )));
    }
    Ok((source.to_owned(), path))
}

/// Adds `source`, or the files in it.
fn add(source: PathBuf, path: PathBuf, found: &mut Vec<Extra>) -> Result<(), Error> {
    let failed = |source: &Path| Error::io(format!("read {}", source.display()));
    if source.is_dir() {
        for entry in source.read_dir().map_err(failed(&source))? {
            let entry = entry.map_err(failed(&source))?;
            let kind = entry.file_type().map_err(failed(&source))?;
            let from = entry.path();
            if kind.is_dir() || from.is_file() {
                add(from, path.join(entry.file_name()), found)?;
            }
        }
        return Ok(());
    }
    let data = source.metadata().map_err(failed(&source))?;
    if !data.is_file() || data.len() > LARGEST || path.to_str().is_none() {
        return Err(Error::Failed(format!(
            "{} cannot be put into the machine: expected a regular file of less than 4 GiB with a \
             path in UTF-8",
            source.display()
        )));
    }
    found.push(Extra { source, path });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(argument: &str) -> String {
        files(&[argument.to_owned()]).unwrap_err().to_string()
    }

    #[test]
    fn folders_stand_for_their_files_and_a_path_may_be_given() {
        let folder = std::env::temp_dir().join(format!("pf-xtask-extra-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("a/b")).unwrap();
        let folder = folder.canonicalize().unwrap();
        for name in ["a/one", "a/b/two"] {
            std::fs::write(folder.join(name), name).unwrap();
        }
        std::os::unix::fs::symlink(&folder, folder.join("a/loop")).unwrap();
        let found = |argument: String| {
            let mut found = files(&[argument]).unwrap();
            found.sort_by(|a, b| a.path.cmp(&b.path));
            let pair = |file: Extra| (file.source, file.path);
            found.into_iter().map(pair).collect::<Vec<_>>()
        };
        let whole = found(format!("{}:/guest", folder.join("a").display()));
        let own = found(folder.join("a/one").display().to_string());
        std::fs::remove_dir_all(&folder).unwrap();
        let two = (folder.join("a/b/two"), PathBuf::from("/guest/b/two"));
        let one = (folder.join("a/one"), PathBuf::from("/guest/one"));
        assert_eq!(whole, [two, one]);
        assert_eq!(own, [(folder.join("a/one"), folder.join("a/one"))]);
    }

    #[test]
    fn names_of_nothing_and_paths_that_lead_elsewhere_are_refused() {
        let says = refused("/nonexistent/bzImage:/bzImage");
        assert!(
            says.contains("no file or folder /nonexistent/bzImage"),
            "{says}"
        );
        for path in ["here", "", "/", "/a/../b"] {
            let says = refused(&format!("/etc/os-release:{path}"));
            assert!(
                says.contains(&format!("at '{path}': expected an absolute")),
                "{says}"
            );
        }
        let says = refused("/dev/null:/null");
        assert!(says.contains("expected a regular file"), "{says}");
    }
}
