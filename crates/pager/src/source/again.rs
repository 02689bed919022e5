//! The source of a restore that was taken over: it may be away for now.
//!
//! **Guarantee.** It has the identity that it had when the restore began. The first read opens it,
//! so a source that hangs holds up no other VM. While it cannot be opened its reads fail, and the
//! VM's policy for lost sources decides.

use super::{FileSource, READS, Source, SourceError, Stores};
use crate::directory::Record;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

#[derive(Debug)]
struct Again {
    record: Record,
    stores: Stores,
    bytes: u64,
    /// The memory file, if a keeper had it.
    kept: Option<OwnedFd>,
    opened: OnceLock<Arc<dyn Source>>,
}

/// The source of a restore, which is opened when it is read. It must be the one of the record, and
/// have at least `bytes` bytes. A copy will do, as far as samples of its bytes tell.
pub(crate) fn again(
    record: &Record,
    stores: &Stores,
    bytes: u64,
    kept: Option<OwnedFd>,
) -> Arc<dyn Source> {
    Arc::new(Again {
        record: record.clone(),
        stores: stores.clone(),
        bytes,
        kept,
        opened: OnceLock::new(),
    })
}

impl Again {
    fn opened(&self) -> Result<&Arc<dyn Source>, SourceError> {
        if let Some(source) = self.opened.get() {
            return Ok(source);
        }
        let (path, format) = (&self.record.restore.memory, self.record.restore.format);
        let source: Arc<dyn Source> = match &self.kept {
            Some(kept) => {
                let failed = |why| SourceError::Failed {
                    what: path.display().to_string(),
                    why,
                };
                let file = kept.try_clone().map_err(failed)?;
                Arc::new(FileSource::from_file(file.into(), path)?)
            }
            None => self.stores.open(path, format)?,
        };
        if !source.is(&self.record.source) {
            let short = |identity: &str| identity.split(';').next().unwrap_or("").to_owned();
            return Err(SourceError::Changed {
                what: path.display().to_string(),
                before: short(&self.record.source),
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
        self.record.source.clone()
    }

    fn forget(&self, offset: u64, len: u64) {
        if let Some(source) = self.opened.get() {
            source.forget(offset, len);
        }
    }
}
