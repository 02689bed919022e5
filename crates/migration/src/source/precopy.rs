//! Pre-copy: pages are sent while the guest runs and changes them.
//!
//! The dirty log is on before the first page is read, and is harvested only when the destination
//! has taken a whole pass. So a page that was changed after it was read is in a harvest, and is
//! sent again or is *missing* at switch-over.

use super::Source;
use super::pages::PageSender;
use crate::clock::monotonic_ns;
use crate::error::MigrationError;
use crate::phase::Phase;
use crate::wire::{Frame, Pass};
use pageferry_addr::RamPage;
use pageferry_userfault::PageBitmap;

/// With this few dirty pages another pass would take less time than its own round trip.
const HARDLY_ANY: usize = 64;
/// How many pages are sent between two looks at `cancel`.
const CHECK_EVERY: u64 = 1024;
/// How many pages are sent between two looks at what the destination says about its memory.
const HEAR_EVERY: u64 = 256;

impl Source<'_> {
    /// All passes. Returns the pages that are not at the destination as they are here now; the
    /// guest still runs and adds to them.
    pub(super) fn precopy(&mut self) -> Result<PageBitmap, MigrationError> {
        let pages = self.vm.machine.ram().pages() as usize;
        let dirty = PageBitmap::new(pages);
        dirty.set_range(0..pages);
        if self.config.precopy_passes == 0 {
            return Ok(dirty);
        }
        self.vm.machine.set_dirty_log(true)?;
        for pass in 1..=self.config.precopy_passes {
            self.enter(Phase::Precopy { pass });
            let began_ns = monotonic_ns();
            let sent = self.send_pass(pass, &dirty)?;
            self.vm.machine.harvest_dirty(&dirty, true)?;
            self.report.passes.push((sent, monotonic_ns() - began_ns));
            if dirty.count() <= HARDLY_ANY {
                break;
            }
        }
        Ok(dirty)
    }

    /// Sends all pages of `dirty`, which is empty afterwards, and waits until they were taken.
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
            if done % HEAR_EVERY == 0 {
                self.take_setup_progress()?;
            }
            if done % CHECK_EVERY == 0 {
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
