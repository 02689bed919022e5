//! The default scheme of memory slots with hooks: tests see the parts of a change, and delay or
//! refuse look-ups.
#![expect(unsafe_code, reason = "wraps a scheme of slots")]

use pageferry_addr::{Gfn, Hva};
use pageferry_hypervisor::{
    Begun, Found, Limits, MemslotReader, MemslotUpdate, Memslots, OutOfMemory, Request, Scalable,
    Slot, SlotData, SlotError,
};
use std::cell::{Cell, RefCell};
use std::ops::Range;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Begin,
    /// Reported just before the commit.
    Commit,
    GiveUp,
    Reclaim,
}

type Hook = Box<dyn Fn(Part, Begun)>;
type Pause = Box<dyn FnOnce()>;

thread_local! {
    /// The number of this thread's next look-ups that find an invalid slot.
    pub(crate) static DENIED: Cell<u32> = const { Cell::new(0) };
    /// Called when a look-up of this thread has found a slot at this frame, before the vCPU uses
    /// the slot.
    pub(crate) static PAUSE: RefCell<Option<(Gfn, Pause)>> = const { RefCell::new(None) };
    /// Called when this thread's vCPU has left its guest because a writer quiesced it.
    pub(crate) static LEFT: RefCell<Option<Box<dyn Fn()>>> = const { RefCell::new(None) };
    /// Called with the parts of this thread's changes.
    pub(crate) static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
}

fn tell(part: Part, begun: Begun) {
    HOOK.with_borrow(|hook| {
        if let Some(hook) = hook {
            hook(part, begun);
        }
    });
}

/// The default scheme with hooks.
pub(crate) struct Watched(Scalable);
pub(crate) struct WatchedReader(<Scalable as Memslots>::Reader);
pub(crate) struct WatchedUpdate<'a>(Option<<Scalable as Memslots>::Update<'a>>);

// SAFETY: the wrapped scheme keeps the contract. Returning `Invalid` gives access to no memory.
unsafe impl Memslots for Watched {
    type Reader = WatchedReader;
    type Update<'a> = WatchedUpdate<'a>;

    fn new(limits: Limits) -> Self {
        Self(Scalable::new(limits))
    }

    fn reader(&self) -> WatchedReader {
        WatchedReader(self.0.reader())
    }

    fn try_reader(&self) -> Result<WatchedReader, OutOfMemory> {
        self.0.try_reader().map(WatchedReader)
    }

    fn begin(&mut self, request: Request<SlotData>) -> Result<WatchedUpdate<'_>, SlotError> {
        let update = WatchedUpdate(Some(self.0.begin(request)?));
        tell(Part::Begin, update.begun());
        Ok(update)
    }

    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.0.by_id(id)
    }

    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>)) {
        self.0.for_each_in_hva(hva, f);
    }

    fn reclaim(&mut self) {
        tell(Part::Reclaim, Begun::Nothing);
        self.0.reclaim();
    }

    fn metadata_bytes(&self) -> usize {
        self.0.metadata_bytes()
    }
}

impl MemslotReader for WatchedReader {
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        match DENIED.get() {
            0 => self.0.lookup(gfn, |found| {
                if let Found::Slot(_) = found
                    && let Some((_, pause)) = PAUSE.with_borrow_mut(|p| p.take_if(|p| p.0 == gfn))
                {
                    pause();
                }
                f(found)
            }),
            denied => {
                DENIED.set(denied - 1);
                f(Found::Invalid)
            }
        }
    }

    fn refresh(&mut self) {
        LEFT.with_borrow(|left| {
            if let Some(left) = left {
                left();
            }
        });
        self.0.refresh();
    }
}

impl MemslotUpdate for WatchedUpdate<'_> {
    fn begun(&self) -> Begun {
        self.0.as_ref().unwrap().begun()
    }

    fn commit(mut self) {
        tell(Part::Commit, self.begun());
        self.0.take().unwrap().commit();
    }
}

impl Drop for WatchedUpdate<'_> {
    fn drop(&mut self) {
        if let Some(update) = self.0.take() {
            let begun = update.begun();
            drop(update);
            tell(Part::GiveUp, begun);
        }
    }
}
