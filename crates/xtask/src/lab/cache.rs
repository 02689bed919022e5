//! Where fetched packages and built kernels are kept.
//!
//! **Guarantee.** All checkouts of a user share what was fetched and built. A build is used only
//! for the source and the configuration that it was made of.
//!
//! **Mechanism.** The cache is `pageferry` in `XDG_CACHE_HOME`, or in `.cache` of the home folder.
//! The name of a build's folder there has a hash of all its inputs. With `--no-cache` all is in the
//! target directory, and one folder takes every change, so that make compiles only what depends on
//! it.

use super::{Error, target_dir};
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};

/// The folder of what was fetched and built.
pub(crate) struct Cache {
    folder: PathBuf,
    is_shared: bool,
}

impl Cache {
    /// The user's cache, or one in the target directory if `no_cache` says so or there is no home.
    pub(crate) fn new(no_cache: bool) -> Result<Self, Error> {
        let shared = if no_cache { None } else { of_user() };
        let is_shared = shared.is_some();
        let folder = shared.unwrap_or_else(|| target_dir().join("lab"));
        // make needs paths that do not depend on where it runs.
        std::fs::create_dir_all(&folder)
            .and_then(|()| folder.canonicalize())
            .map_err(Error::io(format!("make {}", folder.display())))
            .map(|folder| Self { folder, is_shared })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of a build of `inputs`, which is made if need be.
    pub(crate) fn build(&self, name: &str, inputs: &[u8]) -> Result<PathBuf, Error> {
        let mut hash = DefaultHasher::new();
        hash.write(inputs);
        let folder = if self.is_shared {
            self.folder.join(format!("{name}-{:016x}", hash.finish()))
        } else {
            self.folder.join(name)
        };
        std::fs::create_dir_all(&folder)
            .map_err(Error::io(format!("make {}", folder.display())))?;
        Ok(folder)
    }
}

/// The cache of the user (XDG Base Directory Specification), if the user has a home.
fn of_user() -> Option<PathBuf> {
    let variable = |name| {
        let folder = PathBuf::from(std::env::var_os(name)?);
        folder.is_absolute().then_some(folder)
    };
    let caches = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    Some(caches?.join("pageferry"))
}
