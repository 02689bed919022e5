#![expect(unsafe_code, reason = "makes guest memory of a memfd")]
//! A VMM moves its VM to another process. Its memory, machine, vCPU thread and device are its own.
//!
//! The guest adds 1 to a number on each page in turn, and rings the device. The second process
//! checks that all of it continued: `cargo run -p pageferry-migration --example own_vmm`.

use pageferry_addr::{Gpa, RamPage};
use pageferry_machine::{
    AccessError, AdoptedRegion, Apply, BlackoutCost, Device, GuestRam, Machine, MachineError,
    MachineKind, PauseReport, VcpuState, Vcpus,
};
use pageferry_migration::{
    Destination, DestinationConfig, Listener, Resolver, Route, RunningVm, SourceConfig,
    SourceSession, Unobserved, migrate,
};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const PAGES: u64 = 4096;
const HALF: u64 = PAGES * 2048;
/// The part of a blackout that this machine took on idle hosts.
const COST: BlackoutCost = BlackoutCost::new(Duration::from_micros(300), Duration::from_micros(5));

/// The whole VMM. Its vCPU has `steps` as its only register, and the device counts its rings.
struct Vmm {
    ram: Arc<GuestRam>,
    wanted: AtomicBool,
    /// Locked while the vCPU is in the guest.
    steps: Mutex<u64>,
    rung: AtomicU64,
}

/// The vCPU reaches memory by the accessor alone, so the provided methods serve.
impl Machine for Vmm {
    fn kind(&self) -> MachineKind<'_> {
        MachineKind::new("own-vmm", "adder", "own-vmm/1")
    }
    fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }
    fn blackout_cost(&self) -> BlackoutCost {
        COST
    }
}

/// The device does no work of its own that it could pause.
impl Device for Vmm {
    fn name(&self) -> &str {
        "bell.0"
    }
    fn version(&self) -> u32 {
        1
    }
    fn pause(&self) -> Result<(), MachineError> {
        Ok(())
    }
    fn resume(&self) {}
    fn save(&self) -> Result<Vec<u8>, MachineError> {
        Ok(self.rung.load(SeqCst).to_le_bytes().to_vec())
    }
    fn decode<'a>(&'a self, _version: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        let rung = number(bytes)?;
        Ok(Box::new(move || self.rung.store(rung, SeqCst)))
    }
}

fn number(state: &[u8]) -> Result<u64, MachineError> {
    let bytes = state.try_into().map(u64::from_le_bytes);
    bytes.map_err(|_| MachineError::BadState(format!("{} bytes, expected 8", state.len())))
}

impl Vcpus for Vmm {
    fn count(&self) -> usize {
        1
    }
    /// It needs no limit: `step` polls `wanted` while it waits for a page.
    fn pause(&self, _limit: Duration) -> Result<PauseReport, MachineError> {
        let was_running = self.wanted.swap(false, SeqCst);
        drop(self.steps.lock().unwrap());
        let now = Instant::now();
        Ok(PauseReport {
            first_stop: now,
            last_stop: now,
            was_running,
        })
    }
    fn resume(&self) {
        self.wanted.store(true, SeqCst);
    }
    fn inside(&self) -> usize {
        self.steps.try_lock().is_err().into()
    }
    fn save(&self) -> Result<Vec<VcpuState>, MachineError> {
        Ok(vec![VcpuState(
            self.steps.lock().unwrap().to_le_bytes().to_vec(),
        )])
    }
    fn restore(&self, states: &[VcpuState]) -> Result<(), MachineError> {
        *self.steps.lock().unwrap() = number(states.first().map_or(&[], |state| &state.0))?;
        Ok(())
    }
}

impl Vmm {
    /// Makes a step of the guest. A pause ends it early, and it is made again later.
    fn step(&self) -> Result<(), AccessError> {
        let stop = || !self.wanted.load(SeqCst);
        let mut steps = self.steps.lock().unwrap();
        let (at, round, mut bytes) = (RamPage(*steps % PAGES), *steps / PAGES, [0; 8]);
        if stop() {
            return Err(AccessError::Stopped(at));
        }
        self.ram.read(at, &mut bytes, &stop)?;
        assert_eq!(u64::from_le_bytes(bytes), round, "{at} did not continue");
        self.ram.write(at, &(round + 1).to_le_bytes(), &stop)?;
        self.rung.fetch_add(1, SeqCst);
        *steps += 1;
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let memfd = memfd_create("own-vmm", MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&memfd, 2 * HALF)?;
    let low = AdoptedRegion::new(Gpa(0), HALF, memfd.try_clone()?, 0);
    let high = AdoptedRegion::new(Gpa(1 << 32), HALF, memfd, HALF);
    // SAFETY: only the vCPU writes the memfd, and only by the accessor.
    let ram = Arc::new(unsafe { GuestRam::adopt(vec![low, high]) }?);
    let vmm = Arc::new(Vmm {
        ram,
        wanted: false.into(),
        steps: 0.into(),
        rung: 0.into(),
    });
    let vcpu = Arc::clone(&vmm);
    std::thread::spawn(move || {
        loop {
            if vcpu.step().is_err() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    });
    let machine: Arc<dyn Machine> = Arc::clone(&vmm) as _;
    let vm = RunningVm {
        machine: &machine,
        vcpus: &*vmm,
        devices: &[Arc::clone(&vmm) as _],
    };
    if let Some(address) = std::env::args().nth(1) {
        Vcpus::resume(&*vmm);
        std::thread::sleep(Duration::from_millis(100));
        let (config, session) = (SourceConfig::default(), SourceSession::new()?);
        let route = Route::To(address.parse()?);
        let sent = migrate(&vm, &route, b"", &config, &session, &Unobserved)?;
        assert!(
            sent.blackout_forecast
                .is_some_and(|blackout| blackout > COST.of(1))
        );
        return Ok(());
    }
    let (began, config) = (Instant::now(), DestinationConfig::default());
    let late = || began.elapsed() > Duration::from_secs(60);
    let listener = Listener::bind(&"127.0.0.1:0".parse()?)?;
    let destination = Arc::new(Destination::listen(listener, config, |_| {})?);
    let mut source = std::process::Command::new(std::env::current_exe()?);
    source.arg(destination.local_addrs()[0].to_string());
    let mut source = source.spawn()?;
    let incoming = destination.accept(&late)?;
    incoming.receive(&vm, &Resolver::new(), &late, &Unobserved)?;
    let arrived = vmm.rung.load(SeqCst);
    std::thread::sleep(Duration::from_millis(100));
    Vcpus::pause(&*vmm, Duration::ZERO)?;
    let (steps, rung) = (*vmm.steps.lock().unwrap(), vmm.rung.load(SeqCst));
    println!("{arrived} steps when the last page came, {steps} at the end, {rung} rings");
    assert!(source.wait()?.success(), "the source failed");
    assert!(steps > arrived && arrived > PAGES && rung == steps);
    Ok(())
}
