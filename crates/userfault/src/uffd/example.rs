// The frame of the doc examples, which include this file. It is no part of the crate.

#[allow(unused_imports, reason = "each example uses some of them")]
use {
    pageferry_addr::{Hva, PageSize},
    pageferry_userfault::uffd::*,
    std::{os::fd::AsFd, time::Duration},
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use std::ptr::{null_mut, with_exposed_provenance_mut};

type Failure = Box<dyn std::error::Error>;

const PAGE: u64 = 4096;

/// Runs `body` with a userfaultfd, or says why there is none.
fn example(features: Features, body: impl FnOnce(Userfaultfd) -> Result<(), Failure>) {
    match Userfaultfd::open(features) {
        Ok(uffd) => body(uffd).unwrap(),
        Err(OpenError::MissingFeatures { missing, .. }) => {
            pageferry_testkit::skip(&missing.to_string().to_lowercase(), "the kernel is older");
        }
        Err(why) => {
            pageferry_testkit::skip("uffd", why);
        }
    }
}

/// Maps private pages for the rest of the process's life.
#[allow(dead_code, reason = "some examples use it")]
fn private(pages: u64) -> Result<Hva, Failure> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let len = (pages * PAGE) as usize;
    // SAFETY: the kernel chooses an unused address.
    let start = unsafe { mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE)? };
    Ok(Hva(start.expose_provenance() as u64))
}

/// Maps a new memfd twice, for the guest and as its alias.
#[allow(dead_code, reason = "some examples use it")]
fn shared(pages: u64) -> Result<(Hva, Hva), Failure> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let len = (pages * PAGE) as usize;
    let file = memfd_create("pageferry-example", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, len as u64)?;
    // SAFETY: the kernel chooses unused addresses.
    let map = || unsafe { mmap(null_mut(), len, access, MapFlags::SHARED, &file, 0) };
    let start = |at: *mut std::ffi::c_void| Hva(at.expose_provenance() as u64);
    Ok((start(map()?), start(map()?)))
}

/// Reads a byte of a mapping above.
#[allow(dead_code, reason = "some examples use it")]
fn read(at: Hva) -> u8 {
    // SAFETY: the address lies in a mapping, which is never unmapped.
    unsafe { with_exposed_provenance_mut::<u8>(at.0 as usize).read_volatile() }
}

/// Writes a byte of a mapping above.
#[allow(dead_code, reason = "some examples use it")]
fn write(at: Hva, value: u8) {
    // SAFETY: the address lies in a mapping, to which no reference exists.
    unsafe { with_exposed_provenance_mut::<u8>(at.0 as usize).write_volatile(value) }
}
