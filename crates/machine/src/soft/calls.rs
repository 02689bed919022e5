//! The platform behind a hart's SBI calls.
//!
//! A call reaches guest memory by the accessor alone. If a page is missing, the vCPU leaves with a
//! memory fault, like an instruction of the guest, and makes the call again when the page is there.

use super::harts::{Harts, Start};
use crate::{Access, AccessError, Console, GuestRam};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_hypervisor::{RemoteFence, VcpuCore, Vm};
use pageferry_sbi::{Fence, HartMask, HartStatus, Memory, Platform, StartError};

/// What a hart's calls may use.
pub(super) struct Calls<'a> {
    pub(super) core: &'a mut VcpuCore,
    pub(super) vm: &'a Vm,
    pub(super) ram: &'a GuestRam,
    pub(super) harts: &'a Harts,
    pub(super) console: &'a Console,
}

/// A page that a call needs first, and for what.
pub(super) struct Missing {
    pub(super) page: RamPage,
    pub(super) access: Access,
}

/// The part of `bytes` bytes from `address` that lies in its first page. A console may take or give
/// less than it is asked for, so a call needs one page.
const fn within_page(address: u64, bytes: u64) -> usize {
    let left = PAGE_SIZE - address % PAGE_SIZE;
    (if bytes < left { bytes } else { left }) as usize
}

/// Waits for a missing page. Any other refusal means that the console fails.
fn again<T>(error: &AccessError, access: Access) -> Memory<T, Missing> {
    match *error {
        AccessError::Missing(page) => Err(Missing { page, access }),
        _ => Ok(None),
    }
}

impl Platform for Calls<'_> {
    type Again = Missing;

    fn harts(&self) -> u32 {
        self.harts.count()
    }

    fn set_timer(&mut self, deadline: u64) {
        self.core.hart_mut().set_timer(deadline);
    }

    fn send_ipi(&mut self, harts: HartMask) {
        self.harts.interrupt(harts);
    }

    /// A fence here covers all addresses and all address spaces.
    fn fence(&mut self, harts: HartMask, fence: Fence) {
        let fence = match fence {
            Fence::Code => RemoteFence::Code,
            Fence::Translations { .. } => RemoteFence::Translations,
        };
        self.vm.fence(fence, |hart| harts.has(hart));
    }

    fn start(&mut self, hart: u32, entry: u64, opaque: u64) -> Result<(), StartError> {
        if !entry.is_multiple_of(4) || !self.is_ram(entry, 4) {
            return Err(StartError::Address);
        }
        self.harts.start(hart, Start { entry, opaque })
    }

    fn status(&self, hart: u32) -> HartStatus {
        self.harts.status(hart, self.vm.time())
    }

    fn is_ram(&self, address: u64, bytes: u64) -> bool {
        self.ram.layout().contains(Gpa(address), bytes)
    }

    fn console_write(&mut self, address: u64, bytes: u64) -> Memory<u64, Missing> {
        let mut page = [0; PAGE_SIZE as usize];
        let text = &mut page[..within_page(address, bytes)];
        match self.ram.try_read(Gpa(address), text) {
            Ok(()) => Ok(Some(self.console.write(text) as u64)),
            Err(e) => again(&e, Access::Read),
        }
    }

    fn console_write_byte(&mut self, byte: u8) -> bool {
        self.console.write(&[byte]) == 1
    }

    fn console_read(&mut self, address: u64, bytes: u64) -> Memory<u64, Missing> {
        let write = |text: &[u8]| self.ram.try_write(Gpa(address), text);
        match self.console.give_input(within_page(address, bytes), write) {
            Ok(given) => Ok(Some(given as u64)),
            Err(e) => again(&e, Access::Write),
        }
    }
}
