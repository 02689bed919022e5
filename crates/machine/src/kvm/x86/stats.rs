//! KVM's statistics of a VM: how large its mappings of guest memory are
//! (`KVM_GET_STATS_FD` in `Documentation/virt/kvm/api.rst`, Linux 5.14).

use super::sys::stats_fd;
use kvm_ioctls::VmFd;
use pageferry_addr::PageSize;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes of guest memory that KVM maps by pages of 2 MiB and more. `None` if it does not count
/// them.
pub(super) fn large_bytes(vm: &VmFd) -> Option<u64> {
    let stats = File::from(stats_fd(vm).ok()?);
    let sizes = [
        ("pages_2m", PageSize::Size2M),
        ("pages_1g", PageSize::Size1G),
    ];
    sizes.into_iter().try_fold(0, |sum, (name, size)| {
        let pages = value(&stats, name).ok()??;
        Some(sum + pages * size.bytes())
    })
}

/// The value with this name. The header is six words: flags, bytes of a name, number of
/// descriptors, and the offsets of id, descriptors and data. A descriptor is 16 bytes, with the
/// offset in the data at byte 8, then the name.
fn value(stats: &File, name: &str) -> io::Result<Option<u64>> {
    let word = |at: u64| -> io::Result<u64> {
        let mut bytes = [0; 4];
        stats.read_exact_at(&mut bytes, at)?;
        Ok(u32::from_ne_bytes(bytes).into())
    };
    let (name_bytes, descriptors, first, data) = (word(4)?, word(8)?, word(16)?, word(20)?);
    let mut here = vec![0; name_bytes as usize];
    for index in 0..descriptors {
        let at = first + index * (16 + name_bytes);
        stats.read_exact_at(&mut here, at + 16)?;
        if here.split(|byte| *byte == 0).next() == Some(name.as_bytes()) {
            let mut bytes = [0; 8];
            stats.read_exact_at(&mut bytes, data + word(at + 8)?)?;
            return Ok(Some(u64::from_ne_bytes(bytes)));
        }
    }
    Ok(None)
}
