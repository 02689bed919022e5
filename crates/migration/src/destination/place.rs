#![expect(
    unsafe_code,
    reason = "receives into guest memory that no other thread may reach"
)]
//! Receives Pages frames of a bulk channel straight into their final place.
//!
//! It verifies the descriptors before it places a byte of data, and the data before any vCPU may
//! see it. It takes the `placing` bits of all pages of a frame first. If the frame does not arrive
//! whole, it gives them back: the pages are still missing (post-copy), or the VM is discarded
//! (pre-copy).

use super::core::Core;
use crate::error::MigrationError;
use crate::protocol_error::ProtocolError;
use crate::sync::{AtomicU8, AtomicU64, Ordering, fence};
use crate::wire::{FrameHasher, FrameHeader, PAGE_BYTES, Run, RunKind, RunList};
use pageferry_addr::RamPage;
use pageferry_machine::Backing;
use pageferry_transport::channel::{Connection, RawSlice, Wait};
use pageferry_userfault::PageBitmap;

/// The pages that a frame may bring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Due {
    /// Any: no thread of this VM runs, and each page may come again.
    Any = 0,
    /// None: the supervisor loads what SwitchOver has announced.
    Nothing = 1,
    /// Missing ones, once each.
    Missing = 2,
}

/// The pages that are due, for the readers and the supervisor.
///
/// **Guarantee.** No frame that began before SwitchOver writes memory after [`Stage::close`]. A
/// source that writes the rest of such a frame later breaks the protocol: vCPUs and VMM threads
/// reach the pages from then on.
///
/// **Mechanism.** A reader takes the `placing` bits of a frame and then looks at the stage again.
/// The supervisor sets the stage and then looks for `placing` bits. A fence is between both steps
/// on each side. So either the reader sees the new stage and gives the frame up, or the supervisor
/// sees the bits and refuses the SwitchOver. Until the reader gives bits back, it may write.
struct Stage(AtomicU8);

impl Stage {
    fn new() -> Self {
        Self(AtomicU8::new(Due::Any as u8))
    }

    fn get(&self) -> Due {
        match self.0.load(Ordering::Acquire) {
            0 => Due::Any,
            1 => Due::Nothing,
            _ => Due::Missing,
        }
    }

    /// Ends pre-copy. Returns whether no frame is under way.
    fn close(&self, placing: &PageBitmap) -> bool {
        self.0.store(Due::Nothing as u8, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        placing.next_set(0).is_none()
    }

    /// Whether the stage is still `due`, for a reader that has taken `placing` bits since.
    fn is_still(&self, due: Due) -> bool {
        fence(Ordering::SeqCst);
        self.get() == due
    }

    /// Begins post-copy. Release: a reader finds the missing pages.
    fn begin_missing(&self) {
        self.0.store(Due::Missing as u8, Ordering::Release);
    }
}

/// The state that the readers of all bulk channels share.
pub(super) struct Inbound<'a> {
    pub(super) core: &'a Core,
    stage: Stage,
    /// Pages that may have other bytes than zero: those that came, and those that the memory held
    /// before. All others are zero already.
    touched: PageBitmap,
    pub(super) data_pages: AtomicU64,
    pub(super) zero_pages: AtomicU64,
}

impl<'a> Inbound<'a> {
    pub(super) fn try_new(core: &'a Core) -> Result<Self, MigrationError> {
        Ok(Self {
            core,
            stage: Stage::new(),
            touched: held(core)?,
            data_pages: AtomicU64::new(0),
            zero_pages: AtomicU64::new(0),
        })
    }

    /// Ends pre-copy: SwitchOver has come. Frames are refused until [`Self::begin_postcopy`].
    pub(super) fn end_precopy(&self) -> Result<(), ProtocolError> {
        if self.stage.close(self.core.pages.placing()) {
            return Ok(());
        }
        Err(ProtocolError::Contradiction(
            "its SwitchOver overtakes a frame of pages",
        ))
    }

    /// From now on, frames bring missing pages.
    pub(super) fn begin_postcopy(&self) {
        self.stage.begin_missing();
    }

    /// Makes the pages of a run zero. Fresh memory costs a look at a word of bits for 64 pages, so
    /// a source may send any number of zero pages.
    fn zero_touched(&self, run: &Run) {
        let end = run.end() as usize;
        let mut at = run.first.index();
        while let Some(index) = self.touched.next_set(at).filter(|index| *index < end) {
            // SAFETY: as in `Placer::receive_in_place`.
            unsafe { self.core.machine.ram().unchecked() }.zero(RamPage(index as u64));
            at = index + 1;
        }
    }
}

/// The most pages of one search for memory.
const SEARCH: u64 = 1 << 16;

/// The pages whose bytes are perhaps not zero before any page has come.
///
/// The memory need not be fresh: a VMM may adopt memory that it has used, or load firmware before
/// it receives a VM. The machine is armed, so nobody writes the memory while this searches it.
/// Fresh shared memory costs one system call for each of its files.
fn held(core: &Core) -> Result<PageBitmap, MigrationError> {
    let ram = core.machine.ram();
    let held = PageBitmap::try_new(core.page_count() as usize)?;
    if ram.backing() == Backing::Anonymous {
        // All private memory counts as allocated, so a search would find every page. But only this
        // process has it, and drops it at once.
        // SAFETY: (1) the machine is armed, post-copy has not begun, and no reader runs yet.
        let dropped = unsafe { ram.unchecked() }.punch_hole(RamPage(0), ram.pages());
        if dropped.is_err() {
            // The kernel does not drop locked memory.
            held.set_range(0..core.page_count() as usize);
        }
        return Ok(held);
    }
    let mut at = RamPage(0);
    while let Some(pages) = ram.next_allocated(at, SEARCH)? {
        held.set_range(pages.start as usize..pages.end as usize);
        at = RamPage(pages.end);
    }
    Ok(held)
}

/// Receives the Pages frames of one bulk channel.
pub(super) struct Placer<'a> {
    inbound: &'a Inbound<'a>,
    connection: &'a Connection,
    descriptors: Vec<u8>,
    /// The bounce buffer of machines that do not receive in place.
    bounce: Vec<u8>,
}

/// The `placing` bits of a frame. Those of pages that did not arrive are given back.
struct Placing<'a> {
    core: &'a Core,
    runs: &'a [Run],
    /// The number of runs whose bits were taken.
    taken: usize,
    /// The number of runs that have arrived.
    arrived: usize,
}

impl Drop for Placing<'_> {
    fn drop(&mut self) {
        for run in &self.runs[self.arrived..self.taken] {
            self.core.pages.end_placing(run.first, run.pages.into());
        }
    }
}

impl<'a> Placer<'a> {
    pub(super) fn new(inbound: &'a Inbound<'a>, connection: &'a Connection) -> Self {
        Self {
            inbound,
            connection,
            descriptors: Vec::new(),
            bounce: Vec::new(),
        }
    }

    /// Receives the rest of a frame and places its pages.
    pub(super) fn receive(
        &mut self,
        header: &FrameHeader,
        wait: &Wait<'_>,
    ) -> Result<(), MigrationError> {
        let inbound = self.inbound;
        let core = inbound.core;
        self.descriptors
            .resize(RunList::descriptors_len(header)?, 0);
        self.connection.read_exact(&mut self.descriptors, wait)?;
        let list = RunList::decode(header, &self.descriptors, core.page_count())?;
        let mut hasher = header.hasher();
        hasher.update(&self.descriptors);
        // The source sends no page of pre-copy after SwitchOver, and no missing page before
        // `Ready`. So this frame belongs to the stage that it finds.
        let due = inbound.stage.get();
        let postcopy = due == Due::Missing;
        let confirmed = u64::from(list.confirmed_pages());
        if confirmed > 0 && !(postcopy && core.keeps_bytes()) {
            return Err(ProtocolError::CannotConfirm.into());
        }
        let mut placing = Placing {
            core,
            runs: list.runs(),
            taken: 0,
            arrived: 0,
        };
        for run in list.runs() {
            if postcopy {
                core.pages.begin_placing(run.first, run.pages.into())?;
            } else {
                core.pages.begin_filling(run.first, run.pages.into())?;
            }
            placing.taken += 1;
        }
        if due == Due::Nothing || !inbound.stage.is_still(due) {
            return Err(ProtocolError::Contradiction("it sent pages behind SwitchOver").into());
        }
        if !postcopy || core.keeps_bytes() {
            self.receive_in_place(&list, hasher, wait)?;
            for run in list.runs() {
                if run.kind == RunKind::Zero {
                    inbound.zero_touched(run);
                }
                if postcopy {
                    core.arrived(run.first, run.pages.into())?;
                    placing.arrived += 1;
                }
            }
        } else {
            self.receive_copy(&list, hasher, wait)?;
            self.copy_into_place(&mut placing)?;
        }
        drop(placing);
        let data = u64::from(list.data_pages());
        inbound.data_pages.fetch_add(data, Ordering::Relaxed);
        core.confirmed_pages.fetch_add(confirmed, Ordering::Relaxed);
        inbound
            .zero_pages
            .fetch_add(list.zero_pages(), Ordering::Relaxed);
        Ok(())
    }

    fn receive_in_place(
        &self,
        list: &RunList,
        mut hasher: FrameHasher,
        wait: &Wait<'_>,
    ) -> Result<(), MigrationError> {
        let data = list.runs().iter().filter(|run| run.kind == RunKind::Data);
        // SAFETY: no other thread reads or writes the pages of the frame, since this thread has
        // their `placing` bits. In pre-copy no vCPU of this VM runs, and the VMM's own accesses are
        // refused. In post-copy the pages are missing.
        let bytes = unsafe { self.inbound.core.machine.ram().unchecked() };
        let slices: Vec<RawSlice> = data
            .map(|run| {
                // A part of the page may arrive and no more.
                let pages = run.first.index()..run.end() as usize;
                self.inbound.touched.set_range(pages);
                RawSlice {
                    start: bytes.alias(run.first, run.pages.into()),
                    len: run.data_bytes(),
                }
            })
            .collect();
        // SAFETY: each slice is mapped guest memory (`alias` checked the whole run) that lives as
        // long as the machine. As above, no other thread reads or writes it.
        unsafe {
            self.connection
                .read_exact_raw(&slices, &wait.mid_message())?;
        };
        let with_bytes = list.runs().iter().filter(|run| run.kind != RunKind::Zero);
        for run in with_bytes {
            let start = bytes.alias(run.first, run.pages.into()).cast_const();
            let len = run.pages as usize * PAGE_BYTES;
            // SAFETY: as above. The bytes are initialized, like all mapped memory.
            let bytes = unsafe { std::slice::from_raw_parts(start, len) };
            match run.kind {
                RunKind::Confirmed => hasher.update_unsent(bytes),
                _ => hasher.update(bytes),
            }
        }
        Ok(hasher.verify()?)
    }

    fn receive_copy(
        &mut self,
        list: &RunList,
        mut hasher: FrameHasher,
        wait: &Wait<'_>,
    ) -> Result<(), MigrationError> {
        self.bounce.resize(list.data_bytes(), 0);
        if !self.bounce.is_empty() {
            self.connection
                .read_exact(&mut self.bounce, &wait.mid_message())?;
        }
        hasher.update(&self.bounce);
        Ok(hasher.verify()?)
    }

    fn copy_into_place(&self, placing: &mut Placing<'_>) -> Result<(), MigrationError> {
        let core = self.inbound.core;
        let mut data = self.bounce.chunks_exact(PAGE_BYTES);
        for run in placing.runs {
            for page in (run.first.0..run.end()).map(RamPage) {
                let bytes = match run.kind {
                    RunKind::Data => data
                        .next()
                        .expect("a page of data for each page of the runs"),
                    RunKind::Zero => &[0; PAGE_BYTES],
                    RunKind::Confirmed => unreachable!("refused: this machine keeps no bytes"),
                };
                core.persist(|| core.machine.install_copy(page, bytes))?;
                core.made_present(page, 1);
            }
            placing.arrived += 1;
        }
        Ok(())
    }
}

#[cfg(all(test, shuttle))]
mod model {
    use super::*;
    use shuttle::thread;
    use std::sync::Arc;

    /// A reader with a frame of one page, and the supervisor that loads what SwitchOver announced.
    /// They write the page for the VM and let the VM in, so both must never be.
    fn scenario() {
        let stage = Arc::new(Stage::new());
        let placing = Arc::new(PageBitmap::new(1));
        let writing = Arc::new(AtomicU64::new(0));
        let reader = {
            let (stage, placing, writing) = (
                Arc::clone(&stage),
                Arc::clone(&placing),
                Arc::clone(&writing),
            );
            thread::spawn(move || {
                let due = stage.get();
                placing.set_range(0..1);
                if due == Due::Any && stage.is_still(due) {
                    writing.store(1, Ordering::SeqCst);
                    writing.store(0, Ordering::SeqCst);
                }
                placing.clear_range(0..1);
            })
        };
        if stage.close(&placing) {
            assert_eq!(writing.load(Ordering::SeqCst), 0, "a frame writes memory");
            stage.begin_missing();
            assert_eq!(writing.load(Ordering::SeqCst), 0, "a frame writes memory");
        }
        reader.join().expect("no panic");
    }

    #[test]
    fn no_frame_of_precopy_writes_behind_switch_over() {
        shuttle::check_random(scenario, 20_000);
    }
}
