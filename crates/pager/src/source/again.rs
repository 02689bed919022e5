//! The source of a restore that was taken over: it may be away for now.
//!
//! **Guarantee.** It has the identity that it had when the restore began. The first read opens it,
//! so a source that hangs holds up no other VM. While it cannot be opened its reads fail, and the
//! VM's policy for lost sources decides.

use super::{READS, Source, SourceError, Stores};
use crate::options::Restore;
use std::sync::{Arc, OnceLock};

#[derive(Debug)]
struct Again {
    restore: Restore,
    stores: Stores,
    identity: String,
    bytes: u64,
    opened: OnceLock<Arc<dyn Source>>,
}

/// The source of a restore, which is opened when it is read. It must be the one with this identity,
/// and have at least `bytes` bytes.
pub(crate) fn again(
    restore: &Restore,
    stores: &Stores,
    identity: String,
    bytes: u64,
) -> Arc<dyn Source> {
    Arc::new(Again {
        restore: restore.clone(),
        stores: stores.clone(),
        identity,
        bytes,
        opened: OnceLock::new(),
    })
}

impl Again {
    fn opened(&self) -> Result<&Arc<dyn Source>, SourceError> {
        if let Some(source) = self.opened.get() {
            return Ok(source);
        }
        let source = self
            .stores
            .open(&self.restore.memory, self.restore.format)?;
        if !source.is(&self.identity) {
            let short = |identity: &str| identity.split(';').next().unwrap_or("").to_owned();
            return Err(SourceError::Changed {
                what: self.restore.memory.display().to_string(),
                before: short(&self.identity),
                now: format!("{}, and others", short(&source.identity())),
            });
        }
        Ok(self.opened.get_or_init(|| source))
    }
}

impl Source for Again {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn block(&self) -> u64 {
        // Fixed: blocks of faults that wait must not change when the source comes back.
        64 << 10
    }

    fn reads(&self) -> usize {
        // The replay asks once, and opening may wait: it reads at once afterwards.
        self.opened().map_or(READS, |source| source.reads())
    }

    fn is_zero(&self, offset: u64, len: u64) -> bool {
        self.opened
            .get()
            .is_some_and(|source| source.is_zero(offset, len))
    }

    fn read_now(&self, offset: u64, buffer: &mut [u8]) -> Result<bool, SourceError> {
        match self.opened.get() {
            Some(source) => source.read_now(offset, buffer),
            None => Ok(false),
        }
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        self.opened()?.read(offset, buffer)
    }

    fn read_once(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        self.opened()?.read_once(offset, buffer)
    }

    fn identity(&self) -> String {
        self.identity.clone()
    }

    fn forget(&self, offset: u64, len: u64) {
        if let Some(source) = self.opened.get() {
            source.forget(offset, len);
        }
    }
}
