//! A VM of KVM without the engine, for what the engine does not use: one vCPU in real mode, and one
//! slot of data that a test sets as it likes. It has guest_memfd for the data if asked.
#![expect(unsafe_code, reason = "hands memory to KVM, and maps it for the guest")]

use kvm_bindings::{
    KVM_MEM_GUEST_MEMFD, KVM_MEMORY_ATTRIBUTE_PRIVATE, KVM_X86_SW_PROTECTED_VM,
    kvm_create_guest_memfd, kvm_memory_attributes, kvm_pre_fault_memory, kvm_regs,
    kvm_userspace_memory_region, kvm_userspace_memory_region2,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use pageferry_addr::PAGE_SIZE;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

/// The flag, the field and the exit flag of the KVM Userfault series (James Houghton, December
/// 2024): `KVM_MEM_USERFAULT`, the first padding word of `kvm_userspace_memory_region2`, and
/// `KVM_MEMORY_EXIT_FLAG_USERFAULT`.
pub(crate) const USERFAULT: u32 = 1 << 3;
pub(crate) const EXIT_USERFAULT: u64 = 1 << 4;

/// The guest address of the data, which 2 MiB mappings can serve.
const DATA: u64 = 4 << 20;
const CODE: u64 = 0x1000;
/// The slot of the data.
const SLOT: u32 = 1;
/// The alignment of a large page.
const LARGE: usize = 2 << 20;

/// ebx: first byte, esi: first byte behind. Adds one to a word of each page. Puts out the last.
///
/// ```text
/// l: inc dword [ebx]; add ebx,0x1000; cmp ebx,esi; jb l; mov eax,[ebx-0x1000]; out 0x10,eax
/// ```
const COUNT: [u8; 27] = [
    0x66, 0x67, 0xff, 0x03, 0x66, 0x81, 0xc3, 0, 0x10, 0, 0, 0x66, 0x39, 0xf3, 0x72, 0xf0, 0x66,
    0x67, 0x8b, 0x83, 0, 0xf0, 0xff, 0xff, 0x66, 0xe7, 0x10,
];

/// The end of a guest's run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The program is through. The word is the last page's.
    Done(u32),
    /// `KVM_EXIT_MEMORY_FAULT` on a page of the data, with its flags.
    Fault { page: u64, flags: u64 },
    /// `KVM_RUN` failed without an exit.
    Failed(Errno),
}

/// Anonymous memory, aligned as large pages need.
pub(crate) struct Memory {
    start: *mut u8,
    bytes: usize,
}

// SAFETY: the pointer is to a mapping that belongs to no thread.
unsafe impl Send for Memory {}
// SAFETY: shared access is by atomics, and by the kernel.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zero memory. It is never unmapped, so that no VM outlives it.
    pub(crate) fn new(bytes: u64) -> Self {
        let bytes = bytes as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let null = std::ptr::null_mut();
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start = unsafe { rustix::mm::mmap_anonymous(null, bytes + LARGE, access, flags) };
        let start = start.unwrap().cast::<u8>();
        // SAFETY: the mapping is larger by what this adds.
        let start = unsafe { start.add(start.align_offset(LARGE)) };
        Self { start, bytes }
    }

    /// The word at a byte offset.
    pub(crate) fn word(&self, at: u64) -> &AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= self.bytes as u64);
        // SAFETY: it is in the mapping and aligned, and all access to it is atomic.
        unsafe { AtomicU32::from_ptr(self.start.add(at as usize).cast()) }
    }

    pub(crate) fn address(&self) -> u64 {
        self.start.addr() as u64
    }

    /// Takes all access from a range of bytes, or gives it back.
    pub(crate) fn protect(&self, range: Range<u64>, access: bool) {
        assert!(range.end <= self.bytes as u64);
        let flags = if access {
            rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE
        } else {
            rustix::mm::MprotectFlags::empty()
        };
        // SAFETY: the range is in the mapping. A test that touches it meanwhile dies.
        unsafe {
            let start = self.start.add(range.start as usize);
            rustix::mm::mprotect(start.cast(), (range.end - range.start) as usize, flags).unwrap();
        }
    }

    /// Asks for large pages.
    pub(crate) fn large(&self) {
        let advice = Advice::LinuxHugepage;
        // SAFETY: the range is the mapping, and the advice changes no byte.
        unsafe { rustix::mm::madvise(self.start.cast(), self.bytes, advice) }.unwrap();
    }

    /// Sets or clears a bit.
    pub(crate) fn set_bit(&self, bit: u64, value: bool) {
        let (word, mask) = (self.word(bit / 32 * 4), 1 << (bit % 32));
        if value {
            word.fetch_or(mask, Ordering::Release);
        } else {
            word.fetch_and(!mask, Ordering::Release);
        }
    }
}

/// The VM, which a thread may change while another runs the guest.
pub(crate) struct RawVm {
    pub(crate) slots: Slots,
    pub(crate) guest: Guest,
}

/// The slots of a VM.
pub(crate) struct Slots {
    pub(crate) vm: VmFd,
    pub(crate) data: Memory,
    /// The userfault bitmap of the data.
    pub(crate) bitmap: Memory,
    /// The file of the data's private memory.
    pub(crate) private: Option<OwnedFd>,
    pages: u64,
}

/// The vCPU of a VM.
pub(crate) struct Guest(VcpuFd);

impl RawVm {
    /// A VM without the slot of the data, which will have `pages`.
    pub(crate) fn new(pages: u64, private: bool) -> Result<Self, kvm_ioctls::Error> {
        let kvm = Kvm::new()?;
        let vm = if private {
            kvm.create_vm_with_type(KVM_X86_SW_PROTECTED_VM.into())?
        } else {
            kvm.create_vm()?
        };
        let mut slots = Slots {
            vm,
            data: Memory::new(pages * PAGE_SIZE),
            bitmap: Memory::new(pages.div_ceil(8).next_multiple_of(PAGE_SIZE)),
            private: None,
            pages,
        };
        if private {
            slots.private = Some(slots.guest_memfd()?);
            slots.vm.set_memory_attributes(kvm_memory_attributes {
                address: DATA,
                size: pages * PAGE_SIZE,
                attributes: KVM_MEMORY_ATTRIBUTE_PRIVATE.into(),
                flags: 0,
            })?;
        }
        let guest = Guest::new(&slots)?;
        Ok(Self { slots, guest })
    }
}

impl Slots {
    /// A file of private memory for the data.
    pub(crate) fn guest_memfd(&self) -> Result<OwnedFd, kvm_ioctls::Error> {
        let fd = self.vm.create_guest_memfd(kvm_create_guest_memfd {
            size: self.pages * PAGE_SIZE,
            ..Default::default()
        })?;
        // SAFETY: the kernel has just made it, for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The slot of the data with these flags, to which private memory adds its own.
    pub(crate) fn region(&self, flags: u32) -> kvm_userspace_memory_region2 {
        let mut region = kvm_userspace_memory_region2 {
            slot: SLOT,
            flags,
            guest_phys_addr: DATA,
            memory_size: self.pages * PAGE_SIZE,
            userspace_addr: self.data.address(),
            ..Default::default()
        };
        region.pad2[0] = self.bitmap.address();
        if let Some(private) = &self.private {
            region.flags |= KVM_MEM_GUEST_MEMFD;
            region.guest_memfd = private.as_raw_fd() as u32;
        }
        region
    }

    /// Sets the slot of the data.
    pub(crate) fn set(&self, flags: u32) -> Result<(), Errno> {
        self.set_region(self.region(flags))
    }

    /// Deletes the slot of the data.
    pub(crate) fn delete(&self) -> Result<(), Errno> {
        let mut gone = self.region(0);
        gone.memory_size = 0;
        self.set_region(gone)
    }

    /// Sets a slot, whose memory must be a [`Memory`].
    pub(crate) fn set_region(&self, region: kvm_userspace_memory_region2) -> Result<(), Errno> {
        // SAFETY: memory is never unmapped, and all access to it is atomic.
        errno(unsafe { self.vm.set_user_memory_region2(region) })
    }

    /// Sets the slot of the data by `KVM_SET_USER_MEMORY_REGION`.
    pub(crate) fn set_v1(&self, flags: u32) -> Result<(), Errno> {
        let region = kvm_userspace_memory_region {
            slot: SLOT,
            flags,
            guest_phys_addr: DATA,
            memory_size: self.pages * PAGE_SIZE,
            userspace_addr: self.data.address(),
        };
        // SAFETY: as above.
        errno(unsafe { self.vm.set_user_memory_region(region) })
    }

    /// The pages in the dirty log of the data since the last call.
    pub(crate) fn dirty(&self) -> Vec<u64> {
        let bytes = (self.pages * PAGE_SIZE) as usize;
        let log = self.vm.get_dirty_log(SLOT, bytes).unwrap();
        (0..self.pages)
            .filter(|page| log[*page as usize / 64] >> (page % 64) & 1 == 1)
            .collect()
    }
}

impl Guest {
    fn new(slots: &Slots) -> Result<Self, kvm_ioctls::Error> {
        let code = Memory::new(PAGE_SIZE);
        for (at, bytes) in COUNT.chunks(4).enumerate() {
            let mut word = [0; 4];
            word[..bytes.len()].copy_from_slice(bytes);
            let to = code.word(at as u64 * 4);
            to.store(u32::from_le_bytes(word), Ordering::Relaxed);
        }
        let region = kvm_userspace_memory_region {
            guest_phys_addr: CODE,
            memory_size: PAGE_SIZE,
            userspace_addr: code.address(),
            ..Default::default()
        };
        // SAFETY: memory is never unmapped, and all access to it is atomic.
        unsafe { slots.vm.set_user_memory_region(region)? };
        let vcpu = slots.vm.create_vcpu(0)?;
        let mut sregs = vcpu.get_sregs()?;
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        (sregs.ds.limit, sregs.ds.g) = (u32::MAX, 1);
        vcpu.set_sregs(&sregs)?;
        Ok(Self(vcpu))
    }

    /// Lets the guest count on `pages`, until something ends it.
    pub(crate) fn count(&mut self, pages: Range<u64>) -> Ended {
        let registers = kvm_regs {
            rip: CODE,
            rflags: 2,
            rbx: DATA + pages.start * PAGE_SIZE,
            rsi: DATA + pages.end * PAGE_SIZE,
            ..Default::default()
        };
        self.0.set_regs(&registers).unwrap();
        self.resume()
    }

    /// Lets the guest go on where it left.
    pub(crate) fn resume(&mut self) -> Ended {
        match self.0.run() {
            Ok(VcpuExit::IoOut(0x10, word)) => {
                Ended::Done(u32::from_le_bytes(word.try_into().unwrap()))
            }
            Ok(VcpuExit::MemoryFault { flags, gpa, size }) => {
                assert_eq!((size, gpa % PAGE_SIZE), (PAGE_SIZE, 0));
                let page = (gpa - DATA) / PAGE_SIZE;
                Ended::Fault { page, flags }
            }
            Ok(other) => panic!("{other:?} is no exit of this guest"),
            Err(error) => Ended::Failed(Errno::from_raw_os_error(error.errno())),
        }
    }

    /// `KVM_PRE_FAULT_MEMORY` of one page.
    pub(crate) fn pre_fault(&mut self, page: u64) -> Result<(), Errno> {
        /// `_IOWR(KVMIO, 0xd5, struct kvm_pre_fault_memory)`.
        const KVM_PRE_FAULT_MEMORY: u32 = 0xc040_aed5;
        let mut range = kvm_pre_fault_memory {
            gpa: DATA + page * PAGE_SIZE,
            size: PAGE_SIZE,
            ..Default::default()
        };
        let vcpu = self.0.as_raw_fd();
        // SAFETY: the kernel reads and writes the structure only, which is alive and of its size.
        match unsafe { libc::ioctl(vcpu, KVM_PRE_FAULT_MEMORY.into(), &raw mut range) } {
            0 => Ok(()),
            _ => errno(Err(kvm_ioctls::Error::last())),
        }
    }
}

fn errno<T>(result: Result<T, kvm_ioctls::Error>) -> Result<T, Errno> {
    result.map_err(|error| Errno::from_raw_os_error(error.errno()))
}
