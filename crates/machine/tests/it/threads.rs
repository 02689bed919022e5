//! The vCPU threads with a fake vCPU: pauses, resumes, hooks that park, failures.

use pageferry_addr::{Gpa, RamPage};
use pageferry_machine::{
    Access, Exit, FirstInstruction, HookVerdict, Kicker, MachineError, StartState, Vcpu, VcpuHooks,
    VcpuState, VcpuThreads,
};
use pageferry_testkit::{LIMIT, wait_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

#[derive(Default)]
struct FakeKicker(AtomicBool);

impl Kicker for FakeKicker {
    fn kick(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
    fn is_kicked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Runs until kicked. Every `fault_every` rounds it leaves with a memory fault.
struct FakeVcpu {
    id: u32,
    kicker: Arc<FakeKicker>,
    rounds: Arc<AtomicU64>,
    fault_every: Option<u64>,
    fail: Arc<AtomicBool>,
    /// The first round with a retired instruction, and its time.
    first: Option<(u64, Instant)>,
}

impl Vcpu for FakeVcpu {
    fn complete_read(&mut self, _value: u64) {}

    fn id(&self) -> u32 {
        self.id
    }
    fn run(&mut self) -> Result<Exit, MachineError> {
        loop {
            if self.fail.load(Ordering::Relaxed) {
                return Err(MachineError::Guest {
                    vcpu: self.id,
                    why: "it was told to fail".into(),
                });
            }
            if self.kicker.0.swap(false, Ordering::SeqCst) {
                return Ok(Exit::Kicked);
            }
            let round = self.rounds.fetch_add(1, Ordering::Relaxed);
            if self
                .fault_every
                .is_some_and(|every| round.is_multiple_of(every))
            {
                return Ok(Exit::MemoryFault {
                    page: RamPage(round),
                    access: Access::Write,
                });
            }
            std::thread::yield_now();
        }
    }
    fn kicker(&self) -> Arc<dyn Kicker> {
        Arc::clone(&self.kicker) as Arc<dyn Kicker>
    }
    fn save(&mut self) -> Result<VcpuState, MachineError> {
        Ok(VcpuState(
            self.rounds.load(Ordering::Relaxed).to_le_bytes().to_vec(),
        ))
    }
    fn check(&self, state: &VcpuState) -> Result<(), MachineError> {
        let fits = state.0.len() == 8;
        fits.then_some(())
            .ok_or_else(|| MachineError::BadState("not 8 bytes".into()))
    }
    fn restore(&mut self, state: &VcpuState) -> Result<(), MachineError> {
        let bytes = state
            .0
            .as_slice()
            .try_into()
            .map_err(|_| MachineError::BadState("not 8 bytes".into()))?;
        self.rounds
            .store(u64::from_le_bytes(bytes), Ordering::Relaxed);
        Ok(())
    }
    fn set_start(&mut self, _: &StartState) -> Result<(), MachineError> {
        Ok(())
    }
    fn first_instruction(&self) -> FirstInstruction {
        match self.first {
            None => FirstInstruction::Untold,
            Some((round, at)) if self.rounds.load(Ordering::Relaxed) >= round => {
                FirstInstruction::At(at)
            }
            Some(_) => FirstInstruction::NotYet,
        }
    }
}

#[derive(Default)]
struct Hooks {
    park: AtomicBool,
    faults: AtomicUsize,
    failures: AtomicUsize,
}

impl VcpuHooks for Hooks {
    fn memory_fault(&self, _: u32, _: RamPage, _: Access, _: &dyn Kicker) -> HookVerdict {
        self.faults.fetch_add(1, Ordering::SeqCst);
        if self.park.load(Ordering::SeqCst) {
            HookVerdict::Park
        } else {
            HookVerdict::Resume
        }
    }
    fn mmio_write(&self, _: u32, _: Gpa, _: u64, _: u8) -> HookVerdict {
        HookVerdict::Resume
    }
    fn failed(&self, _: u32, _: &MachineError) {
        self.failures.fetch_add(1, Ordering::SeqCst);
    }
}

struct Fixture {
    threads: VcpuThreads,
    hooks: Arc<Hooks>,
    rounds: Vec<Arc<AtomicU64>>,
    fail: Arc<AtomicBool>,
}

fn fixture(vcpus: u32, fault_every: Option<u64>) -> Fixture {
    fixture_that_tells(vcpus, fault_every, |_| None)
}

fn fixture_that_tells(
    vcpus: u32,
    fault_every: Option<u64>,
    first: impl Fn(u32) -> Option<(u64, Instant)>,
) -> Fixture {
    let hooks = Arc::new(Hooks::default());
    let fail = Arc::new(AtomicBool::new(false));
    let rounds: Vec<_> = (0..vcpus).map(|_| Arc::new(AtomicU64::new(1))).collect();
    let fakes = rounds.iter().enumerate().map(|(id, rounds)| {
        Box::new(FakeVcpu {
            id: id as u32,
            kicker: Arc::default(),
            rounds: Arc::clone(rounds),
            fault_every,
            fail: Arc::clone(&fail),
            first: first(id as u32),
        }) as Box<dyn Vcpu>
    });
    let threads =
        VcpuThreads::start(fakes.collect(), Arc::clone(&hooks) as Arc<dyn VcpuHooks>).unwrap();
    Fixture {
        threads,
        hooks,
        rounds,
        fail,
    }
}

fn total(fixture: &Fixture) -> u64 {
    fixture
        .rounds
        .iter()
        .map(|r| r.load(Ordering::Relaxed))
        .sum()
}

#[test]
fn a_paused_vm_does_not_run_and_a_resumed_one_does() {
    let vm = fixture(4, None);
    let before = total(&vm);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(total(&vm), before, "threads start parked");
    for _ in 0..200 {
        let at = total(&vm);
        vm.threads.resume();
        wait_until("progress", || total(&vm) > at);
        let report = vm.threads.pause(LIMIT).unwrap();
        assert!(report.first_stop <= report.last_stop);
        assert!(vm.threads.is_paused());
        let stopped = total(&vm);
        std::thread::yield_now();
        assert_eq!(total(&vm), stopped);
    }
}

#[test]
fn no_resume_is_lost_however_closely_it_follows_a_pause_request() {
    let vm = fixture(3, Some(7));
    for round in 0..500 {
        vm.threads.resume();
        if round % 3 == 0 {
            std::thread::yield_now();
        }
        vm.threads.pause(LIMIT).unwrap();
    }
    let at = vm
        .rounds
        .iter()
        .map(|r| r.load(Ordering::Relaxed))
        .collect::<Vec<_>>();
    vm.threads.resume();
    for (rounds, at) in vm.rounds.iter().zip(at) {
        wait_until("progress of every vCPU", || {
            rounds.load(Ordering::Relaxed) > at
        });
    }
}

#[test]
fn a_vcpu_parked_by_its_hook_goes_on_with_the_next_resume_only() {
    let vm = fixture(2, Some(5));
    vm.hooks.park.store(true, Ordering::SeqCst);
    vm.threads.resume();
    wait_until("both parked", || {
        vm.hooks.faults.load(Ordering::SeqCst) == 2
    });
    let at = total(&vm);
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(total(&vm), at);
    assert!(
        !vm.threads.is_paused(),
        "parked by a hook is not paused by us"
    );
    vm.threads.pause(LIMIT).unwrap();
    vm.hooks.park.store(false, Ordering::SeqCst);
    vm.threads.resume();
    wait_until("progress", || total(&vm) > at + 100);
}

#[test]
fn a_failed_vcpu_answers_pauses_and_stays_down() {
    let vm = fixture(2, None);
    vm.threads.resume();
    vm.fail.store(true, Ordering::Relaxed);
    wait_until("both failed", || {
        vm.hooks.failures.load(Ordering::SeqCst) == 2
    });
    assert!(vm.threads.failures()[0].contains("told to fail"));
    vm.threads.pause(LIMIT).unwrap();
    let at = total(&vm);
    vm.fail.store(false, Ordering::Relaxed);
    vm.threads.resume();
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(total(&vm), at);
    vm.threads.pause(LIMIT).unwrap();
}

#[test]
fn states_are_saved_and_restored_in_order_and_counted() {
    let vm = fixture(3, None);
    vm.threads.pause(LIMIT).unwrap();
    let states: Vec<_> = [10u64, 20, 30]
        .map(|n| VcpuState(n.to_le_bytes().to_vec()))
        .to_vec();
    vm.threads.restore(&states).unwrap();
    assert_eq!(vm.threads.save().unwrap(), states);
    let error = vm.threads.restore(&states[..2]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the vCPU state is not usable: 2 states for 3 vCPUs"
    );
    let last_is_bad = [states[1].clone(), states[2].clone(), VcpuState(vec![])];
    assert!(vm.threads.restore(&last_is_bad).is_err());
    let unchanged = vm.threads.save().unwrap();
    assert_eq!(unchanged, states, "no vCPU has a new state");
}

#[test]
fn stop_ends_the_threads_whatever_they_do() {
    for state in 0..3 {
        let vm = fixture(3, Some(3));
        match state {
            0 => {}
            1 => vm.threads.resume(),
            _ => {
                vm.hooks.park.store(true, Ordering::SeqCst);
                vm.threads.resume();
                wait_until("parked", || vm.hooks.faults.load(Ordering::SeqCst) >= 3);
            }
        }
        vm.threads.stop();
        let at = total(&vm);
        vm.threads.resume();
        assert_eq!(total(&vm), at);
    }
}

#[test]
fn the_first_instruction_is_told_though_first_exits_came_before_it() {
    let at = Instant::now();
    let told = |id| Some((1000, at + Duration::from_secs(u64::from(id))));
    // Each leaves with a memory fault before anything has retired, then runs on without an exit.
    let vm = fixture_that_tells(2, Some(250), told);
    vm.threads.resume();
    assert_eq!(vm.threads.first_instruction(LIMIT), Some(at));
    vm.threads.stop();
}

#[test]
fn engines_that_tell_no_first_instruction_are_not_waited_for() {
    let vm = fixture(2, Some(10));
    vm.threads.resume();
    let asked = Instant::now();
    assert_eq!(vm.threads.first_instruction(LIMIT), None);
    assert!(asked.elapsed() < LIMIT);
    vm.threads.stop();
}
