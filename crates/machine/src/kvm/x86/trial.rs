#![expect(unsafe_code, reason = "places pages of a trial guest")]
//! The choice of a fault delivery: a trial of each on this host.
//!
//! **Guarantee.** `auto` takes the delivery that brought pages fastest here, measured once in the
//! life of the process.
//!
//! **Mechanism.** Small VMs touch missing pages. Their pages are at hand, so the time is that of
//! delivery and installation. The deliveries differ most in who works: with poison the vCPU's own
//! thread does, otherwise a thread beside it. So there is a trial for each of [`CROWDS`], and a VM
//! takes the result of the one that is like it. All threads of a trial stay on the same few cores.
//! The fastest of [`ROUNDS`] rounds counts.

use super::probe::{start_of_guest, write_guest};
use super::shared::VmShared;
use super::userfault::{only_delivery, userfaultfd_deliveries};
use super::vm::{KvmOptions, NewVm, create};
use crate::{
    ArmOptions, Backing, Delivery, DeliveryInUse, DeliveryTrial, Exit, FaultEvents, GuestRam,
    MachineError, MachineSpec, Vcpu,
};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_userfault::PageBitmap;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// The most cores of a trial.
const MOST_CORES: usize = 8;
const ROUNDS: usize = 2;
/// The vCPUs for each core.
const CROWDS: [u32; 4] = [1, 2, 4, 8];
/// The pages that all vCPUs of a trial touch together. The guest's tables map 2 MiB.
const PAGES: u64 = 480;
/// The first of these pages.
const FIRST: RamPage = RamPage(16);
/// The limit of one round, which takes some ten milliseconds.
const LIMIT: Duration = Duration::from_secs(2);
/// The spin time of the thread that reads events, as in a migration.
const SPIN: Duration = Duration::from_micros(100);

/// The trials of this host: with as many vCPUs as cores, and with 2, 4 and 8 times as many. They
/// take about 0.1 s each when they are called first.
pub fn delivery_trials() -> [&'static DeliveryTrial; 4] {
    std::array::from_fn(trial)
}

/// The trial that is like a VM of `vcpus` vCPUs.
fn trial_for(vcpus: u32) -> &'static DeliveryTrial {
    let cores = usable().count();
    let enough = CROWDS.iter().position(|each| each * cores >= vcpus);
    trial(enough.unwrap_or(CROWDS.len() - 1))
}

/// The deliveries that this host supports for memory of `backing`, best first.
pub(super) fn deliveries_on(backing: Backing) -> Vec<Delivery> {
    static KVM_USERFAULT: OnceLock<bool> = OnceLock::new();
    let mut found = userfaultfd_deliveries(backing);
    if only_delivery(backing).is_none()
        && found.contains(&Delivery::Minor)
        && *KVM_USERFAULT.get_or_init(kvm_userfault_works)
    {
        found.insert(0, Delivery::Userfault);
    }
    found
}

/// The delivery for a VM of `vcpus` vCPUs with this memory: the one of `options`, or else one of
/// those that are `usable`, which are in the order of [`deliveries_on`].
///
/// # Errors
/// As [`choose`], and if the options do not fit the memory.
pub(super) fn delivery_for(
    vcpus: u32,
    ram: &GuestRam,
    options: &ArmOptions,
    usable: impl FnOnce() -> Vec<Delivery>,
) -> Result<DeliveryInUse, MachineError> {
    options.check(ram.pages(), ram.backing())?;
    match (options.delivery, only_delivery(ram.backing())) {
        (Some(delivery), _) => Ok(requested(delivery)),
        (None, None) => choose(vcpus, &usable()),
        (None, Some((delivery, because))) => Ok(DeliveryInUse {
            delivery,
            because: because.into(),
        }),
    }
}

fn requested(delivery: Delivery) -> DeliveryInUse {
    DeliveryInUse {
        delivery,
        because: "it was requested".into(),
    }
}

fn deliveries() -> Vec<Delivery> {
    deliveries_on(Backing::Shmem)
}

/// The delivery for a VM of `vcpus` vCPUs, one of `among`. A trial measures faults only. By
/// [`Delivery::Missing`] every missing page is freed while the VM stands still, so it has its turn
/// where there is no other.
///
/// # Errors
/// [`MachineError::EngineUnavailable`] if there is none.
fn choose(vcpus: u32, among: &[Delivery]) -> Result<DeliveryInUse, MachineError> {
    let trial = trial_for(vcpus);
    let measured = trial.per_fault.iter();
    let mut measured: Vec<_> = measured
        .filter(|(delivery, _)| among.contains(delivery))
        .collect();
    // The others stay in their order.
    measured.sort_by_key(|(delivery, _)| *delivery == Delivery::Missing);
    if let [(delivery, fastest), others @ ..] = &measured[..] {
        let others: String = others
            .iter()
            .map(|(other, time)| match other {
                Delivery::Missing => format!(
                    "; {other} {:.0}, but it frees all missing pages while the VM stands still",
                    us(*time)
                ),
                _ => format!(", {other} {:.0}", us(*time)),
            })
            .collect();
        return Ok(DeliveryInUse {
            delivery: *delivery,
            because: format!(
                "it was fastest in a trial with {} vCPUs on {} cores: {:.0} us a page{others}",
                trial.vcpus,
                trial.cores,
                us(*fastest)
            ),
        });
    }
    among
        .first()
        .copied()
        .map(|delivery| DeliveryInUse {
            delivery,
            because: "no trial worked here, and it is the newest that the kernel has".into(),
        })
        .ok_or_else(|| {
            MachineError::EngineUnavailable(
                "this host delivers no faults: userfaultfd is not permitted".into(),
            )
        })
}

/// Whether KVM leaves the guest at a page whose bit is set in a slot's userfault bitmap. The host
/// has the page mapped, so that nothing can sleep if the bitmap has no effect.
fn kvm_userfault_works() -> bool {
    let touch = || -> Result<Exit, MachineError> {
        let page = FIRST;
        let mut new = guest(1, page.0 + 1, |_| page..RamPage(page.0 + 1))?;
        let missing = Arc::new(PageBitmap::new(new.vm.ram.pages() as usize));
        missing.set(page);
        arm(&new.vm, &missing, Delivery::Userfault)?;
        new.vm.faults.begin_postcopy()?;
        new.vm.faults.install(RamPage(0), page.0 + 1)?;
        new.vcpus[0].run()
    };
    matches!(touch(), Ok(Exit::MemoryFault { page, .. }) if page == FIRST)
}

/// Arms a machine by request, with one stream.
fn arm(
    vm: &VmShared,
    missing: &Arc<PageBitmap>,
    delivery: Delivery,
) -> Result<Vec<Box<dyn FaultEvents>>, MachineError> {
    vm.arm(missing, requested(delivery), &delivery.into())
}

/// A machine of `pages` pages whose vCPUs touch the pages that `own` gives, and then ring.
fn guest(
    vcpus: u32,
    pages: u64,
    own: impl Fn(u64) -> Range<RamPage>,
) -> Result<NewVm, MachineError> {
    // mov [rdi],rdi; add rdi,0x1000; cmp rdi,rsi; jb .-15; mov ebx,0xd0000000; mov [rbx],rdi; jmp .
    const CODE: [u8; 25] = [
        0x48, 0x89, 0x3f, 0x48, 0x81, 0xc7, 0, 0x10, 0, 0, 0x48, 0x39, 0xf7, 0x72, 0xf1, 0xbb, 0,
        0, 0, 0xd0, 0x48, 0x89, 0x3b, 0xeb, 0xfe,
    ];
    let spec = MachineSpec::new(vcpus, pages * PAGE_SIZE);
    let mut new = create(spec, KvmOptions::default())?;
    new.vm.ram.allocate()?;
    write_guest(&new.vm.ram, &CODE)?;
    for (id, vcpu) in (0..).zip(&mut new.vcpus) {
        let own = own(id);
        let args = [own.start.byte_offset(), own.end.byte_offset()];
        vcpu.set_start(&start_of_guest(args))?;
    }
    Ok(new)
}

/// The cores that this process may use.
fn usable() -> CpuSet {
    sched_getaffinity(None).unwrap_or_else(|_| {
        let mut one = CpuSet::new();
        one.set(0);
        one
    })
}

/// The result of the trial of one of the [`CROWDS`], from the first call on.
fn trial(crowd: usize) -> &'static DeliveryTrial {
    static RESULTS: [OnceLock<DeliveryTrial>; CROWDS.len()] =
        [const { OnceLock::new() }; CROWDS.len()];
    RESULTS[crowd].get_or_init(|| {
        let mut cores = CpuSet::new();
        let allowed = usable();
        (0..CpuSet::MAX_CPU)
            .filter(|&core| allowed.is_set(core))
            .take(MOST_CORES)
            .for_each(|core| cores.set(core));
        let vcpus = cores.count() * CROWDS[crowd];
        // The threads that this one starts stay on its cores.
        let measured = std::thread::scope(|scope| {
            let measure = || {
                let _ = sched_setaffinity(None, &cores);
                measure(vcpus)
            };
            let thread = std::thread::Builder::new().name("trial".into());
            thread
                .spawn_scoped(scope, measure)
                .map_or(Vec::new(), |thread| thread.join().unwrap_or_default())
        });
        DeliveryTrial {
            vcpus,
            cores: cores.count(),
            per_fault: measured,
        }
    })
}

/// Measures all deliveries in turns. Returns the fastest first.
fn measure(vcpus: u32) -> Vec<(Delivery, Duration)> {
    let mut fastest: Vec<(Delivery, Duration)> = Vec::new();
    for round in 0..ROUNDS {
        for delivery in deliveries() {
            let Ok(took) = run(delivery, vcpus) else {
                fastest.retain(|(failed, _)| *failed != delivery);
                continue;
            };
            match fastest.iter_mut().find(|(of, _)| *of == delivery) {
                Some((_, least)) => *least = took.min(*least),
                None if round == 0 => fastest.push((delivery, took)),
                None => {}
            }
        }
    }
    fastest.sort_by_key(|(_, took)| *took);
    fastest
}

/// Runs one VM. Returns the time from fault to fault.
fn run(delivery: Delivery, vcpus: u32) -> Result<Duration, MachineError> {
    let each = PAGES / u64::from(vcpus);
    let touched = each * u64::from(vcpus);
    let new = guest(vcpus, FIRST.0 + PAGES, |id| {
        let first = FIRST.0 + id * each;
        RamPage(first)..RamPage(first + each)
    })?;
    let (vm, mut all) = (new.vm, new.vcpus);
    let missing = Arc::new(PageBitmap::new(vm.ram.pages() as usize));
    missing.set_range(FIRST.0 as usize..(FIRST.0 + touched) as usize);
    let mut events = arm(&vm, &missing, delivery)?
        .pop()
        .ok_or(MachineError::NoDelivery(delivery))?;
    vm.faults.begin_postcopy()?;
    vm.assist(&|| false, &|_| {})?;
    vm.faults.install(RamPage(0), FIRST.0)?;

    let source = Source {
        claimed: PageBitmap::new(missing.pages()),
        missing,
        vm,
        over: AtomicBool::new(false),
    };
    let kickers: Vec<_> = all.iter().map(|vcpu| vcpu.kicker()).collect();
    std::thread::scope(|scope| {
        let source = &source;
        let mut threads = Vec::with_capacity(all.len());
        let mut result = Ok(());
        for vcpu in &mut all {
            let run = move || -> Result<(Instant, Instant), MachineError> {
                let began = Instant::now();
                source.drive(vcpu.as_mut())?;
                Ok((began, Instant::now()))
            };
            match std::thread::Builder::new().spawn_scoped(scope, run) {
                Ok(thread) => threads.push(thread),
                Err(e) => result = Err(MachineError::os("cannot start a thread", e)),
            }
        }
        let all_ended = || threads.iter().all(|thread| thread.is_finished());
        result = result.and_then(|()| source.serve(events.as_mut(), &all_ended));
        source.over.store(true, Ordering::Release);
        while !all_ended() {
            kickers.iter().for_each(|kicker| kicker.kick());
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut times: Option<(Instant, Instant)> = None;
        for thread in threads {
            let (began, ended) = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            times = Some(match times {
                None => (began, ended),
                Some((first, last)) => (first.min(began), last.max(ended)),
            });
        }
        result?;
        let took = times.map_or(Duration::ZERO, |(first, last)| last - first);
        Ok(took.div_f64(touched as f64))
    })
}

fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The pages of one VM. Their bytes are at hand.
struct Source {
    vm: Arc<VmShared>,
    missing: Arc<PageBitmap>,
    /// Pages that a thread brings or has brought.
    claimed: PageBitmap,
    /// The threads end, whatever the guest does.
    over: AtomicBool,
}

impl Source {
    fn bring(&self, page: RamPage) -> Result<(), MachineError> {
        const BYTES: [u8; PAGE_SIZE as usize] = [0x5a; PAGE_SIZE as usize];
        let faults = &self.vm.faults;
        if !self.missing.test(page) {
            return faults.install(page, 1);
        }
        if !self.claimed.set(page) {
            return Ok(());
        }
        if faults.receives_in_place() {
            // SAFETY: (1) the page is missing, and this thread alone has claimed it.
            unsafe { self.vm.ram.unchecked() }.write(page, &BYTES);
            faults.install(page, 1)?;
        } else {
            faults.install_copy(page, &BYTES)?;
        }
        self.missing.clear(page);
        Ok(())
    }

    /// Runs a vCPU to the end of its program.
    fn drive(&self, vcpu: &mut dyn Vcpu) -> Result<(), MachineError> {
        loop {
            match vcpu.run()? {
                Exit::MemoryFault { page, .. } => self.bring(page)?,
                Exit::MmioWrite { .. } => return Ok(()),
                _ if self.over.load(Ordering::Acquire) => {
                    return Err(MachineError::WrongState("the trial ended before the guest"));
                }
                _ => {}
            }
        }
    }

    /// Brings the pages that events ask for, until `ended`.
    fn serve(
        &self,
        events: &mut dyn FaultEvents,
        ended: &dyn Fn() -> bool,
    ) -> Result<(), MachineError> {
        let began = Instant::now();
        let mut last = began;
        while !ended() {
            let now = Instant::now();
            if now - began > LIMIT {
                return Err(MachineError::Timeout {
                    what: "the trial of a fault delivery",
                    limit: LIMIT,
                });
            }
            if let Some(event) = events.next()? {
                self.bring(event.page)?;
                last = Instant::now();
            } else if now - last > SPIN {
                let limit = Timespec {
                    tv_sec: 0,
                    tv_nsec: 500_000,
                };
                // The loop looks again in any case.
                let mut fds = [PollFd::from_borrowed_fd(events.fd(), PollFlags::IN)];
                let _ = poll(&mut fds, Some(&limit));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_choice_is_the_fastest_of_all_that_the_host_has() {
        if let Err(why) = crate::kvm::probe_vm() {
            pageferry_testkit::skip("kvm", why);
            return;
        }
        if deliveries().is_empty() {
            pageferry_testkit::skip("uffd", "no delivery on this host");
            return;
        }
        for trial in delivery_trials() {
            assert_eq!(trial.per_fault.len(), deliveries().len(), "{trial:?}");
            assert!(trial.per_fault.is_sorted_by(|(_, a), (_, b)| a <= b));
            assert!(
                trial.per_fault.iter().all(|(_, took)| us(*took) > 0.1),
                "{trial:?}"
            );
        }
        let crowded = choose(usable().count() + 1, &deliveries()).unwrap();
        let measured = trial_for(usable().count() + 1)
            .per_fault
            .iter()
            .map(|(delivery, _)| *delivery);
        let mut stops_no_vm = measured.filter(|delivery| *delivery != Delivery::Missing);
        let fastest = stops_no_vm.next().unwrap_or(Delivery::Missing);
        assert_eq!(crowded.delivery, fastest);
        let alone = choose(1, &[Delivery::Missing]).unwrap();
        assert_eq!(alone.delivery, Delivery::Missing);
        assert!(crowded.because.contains("us a page"), "{}", crowded.because);
    }
}
