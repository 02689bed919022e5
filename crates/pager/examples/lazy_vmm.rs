#![expect(unsafe_code, reason = "maps guest memory and registers it")]
//! A VMM of one's own that starts from a snapshot before its memory is read: it maps memory, makes
//! a userfaultfd, and sends both to a pager, as Firecracker does. Here the pager is in the same
//! process. Run it by `cargo run -p pageferry-pager --example lazy_vmm`.

use pageferry_addr::Hva;
use pageferry_pager::{Pager, Region, Restore, Settings, connect};
use pageferry_userfault::uffd::{Features, OpenError, RegisterMode, Userfaultfd};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
use std::error::Error;
use std::os::fd::AsFd;
use std::time::Instant;

/// The size of the guest's memory.
const BYTES: usize = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let scratch = std::env::temp_dir().join(format!("lazy-vmm-{}", std::process::id()));
    std::fs::create_dir(&scratch)?;
    let memory = scratch.join("memory");
    std::fs::write(&memory, vec![7; BYTES])?;
    let settings = Settings {
        directory: scratch.join("state"),
        ..Settings::default()
    };
    let pager = Pager::start(settings)?;
    let name = "example".parse()?;
    let socket = scratch.join("socket");
    pager.restore(&name, Restore::new(&memory, &socket))?;

    // The VMM. Its pages are missing until somebody touches them.
    let uffd = match Userfaultfd::open(Features::EVENT_REMOVE) {
        Err(why @ OpenError::NotPermitted { .. }) => {
            println!("SKIPPED: {why}");
            return Ok(std::fs::remove_dir_all(&scratch)?);
        }
        opened => opened?,
    };
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses an unused address.
    let guest = unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, access, MapFlags::PRIVATE)? };
    let guest: *mut u8 = guest.cast();
    let address = guest.expose_provenance();
    // SAFETY: the pager's threads resolve the faults and never touch the range. No reference to it
    // exists, and it stays mapped.
    unsafe { uffd.register(Hva(address as u64), BYTES as u64, RegisterMode::MISSING)? };
    let region = Region {
        address: address as u64,
        size: BYTES as u64,
        offset: 0,
    };
    let _stream = connect(&socket, &[region], 4096, uffd.as_fd())?;

    // The guest.
    let began = Instant::now();
    for page in (0..BYTES / 4096).step_by(1000) {
        // SAFETY: the byte lies in the mapping.
        assert_eq!(unsafe { guest.add(page * 4096).read_volatile() }, 7);
    }
    let vm = pager
        .status(&name)
        .and_then(|status| status.vm)
        .ok_or("it is served")?;
    println!(
        "after {:?}, {} of {} pages are there",
        began.elapsed(),
        vm.resident,
        vm.pages
    );
    assert!(vm.resident < vm.pages / 100);
    Ok(std::fs::remove_dir_all(&scratch)?)
}
