//! One interface over `vm-memory`'s own memory and ours, so that every test runs against both.

use pageferry_vm_memory::{SlotMemory, SlotSnapshot};
use std::sync::Arc;
use vm_memory::bitmap::NewBitmap;
use vm_memory::{
    FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend,
    GuestMemoryMmap, GuestRegionMmap,
};

pub(crate) const PAGE: u64 = 0x1000;

/// A changeable memory map of `GuestRegionMmap`s.
pub(crate) trait Kind<B: NewBitmap + Send + Sync + 'static = ()> {
    type Memory: GuestMemoryBackend<R = GuestRegionMmap<B>> + Clone;
    type Space: GuestAddressSpace<M = Self::Memory> + Send + Sync + 'static;

    /// A map of these regions, or `None` if they are refused.
    fn of(regions: Vec<GuestRegionMmap<B>>) -> Option<Self::Space>;
    fn insert(space: &Self::Space, region: Arc<GuestRegionMmap<B>>) -> bool;
    fn remove(space: &Self::Space, base: u64, size: u64) -> Option<Arc<GuestRegionMmap<B>>>;
    /// Moves the region at `base` to `to`, in one step if the kind can.
    fn relocate(space: &Self::Space, base: u64, size: u64, to: u64) -> bool;
}

/// `vm-memory`'s own memory.
pub(crate) struct Mmap;
/// The memory of this crate.
pub(crate) struct Slots;

impl<B: NewBitmap + Send + Sync + 'static> Kind<B> for Mmap {
    type Memory = GuestMemoryMmap<B>;
    type Space = GuestMemoryAtomic<GuestMemoryMmap<B>>;

    fn of(mut regions: Vec<GuestRegionMmap<B>>) -> Option<Self::Space> {
        use vm_memory::GuestMemoryRegion;
        regions.sort_by_key(GuestMemoryRegion::start_addr);
        GuestMemoryMmap::from_regions(regions)
            .ok()
            .map(GuestMemoryAtomic::new)
    }

    fn insert(space: &Self::Space, region: Arc<GuestRegionMmap<B>>) -> bool {
        let guard = space.lock().unwrap();
        match space.memory().insert_region(region) {
            Ok(next) => guard.replace(next),
            Err(_) => return false,
        }
        true
    }

    fn remove(space: &Self::Space, base: u64, size: u64) -> Option<Arc<GuestRegionMmap<B>>> {
        let guard = space.lock().unwrap();
        let (next, region) = space
            .memory()
            .remove_region(GuestAddress(base), size)
            .ok()?;
        guard.replace(next);
        Some(region)
    }

    fn relocate(space: &Self::Space, base: u64, size: u64, to: u64) -> bool {
        let guard = space.lock().unwrap();
        let Ok((without, region)) = space.memory().remove_region(GuestAddress(base), size) else {
            return false;
        };
        let moved = GuestRegionMmap::with_arc(region.get_mmap(), GuestAddress(to)).unwrap();
        match without.insert_region(Arc::new(moved)) {
            Ok(next) => guard.replace(next),
            Err(_) => return false,
        }
        true
    }
}

impl<B: NewBitmap + Send + Sync + 'static> Kind<B> for Slots {
    type Memory = SlotSnapshot<GuestRegionMmap<B>>;
    type Space = SlotMemory<GuestRegionMmap<B>>;

    fn of(regions: Vec<GuestRegionMmap<B>>) -> Option<Self::Space> {
        SlotMemory::from_regions(regions.into_iter().map(Arc::new)).ok()
    }

    fn insert(space: &Self::Space, region: Arc<GuestRegionMmap<B>>) -> bool {
        space.lock().insert_region(region).is_ok()
    }

    fn remove(space: &Self::Space, base: u64, size: u64) -> Option<Arc<GuestRegionMmap<B>>> {
        space.lock().remove_region(GuestAddress(base), size).ok()
    }

    fn relocate(space: &Self::Space, base: u64, size: u64, to: u64) -> bool {
        let snapshot = space.memory();
        let Some(region) = snapshot.find_region(GuestAddress(base)) else {
            return false;
        };
        let moved = GuestRegionMmap::with_arc(region.get_mmap(), GuestAddress(to)).unwrap();
        assert_eq!(moved.size() as u64, size);
        space
            .lock()
            .move_region(GuestAddress(base), Arc::new(moved))
            .is_ok()
    }
}

/// Anonymous memory of `size` bytes at `base`.
pub(crate) fn region<B: NewBitmap>(base: u64, size: u64) -> GuestRegionMmap<B> {
    GuestRegionMmap::from_range(GuestAddress(base), size as usize, None).unwrap()
}

/// A map of anonymous regions, each `(base, size)`.
pub(crate) fn map<B: NewBitmap + Send + Sync + 'static, K: Kind<B>>(
    ranges: &[(u64, u64)],
) -> K::Space {
    K::of(
        ranges
            .iter()
            .map(|&(base, size)| region(base, size))
            .collect(),
    )
    .unwrap()
}

/// A map of regions of a file, one after the other from `offset` on.
pub(crate) fn file_map<K: Kind>(ranges: &[(u64, u64)], offset: u64) -> K::Space {
    let total: u64 = ranges.iter().map(|(_, size)| size).sum();
    let file = tempfile();
    file.set_len(offset + total).unwrap();
    let file = Arc::new(file);
    let mut at = offset;
    let regions = ranges
        .iter()
        .map(|&(base, size)| {
            let place = FileOffset::from_arc(Arc::clone(&file), at);
            at += size;
            GuestRegionMmap::from_range(GuestAddress(base), size as usize, Some(place)).unwrap()
        })
        .collect();
    K::of(regions).unwrap()
}

/// A file that no other process sees.
pub(crate) fn tempfile() -> std::fs::File {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!(
        "pageferry-vm-memory-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let path = std::env::temp_dir().join(name);
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    std::fs::remove_file(path).unwrap();
    file
}

/// Runs each generic test against both kinds.
macro_rules! against_both {
    ($($test:ident),* $(,)?) => {
        mod vm_memorys_own {
            $(#[test] fn $test() { super::$test::<$crate::rust_vmm::kinds::Mmap>(); })*
        }
        mod slots {
            $(#[test] fn $test() { super::$test::<$crate::rust_vmm::kinds::Slots>(); })*
        }
    };
}
pub(crate) use against_both;
