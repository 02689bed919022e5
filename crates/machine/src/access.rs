#![expect(
    unsafe_code,
    reason = "copies bytes of pages that it has found present"
)]
//! The VMM's own accesses to guest memory: devices, loaders, monitors.
//!
//! **Guarantee.** An access touches a page only if the page's bytes are there. Otherwise it touches
//! nothing and says why, or brings the page first. Each write is in the machine's dirty log.
//!
//! **Mechanism.**
//! 1. An access enters the `gate`, which is closed while a machine waits for its memory.
//! 2. It tests the bits of all its pages in the missing bitmap. A clear bit stays clear, so the
//!    pages stay present from the test to the copy.
//! 3. It copies through the alias mapping, which never faults into userfaultfd. Private memory has
//!    no alias. There the access has its pages mapped first, so that no hole makes it sleep.
//! 4. A write follows the rules of the engine, if it has any. On the soft engine it ends the LR
//!    reservations of its bytes, and is refused on write-tracked pages.
//! 5. A write marks its pages in the log of written pages, after the bytes (`written`).
//!
//! [`GuestRam::read`] and [`GuestRam::write`] ask a [`Fetch`] for missing pages between two tries,
//! outside the gate. A migration attaches it.
//!
//! **Neighbours.** `unchecked` has the copies. `devices` has the traits of rust-vmm on top.

use crate::gate::Use;
use crate::{GuestRam, MachineError};
use core::fmt;
use core::ops::Range;
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use std::sync::Weak;
use std::time::Duration;

/// Maps present pages of an armed machine, from a first page on.
pub(crate) type MapPages = dyn Fn(RamPage, u64) + Send + Sync;

/// Stores by the rules of an engine: refuses, or calls the function for one part of the bytes after
/// another.
pub(crate) type StoreRules =
    dyn Fn(Extent, Store, &mut dyn FnMut(Range<u64>)) -> Result<(), AccessError> + Send + Sync;

/// A store, for the [`StoreRules`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Store {
    /// It may be refused.
    Asked,
    /// Its bytes are there already. It is never refused.
    #[cfg_attr(
        not(feature = "vm-memory"),
        expect(dead_code, reason = "only devices with slices store so")
    )]
    Done,
}

/// The most pages that an access asks its [`Fetch`] for at once.
const FETCH_PAGES: u64 = 16;

/// The start of an access.
///
/// An access at a guest-physical address ends before the next hole. An access at a page counts in
/// RAM, which has no holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum At {
    /// A guest-physical address.
    Gpa(Gpa),
    /// A page of RAM, and bytes behind its start.
    Page(RamPage, u64),
}

impl From<Gpa> for At {
    fn from(gpa: Gpa) -> Self {
        Self::Gpa(gpa)
    }
}

impl From<RamPage> for At {
    fn from(page: RamPage) -> Self {
        Self::Page(page, 0)
    }
}

impl From<(RamPage, u64)> for At {
    fn from((page, offset): (RamPage, u64)) -> Self {
        Self::Page(page, offset)
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpa(gpa) => write!(f, "guest-physical address {gpa}"),
            Self::Page(page, 0) => write!(f, "RAM page {page}"),
            Self::Page(page, offset) => write!(f, "byte {offset} of RAM page {page}"),
        }
    }
}

/// The reason why an access to guest memory did not happen. It has read and written nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The page has not arrived, and the call was not asked to wait, or nobody fetches pages.
    #[error("RAM page {0} is missing: a migration has not brought it yet")]
    Missing(RamPage),
    /// Some of the bytes are not RAM.
    #[error("{bytes} bytes at {at} are not all RAM, which has {ram} bytes")]
    NotRam {
        /// The start.
        at: At,
        /// The number of bytes.
        bytes: u64,
        /// The size of RAM.
        ram: u64,
    },
    /// The machine is armed, and post-copy has not begun. No page has its final bytes.
    #[error("guest memory is not here yet: wait until the incoming VM starts")]
    Receiving,
    /// A write to a machine whose last bytes a migration is taking away.
    #[error("guest memory is frozen while a migration takes its last bytes")]
    Frozen,
    /// A write to a page whose stores the VMM tracks.
    #[error("RAM page {0} is write-tracked: copy it and untrack it first")]
    Tracked(RamPage),
    /// The caller's `stop` ended the wait for a page.
    #[error("the wait for RAM page {0} was stopped")]
    Stopped(RamPage),
    /// The page cannot arrive any more.
    #[error("RAM page {page} cannot arrive: {why}")]
    Lost {
        /// The page.
        page: RamPage,
        /// The reason.
        why: String,
    },
}

/// Brings missing pages for the VMM's own accesses.
pub trait Fetch: Send + Sync {
    /// Claims and requests those of `pages` pages from `first` that are missing, and waits until
    /// all are present. It polls `stop` at least every 10 ms, and gives up when that returns true.
    ///
    /// # Errors
    /// [`AccessError::Stopped`], or [`AccessError::Lost`] when a page cannot arrive.
    fn fetch(&self, first: RamPage, pages: u64, stop: &dyn Fn() -> bool)
    -> Result<(), AccessError>;
}

/// Keeps the VMM's writes out while it lives. See [`GuestRam::freeze`].
#[must_use = "writes are let in again when it is dropped"]
pub struct Frozen<'a>(&'a GuestRam);

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        self.0.gate.thaw();
    }
}

/// Leaves the gate on drop.
struct Entered<'a>(&'a GuestRam, Use);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.gate.leave(self.1);
    }
}

/// The bytes of an access.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) page: RamPage,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl Extent {
    /// Its pages, as indices.
    pub(crate) fn pages(self) -> Range<u64> {
        let pages = (self.offset + self.bytes).div_ceil(PAGE_SIZE);
        self.page.0..self.page.0 + pages
    }
}

impl GuestRam {
    /// Copies bytes out, if all their pages are present. Each naturally aligned part of 2, 4 or 8
    /// bytes is one access, so it is untorn. Different parts may be of different times if the guest
    /// writes them meanwhile.
    ///
    /// ```
    /// use pageferry_addr::{Gpa, RamPage};
    /// use pageferry_machine::{AccessError, Engine, MachineSpec, create};
    /// use pageferry_userfault::PageBitmap;
    /// use std::sync::Arc;
    ///
    /// let new = create(Engine::Soft, MachineSpec::new(1, 64 << 12))?;
    /// let ram = new.machine.ram();
    /// ram.try_write(Gpa(0x5ffe), b"four")?;
    ///
    /// let missing = Arc::new(PageBitmap::new(64));
    /// new.machine.arm_userfault(Arc::clone(&missing), None.into())?;
    /// assert_eq!(ram.try_read(RamPage(5), &mut [0]), Err(AccessError::Receiving));
    /// missing.set(RamPage(6));
    /// new.machine.begin_postcopy()?;
    ///
    /// let mut bytes = [0; 4];
    /// assert_eq!(ram.try_read(Gpa(0x5ffe), &mut bytes), Err(AccessError::Missing(RamPage(6))));
    /// missing.clear(RamPage(6)); // its bytes are in place
    /// ram.try_read((RamPage(5), 0xffe), &mut bytes)?;
    /// assert_eq!(&bytes, b"four");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`AccessError::Missing`] with the first missing page, [`AccessError::Receiving`], or
    /// [`AccessError::NotRam`]. Nothing is copied then.
    pub fn try_read(&self, at: impl Into<At>, into: &mut [u8]) -> Result<(), AccessError> {
        let extent = self.extent(at.into(), into.len() as u64)?;
        let _entered = self.enter_for(extent, Use::Read)?;
        self.read_present(extent, into);
        Ok(())
    }

    /// Copies `extent` out. The caller has entered the gate, and found its pages present.
    pub(crate) fn read_present(&self, extent: Extent, into: &mut [u8]) {
        // SAFETY: (2) the pages are present; see the module's first lines.
        let bytes = unsafe { self.unchecked() };
        bytes.read_at(extent.page, extent.offset, into);
    }

    /// Copies bytes in, if all their pages are present, and puts the pages into the dirty log. Each
    /// naturally aligned part of 2, 4 or 8 bytes is one access: the guest finds it whole.
    ///
    /// A write that ends while a harvest runs is in that harvest or in the next. So a migration
    /// freezes the memory before its last harvest ([`GuestRam::freeze`]).
    ///
    /// # Errors
    /// As [`GuestRam::try_read`], [`AccessError::Frozen`], and [`AccessError::Tracked`]. Nothing is
    /// written then.
    pub fn try_write(&self, at: impl Into<At>, from: &[u8]) -> Result<(), AccessError> {
        let extent = self.extent(at.into(), from.len() as u64)?;
        let _entered = self.enter_for(extent, Use::Write)?;
        self.write_present(extent, from)
    }

    /// Copies `extent` in, by the rules of the engine, and marks its pages. The caller has entered
    /// the gate, and found its pages present.
    pub(crate) fn write_present(&self, extent: Extent, from: &[u8]) -> Result<(), AccessError> {
        // SAFETY: (1) the pages are present. So no thread places them, and no thread has a slice of
        // them: that takes a frozen machine. Other writers are volatile too.
        let bytes = unsafe { self.unchecked() };
        self.store(extent, &mut |part| {
            let from = &from[part.start as usize..part.end as usize];
            bytes.write_at(extent.page, extent.offset + part.start, from);
        })?;
        self.written.mark(extent.pages());
        Ok(())
    }

    /// Calls `store` for all bytes of `extent` in parts, by the rules of the engine.
    pub(crate) fn store(
        &self,
        extent: Extent,
        store: &mut dyn FnMut(Range<u64>),
    ) -> Result<(), AccessError> {
        match self.rules.get() {
            Some(rules) => rules(extent, Store::Asked, store),
            None => {
                store(0..extent.bytes);
                Ok(())
            }
        }
    }

    /// Does what the rules of the engine ask for after a store of `extent`, whose bytes are there,
    /// and marks its pages.
    #[cfg(feature = "vm-memory")]
    pub(crate) fn stored(&self, extent: Extent) {
        if let Some(rules) = self.rules.get() {
            let done = rules(extent, Store::Done, &mut |_| ());
            debug_assert_eq!(done, Ok(()), "a store that is done is never refused");
        }
        self.written.mark(extent.pages());
    }

    /// [`GuestRam::try_read`], which first brings missing pages. It returns early when `stop`
    /// returns true while it waits.
    ///
    /// # Errors
    /// As [`GuestRam::try_read`] and [`Fetch::fetch`]. [`AccessError::Missing`] means that no
    /// migration fetches pages for this machine.
    pub fn read(
        &self,
        at: impl Into<At>,
        into: &mut [u8],
        stop: &dyn Fn() -> bool,
    ) -> Result<(), AccessError> {
        let at = at.into();
        self.fetching(at, into.len(), stop, || self.try_read(at, into))
    }

    /// [`GuestRam::try_write`], which first brings missing pages. It returns early when `stop`
    /// returns true while it waits.
    ///
    /// # Errors
    /// As [`GuestRam::try_write`] and [`GuestRam::read`].
    pub fn write(
        &self,
        at: impl Into<At>,
        from: &[u8],
        stop: &dyn Fn() -> bool,
    ) -> Result<(), AccessError> {
        let at = at.into();
        self.fetching(at, from.len(), stop, || self.try_write(at, from))
    }

    /// Names the source of missing pages for [`GuestRam::read`] and [`GuestRam::write`]. It is
    /// asked as long as it lives.
    ///
    /// # Errors
    /// When the memory has a source already.
    pub fn attach(&self, source: Weak<dyn Fetch>) -> Result<(), MachineError> {
        self.fetch
            .set(source)
            .map_err(|_| MachineError::WrongState("this machine has received a migration before"))
    }

    /// Keeps the VMM's writes out until the result is dropped, and waits for those under way. They
    /// are in the next harvest. Reads go on.
    ///
    /// ```
    /// use pageferry_addr::RamPage;
    /// use pageferry_machine::{AccessError, GuestRam, RamLayout};
    ///
    /// let ram = GuestRam::new(RamLayout::for_memory(1 << 20)?)?;
    /// let frozen = ram.freeze()?;
    /// assert_eq!(ram.try_write(RamPage(0), b"late"), Err(AccessError::Frozen));
    /// drop(frozen);
    /// ram.try_write(RamPage(0), b"now")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the memory is frozen already, or a device holds on to it for too long: see
    /// [`GuestRam::set_device_limit`].
    pub fn freeze(&self) -> Result<Frozen<'_>, MachineError> {
        self.gate.freeze()?;
        Ok(Frozen(self))
    }

    /// Sets how long [`GuestRam::freeze`] and arming wait for devices that hold on to memory. The
    /// default is a second.
    ///
    /// # Panics
    /// If it was set before.
    pub fn set_device_limit(&self, limit: Duration) {
        self.gate.set_limit(limit);
    }

    fn fetching(
        &self,
        at: At,
        bytes: usize,
        stop: &dyn Fn() -> bool,
        mut attempt: impl FnMut() -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        loop {
            match attempt() {
                Err(AccessError::Missing(page)) => {
                    self.bring(page, self.extent(at, bytes as u64)?, stop)?;
                }
                done => return done,
            }
        }
    }

    /// Brings `page` and those behind it of `extent`, some at a time.
    pub(crate) fn bring(
        &self,
        page: RamPage,
        extent: Extent,
        stop: &dyn Fn() -> bool,
    ) -> Result<(), AccessError> {
        let source = self.fetch.get().and_then(Weak::upgrade);
        let source = source.ok_or(AccessError::Missing(page))?;
        let pages = (extent.pages().end - page.0).min(FETCH_PAGES);
        source.fetch(page, pages, stop)
    }

    /// Finds the bytes in RAM.
    pub(crate) fn extent(&self, at: At, bytes: u64) -> Result<Extent, AccessError> {
        let layout = self.layout();
        let start_and_end = match at {
            At::Page(page, offset) => page
                .0
                .checked_mul(PAGE_SIZE)
                .and_then(|start| start.checked_add(offset))
                .map(|start| (start, layout.bytes())),
            At::Gpa(gpa) => layout.regions().iter().find_map(|region| {
                let offset = gpa.checked_offset_from(region.gfn.gpa())?;
                let first = region.first.byte_offset();
                let size = region.pages * PAGE_SIZE;
                (offset < size).then_some((first + offset, first + size))
            }),
        };
        start_and_end
            .filter(|(start, end)| start.checked_add(bytes).is_some_and(|to| to <= *end))
            .map(|(start, _)| Extent {
                page: RamPage(start / PAGE_SIZE),
                offset: start % PAGE_SIZE,
                bytes,
            })
            .ok_or(AccessError::NotRam {
                at,
                bytes,
                ram: layout.bytes(),
            })
    }

    /// Enters the gate, if all pages are present.
    fn enter_for(&self, extent: Extent, access: Use) -> Result<Entered<'_>, AccessError> {
        self.gate.enter(access)?;
        let entered = Entered(self, access);
        self.check_present(extent)?;
        Ok(entered)
    }

    /// Finds the first missing page. If there is none, a touch of the pages does not sleep. The
    /// caller has entered the gate.
    pub(crate) fn check_present(&self, extent: Extent) -> Result<(), AccessError> {
        let pages = extent.pages();
        if let Some(missing) = self.gate.missing()
            && let Some(page) = pages.clone().map(RamPage).find(|page| missing.test(*page))
        {
            return Err(AccessError::Missing(page));
        }
        self.map_present(RamPage(pages.start), pages.end - pages.start);
        Ok(())
    }

    /// Makes a touch of present pages possible without a sleep, where userfaultfd watches the
    /// alias too.
    pub(crate) fn map_present(&self, first: RamPage, pages: u64) {
        if let Some(map) = self.map.get() {
            map(first, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RamLayout;
    use pageferry_userfault::PageBitmap;
    use std::sync::Arc;

    /// A harvest after a write's bytes, and before the write is over: the write is in the next one.
    #[test]
    fn a_harvest_that_overtakes_a_mark_loses_nothing() {
        let harvest = |ram: &GuestRam| {
            let dirty = PageBitmap::new(16);
            ram.harvest_writes(&dirty, true).unwrap();
            dirty.count()
        };
        let layout = RamLayout::for_memory(16 * PAGE_SIZE).unwrap();
        let ram = Arc::new(GuestRam::new(layout).unwrap());
        let weak = Arc::downgrade(&ram);
        ram.rules.get_or_init(|| {
            Box::new(move |extent, _, store| {
                store(0..extent.bytes);
                harvest(&weak.upgrade().expect("the test holds it"));
                Ok(())
            })
        });
        for (at, bytes, pages) in [(5, 1, 1), (PAGE_SIZE - 1, 2, 2), (0, 3 * PAGE_SIZE, 3)] {
            ram.try_write(Gpa(at), &vec![1; bytes as usize]).unwrap();
            assert_eq!(harvest(&ram), pages, "{bytes} bytes at {at}");
            assert_eq!(harvest(&ram), 0);
        }
    }
}
