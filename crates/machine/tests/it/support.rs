//! Shared by the tests of the KVM engine: a guest in ring 3 over flat tables, and limits on
//! waiting.

use crate::place::placing;
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{
    Backing, DOORBELL_GPA, Exit, GuestRam, Kicker, MachineSpec, NewMachine, RamLayout, StartMode,
    StartState, Vcpu, kvm,
};
pub(crate) use pageferry_testkit::process::runs_in_child;
use pageferry_testkit::{LIMIT, skip};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The guest's page tables.
pub(crate) const TABLES: Range<RamPage> = RamPage(1)..RamPage(5);
/// The page of the first program.
pub(crate) const CODE: RamPage = RamPage(5);
/// The first page that no program and no table uses.
pub(crate) const DATA: RamPage = RamPage(16);

/// rdi: first byte, rsi: first byte behind. Adds one to a word of each page, once, and rings.
///
/// ```text
/// l: inc qword [rdi]; add rdi,0x1000; cmp rdi,rsi; jb l; mov ebx,0xd0000000; mov [rbx],rdi; jmp .
/// ```
pub(crate) const COUNT: [u8; 25] = [
    0x48, 0xff, 0x07, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7, 0x72, 0xf1, 0xbb, 0, 0, 0,
    0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
];

/// Whether this host has no KVM.
pub(crate) fn no_kvm() -> bool {
    kvm::probe_vm().err().is_some_and(|why| skip("kvm", why))
}

/// A machine with flat tables: the first GiB, and the doorbell's 2 MiB, at their own addresses.
pub(crate) fn machine(vcpus: u32, pages: u64) -> NewMachine {
    pluggable(vcpus, pages).0
}

/// [`machine`], with interrupt controllers or without.
pub(crate) fn machine_with(vcpus: u32, pages: u64, irqchip: kvm::Irqchip) -> NewMachine {
    let options = kvm::KvmOptions {
        irqchip,
        ..kvm::KvmOptions::default()
    };
    pluggable_with(vcpus, pages, options).0
}

/// [`machine`], with this kind of dirty log.
pub(crate) fn tracked(vcpus: u32, pages: u64, dirty_tracking: kvm::DirtyTracking) -> NewMachine {
    let options = kvm::KvmOptions {
        dirty_tracking,
        ..kvm::KvmOptions::default()
    };
    pluggable_with(vcpus, pages, options).0
}

/// The kinds of dirty log of this host: a bitmap, and rings that are large or overflow often.
pub(crate) fn trackings() -> Vec<kvm::DirtyTracking> {
    use kvm::DirtyTracking::{Bitmap, Ring};
    let mut kinds = vec![Bitmap];
    match kvm::create_with(
        MachineSpec::new(1, PAGE_SIZE),
        kvm::KvmOptions {
            dirty_tracking: Ring(SMALL_RING),
            ..kvm::KvmOptions::default()
        },
    ) {
        Ok(_) => kinds.extend([Ring(1 << 16), Ring(SMALL_RING)]),
        Err(why) => {
            skip("dirty-ring", why);
        }
    }
    kinds
}

/// The entries of a small ring. KVM keeps 64 free, and on Intel CPUs 512 more.
pub(crate) const SMALL_RING: u32 = 1024;

/// [`machine`], plus a handle that plugs memory beyond RAM into it.
pub(crate) fn pluggable(vcpus: u32, pages: u64) -> (NewMachine, kvm::MemoryPlug) {
    pluggable_with(vcpus, pages, kvm::KvmOptions::default())
}

fn pluggable_with(
    vcpus: u32,
    pages: u64,
    options: kvm::KvmOptions<'_>,
) -> (NewMachine, kvm::MemoryPlug) {
    let spec = MachineSpec::new(vcpus, pages * PAGE_SIZE);
    let (new, plug) = kvm::create_pluggable(spec, options).unwrap();
    write_tables(new.machine.ram());
    (new, plug)
}

/// [`machine`], whose memory is of `backing`.
pub(crate) fn machine_on(backing: Backing, vcpus: u32, pages: u64) -> NewMachine {
    let spec = MachineSpec {
        backing,
        ..MachineSpec::new(vcpus, pages * PAGE_SIZE)
    };
    let new = kvm::create(spec).unwrap();
    write_tables(new.machine.ram());
    new
}

/// Memory to plug.
pub(crate) fn memory(pages: u64) -> Arc<GuestRam> {
    let layout = RamLayout::for_memory(pages * PAGE_SIZE).unwrap();
    Arc::new(GuestRam::new(layout).unwrap())
}

/// Tables in pages 1 to 4, accessed and dirty.
pub(crate) fn write_tables(ram: &GuestRam) {
    const TABLE: u64 = 0x67;
    const LARGE: u64 = 0xe7;
    let entry = |page: u64, index: u64, value: u64| {
        let at = (RamPage(page), index * 8);
        ram.try_write(at, &value.to_le_bytes()).unwrap();
    };
    entry(1, 0, 0x2000 | TABLE);
    entry(2, 0, 0x3000 | TABLE);
    entry(2, 3, 0x4000 | TABLE);
    for index in 0..512 {
        entry(3, index, (index << 21) | LARGE);
    }
    let doorbell = DOORBELL_GPA.0;
    entry(4, (doorbell >> 21) & 511, (doorbell & !0x1f_ffff) | LARGE);
}

/// Writes `code` at [`CODE`] + `slot` pages, and sets `vcpu` to start there with `args`.
pub(crate) fn start(ram: &GuestRam, vcpu: &mut dyn Vcpu, slot: u64, code: &[u8], args: [u64; 2]) {
    let page = RamPage(CODE.0 + slot);
    placing(ram).write_at(page, 0, code);
    let start = StartState {
        entry: page.byte_offset(),
        stack: 0xf000,
        args,
        tables: Gpa(0x1000),
        mode: StartMode::User,
    };
    vcpu.set_start(&start).unwrap();
}

/// Kicks a vCPU again and again once a limit has passed, so that no test hangs.
pub(crate) struct Watchdog {
    done: Arc<AtomicBool>,
    fired: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn new(kicker: Arc<dyn Kicker>, limit: Duration) -> Self {
        let done = Arc::new(AtomicBool::new(false));
        let fired = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (done, fired) = (Arc::clone(&done), Arc::clone(&fired));
            move || {
                let end = Instant::now() + limit;
                while !done.load(Ordering::Acquire) {
                    if Instant::now() > end {
                        fired.store(true, Ordering::Release);
                        kicker.kick();
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        });
        Self {
            done,
            fired,
            thread: Some(thread),
        }
    }

    pub(crate) fn fired(&self) -> bool {
        self.fired.load(Ordering::Acquire)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Release);
        self.thread.take().map(JoinHandle::join);
    }
}

/// Stops the vCPUs on drop, also after a panic.
struct KickOnDrop(Vec<Arc<dyn Kicker>>);

impl Drop for KickOnDrop {
    fn drop(&mut self) {
        self.0.iter().for_each(|kicker| kicker.kick());
    }
}

/// Calls `drive` on each vCPU on a separate thread while `meanwhile` runs. Then kicks them all.
pub(crate) fn drive_beside<T>(
    vcpus: &mut [Box<dyn Vcpu>],
    drive: impl Fn(&mut dyn Vcpu) + Sync,
    meanwhile: impl FnOnce() -> T,
) -> T {
    std::thread::scope(|scope| {
        let drive = &drive;
        let _kick = KickOnDrop(vcpus.iter().map(|vcpu| vcpu.kicker()).collect());
        for vcpu in vcpus {
            scope.spawn(move || drive(vcpu.as_mut()));
        }
        meanwhile()
    })
}

/// Calls `drive` on each vCPU on a separate thread, and `meanwhile` until all have ended.
pub(crate) fn drive_all(
    vcpus: &mut [Box<dyn Vcpu>],
    drive: impl Fn(&mut dyn Vcpu) + Sync,
    mut meanwhile: impl FnMut(),
) {
    std::thread::scope(|scope| {
        let drive = &drive;
        let threads: Vec<_> = vcpus
            .iter_mut()
            .map(|vcpu| scope.spawn(move || drive(vcpu.as_mut())))
            .collect();
        while !threads.iter().all(|thread| thread.is_finished()) {
            meanwhile();
        }
    });
}

/// Runs until the vCPU leaves; fails the test after [`LIMIT`].
pub(crate) fn run(vcpu: &mut dyn Vcpu) -> Exit {
    let watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
    let exit = vcpu.run().unwrap();
    assert!(
        !watchdog.fired(),
        "the guest did not leave within {LIMIT:?}"
    );
    exit
}

/// The value of an eight-byte store to the doorbell.
pub(crate) fn rung(exit: Exit) -> u64 {
    match exit {
        Exit::MmioWrite {
            gpa,
            value,
            size: 8,
        } if gpa == DOORBELL_GPA => value,
        other => panic!("{other:?} is no ring of the doorbell"),
    }
}

/// The `index`th word of a page.
pub(crate) fn word(ram: &GuestRam, page: RamPage, index: usize) -> u64 {
    let mut bytes = [0; 8];
    ram.try_read((page, index as u64 * 8), &mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}
