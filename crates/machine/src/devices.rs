#![expect(
    unsafe_code,
    reason = "hands out slices of pages that it has found present"
)]
//! Guest memory for devices written against `vm-memory` of rust-vmm (feature `vm-memory`).
//!
//! **Guarantee.** A device that is generic over `vm-memory`'s traits works on a machine that
//! receives a migration. Before it gets a slice, all pages of the slice are present. Its writes
//! through slices are in the machine's dirty log.
//!
//! **Mechanism.** A [`DeviceView`] enters the `gate` once, for all its slices. Each slice brings
//! its missing pages before it is handed out. A page that is present stays present. The slices'
//! bitmap is the log of written pages, which `vm-memory` marks after each write. The mark also ends
//! LR reservations of the soft engine.
//!
//! **Limits.** A write through a slice ends reservations just after its bytes. So an SC in between
//! may succeed, unlike with [`GuestRam::try_write`]. A slice of a write-tracked page is refused.
//! But a page may become tracked while a device holds its slice. Copies through a slice are
//! `vm-memory`'s. So are those by guest-physical address: it implements `Bytes<GuestAddress>` for
//! all address spaces, by slices. It promises single accesses only for up to 8 bytes that are
//! aligned alike at both ends. Copies through a [`DeviceRegion`] tear no aligned part, like those
//! of [`GuestRam::try_read`].
//!
//! **Neighbours.** `access` has the accessor on which this is built.

use crate::access::{At, Extent};
use crate::gate::Use;
use crate::{AccessError, GuestRam, RamRegion};
use pageferry_addr::{PAGE_SIZE, RamPage};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::bitmap::{Bitmap, BitmapSlice, WithBitmapSlice};
use vm_memory::guest_memory::{Error, Result};
use vm_memory::{
    AtomicAccess, Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion,
    GuestUsize, MemoryRegionAddress, ReadVolatile, VolatileSlice, WriteVolatile,
};

/// The memory of a machine as `vm-memory`'s address space. Clones are handles of the same memory.
///
/// Take a view for each operation of a device ([`GuestAddressSpace::memory`]), and drop it
/// afterwards. A view that is held keeps the machine from being armed, and from being migrated
/// away. While the machine waits for its memory, or is frozen, all accesses through a new view
/// fail.
///
/// An access that fails has an I/O error around an [`AccessError`].
///
/// ```
/// use pageferry_machine::{DeviceMemory, Engine, MachineSpec, create};
/// use std::sync::Arc;
/// use vm_memory::{Bytes, GuestAddress, GuestAddressSpace, GuestMemoryResult};
///
/// /// A device of any VMM: it knows `vm-memory`, not us.
/// struct Console<AS: GuestAddressSpace>(AS);
///
/// impl<AS: GuestAddressSpace> Console<AS> {
///     fn take(&self, addr: GuestAddress) -> GuestMemoryResult<u32> {
///         let memory = self.0.memory();
///         let value: u32 = memory.read_obj(addr)?;
///         memory.write_obj(0_u32, addr)?;
///         Ok(value)
///     }
/// }
///
/// let new = create(Engine::Soft, MachineSpec::new(1, 1 << 20))?;
/// let memory = DeviceMemory::new(Arc::clone(new.machine.ram()), || false);
/// memory.memory().write_obj(7_u32, GuestAddress(0x1000))?;
/// let console = Console(memory);
/// assert_eq!(console.take(GuestAddress(0x1000))?, 7);
/// assert_eq!(console.take(GuestAddress(0x1000))?, 0);
/// assert!(console.take(GuestAddress(1 << 20)).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct DeviceMemory {
    ram: Arc<GuestRam>,
    stop: Arc<dyn Fn() -> bool + Send + Sync>,
}

impl DeviceMemory {
    /// The memory `ram`. A device that waits for a missing page gives up when `stop` returns true.
    #[must_use]
    pub fn new(ram: Arc<GuestRam>, stop: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self {
            ram,
            stop: Arc::new(stop),
        }
    }
}

impl GuestAddressSpace for DeviceMemory {
    type M = DeviceView;
    type T = Arc<DeviceView>;

    fn memory(&self) -> Self::T {
        // Writers and readers get the same view.
        let entered = self.ram.gate.enter(Use::Write);
        let lease = Arc::new(Lease {
            memory: self.clone(),
            entered,
        });
        let regions = self.ram.layout().regions().iter();
        let regions = regions.map(|region| DeviceRegion {
            lease: Arc::clone(&lease),
            region: *region,
        });
        Arc::new(DeviceView {
            regions: regions.collect(),
        })
    }
}

/// A stay in the gate, for all slices of a view.
struct Lease {
    memory: DeviceMemory,
    entered: core::result::Result<(), AccessError>,
}

impl Drop for Lease {
    fn drop(&mut self) {
        if self.entered.is_ok() {
            self.memory.ram.gate.leave(Use::Write);
        }
    }
}

/// A device's view of guest memory, for one operation. See [`DeviceMemory`].
pub struct DeviceView {
    regions: Box<[DeviceRegion]>,
}

impl GuestMemoryBackend for DeviceView {
    type R = DeviceRegion;

    fn iter(&self) -> impl Iterator<Item = &DeviceRegion> {
        self.regions.iter()
    }

    /// Whether all the bytes are RAM. It brings no page.
    fn check_range(&self, base: GuestAddress, len: usize) -> bool {
        self.regions.iter().any(|region| {
            let offset = base.0.checked_sub(region.start_addr().0);
            offset.is_some_and(|at| region.has(at, len))
        })
    }
}

/// A contiguous piece of guest memory in a [`DeviceView`].
pub struct DeviceRegion {
    lease: Arc<Lease>,
    region: RamRegion,
}

fn refused(error: AccessError) -> Error {
    match error {
        AccessError::NotRam { .. } => Error::InvalidBackendAddress,
        error => Error::IOError(io::Error::other(error)),
    }
}

impl DeviceRegion {
    fn ram(&self) -> &GuestRam {
        &self.lease.memory.ram
    }

    /// Whether `len` bytes from `offset` are all in the region.
    fn has(&self, offset: u64, len: usize) -> bool {
        let end = offset.checked_add(len as u64);
        end.is_some_and(|end| end <= self.len())
    }

    /// Brings the missing pages of `count` bytes from `offset` on.
    fn ready(&self, offset: MemoryRegionAddress, count: usize) -> Result<Extent> {
        self.lease.entered.clone().map_err(refused)?;
        if !self.has(offset.0, count) {
            return Err(Error::InvalidBackendAddress);
        }
        let ram = self.ram();
        let at = At::Page(self.region.first, offset.0);
        let extent = ram.extent(at, count as u64).map_err(refused)?;
        while let Err(AccessError::Missing(page)) = ram.check_present(extent) {
            ram.bring(page, extent, &*self.lease.memory.stop)
                .map_err(refused)?;
        }
        Ok(extent)
    }

    /// At most `most` bytes from `addr`: as many as the region has there.
    fn left(&self, addr: MemoryRegionAddress, most: usize) -> Result<usize> {
        let left = self.len().checked_sub(addr.0);
        let left = left.ok_or(Error::InvalidBackendAddress)?;
        Ok(most.min(usize::try_from(left).unwrap_or(usize::MAX)))
    }

    /// A slice of the bytes from `addr`, at most `most` of them.
    fn some(
        &self,
        addr: MemoryRegionAddress,
        most: usize,
    ) -> Result<VolatileSlice<'_, Written<'_>>> {
        self.get_slice(addr, self.left(addr, most)?)
    }
}

impl GuestMemoryRegion for DeviceRegion {
    type B = GuestRam;

    fn len(&self) -> GuestUsize {
        self.region.pages * PAGE_SIZE
    }

    fn start_addr(&self) -> GuestAddress {
        GuestAddress(self.region.gfn.gpa().0)
    }

    fn bitmap(&self) -> Written<'_> {
        self.ram()
            .slice_at(self.region.first.byte_offset() as usize)
    }

    /// Brings the missing pages of the slice first.
    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, Written<'_>>> {
        let extent = self.ready(offset, count)?;
        let ram = self.ram();
        // A slice may write, so it covers no tracked page.
        ram.store(extent, &mut |_| ()).map_err(refused)?;
        let start = self.region.first.byte_offset() + offset.0;
        // SAFETY: `extent` checked that the bytes are in RAM, which lives as long as `self`. All
        // its pages are present, and stay so. While the lease lives, the machine cannot be armed or
        // frozen. So no thread places these pages or has plain slices of them, and all other
        // accesses are volatile.
        Ok(unsafe {
            let bytes = ram.unchecked().alias(RamPage(0), 0).add(start as usize);
            VolatileSlice::with_bitmap(bytes, count, ram.slice_at(start as usize), None)
        })
    }
}

impl Bytes<MemoryRegionAddress> for DeviceRegion {
    type E = Error;

    fn write(&self, buf: &[u8], addr: MemoryRegionAddress) -> Result<usize> {
        let count = self.left(addr, buf.len())?;
        self.write_slice(&buf[..count], addr)?;
        Ok(count)
    }

    fn read(&self, buf: &mut [u8], addr: MemoryRegionAddress) -> Result<usize> {
        let count = self.left(addr, buf.len())?;
        self.read_slice(&mut buf[..count], addr)?;
        Ok(count)
    }

    fn write_slice(&self, buf: &[u8], addr: MemoryRegionAddress) -> Result<()> {
        let extent = self.ready(addr, buf.len())?;
        self.ram().write_present(extent, buf).map_err(refused)
    }

    fn read_slice(&self, buf: &mut [u8], addr: MemoryRegionAddress) -> Result<()> {
        let extent = self.ready(addr, buf.len())?;
        self.ram().read_present(extent, buf);
        Ok(())
    }

    fn read_volatile_from<F: ReadVolatile>(
        &self,
        addr: MemoryRegionAddress,
        src: &mut F,
        count: usize,
    ) -> Result<usize> {
        Ok(self.some(addr, count)?.read_volatile_from(0, src, count)?)
    }

    fn read_exact_volatile_from<F: ReadVolatile>(
        &self,
        addr: MemoryRegionAddress,
        src: &mut F,
        count: usize,
    ) -> Result<()> {
        let slice = self.get_slice(addr, count)?;
        Ok(slice.read_exact_volatile_from(0, src, count)?)
    }

    fn write_volatile_to<F: WriteVolatile>(
        &self,
        addr: MemoryRegionAddress,
        dst: &mut F,
        count: usize,
    ) -> Result<usize> {
        Ok(self.some(addr, count)?.write_volatile_to(0, dst, count)?)
    }

    fn write_all_volatile_to<F: WriteVolatile>(
        &self,
        addr: MemoryRegionAddress,
        dst: &mut F,
        count: usize,
    ) -> Result<()> {
        let slice = self.get_slice(addr, count)?;
        Ok(slice.write_all_volatile_to(0, dst, count)?)
    }

    fn store<T: AtomicAccess>(
        &self,
        val: T,
        addr: MemoryRegionAddress,
        order: Ordering,
    ) -> Result<()> {
        let slice = self.get_slice(addr, size_of::<T>())?;
        Ok(slice.store(val, 0, order)?)
    }

    fn load<T: AtomicAccess>(&self, addr: MemoryRegionAddress, order: Ordering) -> Result<T> {
        let slice = self.get_slice(addr, size_of::<T>())?;
        Ok(slice.load(0, order)?)
    }
}

/// The log of written pages, from a byte of RAM on.
#[derive(Clone, Copy, Debug)]
pub struct Written<'a> {
    ram: &'a GuestRam,
    start: usize,
}

impl<'a> WithBitmapSlice<'a> for GuestRam {
    type S = Written<'a>;
}

/// The log of the pages that the VMM wrote. Offsets are bytes of RAM.
impl Bitmap for GuestRam {
    fn mark_dirty(&self, offset: usize, len: usize) {
        self.slice_at(0).mark_dirty(offset, len);
    }

    fn dirty_at(&self, offset: usize) -> bool {
        self.slice_at(0).dirty_at(offset)
    }

    fn slice_at(&self, offset: usize) -> Written<'_> {
        Written {
            ram: self,
            start: offset,
        }
    }
}

impl<'a> WithBitmapSlice<'_> for Written<'a> {
    type S = Written<'a>;
}

impl BitmapSlice for Written<'_> {}

impl Bitmap for Written<'_> {
    fn mark_dirty(&self, offset: usize, len: usize) {
        let at = At::Page(RamPage(0), (self.start + offset) as u64);
        if len > 0
            && let Ok(extent) = self.ram.extent(at, len as u64)
        {
            // Also if a page became tracked meanwhile. It was not when the slice was handed out.
            self.ram.stored(extent);
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = (self.start + offset) as u64 / PAGE_SIZE;
        self.ram.written.is_marked(RamPage(page))
    }

    fn slice_at(&self, offset: usize) -> Self {
        Self {
            start: self.start + offset,
            ..*self
        }
    }
}
