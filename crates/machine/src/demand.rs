#![expect(unsafe_code, reason = "registers guest memory with a userfaultfd")]
//! Guest memory whose pages come from another thread or process, such as a page server.

use crate::{Backing, GuestRam, MachineError};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::uffd::{Features, RegisterMode, Userfaultfd};

impl GuestRam {
    /// Registers all of private memory with a new userfaultfd. From now on, a thread that touches a
    /// page for the first time sleeps until the holder of the userfaultfd has placed the page. That
    /// is so for vCPUs, for the VMM, and for system calls. Nothing must have been written before.
    ///
    /// The machine knows of no missing page then: it is not armed, and it may be the source of a
    /// migration.
    ///
    /// # Errors
    /// [`MachineError::WrongState`] for memory with files: it has two mappings, and a page would be
    /// missing in both. [`MachineError::EngineUnavailable`] if no userfaultfd is permitted here.
    pub fn demand(&self) -> Result<Userfaultfd, MachineError> {
        if self.backing() != Backing::Anonymous {
            return Err(MachineError::WrongState(
                "pages can come from a page server into private memory only",
            ));
        }
        // A page server hears of pages that are given back, should that happen.
        let uffd = Userfaultfd::open(Features::EVENT_REMOVE).map_err(|why| {
            MachineError::EngineUnavailable(format!("memory cannot come from a page server: {why}"))
        })?;
        let start = self.guest_hva(RamPage(0));
        let bytes = self.pages() * PAGE_SIZE;
        // SAFETY: (1) all accesses to guest memory may sleep, and a page server touches none of it.
        // (2) No Rust reference to guest memory exists anywhere. (3) The mapping is ours, and ends
        // with this value; the userfaultfd then has nothing registered.
        unsafe { uffd.register(start, bytes, RegisterMode::MISSING) }
            .map_err(|why| MachineError::os("cannot register guest memory", why))?;
        Ok(uffd)
    }
}
