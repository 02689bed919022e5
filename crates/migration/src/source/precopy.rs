//! Pre-copy: the source sends pages while the guest runs and changes them.
//!
//! The source starts the dirty log before it reads the first page. It harvests the log only after
//! the destination has acknowledged a whole pass. So a page that the guest changes after it was
//! read is in a later harvest. The source sends it again, or it is *missing* at switch-over.
//!
//! The destination allocates memory beside the passes. If it takes long after the last pass, what
//! the guest dirties meanwhile would be missing. So another pass follows if the source waited for
//! longer than the pass took.

use super::Source;
use super::pages::PageSender;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::wire::{Frame, Pass};
use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;

/// Passes end at this number of dirty pages. Sending so few takes less time than the round trip of
/// a pass.
const FEW_PAGES: usize = 64;
/// The number of pages between two checks of `cancel`.
const CANCEL_EVERY: u64 = 1024;
/// The number of pages between two checks for SetupProgress frames.
const RECEIVE_EVERY: u64 = 256;

impl Source<'_> {
    /// Runs all passes. Returns the pages whose current bytes are not at the destination. The guest
    /// still runs and dirties more.
    pub(super) fn precopy(&mut self) -> Result<PageBitmap, MigrationError> {
        let pages = self.vm.machine.ram().pages() as usize;
        let dirty = PageBitmap::try_new(pages)?;
        dirty.set_range(0..pages);
        if self.config.precopy_passes == 0 {
            return Ok(dirty);
        }
        self.vm.machine.set_dirty_log(true)?;
        let mut pass = 0;
        loop {
            pass += 1;
            self.enter(Phase::Precopy { pass });
            let began_ns = monotonic_ns();
            let sent = self.send_pass(pass, &dirty)?;
            self.vm.machine.harvest_dirty(&dirty, true)?;
            let ended_ns = monotonic_ns();
            let took_ns = ended_ns - began_ns;
            self.report.passes.push((sent, took_ns));
            if pass >= self.config.precopy_passes || dirty.count() <= FEW_PAGES {
                self.wait_until_destination_is_ready()?;
                if monotonic_ns() - ended_ns <= took_ns {
                    return Ok(dirty);
                }
            }
        }
    }

    /// Sends all pages of `dirty`, clears their bits, and waits for the acknowledgement. Returns
    /// their number.
    fn send_pass(&mut self, pass: u32, dirty: &PageBitmap) -> Result<u64, MigrationError> {
        let ram = std::sync::Arc::clone(self.vm.machine.ram());
        let phase = Phase::Precopy { pass };
        let total = dirty.count() as u64;
        let mut sender = PageSender::new(&ram, self.cancel);
        let mut allocated = 0..0;
        let mut done = 0;
        let mut next = dirty.next_set(0);
        while let Some(index) = next {
            let page = RamPage(index as u64);
            dirty.clear(page);
            if page.0 >= allocated.end {
                allocated = ram
                    .next_allocated(page)?
                    .unwrap_or(ram.pages()..ram.pages());
            }
            if page.0 < allocated.start {
                sender.add_hole(&mut self.link, page)?;
            } else {
                sender.add_running(&mut self.link, page)?;
            }
            done += 1;
            if done % RECEIVE_EVERY == 0 {
                self.take_setup_progress()?;
            }
            if done % CANCEL_EVERY == 0 {
                self.check_cancel()?;
                self.observer.progress(phase, done, total);
            }
            next = dirty.next_set(index + 1);
        }
        sender.send_copies(&mut self.link)?;
        self.observer.progress(phase, done, total);
        self.report.pages.precopy += sender.data_pages;
        self.report.pages.zero += sender.zero_pages;
        self.report.page_bytes += sender.data_pages * pageferry_addr::PAGE_SIZE;
        let ended = Pass { pass, pages: done };
        self.link.send(&Frame::PassEnd(ended))?;
        match self.receive_answer()? {
            Frame::PassAck(taken) if taken == ended => Ok(done),
            Frame::PassAck(taken) => Err(MigrationError::Peer(format!(
                "it confirmed {} pages of pass {} where {} of pass {} were sent",
                taken.pages, taken.pass, ended.pages, ended.pass
            ))),
            other => Err(self.link.unexpected("PassAck", &other)),
        }
    }
}
