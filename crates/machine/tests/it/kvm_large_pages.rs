//! Memory that the host backs by 2 MiB pages, under a log and after it: the behaviour of Linux's
//! `tools/testing/selftests/kvm/x86/dirty_log_page_splitting_test.c`. The tests always check that a
//! harvest names exactly the 4 KiB pages that were written, and that no store is lost. They check
//! the sizes of the guest's mappings only if KVM has the statistics and maps this guest by 2 MiB.
#![expect(
    unsafe_code,
    reason = "asks the host for large pages, and KVM for its statistics"
)]

use crate::support::{
    COUNT, Watchdog, drive_all, machine, no_kvm, rung, runs_in_child, start, word,
};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{GuestRam, NewMachine, Vcpu};
use pageferry_testkit::LIMIT;
use pageferry_userfault::PageBitmap;
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::{File, read_dir, read_link, read_to_string};
use std::io;
use std::ops::Range;
use std::os::fd::{FromRawFd, RawFd};
use std::os::unix::fs::FileExt;

const VCPUS: u64 = 2;
/// Pages of 4 KiB in one of 2 MiB.
const LARGE: u64 = 512;
const LARGES: u64 = 8;
/// Tables and code are in the first 2 MiB.
const DATA: Range<u64> = LARGE..LARGE + LARGES * LARGE;

/// KVM's statistics of a VM: `KVM_GET_STATS_FD` in `Documentation/virt/kvm/api.rst`.
pub(crate) struct Stats(File);

impl Stats {
    /// The statistics of this process's only VM.
    fn new() -> io::Result<Self> {
        let descriptors = read_dir("/proc/self/fd")?.filter_map(Result::ok);
        let vms = descriptors.filter(|entry| {
            read_link(entry.path()).is_ok_and(|to| to.as_os_str() == "anon_inode:kvm-vm")
        });
        let vms: Vec<i32> = vms
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        let [vm] = vms[..] else {
            panic!("{vms:?} are VMs, and one was expected");
        };
        Self::of(vm)
    }

    /// The statistics of a VM.
    pub(crate) fn of(vm: RawFd) -> io::Result<Self> {
        /// `_IO(KVMIO, 0xce)`.
        const KVM_GET_STATS_FD: u32 = 0xaece;
        // SAFETY: the call takes no argument. A descriptor that is no longer a VM would be refused.
        let fd = unsafe { libc::ioctl(vm, KVM_GET_STATS_FD.into()) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just made it, for us.
        Ok(Self(unsafe { File::from_raw_fd(fd) }))
    }

    fn read<const BYTES: usize>(&self, at: u64) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        self.0.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn word(&self, at: u64) -> u64 {
        u32::from_ne_bytes(self.read(at)).into()
    }

    /// The value with this name. The header is six words: flags, bytes of a name, number of
    /// descriptors, and the offsets of id, descriptors and data. A descriptor is 16 bytes, with the
    /// offset in the data at byte 8, then the name.
    fn get(&self, name: &str) -> u64 {
        let [name_bytes, descriptors, first, data] = [4, 8, 16, 20].map(|at| self.word(at));
        let mut all = (0..descriptors).map(|i| first + i * (16 + name_bytes));
        let named = |at: &u64| {
            let mut there = vec![0; name_bytes as usize];
            self.0.read_exact_at(&mut there, at + 16).unwrap();
            there.split(|byte| *byte == 0).next() == Some(name.as_bytes())
        };
        let at = all.find(named).expect("x86 hosts count pages by size");
        u64::from_ne_bytes(self.read(data + self.word(at + 8)))
    }

    /// The number of mappings of 4 KiB.
    pub(crate) fn small(&self) -> u64 {
        self.get("pages_4k")
    }

    /// The number of mappings of 2 MiB and more.
    pub(crate) fn large(&self) -> u64 {
        self.get("pages_2m") + self.get("pages_1g")
    }
}

/// A machine whose mapping begins at a multiple of 2 MiB, as large pages need. The last try takes
/// any.
fn aligned_machine() -> NewMachine {
    for _ in 0..16 {
        let new = machine(VCPUS as u32, DATA.end);
        let beyond = new.machine.ram().guest_hva(RamPage(0)).0 % (LARGE * PAGE_SIZE);
        if beyond == 0 {
            return new;
        }
        drop(new);
        // The kernel maps from the top down. With this much taken, the next mapping is aligned.
        // Never unmapped.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let bytes = beyond as usize;
        // SAFETY: the kernel chooses an unused address; nothing existing is replaced.
        unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags)
        }
        .unwrap();
    }
    machine(VCPUS as u32, DATA.end)
}

/// Makes the host back the data by 2 MiB pages, and nothing else, whatever its policy for shared
/// memory.
fn collapse(ram: &GuestRam) -> io::Result<()> {
    /// `include/uapi/asm-generic/mman-common.h`; Linux 6.1 and later.
    const MADV_COLLAPSE: i32 = 25;
    let advise = |pages: Range<u64>, advice| {
        let at = ram.guest_hva(RamPage(pages.start)).0 as *mut _;
        let bytes = (pages.end - pages.start) * PAGE_SIZE;
        // SAFETY: the range is in the guest's mapping. Neither advice changes a byte.
        match unsafe { libc::madvise(at, bytes as usize, advice) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    };
    advise(0..DATA.start, libc::MADV_NOHUGEPAGE)?;
    advise(DATA, MADV_COLLAPSE)
}

/// Whether KVM splits large mappings eagerly when a log starts. Only the TDP MMU does.
fn splits_eagerly() -> bool {
    ["eager_page_split", "tdp_mmu"].iter().all(|parameter| {
        read_to_string(format!("/sys/module/kvm/parameters/{parameter}"))
            .is_ok_and(|text| text.trim() == "Y")
    })
}

struct Test {
    new: NewMachine,
    /// The number of writes to each page of the data.
    counts: Vec<u64>,
}

impl Test {
    /// The vCPUs share the ranges, and write each page once.
    fn count(&mut self, ranges: &[Range<u64>]) {
        let ram = self.new.machine.ram();
        let drive = |vcpu: &mut dyn Vcpu| {
            let _watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
            let id = u64::from(vcpu.id());
            for range in ranges.iter().skip(id as usize).step_by(VCPUS as usize) {
                let args = [range.start, range.end].map(|page| page * PAGE_SIZE);
                start(ram, vcpu, id, &COUNT, args);
                assert_eq!(rung(vcpu.run().unwrap()), args[1]);
            }
        };
        drive_all(&mut self.new.vcpus, drive, std::thread::yield_now);
        for page in ranges.iter().cloned().flatten() {
            self.counts[(page - DATA.start) as usize] += 1;
        }
        for (page, count) in DATA.zip(&self.counts) {
            assert_eq!(word(ram, RamPage(page), 0), *count, "page {page}");
        }
    }

    fn count_all(&mut self) {
        let middle = DATA.start + (DATA.end - DATA.start) / 2;
        self.count(&[DATA.start..middle, middle..DATA.end]);
    }

    /// Returns the pages of the data that the log names, and checks that the next harvest names
    /// none.
    fn harvest(&self) -> Vec<u64> {
        let dirty = PageBitmap::new(DATA.end as usize);
        let machine = &self.new.machine;
        machine.harvest_dirty(&dirty, true).unwrap();
        let none = PageBitmap::new(DATA.end as usize);
        assert_eq!(machine.harvest_dirty(&none, true).unwrap(), 0);
        DATA.filter(|page| dirty.test(RamPage(*page))).collect()
    }
}

#[test]
fn a_log_splits_large_pages_and_they_are_large_again_after_it() {
    // It finds its VM among the process's descriptors.
    if no_kvm() || runs_in_child() {
        return;
    }
    let new = aligned_machine();
    let ram = new.machine.ram();
    ram.allocate().unwrap();
    let collapsed = collapse(ram);
    let stats = Stats::new();
    let counts = vec![0; (DATA.end - DATA.start) as usize];
    let mut test = Test { new, counts };
    test.count_all();
    // The reason why sizes are not checked, if they are not.
    let sizes = match (&collapsed, &stats) {
        (Err(why), _) => Err(format!("the host gives no large pages: {why}")),
        (_, Err(why)) => Err(format!("KVM has no statistics: {why}")),
        (_, Ok(stats)) if stats.large() < LARGES => Err(format!(
            "KVM maps {} large pages of {LARGES}",
            stats.large()
        )),
        (_, Ok(stats)) => Ok(stats),
    };
    match &sizes {
        Ok(stats) => println!("{} large pages", stats.large()),
        Err(why) => println!("sizes are NOT checked, only the log: {why}"),
    }
    let large = |what: &str, expected: u64| {
        if let Ok(stats) = &sizes {
            assert_eq!(stats.large(), expected, "{what}");
        }
    };
    let all: Vec<_> = DATA.collect();
    let whole = sizes.as_ref().map_or(0, |stats| stats.large());
    for _ in 0..2 {
        test.new.machine.set_dirty_log(true).unwrap();
        large("log on", if splits_eagerly() { 0 } else { whole });
        assert_eq!(test.harvest(), [0; 0]);

        // A few pages in some of the large ones: the log must have these, and not their neighbours.
        let few = [
            0,
            1,
            77,
            LARGE - 1,
            LARGE,
            3 * LARGE + 5,
            LARGES * LARGE - 1,
        ];
        let few = few.map(|page| DATA.start + page);
        test.count(&few.map(|page| page..page + 1));
        assert_eq!(test.harvest(), few);

        for _ in 0..2 {
            test.count_all();
            large("all written under the log", 0);
            assert_eq!(test.harvest(), all);
            large("the log cleared", 0);
        }

        test.new.machine.set_dirty_log(false).unwrap();
        test.count_all();
        large("log off, all written", whole);
    }
}
