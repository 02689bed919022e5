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

use crate::{
    Access, Exit, FirstInstruction, HookVerdict, Kicker, MachineError, PauseReport, Reset, Vcpu,
    VcpuState, Vcpus,
};
use pageferry_addr::{Gpa, RamPage};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The reactions of a VM's owner to the exits of its vCPUs. Called on the vCPU's own thread.
pub trait VcpuHooks: Send + Sync {
    /// The vCPU touched a missing page. Returns when the vCPU should retry (the page is there, or
    /// `kicker` [is kicked](Kicker::is_kicked)) or park.
    fn memory_fault(
        &self,
        vcpu: u32,
        page: RamPage,
        access: Access,
        kicker: &dyn Kicker,
    ) -> HookVerdict;

    /// The vCPU stored `size` bytes (1, 2, 4 or 8) of `value` to an address outside RAM.
    fn mmio_write(&self, vcpu: u32, gpa: Gpa, value: u64, size: u8) -> HookVerdict;

    /// The vCPU loads `size` bytes (1, 2, 4 or 8) from an address outside RAM. Returns the value.
    fn mmio_read(&self, _vcpu: u32, _gpa: Gpa, _size: u8) -> u64 {
        u64::MAX
    }

    /// The vCPU wrote `size` bytes (1, 2 or 4) of `value` to an I/O port.
    fn port_write(&self, _vcpu: u32, _port: u16, _value: u32, _size: u8) -> HookVerdict {
        HookVerdict::Resume
    }

    /// The vCPU reads `size` bytes (1, 2 or 4) from an I/O port. Returns the value.
    fn port_read(&self, _vcpu: u32, _port: u16, _size: u8) -> u32 {
        u32::MAX
    }

    /// The guest ends itself. The vCPU's thread parks; the other vCPUs run until the owner pauses
    /// the VM.
    fn reset(&self, _vcpu: u32, _reset: Reset) {}

    /// The vCPU cannot run any further. Its thread is parked for good.
    fn failed(&self, vcpu: u32, error: &MachineError);

    /// A pause begins. Hooks that sleep on a vCPU's behalf should check their kicker.
    fn pausing(&self) {}
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Want {
    Pause,
    Run,
    Stop,
}

/// The run state of the VM, as wanted and as reached.
struct RunState {
    want: Want,
    /// Advanced by every resume.
    epoch: u64,
    /// Per vCPU: whether its thread is parked, and the time at which it left the guest.
    parked: Vec<(bool, Instant)>,
    /// The errors of vCPUs that stopped for good.
    failures: Vec<String>,
}

/// The part that the vCPU threads and the controller share.
struct ThreadControl {
    state: Mutex<RunState>,
    threads: Condvar,
    controller: Condvar,
    /// A copy of `want != Run` that a thread reads after each exit without the mutex. It may lag:
    /// the kick that follows every change makes the thread read it again.
    hold: AtomicBool,
    hooks: Arc<dyn VcpuHooks>,
    /// Per vCPU: the time of its first instruction, if the engine knows it. It is set after the
    /// first exit whose report is final. A first exit does not report it if the first instruction
    /// waits for memory.
    first: Vec<OnceLock<Option<Instant>>>,
}

/// The threads of one VM. Dropping it stops and joins them.
pub struct VcpuThreads {
    control: Arc<ThreadControl>,
    vcpus: Vec<Arc<Mutex<Box<dyn Vcpu>>>>,
    kickers: Vec<Arc<dyn Kicker>>,
    handles: Mutex<Vec<JoinHandle<()>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VcpuThreads {
    /// The interval between kicks of a pause that is not answered.
    const KICK_AGAIN: Duration = Duration::from_millis(20);
    /// The time that a stop waits for the vCPUs to leave the guest.
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
        let control = Arc::new(ThreadControl {
            state: Mutex::new(RunState {
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
            control: Arc::clone(&control),
            vcpus,
            kickers,
            handles: Mutex::new(Vec::new()),
        };
        for (index, vcpu) in threads.vcpus.iter().enumerate() {
            let (control, vcpu) = (Arc::clone(&control), Arc::clone(vcpu));
            let handle = std::thread::Builder::new()
                .name(format!("vcpu{index}"))
                .spawn(move || thread_main(&control, index, &vcpu))
                .map_err(|e| MachineError::os("cannot start a vCPU thread", e))?;
            lock(&threads.handles).push(handle);
        }
        Ok(threads)
    }

    /// The number of vCPUs.
    #[must_use]
    pub fn count(&self) -> usize {
        self.vcpus.len()
    }

    /// Lets all vCPUs run, except those that stopped for good.
    pub fn resume(&self) {
        let mut state = lock(&self.control.state);
        if state.want == Want::Stop {
            return;
        }
        state.want = Want::Run;
        state.epoch += 1;
        self.control.hold.store(false, Ordering::Release);
        drop(state);
        self.control.threads.notify_all();
    }

    /// Returns whether the VM was to run until now.
    fn hold(&self, want: Want) -> bool {
        let mut state = lock(&self.control.state);
        let was_running = state.want == Want::Run;
        if state.want != Want::Stop {
            state.want = want;
        }
        self.control.hold.store(true, Ordering::Release);
        drop(state);
        self.kick_running();
        self.control.hooks.pausing();
        self.control.threads.notify_all();
        was_running
    }

    fn kick_running(&self) {
        let running: Vec<bool> = lock(&self.control.state)
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
    /// [`MachineError::Timeout`] when a vCPU does not leave the guest within `limit`. The request
    /// stands, and the vCPU parks when it leaves.
    pub fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        let was_running = self.hold(Want::Pause);
        let deadline = Instant::now() + limit;
        let mut state = lock(&self.control.state);
        while state.parked.iter().any(|p| !p.0) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(MachineError::Timeout {
                    what: "pausing the vCPUs",
                    limit,
                });
            }
            let (next, _) = self
                .control
                .controller
                .wait_timeout(state, left.min(Self::KICK_AGAIN))
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
        let stops = state.parked.iter().map(|p| p.1);
        Ok(PauseReport {
            first_stop: stops.clone().min().unwrap_or(deadline),
            last_stop: stops.max().unwrap_or(deadline),
            was_running,
        })
    }

    /// Whether all vCPUs are parked now.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        let state = lock(&self.control.state);
        state.want != Want::Run && state.parked.iter().all(|p| p.0)
    }

    /// The number of vCPUs that are not parked.
    #[must_use]
    pub fn inside(&self) -> usize {
        let state = lock(&self.control.state);
        state.parked.iter().filter(|p| !p.0).count()
    }

    /// The time at which the first guest instruction of this VM in this process ran, if an engine
    /// knows it.
    ///
    /// This kicks the vCPUs that have not reported theirs, and waits for them for at most `limit`.
    /// The vCPUs run on. After the limit, the reports of the others count. A paused VM is not
    /// waited for.
    #[must_use]
    pub fn first_instruction(&self, limit: Duration) -> Option<Instant> {
        let deadline = Instant::now() + limit;
        let mut kicked = None;
        let waits = || self.control.first.iter().any(|f| f.get().is_none());
        while waits() && !self.is_paused() && Instant::now() < deadline {
            // Repeated: the exit for a kick may have come before the first instruction.
            if kicked.is_none_or(|at: Instant| at.elapsed() >= Self::KICK_AGAIN) {
                self.kick_running();
                kicked = Some(Instant::now());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        self.control
            .first
            .iter()
            .filter_map(|f| f.get().copied().flatten())
            .min()
    }

    /// The errors of the vCPUs that stopped for good.
    #[must_use]
    pub fn failures(&self) -> Vec<String> {
        lock(&self.control.state).failures.clone()
    }

    /// Calls `f` with each vCPU in turn. The VM must be paused, or this waits for a vCPU that runs.
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

    /// Saves the states of all vCPUs of a paused VM.
    ///
    /// # Errors
    /// When an engine cannot save one.
    pub fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        let mut states = Vec::with_capacity(self.count());
        self.with_vcpus(|vcpu| vcpu.save().map(|state| states.push(state)))?;
        Ok(states)
    }

    /// Replaces the states of all vCPUs of a paused VM. All are decoded before any vCPU changes.
    ///
    /// # Errors
    /// When the number of states is not the number of vCPUs, or an engine refuses a state.
    pub fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        if states.len() != self.count() {
            return Err(MachineError::BadState(format!(
                "{} states for {} vCPUs",
                states.len(),
                self.count()
            )));
        }
        let mut unchecked = states.iter();
        self.with_vcpus(|vcpu| unchecked.next().map_or(Ok(()), |state| vcpu.check(state)))?;
        let mut states = states.iter();
        self.with_vcpus(|vcpu| states.next().map_or(Ok(()), |state| vcpu.restore(state)))
    }

    /// Stops all vCPUs for good and joins their threads. Repeating it is harmless.
    ///
    /// A vCPU may sleep inside the kernel on a page that never comes, where no kick ends the sleep:
    /// KVM's own access to guest memory, after a lost migration. [`Machine::abandon`] ends that
    /// sleep. Without it, the thread is left alone after 5 s. It owns what it uses, and never
    /// enters the guest again.
    ///
    /// [`Machine::abandon`]: crate::Machine::abandon
    pub fn stop(&self) {
        self.hold(Want::Stop);
        let handles = std::mem::take(&mut *lock(&self.handles));
        let deadline = Instant::now() + Self::STOP_LIMIT;
        for handle in handles {
            while !handle.is_finished() && Instant::now() < deadline {
                self.kick_running();
                self.control.threads.notify_all();
                std::thread::sleep(Duration::from_micros(200));
            }
            if handle.is_finished() {
                // The panic hook has reported the panic of a vCPU thread. There is nothing left to
                // undo.
                let _ = handle.join();
            }
        }
    }
}

impl Vcpus for VcpuThreads {
    fn count(&self) -> usize {
        self.count()
    }

    fn pause(&self, limit: Duration) -> Result<PauseReport, MachineError> {
        self.pause(limit)
    }

    fn resume(&self) {
        self.resume();
    }

    fn inside(&self) -> usize {
        self.inside()
    }

    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        self.save()
    }

    fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        self.restore(states)
    }

    fn first_instruction(&self, limit: Duration) -> Option<Instant> {
        self.first_instruction(limit)
    }
}

impl Drop for VcpuThreads {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The reason why a thread parks. It decides which event ends that.
#[derive(Clone, Copy)]
enum ParkReason {
    /// The VM is held. The thread continues as soon as the VM runs.
    Held,
    /// A hook parked it while the VM ran in this epoch. The thread continues in a later one.
    Hook(u64),
    /// The vCPU cannot run any further. Only a stop ends this.
    Failed,
}

/// Parks until the vCPU may run again. Returns the epoch it runs in, or `None` when the VM stops.
fn park(
    control: &ThreadControl,
    index: usize,
    reason: ParkReason,
    left_guest: Instant,
) -> Option<u64> {
    let mut state = lock(&control.state);
    state.parked[index] = (true, left_guest);
    control.controller.notify_all();
    loop {
        match (state.want, reason) {
            (Want::Stop, _) => return None,
            (Want::Run, ParkReason::Held) => break,
            (Want::Run, ParkReason::Hook(epoch)) if state.epoch > epoch => break,
            _ => {}
        }
        state = control
            .threads
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner);
    }
    state.parked[index].0 = false;
    Some(state.epoch)
}

fn thread_main(control: &ThreadControl, index: usize, vcpu: &Mutex<Box<dyn Vcpu>>) {
    let mut left_guest = Instant::now();
    let mut reason = ParkReason::Held;
    while let Some(epoch) = park(control, index, reason, left_guest) {
        let mut vcpu = lock(vcpu);
        let outcome = run_until_held(control, index, vcpu.as_mut());
        left_guest = Instant::now();
        reason = match outcome {
            Ok(Stopped::Held) => ParkReason::Held,
            Ok(Stopped::ByHook) => ParkReason::Hook(epoch),
            Err(error) => {
                lock(&control.state).failures.push(error.to_string());
                control.hooks.failed(vcpu.id(), &error);
                ParkReason::Failed
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
    control: &ThreadControl,
    index: usize,
    vcpu: &mut dyn Vcpu,
) -> Result<Stopped, MachineError> {
    let kicker = vcpu.kicker();
    let id = vcpu.id();
    loop {
        let exit = vcpu.run()?;
        if control.first[index].get().is_none() {
            let known = match vcpu.first_instruction() {
                FirstInstruction::NotYet => None,
                FirstInstruction::Untold => Some(None),
                FirstInstruction::At(when) => Some(Some(when)),
            };
            if let Some(known) = known {
                let _ = control.first[index].set(known);
            }
        }
        let verdict = match exit {
            Exit::MemoryFault { page, access } => {
                control
                    .hooks
                    .memory_fault(id, page, access, kicker.as_ref())
            }
            Exit::MmioWrite { gpa, value, size } => control.hooks.mmio_write(id, gpa, value, size),
            Exit::MmioRead { gpa, size } => {
                vcpu.complete_read(control.hooks.mmio_read(id, gpa, size));
                HookVerdict::Resume
            }
            Exit::PortWrite { port, value, size } => {
                control.hooks.port_write(id, port, value, size)
            }
            Exit::PortRead { port, size } => {
                vcpu.complete_read(control.hooks.port_read(id, port, size).into());
                HookVerdict::Resume
            }
            Exit::Kicked => HookVerdict::Resume,
            // Nothing will ever wake it: the machine has no interrupt controller.
            Exit::Halted => HookVerdict::Park,
            Exit::Reset(reset) => {
                control.hooks.reset(id, reset);
                HookVerdict::Park
            }
        };
        if control.hold.load(Ordering::Acquire) {
            return Ok(Stopped::Held);
        }
        if verdict == HookVerdict::Park {
            return Ok(Stopped::ByHook);
        }
    }
}
