//! Where memory may lie besides the file system: the stores of the pager.

#[cfg(feature = "peers")]
use super::share;
#[cfg(feature = "peers")]
use crate::args::TlsArgs;
#[cfg(feature = "object-store")]
use crate::exit::Exit;
use crate::exit::Failure;
use clap::Args;
#[cfg(feature = "object-store")]
use pageferry_harness::size;
use pageferry_pager::{Store, Stores};
use std::sync::Arc;

/// The stores of a pager. A build without the features `object-store` and `peers` has none.
#[derive(Debug, Args)]
pub(crate) struct StoreArgs {
    #[cfg(feature = "peers")]
    #[command(flatten)]
    tls: TlsArgs,
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
    /// Whether the user has chosen something.
    #[cfg_attr(
        not(any(feature = "object-store", feature = "peers")),
        expect(clippy::unused_self, reason = "as with the features")
    )]
    pub(crate) fn is_given(&self) -> bool {
        let given = [
            #[cfg(feature = "peers")]
            (self.tls.insecure || self.tls.options().is_some()),
            #[cfg(feature = "object-store")]
            self.cache.is_some(),
        ];
        <[bool]>::contains(&given, &true)
    }

    /// Opens the stores.
    ///
    /// # Errors
    /// When the directory of the cache cannot be made, or the certificates do not serve.
    #[cfg_attr(
        not(any(feature = "object-store", feature = "peers")),
        expect(clippy::unnecessary_wraps, reason = "as with the features")
    )]
    pub(crate) fn open(&self) -> Result<Stores, Failure> {
        let stores: Vec<Arc<dyn Store>> = vec![
            #[cfg(feature = "object-store")]
            self.objects()?,
            #[cfg(feature = "peers")]
            share::store(&self.tls)?,
        ];
        Ok(Stores::new(stores))
    }

    #[cfg(feature = "object-store")]
    fn objects(&self) -> Result<Arc<dyn Store>, Failure> {
        use pageferry_pager::stores::{Cache, ObjectStores};
        let cache = match &self.cache {
            Some(directory) => Cache::at(directory, self.cache_bytes).map_err(|why| {
                let directory = directory.display();
                Failure::new(Exit::Usage, format!("the cache at {directory}: {why}"))
            })?,
            None => Cache::in_memory(),
        };
        let stores = ObjectStores::from_env(cache);
        Ok(Arc::new(stores.map_err(|why| {
            Failure::new(Exit::Usage, why.to_string())
        })?))
    }
}
