//! The registers of virtio-mmio, version 2, and the worker that serves the queues.
//!
//! A worker serves a request without the lock of the registers, so no vCPU waits for it. Only a
//! reset, and a queue that the driver takes away, wait until the worker stands still. The worker
//! says so under the lock, and a pause is said there too, so the one or the other sees it.
//! `tests/shuttle` has a model of it.

use super::chain::{self, Step};
use super::registers::{MOST_ENTRIES, Registers};
use super::{Chain, Fault, VirtioDevice};
use crate::sync::{AtomicBool, Bell, Condvar, Mutex, MutexGuard, thread};
use pageferry_machine::{Apply, Device, DeviceMemory, GuestRam, Interrupt, MachineError};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use virtio_queue::Queue;
use vm_memory::GuestAddressSpace;

const INDIRECT: u64 = 1 << 28;
const VERSION_1: u64 = 1 << 32;
/// The offset of the configuration.
const CONFIG: u64 = 0x100;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 0x40;
const PAUSE_LIMIT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(10);

struct Shared {
    registers: Registers,
    /// Whether the worker is in a request.
    is_busy: bool,
    is_paused: bool,
    is_over: bool,
    /// A state of another host came, and the device has not gone on with it yet.
    has_arrived: bool,
    config: Vec<u8>,
}

/// For what a queue waits.
#[derive(PartialEq, Eq)]
enum Wait {
    /// The driver.
    Driver,
    /// Something for its first request.
    Input,
    /// A page, or a lock.
    Later,
}

struct Inner {
    name: String,
    id: u32,
    features: u64,
    device: Mutex<Box<dyn VirtioDevice>>,
    memory: DeviceMemory,
    interrupt: Arc<dyn Interrupt>,
    shared: Mutex<Shared>,
    idle: Condvar,
    /// Ends waits for missing pages.
    stop: Arc<AtomicBool>,
    bell: Bell,
}

fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Waits until the worker is in no request.
    fn quiesce<'a>(
        &self,
        mut shared: MutexGuard<'a, Shared>,
        limit: Duration,
    ) -> MutexGuard<'a, Shared> {
        self.stop.store(true, Ordering::SeqCst);
        let deadline = Instant::now() + limit;
        while shared.is_busy {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.idle.wait_timeout(shared, left);
            shared = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        shared
    }

    /// Waits for the worker, and lets the driver take queues away. After [`PAUSE_LIMIT`] a request
    /// may still use them, and its answer is dropped.
    fn take_away(&self, shared: MutexGuard<'_, Shared>, change: impl FnOnce(&mut Registers)) {
        let mut shared = self.quiesce(shared, PAUSE_LIMIT);
        change(&mut shared.registers);
        let stops = shared.is_paused || shared.is_busy;
        self.stop.store(stops, Ordering::SeqCst);
    }

    /// Serves a queue until it has to wait.
    fn drain(&self, index: usize) -> Wait {
        loop {
            let mut shared = locked(&self.shared);
            let status = shared.registers.status;
            let mut queue = shared.registers.queues[index];
            let before = queue;
            let works = status & (DRIVER_OK | NEEDS_RESET) == DRIVER_OK;
            let stops = shared.is_paused || shared.is_over || self.stop.load(Ordering::SeqCst);
            if !works || !queue.ready || stops {
                return Wait::Driver;
            }
            shared.is_busy = true;
            let features = shared.registers.features;
            drop(shared);
            let stop = || self.stop.load(Ordering::SeqCst);
            let serve = |chain: &Chain| locked(&self.device).serve(index, chain);
            let view = self.memory.memory();
            let done = chain::step(&view, &mut queue, features, stop, serve);
            drop(view);
            let mut shared = locked(&self.shared);
            shared.is_busy = false;
            let is_paused = shared.is_paused;
            let registers = &mut shared.registers;
            let raised = match done {
                _ if registers.queues[index] != before => {
                    // The driver took the queue away, and has waited long enough.
                    self.stop.store(is_paused, Ordering::SeqCst);
                    self.bell.ring(); // There may be a new one.
                    0
                }
                Ok(Step::Done { interrupt }) => {
                    registers.queues[index] = queue;
                    u32::from(interrupt)
                }
                Err(Fault::Broken) => {
                    registers.status |= NEEDS_RESET;
                    2
                }
                Ok(Step::Empty | Step::Idle) | Err(Fault::Later) => 0,
            };
            registers.interrupt |= raised;
            if raised != 0 {
                self.interrupt.raise(); // Under the lock: a paused device raises none.
            }
            drop(shared);
            self.idle.notify_all();
            match done {
                Ok(Step::Done { .. }) => {}
                Ok(Step::Empty) | Err(Fault::Broken) => return Wait::Driver,
                Ok(Step::Idle) => return Wait::Input,
                Err(Fault::Later) => return Wait::Later,
            }
        }
    }

    fn work(&self, mut input: Option<OwnedFd>) {
        let (mut wants_input, mut limit) = (false, None);
        loop {
            let wanted = input.as_ref().filter(|_| wants_input);
            if self.bell.wait(wanted, limit) {
                input = None; // The host has removed it.
            }
            let shared = locked(&self.shared);
            if shared.is_over {
                return;
            }
            let (queues, is_paused) = (shared.registers.queues.len(), shared.is_paused);
            drop(shared);
            limit = (!is_paused).then(|| locked(&self.device).tick()).flatten();
            wants_input = false;
            for index in 0..queues {
                match self.drain(index) {
                    Wait::Driver => {}
                    Wait::Input => wants_input = true,
                    Wait::Later => limit = Some(limit.map_or(RETRY, |limit| limit.min(RETRY))),
                }
            }
        }
    }
}

/// A virtio device on virtio-mmio. See the crate's first page.
pub struct MmioTransport {
    inner: Arc<Inner>,
    worker: Option<thread::JoinHandle<()>>,
}

impl MmioTransport {
    /// The number of addresses that it has.
    pub const BYTES: u64 = 0x1000;

    /// Starts a worker for `device`.
    ///
    /// # Errors
    /// When an eventfd or a thread is refused.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        ram: Arc<GuestRam>,
        interrupt: Arc<dyn Interrupt>,
        name: &str,
    ) -> io::Result<Arc<Self>> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let input = device.input().map(|input| input.try_clone_to_owned());
        let input = input.transpose()?;
        let inner = Arc::new(Inner {
            name: name.into(),
            id: device.id(),
            features: device.features() | VERSION_1 | INDIRECT,
            shared: Mutex::new(Shared {
                registers: Registers::new(device.queues()),
                is_busy: false,
                is_paused: false,
                is_over: false,
                has_arrived: false,
                config: device.config(),
            }),
            device: Mutex::new(device),
            memory: DeviceMemory::new(ram, move || stopped.load(Ordering::SeqCst)),
            interrupt,
            idle: Condvar::new(),
            stop,
            bell: Bell::new()?,
        });
        let works = Arc::clone(&inner);
        let thread = thread::Builder::new().name(name.into());
        let worker = Some(thread.spawn(move || works.work(input))?);
        Ok(Arc::new(Self { inner, worker }))
    }

    /// The offset of the register that tells the device to look at its queues.
    pub const NOTIFY: u64 = 0x50;

    /// The eventfd that wakes the worker, as a write of `QueueNotify` does.
    #[must_use]
    pub fn notify(&self) -> BorrowedFd<'_> {
        self.inner.bell.as_fd()
    }

    fn word(&self, offset: u64) -> u32 {
        let inner = &self.inner;
        let shared = locked(&inner.shared);
        let registers = &shared.registers;
        let queue = registers.queues.get(registers.selected as usize);
        match offset {
            0 => u32::from_le_bytes(*b"virt"),
            4 => 2,
            8 => inner.id,
            0xc => u32::from_le_bytes(*b"pgfy"),
            0x10 if registers.device_half < 2 => {
                (inner.features >> (32 * registers.device_half)) as u32
            }
            0x34 => queue.map_or(0, |_| MOST_ENTRIES.into()),
            0x44 => queue.map_or(0, |queue| queue.ready.into()),
            0x60 => registers.interrupt,
            0x70 => registers.status,
            0xb0 | 0xb4 => u32::MAX, // There is no shared memory.
            _ => 0,
        }
    }

    fn set_status(&self, mut shared: MutexGuard<'_, Shared>, value: u32) {
        if value == 0 {
            self.inner.take_away(shared, Registers::reset);
            return;
        }
        let registers = &mut shared.registers;
        let mut status = registers.status | value & 0x8f;
        if registers.features & VERSION_1 == 0 {
            status &= !FEATURES_OK;
        }
        if status & FEATURES_OK == 0 {
            status &= !DRIVER_OK;
        }
        registers.status = status;
        self.inner.bell.ring();
    }

    fn set_word(&self, offset: u64, value: u32) {
        let inner = &self.inner;
        let mut shared = locked(&inner.shared);
        let registers = &mut shared.registers;
        match offset {
            0x14 => registers.device_half = value,
            0x20 if registers.status & FEATURES_OK == 0 && registers.driver_half < 2 => {
                let shift = 32 * registers.driver_half;
                let others = registers.features & !(0xffff_ffff << shift);
                registers.features = (others | u64::from(value) << shift) & inner.features;
            }
            0x24 => registers.driver_half = value,
            0x30 => registers.selected = value,
            Self::NOTIFY => inner.bell.ring(),
            0x64 => registers.interrupt &= !value,
            0x70 => self.set_status(shared, value),
            0x44 if value == 0 => {
                inner.take_away(shared, Registers::reset_queue);
                inner.bell.ring();
            }
            _ => {
                let selected = registers.selected as usize;
                let Some(queue) = registers.queues.get_mut(selected) else {
                    return;
                };
                if queue.ready {
                    return; // It stays as it is while it is in use.
                }
                let set = |old: u64, shift: u32| {
                    old & !(0xffff_ffff << shift) | u64::from(value) << shift
                };
                match offset {
                    0x38 => queue.size = u16::try_from(value).unwrap_or(0),
                    0x44 => match Queue::try_from(*queue) {
                        Ok(_) => queue.ready = true,
                        Err(_) => registers.status |= NEEDS_RESET,
                    },
                    0x80 => queue.desc_table = set(queue.desc_table, 0),
                    0x84 => queue.desc_table = set(queue.desc_table, 32),
                    0x90 => queue.avail_ring = set(queue.avail_ring, 0),
                    0x94 => queue.avail_ring = set(queue.avail_ring, 32),
                    0xa0 => queue.used_ring = set(queue.used_ring, 0),
                    0xa4 => queue.used_ring = set(queue.used_ring, 32),
                    _ => {}
                }
            }
        }
    }
}

impl MmioTransport {
    /// Reads from `offset` on. It takes any offset and any width.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(at) = offset.checked_sub(CONFIG) {
            let at = usize::try_from(at).unwrap_or(usize::MAX);
            let shared = locked(&self.inner.shared);
            let config = shared.config.get(at..).unwrap_or_default();
            let len = config.len().min(data.len());
            data[..len].copy_from_slice(&config[..len]);
        } else if data.len() == 4 {
            data.copy_from_slice(&self.word(offset).to_le_bytes());
        }
    }

    /// Writes from `offset` on. It takes any offset and any width.
    pub fn write(&self, offset: u64, data: &[u8]) {
        if let Ok(word) = data.try_into() {
            self.set_word(offset, u32::from_le_bytes(word));
        }
    }
}

impl Device for MmioTransport {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        let inner = &self.inner;
        let mut shared = locked(&inner.shared);
        shared.is_paused = true;
        let shared = inner.quiesce(shared, PAUSE_LIMIT);
        let refused = |why: &dyn std::fmt::Display| {
            MachineError::Device(format!("{} cannot pause: {why}", inner.name))
        };
        if shared.is_busy {
            return Err(refused(&"a request takes longer than 5 s"));
        }
        drop(shared);
        locked(&inner.device).pause().map_err(|why| refused(&why))
    }

    fn resume(&self) {
        let inner = &self.inner;
        let mut shared = locked(&inner.shared);
        if !shared.is_paused {
            return;
        }
        if !shared.is_busy {
            locked(&inner.device).resume(shared.has_arrived);
        }
        shared.has_arrived = false;
        shared.is_paused = false;
        inner.stop.store(false, Ordering::SeqCst);
        // An edge may have stayed behind at the source.
        if shared.registers.interrupt != 0 {
            inner.interrupt.raise();
        }
        drop(shared);
        inner.bell.ring();
    }

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        let mut bytes = locked(&self.inner.shared).registers.encode();
        bytes.extend(locked(&self.inner.device).state());
        Ok(bytes)
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        let inner = &self.inner;
        let queues = locked(&inner.shared).registers.queues.len();
        let decoded = Registers::decode(bytes, queues, inner.features);
        let checked = decoded.and_then(|(registers, rest)| {
            locked(&inner.device).check(rest)?;
            Ok((registers, rest.to_vec()))
        });
        let refused = |why| MachineError::Device(format!("{}: {why}", inner.name));
        let (registers, rest) = checked.map_err(refused)?;
        Ok(Box::new(move || {
            let mut shared = locked(&inner.shared);
            let mut device = locked(&inner.device);
            device.apply(&rest);
            shared.registers = registers;
            shared.config = device.config();
            shared.has_arrived = true;
        }))
    }
}

impl Drop for MmioTransport {
    fn drop(&mut self) {
        locked(&self.inner.shared).is_over = true;
        self.inner.stop.store(true, Ordering::SeqCst);
        self.inner.bell.ring();
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
    }
}
