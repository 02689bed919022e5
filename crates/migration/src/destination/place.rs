#![expect(
    unsafe_code,
    reason = "receives into guest memory that no other thread may reach"
)]
//! Receives Pages frames of the stream straight into their final place.
//!
//! It verifies the descriptors before it places a byte of data, and the data before any vCPU may
//! see it. After a frame with wrong data, its pages stay missing (post-copy) or the VM is discarded
//! (pre-copy).

use super::core::Core;
use crate::error::MigrationError;
use crate::link::{RawSlice, StreamLink};
use crate::wire::{FrameHeader, PAGE_BYTES, RunKind, RunList};
use pageferry_addr::RamPage;
use pageferry_machine::GuestRam;
use pageferry_userfault::PageBitmap;
use std::time::Duration;

/// Receives Pages frames.
pub(super) struct Placer<'a> {
    ram: &'a GuestRam,
    /// Pages that were written here. All others are zero already.
    touched: PageBitmap,
    /// The bounce buffer of machines that do not receive in place.
    bounce: Vec<u8>,
    limit: Duration,
    pub(super) data_pages: u64,
    pub(super) zero_pages: u64,
}

impl<'a> Placer<'a> {
    pub(super) fn try_new(ram: &'a GuestRam, limit: Duration) -> Result<Self, MigrationError> {
        Ok(Self {
            ram,
            touched: PageBitmap::try_new(ram.pages() as usize)?,
            bounce: Vec::new(),
            limit,
            data_pages: 0,
            zero_pages: 0,
        })
    }

    /// Returns the page counts of all frames so far, and resets them.
    pub(super) fn take_counts(&mut self) -> (u64, u64) {
        (
            std::mem::take(&mut self.data_pages),
            std::mem::take(&mut self.zero_pages),
        )
    }

    fn count(&mut self, list: &RunList) {
        self.data_pages += u64::from(list.data_pages());
        self.zero_pages += list.zero_pages();
    }

    /// Receives a frame of pre-copy. No vCPU runs here, and every page may be overwritten.
    pub(super) fn precopy(
        &mut self,
        link: &mut StreamLink,
        header: &FrameHeader,
    ) -> Result<(), MigrationError> {
        let list = link.receive_runs(header, self.ram.pages(), self.limit)?;
        self.receive_in_place(link, &list)?;
        for run in list.runs() {
            let range = run.first.index()..run.end() as usize;
            match run.kind {
                RunKind::Data => {
                    self.touched.set_range(range);
                }
                RunKind::Zero => self.zero_touched(range),
            }
        }
        self.count(&list);
        Ok(())
    }

    fn zero_touched(&self, range: std::ops::Range<usize>) {
        let mut at = range.start;
        while let Some(index) = self.touched.next_set(at).filter(|index| *index < range.end) {
            // SAFETY: as in `receive_in_place`.
            unsafe { self.ram.unchecked() }.zero(RamPage(index as u64));
            at = index + 1;
        }
    }

    /// Receives a frame of post-copy. The vCPUs run, and every page of the frame must be missing.
    pub(super) fn postcopy(
        &mut self,
        link: &mut StreamLink,
        header: &FrameHeader,
        core: &Core,
    ) -> Result<(), MigrationError> {
        let list = link.receive_runs(header, self.ram.pages(), self.limit)?;
        for run in list.runs() {
            core.begin_placing(run.first, run.pages.into())?;
        }
        if core.machine.receives_in_place() {
            self.receive_in_place(link, &list)?;
            for run in list.runs() {
                if run.kind == RunKind::Zero {
                    self.zero_touched(run.first.index()..run.end() as usize);
                }
                core.arrived(run.first, run.pages.into())?;
            }
        } else {
            self.receive_and_copy(link, &list, core)?;
        }
        self.count(&list);
        Ok(())
    }

    fn receive_in_place(
        &self,
        link: &mut StreamLink,
        list: &RunList,
    ) -> Result<(), MigrationError> {
        let data = list.runs().iter().filter(|run| run.kind == RunKind::Data);
        // SAFETY: no other thread reads or writes the pages of the frame. In pre-copy no vCPU of
        // this VM runs, and the VMM's own accesses are refused. In post-copy the pages are missing,
        // and this thread has their `placing` bits.
        let bytes = unsafe { self.ram.unchecked() };
        let slices: Vec<RawSlice> = data
            .clone()
            .map(|run| RawSlice {
                start: bytes.alias(run.first, run.pages.into()),
                len: run.data_bytes(),
            })
            .collect();
        let mut hasher = link.take_runs_hasher();
        // SAFETY: each slice is mapped guest memory (`alias` checked the whole run) that lives as
        // long as `self.ram`. As above, no other thread reads or writes it.
        unsafe { link.receive_raw(&slices, self.limit)? };
        for run in data {
            let start = bytes.alias(run.first, run.pages.into()).cast_const();
            // SAFETY: as above. The bytes are initialized, like all mapped memory.
            hasher.update(unsafe { std::slice::from_raw_parts(start, run.data_bytes()) });
        }
        Ok(hasher.verify()?)
    }

    fn receive_and_copy(
        &mut self,
        link: &mut StreamLink,
        list: &RunList,
        core: &Core,
    ) -> Result<(), MigrationError> {
        self.bounce.resize(list.data_bytes(), 0);
        link.receive_exact(&mut self.bounce, self.limit)?;
        let mut hasher = link.take_runs_hasher();
        hasher.update(&self.bounce);
        hasher.verify()?;
        let mut data = self.bounce.chunks_exact(PAGE_BYTES);
        for run in list.runs() {
            for page in (run.first.0..run.end()).map(RamPage) {
                let bytes = match run.kind {
                    RunKind::Data => data
                        .next()
                        .expect("a page of data for each page of the runs"),
                    RunKind::Zero => &[0; PAGE_BYTES],
                };
                core.machine.install_copy(page, bytes)?;
                core.made_present(page, 1);
            }
        }
        Ok(())
    }
}
