//! The vCPU threads: start, pause, resume, stop.
//!
//! **Guarantee.** When [`VcpuThreads::pause`] has returned `Ok`, no vCPU runs, and none will until
//! [`VcpuThreads::resume`]. No request to pause or resume is lost, whatever the threads are doing.
//!
//! **Mechanism.** One word (`want`) holds the wanted state of the VM. It lies under one mutex with
//! two condition variables, one for the threads and one for the controller.
//!
//! - A thread leaves the guest only by an exit. `pause` first writes `want`, then kicks. A vCPU
//!   keeps a kick until it is taken ([`crate::Kicker::kick`]). So a thread that read the old `want`
//!   before it entered the guest leaves it at once.
//! - A thread that a hook parked stays parked until the next `resume`, which advances `epoch`.
//! - While a thread runs its vCPU it holds that vCPU's mutex. It releases the mutex before it
//!   reports itself parked. So a thread that paused the VM takes the vCPUs
//!   ([`VcpuThreads::with_vcpus`]) without waiting.

use crate::{Access, Exit, FirstInstruction, HookVerdict, Kicker, MachineError, Vcpu, VcpuState};
use pageferry_addr::{Gpa, RamPage};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the owner of a VM does about the exits of its vCPUs. Called on the vCPU's own thread.
pub trait VcpuHooks: Send + Sync {
    /// The vCPU touched a missing page. Returns when it should try again (the page is there, or
    /// `kicker` [is kicked](Kicker::is_kicked)) or park.
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict;

    /// The vCPU stored `value` to an address outside RAM.
    fn mmio_write(&self, vcpu: u32, gpa: Gpa, value: u64) -> HookVerdict;

    /// The vCPU cannot go on; it is parked for good.
    fn failed(&self, vcpu: u32, error: &MachineError);

    /// A pause was asked for: hooks that sleep on a vCPU's behalf should look at their kicker.
    fn pausing(&self) {}
}

/// When the vCPUs stopped.
#[derive(Clone, Copy, Debug)]
pub struct PauseReport {
    /// The first vCPU left the guest for good.
    pub first_stop: Instant,
    /// The last vCPU did.
    pub last_stop: Instant,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    Pause,
    Run,
    Stop,
}

struct State {
    want: Want,
    /// Advanced by every resume.
    epoch: u64,
    /// Per vCPU: whether its thread is parked, and when it left the guest.
    parked: Vec<(bool, Instant)>,
    /// Why vCPUs stopped for good.
    failures: Vec<String>,
}

struct Shared {
    state: Mutex<State>,
    threads: Condvar,
    controller: Condvar,
    /// A copy of `want != Run` that a thread reads after each exit without the mutex. It may lag:
    /// the kick that follows every change makes the thread look again.
    hold: AtomicBool,
    hooks: Arc<dyn VcpuHooks>,
    /// Per vCPU, once it has left the guest and no later exit can tell more: when its first
    /// instruction ran, where the engine can tell. A first exit tells nothing if the first
    /// instruction waits for memory.
    first: Vec<OnceLock<Option<Instant>>>,
}

/// The threads of one VM. Dropping it stops and joins them.
pub struct VcpuThreads {
    shared: Arc<Shared>,
    vcpus: Vec<Arc<Mutex<Box<dyn Vcpu>>>>,
    kickers: Vec<Arc<dyn Kicker>>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VcpuThreads {
    /// How often a pause that is not answered kicks again.
    const KICK_AGAIN: Duration = Duration::from_millis(20);
    /// How long a stop waits for the vCPUs to leave the guest.
    const STOP_LIMIT: Duration = Duration::from_secs(5);

    /// Starts one thread for each vCPU, parked.
    ///
    /// # Errors
    /// When the host has no room for another thread.
    pub fn start(
        vcpus: Vec<Box<dyn Vcpu>>,
        hooks: Arc<dyn VcpuHooks>,
    ) -> Result<Self, MachineError> {
        let now = Instant::now();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                want: Want::Pause,
                epoch: 0,
                parked: vec![(false, now); vcpus.len()],
                failures: Vec::new(),
            }),
            threads: Condvar::new(),
            controller: Condvar::new(),
            hold: AtomicBool::new(true),
            hooks,
            first: vcpus.iter().map(|_| OnceLock::new()).collect(),
        });
        let kickers = vcpus.iter().map(|v| v.kicker()).collect();
        let vcpus: Vec<_> = vcpus.into_iter().map(|v| Arc::new(Mutex::new(v))).collect();
        let threads = Self {
            shared: Arc::clone(&shared),
            vcpus,
            kickers,
            handles: Mutex::new(Vec::new()),
        };
        for (index, vcpu) in threads.vcpus.iter().enumerate() {
            let (shared, vcpu) = (Arc::clone(&shared), Arc::clone(vcpu));
            let handle = std::thread::Builder::new()
                .name(format!("vcpu{index}"))
                .spawn(move || thread_main(&shared, index, &vcpu))
                .map_err(|e| MachineError::os("cannot start a vCPU thread", e))?;
            lock(&threads.handles).push(handle);
        }
        Ok(threads)
    }

    /// How many vCPUs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.vcpus.len()
    }

    /// Lets all vCPUs run that did not stop for good.
    pub fn resume(&self) {
        let mut state = lock(&self.shared.state);
        if state.want == Want::Stop {
            return;
        }
        state.want = Want::Run;
        state.epoch += 1;
        self.shared.hold.store(false, Ordering::Release);
        drop(state);
        self.shared.threads.notify_all();
    }

    fn hold(&self, want: Want) {
        let mut state = lock(&self.shared.state);
        if state.want != Want::Stop {
            state.want = want;
        }
        self.shared.hold.store(true, Ordering::Release);
        drop(state);
        self.kick_running();
        self.shared.hooks.pausing();
        self.shared.threads.notify_all();
    }

    fn kick_running(&self) {
        let running: Vec<bool> = lock(&self.shared.state)
            .parked
            .iter()
            .map(|p| !p.0)
            .collect();
        for (kicker, running) in self.kickers.iter().zip(running) {
            if running {
                kicker.kick();
            }
        }
    }

    /// Pauses all vCPUs and waits until they are parked.
    ///
    /// # Errors
    /// [`MachineError::Timeout`] when a vCPU does not leave the guest within `limit`; the request
    /// stands, and the vCPU parks when it leaves.
    pub fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        self.hold(Want::Pause);
        let deadline = Instant::now() + limit;
        let mut state = lock(&self.shared.state);
        while state.parked.iter().any(|p| !p.0) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(MachineError::Timeout {
                    what: "pausing the vCPUs",
                    millis: u64::try_from(limit.as_millis()).unwrap_or(u64::MAX),
                });
            }
            let (next, _) = self
                .shared
                .controller
                .wait_timeout(state, left.min(Self::KICK_AGAIN))
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
        let stops = state.parked.iter().map(|p| p.1);
        Ok(PauseReport {
            first_stop: stops.clone().min().unwrap_or(deadline),
            last_stop: stops.max().unwrap_or(deadline),
        })
    }

    /// Whether all vCPUs are parked now.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        let state = lock(&self.shared.state);
        state.want != Want::Run && state.parked.iter().all(|p| p.0)
    }

    /// When the first guest instruction of this VM in this process ran, where the engine can tell.
    ///
    /// vCPUs that have not told of theirs are kicked and run on; this waits for them, at most
    /// `limit`, and then says what the others told.
    #[must_use]
    pub fn first_instruction(&self, limit: Duration) -> Option<Instant> {
        let deadline = Instant::now() + limit;
        let mut kicked = None;
        while self.shared.first.iter().any(|f| f.get().is_none()) && Instant::now() < deadline {
            // Once more after a while: the exit for a kick may have come before the first
            // instruction.
            if kicked.is_none_or(|at: Instant| at.elapsed() >= Self::KICK_AGAIN) {
                self.kick_running();
                kicked = Some(Instant::now());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        self.shared
            .first
            .iter()
            .filter_map(|f| f.get().copied().flatten())
            .min()
    }

    /// Why vCPUs stopped for good, if any did.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        lock(&self.shared.state).failures.clone()
    }

    /// Calls `f` with each vCPU in turn. The VM must be paused: a vCPU that runs is waited for.
    ///
    /// # Errors
    /// The first error of `f`.
    pub fn with_vcpus<E>(
        &self,
        mut f: impl FnMut(&mut dyn Vcpu) -> Result<(), E>,
    ) -> Result<(), E> {
        self.vcpus
            .iter()
            .try_for_each(|vcpu| f(lock(vcpu).as_mut()))
    }

    /// The states of all vCPUs of a paused VM.
    ///
    /// # Errors
    /// When an engine cannot save one.
    pub fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        let mut states = Vec::with_capacity(self.count());
        self.with_vcpus(|vcpu| vcpu.save().map(|state| states.push(state)))?;
        Ok(states)
    }

    /// Replaces the states of all vCPUs of a paused VM.
    ///
    /// # Errors
    /// When there is not one state for each vCPU, or an engine refuses one.
    pub fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        if states.len() != self.count() {
            return Err(MachineError::BadState(format!(
                "{} states for {} vCPUs",
                states.len(),
                self.count()
            )));
        }
        let mut states = states.iter();
        self.with_vcpus(|vcpu| states.next().map_or(Ok(()), |state| vcpu.restore(state)))
    }

    /// Stops all vCPUs for good and joins their threads. Repeating it is harmless.
    ///
    /// A vCPU that sleeps inside the kernel on a page that never comes may take no kick (KVM's own
    /// access to guest memory, after a lost migration). After 5 s its thread is left alone: it owns
    /// what it uses, and never enters the guest again.
    pub fn stop(&self) {
        self.hold(Want::Stop);
        let handles = std::mem::take(&mut *lock(&self.handles));
        let deadline = Instant::now() + Self::STOP_LIMIT;
        for handle in handles {
            while !handle.is_finished() && Instant::now() < deadline {
                self.kick_running();
                self.shared.threads.notify_all();
                std::thread::sleep(Duration::from_micros(200));
            }
            if handle.is_finished() {
                // A panic of a vCPU thread was reported by the panic hook; there is nothing left to
                // undo.
                let _ = handle.join();
            }
        }
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Why a thread parks, and so what lets it go on.
#[derive(Clone, Copy)]
enum Reason {
    /// The VM is held: goes on as soon as it runs.
    Held,
    /// A hook asked for it while the VM ran in this epoch: goes on with a later one.
    Hook(u64),
    /// The vCPU cannot go on: only a stop ends this.
    Failed,
}

/// Parks until the vCPU may run again and returns the epoch it runs in; `None` when the VM stops.
fn park(shared: &Shared, index: usize, reason: Reason, left_guest: Instant) -> Option<u64> {
    let mut state = lock(&shared.state);
    state.parked[index] = (true, left_guest);
    shared.controller.notify_all();
    loop {
        match (state.want, reason) {
            (Want::Stop, _) => return None,
            (Want::Run, Reason::Held) => break,
            (Want::Run, Reason::Hook(epoch)) if state.epoch > epoch => break,
            _ => {}
        }
        state = shared
            .threads
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner);
    }
    state.parked[index].0 = false;
    Some(state.epoch)
}

fn thread_main(shared: &Shared, index: usize, vcpu: &Mutex<Box<dyn Vcpu>>) {
    let mut left_guest = Instant::now();
    let mut reason = Reason::Held;
    while let Some(epoch) = park(shared, index, reason, left_guest) {
        let mut vcpu = lock(vcpu);
        let outcome = run_until_held(shared, index, vcpu.as_mut());
        left_guest = Instant::now();
        reason = match outcome {
            Ok(Stopped::Held) => Reason::Held,
            Ok(Stopped::ByHook) => Reason::Hook(epoch),
            Err(error) => {
                lock(&shared.state).failures.push(error.to_string());
                shared.hooks.failed(vcpu.id(), &error);
                Reason::Failed
            }
        };
    }
}

enum Stopped {
    Held,
    ByHook,
}

/// Runs the vCPU until the VM is held or a hook parks it.
fn run_until_held(
    shared: &Shared,
    index: usize,
    vcpu: &mut dyn Vcpu,
) -> Result<Stopped, MachineError> {
    let kicker = vcpu.kicker();
    let id = vcpu.id();
    loop {
        let exit = vcpu.run()?;
        if shared.first[index].get().is_none() {
            let known = match vcpu.first_instruction() {
                FirstInstruction::NotYet => None,
                FirstInstruction::Untold => Some(None),
                FirstInstruction::At(when) => Some(Some(when)),
            };
            if let Some(known) = known {
                let _ = shared.first[index].set(known);
            }
        }
        let verdict = match exit {
            Exit::MemoryFault { page, access } => {
                shared.hooks.memory_fault(id, page, access, kicker.as_ref())
            }
            Exit::MmioWrite { gpa, value, .. } => shared.hooks.mmio_write(id, gpa, value),
            Exit::MmioRead { .. } | Exit::Kicked => HookVerdict::Resume,
            // Nothing will ever wake it: no interrupt controller is modelled.
            Exit::Halted => HookVerdict::Park,
        };
        if shared.hold.load(Ordering::Acquire) {
            return Ok(Stopped::Held);
        }
        if verdict == HookVerdict::Park {
            return Ok(Stopped::ByHook);
        }
    }
}
