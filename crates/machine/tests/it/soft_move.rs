//! A busy VM of the soft engine moves to another machine: dirty log, pause, state, missing pages.

use crate::place::placing;
use crate::start::start_at;
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_guest::{Isa, Workload};
use pageferry_machine::{
    Access, Delivery, Engine, FirstInstruction, GuestRam, HookVerdict, Kicker, MachineError,
    MachineSpec, NewMachine, StartMode, StartState, VcpuHooks, VcpuState, VcpuThreads, create,
};
use pageferry_testkit::{LIMIT, wait_until};
use pageferry_userfault::PageBitmap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const SPEC: MachineSpec = MachineSpec::new(4, 8 << 20);

fn copy_page(from: &GuestRam, to: &GuestRam, page: RamPage) {
    let mut bytes = [0; PAGE_SIZE as usize];
    from.try_read(page, &mut bytes).unwrap();
    placing(to).write(page, &bytes);
}

/// Serves memory faults from another VM's RAM.
struct Hooks {
    ram: Arc<GuestRam>,
    source: Option<(Arc<GuestRam>, Arc<PageBitmap>)>,
    faults: AtomicU64,
    /// One thread at a time brings a page.
    bringing: Mutex<()>,
    trouble: Mutex<Vec<String>>,
}

impl Hooks {
    fn new(ram: &Arc<GuestRam>, source: Option<(Arc<GuestRam>, Arc<PageBitmap>)>) -> Arc<Self> {
        Arc::new(Self {
            ram: Arc::clone(ram),
            source,
            faults: AtomicU64::new(0),
            bringing: Mutex::default(),
            trouble: Mutex::default(),
        })
    }

    fn bring(&self, page: RamPage) {
        let (source, missing) = self.source.as_ref().expect("nothing is missing here");
        let _bringing = self.bringing.lock().unwrap();
        if missing.test(page) {
            copy_page(source, &self.ram, page);
            missing.clear(page);
        }
    }

    fn assert_no_trouble(&self) {
        assert!(
            self.trouble.lock().unwrap().is_empty(),
            "{:?}",
            self.trouble.lock().unwrap()
        );
    }
}

impl VcpuHooks for Hooks {
    fn memory_fault(
        &self,
        _vcpu: u32,
        page: RamPage,
        _access: Access,
        _kicker: &dyn Kicker,
    ) -> HookVerdict {
        self.faults.fetch_add(1, Ordering::Relaxed);
        self.bring(page);
        HookVerdict::Resume
    }

    fn mmio_write(&self, vcpu: u32, gpa: Gpa, value: u64, _: u8) -> HookVerdict {
        let what = format!("vCPU {vcpu} rang {value:#x} at {gpa}");
        self.trouble.lock().unwrap().push(what);
        HookVerdict::Park
    }

    fn failed(&self, vcpu: u32, error: &MachineError) {
        let what = format!("vCPU {vcpu} failed: {error}");
        self.trouble.lock().unwrap().push(what);
    }
}

fn load(new: &mut NewMachine, workload: &Workload) {
    for (gpa, bytes) in workload.image() {
        new.machine.ram().try_write(gpa, &bytes).unwrap();
    }
    for vcpu in &mut new.vcpus {
        let start = workload.start(vcpu.id());
        vcpu.set_start(&StartState {
            entry: start.entry,
            stack: start.stack,
            args: start.args,
            tables: start.tables,
            mode: StartMode::User,
        })
        .unwrap();
    }
}

#[track_caller]
fn verify(workload: &Workload, ram: &GuestRam) -> u64 {
    let verdict = workload
        .verify(&mut |page, bytes| ram.try_read(page, bytes))
        .unwrap();
    assert!(verdict.holds(), "{verdict:?}");
    done(workload, ram)
}

/// The number of pages that all vCPUs have rewritten.
fn done(workload: &Workload, ram: &GuestRam) -> u64 {
    done_each(workload, ram).iter().sum()
}

/// The number of pages that each vCPU has rewritten.
fn done_each(workload: &Workload, ram: &GuestRam) -> Vec<u64> {
    (0..SPEC.vcpus)
        .map(|vcpu| {
            let mut page = [0; PAGE_SIZE as usize];
            let control = workload.control_page(vcpu);
            ram.try_read(control, &mut page).unwrap();
            pageferry_guest::Control::parse(&page).unwrap().done
        })
        .collect()
}

/// Whether each vCPU has rewritten more pages than `then`. On a busy host some may not have run
/// when others have done much.
fn all_ran(workload: &Workload, ram: &GuestRam, then: &[u64]) -> bool {
    let now = done_each(workload, ram);
    now.iter().zip(then).all(|(now, then)| now > then)
}

/// Copies the pages whose bits are set and clears them.
fn copy_dirty(dirty: &PageBitmap, from: &GuestRam, to: &GuestRam) {
    while let Some(page) = dirty.next_set(0) {
        let page = RamPage(page as u64);
        dirty.clear(page);
        copy_page(from, to, page);
    }
}

#[test]
fn a_busy_vm_moves_and_loses_nothing() {
    let workload = Workload::new(Isa::Rv64, SPEC.vcpus, SPEC.memory_bytes).unwrap();
    let mut old = create(Engine::Soft, SPEC).unwrap();
    load(&mut old, &workload);
    let old_ram = Arc::clone(old.machine.ram());
    let old_hooks = Hooks::new(&old_ram, None);
    let old_threads =
        VcpuThreads::start(old.vcpus, Arc::clone(&old_hooks) as Arc<dyn VcpuHooks>).unwrap();
    old_threads.resume();
    wait_until("a first pass", || {
        done(&workload, &old_ram) > old_ram.pages()
    });

    // Pre-copy: everything once, then the pages written meanwhile, twice.
    let new = create(Engine::Soft, SPEC).unwrap();
    let new_ram = Arc::clone(new.machine.ram());
    let missing = Arc::new(PageBitmap::new(new_ram.pages() as usize));
    assert!(
        new.machine
            .arm_userfault(Arc::clone(&missing), Delivery::Exit.into())
            .unwrap()
            .is_empty()
    );
    old.machine.set_dirty_log(true).unwrap();
    for page in (0..old_ram.pages()).map(RamPage) {
        copy_page(&old_ram, &new_ram, page);
    }
    for _ in 0..2 {
        // Long enough for the guest to write some pages, too short for all.
        std::thread::sleep(Duration::from_millis(1));
        let dirty = PageBitmap::new(old_ram.pages() as usize);
        let named = old.machine.harvest_dirty(&dirty, true).unwrap();
        assert_eq!(named, dirty.count());
        copy_dirty(&dirty, &old_ram, &new_ram);
    }

    // Switch-over.
    let ran = done(&workload, &old_ram);
    wait_until("a page more", || done(&workload, &old_ram) > ran);
    old_threads.pause(LIMIT).unwrap();
    old_hooks.assert_no_trouble();
    let switch_over = verify(&workload, &old_ram);
    let each_then = done_each(&workload, &old_ram);
    let named = old.machine.harvest_dirty(&missing, false).unwrap();
    assert!(named > 0 && named == missing.count());
    new.machine.begin_postcopy().unwrap();
    let states = old_threads.save().unwrap();

    // Post-copy: vCPUs bring the pages that they touch, this thread brings the rest.
    let new_hooks = Hooks::new(&new_ram, Some((Arc::clone(&old_ram), Arc::clone(&missing))));
    let new_threads =
        VcpuThreads::start(new.vcpus, Arc::clone(&new_hooks) as Arc<dyn VcpuHooks>).unwrap();
    new_threads.restore(&states).unwrap();
    let before = Instant::now();
    new_threads.resume();
    new.machine.assist_postcopy(&|| false, &|_| {}).unwrap();
    wait_until("the first fault", || {
        new_hooks.faults.load(Ordering::Relaxed) > 0
    });
    while let Some(page) = missing.next_set(0) {
        new_hooks.bring(RamPage(page as u64));
    }
    new.machine.disarm_userfault().unwrap();
    wait_until("another pass", || {
        done(&workload, &new_ram) > switch_over + new_ram.pages()
            && all_ran(&workload, &new_ram, &each_then)
    });
    new_threads.pause(LIMIT).unwrap();
    new_hooks.assert_no_trouble();
    verify(&workload, &new_ram);
    new_threads
        .with_vcpus(|vcpu| {
            let FirstInstruction::At(first) = vcpu.first_instruction() else {
                panic!("it ran");
            };
            assert!(before < first && first < Instant::now());
            Ok::<_, MachineError>(())
        })
        .unwrap();
    println!(
        "{named} pages were missing; vCPUs faulted {} times",
        new_hooks.faults.load(Ordering::Relaxed)
    );
}

/// The check above can fail: one byte of one page is not brought over.
#[test]
fn a_lost_page_is_found_by_the_guest_and_by_the_host() {
    let workload = Workload::new(Isa::Rv64, SPEC.vcpus, SPEC.memory_bytes).unwrap();
    let mut new = create(Engine::Soft, SPEC).unwrap();
    load(&mut new, &workload);
    let ram = Arc::clone(new.machine.ram());
    let hooks = Hooks::new(&ram, None);
    let threads = VcpuThreads::start(new.vcpus, Arc::clone(&hooks) as Arc<dyn VcpuHooks>).unwrap();
    threads.resume();
    let share = ram.pages() / u64::from(SPEC.vcpus);
    wait_until("a first pass of each", || {
        all_ran(&workload, &ram, &[share; SPEC.vcpus as usize])
    });
    threads.pause(LIMIT).unwrap();
    verify(&workload, &ram);
    ram.try_write(RamPage(workload.share(2).start), &[0; 4096])
        .unwrap();
    let verdict = workload
        .verify(&mut |page, bytes| ram.try_read(page, bytes))
        .unwrap();
    assert!(!verdict.host_holds());
    threads.resume();
    wait_until("the guest to notice", || {
        !hooks.trouble.lock().unwrap().is_empty()
    });
    threads.pause(LIMIT).unwrap();
}

#[test]
fn a_state_that_one_vcpu_refuses_changes_no_vcpu() {
    let mut new = create(Engine::Soft, MachineSpec::new(2, 1 << 20)).unwrap();
    let before = new.vcpus[0].save().unwrap();
    start_at(&mut *new.vcpus[0], 0x1000);
    let started = new.vcpus[0].save().unwrap();
    let hooks = Hooks::new(new.machine.ram(), None);
    let threads = VcpuThreads::start(new.vcpus, hooks as Arc<dyn VcpuHooks>).unwrap();
    // Registers and pc. The clock behind them goes on.
    let registers = || threads.save().unwrap()[0].0[..280].to_vec();
    let present = registers();
    let mut short = started.clone();
    short.0.pop();
    for bad in [short, VcpuState(vec![])] {
        assert!(threads.restore(&[before.clone(), bad]).is_err());
        assert!(registers() == present);
    }
    threads.restore(&[before, started]).unwrap();
    assert!(registers() != present);
}
