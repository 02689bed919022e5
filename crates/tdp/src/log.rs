//! The interface to dirty logs: reports of what guests did to pages.

use pageferry_addr::Gfn;

/// Receives reports about pages from the MMU, above all for a dirty log.
///
/// The MMU calls it after an entry has changed, and before the call that changed it returns. It
/// must not call the MMU. If it panics, the tables and counts stay right, but it does not get the
/// rest of that call's reports.
///
/// A reader of the log misses nothing for good if it takes these steps in order, and then copies
/// the pages:
///
/// | log by write protection | log by dirty bits |
/// |---|---|
/// | 1. take the bits | 1. [clean](crate::Worker::clear_dirty) the pages, which reports them |
/// | 2. protect those pages | 2. flush |
/// | 3. flush | 3. take the bits |
///
/// A call in progress may have found a page dirty, or made it writable for all vCPUs, and not
/// reported it yet. Other vCPUs' TLBs may hold that page at once. The page is in the log when that
/// call is over. So before the last reading, vCPUs must stand still outside their faults, and zaps
/// must be over.
///
/// # A log by write protection
///
/// It works in every format. Each page costs a fault at its first store after a harvest.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/heap/mod.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use pageferry_addr::{Gfn, GfnRange};
/// # use pageferry_tdp::format::{Access, Ept4, MemoryType, Writes};
/// # use pageferry_tdp::{Fault, Log, Mmu, Target};
/// use std::cell::RefCell;
/// use std::collections::BTreeSet;
///
/// /// The frames that are dirty. A real log has a bitmap of atomic words.
/// #[derive(Default)]
/// struct Dirty(RefCell<BTreeSet<u64>>);
///
/// impl Log for Dirty {
///     fn dirtied(&self, gfn: Gfn, pages: u64) {
///         self.0.borrow_mut().extend(gfn.0..gfn.0 + pages);
///     }
/// }
///
/// let mmu = Mmu::<Ept4, _>::new(Heap)?;
/// let mut worker = mmu.worker();
/// # let page = |gfn: Gfn, level| Target {
/// #     pfn: Pfn(0x7000 + gfn.0), level, access: Access::ALL, writes: Writes::Allowed,
/// #     memory: MemoryType::WriteBack,
/// # };
/// # let store = Fault { gfn: Gfn(5), access: Access::READ_WRITE };
/// # let ticket = worker.ticket();
/// # worker.fault(ticket, store, page(store.gfn, 2), &())?; // a page of 2 MiB
/// let slot = GfnRange::new(Gfn(0), 512).unwrap();
/// let log = Dirty::default();
///
/// // Start. Faults that looked at the slot before it was logged must be over.
/// worker.split(slot, 1, &log)?;
/// worker.log_by_fault(slot, &log);
/// log.0.take(); // The caller copies all of memory once.
///
/// // A store faults. The fault makes the page writable, and sets its bit.
/// worker.fast_fault(store, &log).expect("the class of the leaf allows stores");
///
/// // Harvest: take the bits, protect these pages (this flushes), copy them.
/// let dirty = log.0.take();
/// assert_eq!(dirty, [5].into());
/// let bits = dirty.iter().fold(0, |bits, page| bits | 1 << page);
/// worker.write_protect_mask(Gfn(0), bits, &log);
///
/// // Stop, and collapse to large pages.
/// worker.unlog(slot, &());
/// let made = worker.recover(slot, &(), |gfn, level| Some(page(gfn, level)));
/// assert_eq!((made, mmu.stats().leaves), (1, [0, 1, 0]));
/// # Ok(())
/// # }
/// ```
///
/// With several words of bits, make the calls of one harvest inside
/// [`deferred`](crate::Worker::deferred), which flushes once. While the log is on, faults map
/// stores by 4 KiB, and pages get the class
/// [`AllowedLoggedByFault`](crate::format::Writes::AllowedLoggedByFault). The target of a load
/// leaves out the permission to store.
///
/// # A log by dirty bits
///
/// It needs a format whose hardware sets the bits
/// ([`DirtyBy::Hardware`](crate::format::DirtyBy::Hardware)). Stores do not fault, but a harvest
/// visits every leaf of the range.
///
/// ```
/// # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/heap/mod.rs"));
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use pageferry_addr::{Gfn, GfnRange};
/// # use pageferry_tdp::format::{Access, Ept4, MemoryType, Writes};
/// # use pageferry_tdp::{Fault, Log, Mmu, Target};
/// # #[derive(Default)]
/// # struct Dirty(std::cell::RefCell<std::collections::BTreeSet<u64>>);
/// # impl Log for Dirty {
/// #     fn dirtied(&self, gfn: Gfn, pages: u64) {
/// #         self.0.borrow_mut().extend(gfn.0..gfn.0 + pages);
/// #     }
/// # }
/// # let mmu = Mmu::<Ept4, _>::new(Heap)?;
/// # let mut worker = mmu.worker();
/// # let page = |gfn: Gfn, level| Target {
/// #     pfn: Pfn(0x7000 + gfn.0), level, access: Access::ALL, writes: Writes::Allowed,
/// #     memory: MemoryType::WriteBack,
/// # };
/// # let store = Fault { gfn: Gfn(5), access: Access::READ_WRITE };
/// # let ticket = worker.ticket();
/// # worker.fault(ticket, store, page(store.gfn, 2), &())?; // a page of 2 MiB
/// # let slot = GfnRange::new(Gfn(0), 512).unwrap();
/// # let log = Dirty::default();
/// // Start: a large page has one dirty bit, so split it. Then make all pages clean.
/// worker.split(slot, 1, &log)?;
/// worker.clear_dirty(slot, &());
///
/// // The hardware sets the bit at a store, as this look-up does.
/// assert!(worker.translate(store.gfn, store.access).is_some());
///
/// // Harvest: clean the pages, which reports them and flushes. Then take the bits, and copy.
/// worker.clear_dirty(slot, &log);
/// assert_eq!(log.0.take(), [5].into());
///
/// // Stop: nothing but to collapse.
/// let made = worker.recover(slot, &(), |gfn, level| Some(page(gfn, level)));
/// assert_eq!((made, mmu.stats().leaves), (1, [0, 1, 0]));
/// # Ok(())
/// # }
/// ```
///
/// All calls that may lose a dirty bit get the slot's log: [`zap`](crate::Worker::zap),
/// [`invalidate`](crate::Worker::invalidate), [`zap_all`](crate::Worker::zap_all). They must not
/// run beside the last reading.
pub trait Log {
    /// Whether the pages are logged at all. If so, only pages of the smallest size become writable.
    fn is_on(&self) -> bool {
        true
    }

    /// Reports that the guest has stored to some of the `pages` pages from `gfn` on, or can from
    /// now on do so without a fault.
    fn dirtied(&self, gfn: Gfn, pages: u64);

    /// Reports that the guest has used some of the `pages` pages from `gfn` on. The entry that
    /// recorded this is gone.
    fn accessed(&self, gfn: Gfn, pages: u64) {
        let _ = (gfn, pages);
    }
}

/// No log.
impl Log for () {
    fn is_on(&self) -> bool {
        false
    }

    fn dirtied(&self, _: Gfn, _: u64) {}
}

impl<L: Log + ?Sized> Log for &L {
    fn is_on(&self) -> bool {
        (**self).is_on()
    }

    fn dirtied(&self, gfn: Gfn, pages: u64) {
        (**self).dirtied(gfn, pages);
    }

    fn accessed(&self, gfn: Gfn, pages: u64) {
        (**self).accessed(gfn, pages);
    }
}
