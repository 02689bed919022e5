//! Where memory may lie besides the file system: `--cache`, and the stores of the crate `remote`.

use crate::exit::Failure;
#[cfg(feature = "object-store")]
use crate::{exit::Exit, size};
use clap::Args;
use pageferry_pager::Stores;

/// The stores of a pager. A build without the feature `object-store` has none.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    /// Keep blocks of object stores in this directory, also for the next pager
    ///
    /// One pager at a time uses a directory. A cache that fails costs speed only.
    #[cfg(feature = "object-store")]
    #[arg(long, value_name = "DIR")]
    cache: Option<std::path::PathBuf>,
    /// The most that the cache takes on disk
    #[cfg(feature = "object-store")]
    #[arg(long, value_name = "SIZE", default_value = "10G", requires = "cache",
          value_parser = size::parse)]
    cache_bytes: u64,
}

impl StoreArgs {
    /// Opens the cache.
    ///
    /// # Errors
    /// When its directory cannot be made.
    #[cfg(feature = "object-store")]
    pub(crate) fn open(&self) -> Result<Stores, Failure> {
        use pageferry_remote::{Cache, ObjectStores};
        let cache = match &self.cache {
            Some(directory) => Cache::at(directory, self.cache_bytes).map_err(|why| {
                let directory = directory.display();
                Failure::new(Exit::Usage, format!("the cache at {directory}: {why}"))
            })?,
            None => Cache::in_memory(),
        };
        Ok(Stores::new([
            std::sync::Arc::new(ObjectStores::from_env(cache)) as _,
        ]))
    }

    /// There are none.
    ///
    /// # Errors
    /// Never.
    #[cfg(not(feature = "object-store"))]
    #[expect(clippy::unnecessary_wraps, reason = "as with the feature")]
    pub(crate) fn open(&self) -> Result<Stores, Failure> {
        Ok(Stores::default())
    }
}
