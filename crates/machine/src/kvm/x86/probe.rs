//! The test whether KVM works here, by running a guest.

use super::exits::described;
use super::vm::{KvmOptions, create};
use crate::{
    AccessError, DOORBELL_GPA, Exit, GuestRam, Kicker, MachineError, MachineSpec, StartMode,
    StartState,
};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// The limit for the guest. It needs a millisecond; a busy host may let it wait.
const LIMIT: Duration = Duration::from_secs(10);
/// The limit for a kicked vCPU.
const KICK_LIMIT: Duration = Duration::from_secs(1);

/// Runs a VM with one vCPU in ring 3 and 64-bit mode. The guest adds, and stores outside RAM. The
/// store must arrive here.
///
/// Takes milliseconds if KVM works, and at most 11 s in any case.
///
/// # Errors
/// [`MachineError::EngineUnavailable`] with the fault, and a remedy where there is one.
pub fn probe_vm() -> Result<(), MachineError> {
    limited(run_probe)
}

/// Tests whether KVM runs a kernel: code in ring 0 must run on the processor, as that of ring 3
/// does. A KVM without hardware for it interprets it instead, some 100 times as slowly, and an
/// ordinary Linux then does not even boot.
///
/// Takes some 50 ms at most if KVM works, and at most 11 s in any case.
///
/// # Errors
/// [`MachineError::EngineUnavailable`] with the reason. [`probe_vm`] says more if no VM runs at all.
pub fn probe_kernels() -> Result<(), MachineError> {
    limited(run_kernel_probe)
}

/// A probe. It sends a handle to kick its vCPU.
type Probe = fn(&mpsc::Sender<Arc<dyn Kicker>>) -> Result<(), MachineError>;

/// Calls `run` on a thread, within limits.
fn limited(run: Probe) -> Result<(), MachineError> {
    let (kicker_out, kicker_in) = mpsc::channel::<Arc<dyn Kicker>>();
    let (verdict_out, verdict_in) = mpsc::channel();
    std::thread::Builder::new()
        .name("kvm-probe".into())
        .spawn(move || {
            // If this took too long, the receiver is gone, and the verdict is dropped.
            let _ = verdict_out.send(run(&kicker_out));
        })
        .map_err(|e| MachineError::os("cannot start the thread of the KVM probe", e))?;
    if let Ok(verdict) = verdict_in.recv_timeout(LIMIT) {
        return verdict;
    }
    let stuck = || {
        MachineError::EngineUnavailable(format!(
            "a VM can be created, but a guest of a few instructions did not finish within {} ms",
            LIMIT.as_millis()
        ))
    };
    let Ok(kicker) = kicker_in.try_recv() else {
        return Err(stuck());
    };
    kicker.kick();
    // A vCPU that does not react to a kick is left to its thread.
    match verdict_in.recv_timeout(KICK_LIMIT) {
        Ok(Err(why)) => Err(why),
        Ok(Ok(())) | Err(_) => Err(stuck()),
    }
}

/// The page of a probe guest's code.
const CODE_PAGE: RamPage = RamPage(5);

/// Writes a probe guest: its code, and tables that map the first 2 MiB and the doorbell at their
/// own addresses.
pub(super) fn write_guest(ram: &GuestRam, code: &[u8]) -> Result<(), AccessError> {
    // Present, writable, user; accessed and dirty, so that the CPU does not set them; large.
    const TABLE: u64 = 0x67;
    const LARGE: u64 = TABLE | 0x80;
    let entry = |page: u64, index: u64, value: u64| {
        ram.try_write((RamPage(page), index * 8), &value.to_le_bytes())
    };
    // Pages 1 to 4: the root, 1 GiB entries, and two tables of 2 MiB pages, for code and doorbell.
    let doorbell = DOORBELL_GPA.0;
    entry(1, 0, 0x2000 | TABLE)?;
    entry(2, 0, 0x3000 | TABLE)?;
    entry(2, doorbell >> 30, 0x4000 | TABLE)?;
    entry(3, 0, LARGE)?;
    entry(4, (doorbell >> 21) & 511, (doorbell & !0x1f_ffff) | LARGE)?;
    ram.try_write(CODE_PAGE, code)
}

/// The start of a vCPU of a probe guest.
pub(super) fn start_of_guest(args: [u64; 2]) -> StartState {
    StartState {
        entry: CODE_PAGE.byte_offset(),
        stack: 0x8000,
        args,
        tables: Gpa(0x1000),
        mode: StartMode::User,
    }
}

fn run_probe(kicker: &mpsc::Sender<Arc<dyn Kicker>>) -> Result<(), MachineError> {
    const A: u64 = 0x1234_5678_9abc_def0;
    const B: u64 = 0x0fed_cba9_8765_4321;
    // lea rax, [rdi+rsi]; mov ebx, 0xd0000000; mov [rbx], rax; jmp .
    const CODE: [u8; 14] = [
        0x48, 0x8d, 0x04, 0x37, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x03, 0xeb, 0xfe,
    ];

    let new = create(MachineSpec::new(1, 16 * PAGE_SIZE), KvmOptions::default())?;
    write_guest(&new.vm.ram, &CODE)?;
    let mut vcpus = new.vcpus;
    let vcpu = &mut vcpus[0];
    vcpu.set_start(&start_of_guest([A, B]))?;
    // The receiver is gone if the probe was given up.
    let _ = kicker.send(vcpu.kicker());
    match vcpu.run() {
        Ok(Exit::MmioWrite {
            gpa,
            value,
            size: 8,
        }) if gpa == DOORBELL_GPA && value == A.wrapping_add(B) => Ok(()),
        Ok(Exit::Kicked) => Err(MachineError::EngineUnavailable(
            "a VM can be created, but its guest makes no progress".into(),
        )),
        Ok(other) => Err(MachineError::EngineUnavailable(format!(
            "a VM can be created, but its guest left for an unexpected reason: {}",
            described(&other)
        ))),
        Err(why) => Err(MachineError::EngineUnavailable(format!(
            "a VM can be created, but its guest does not run: {why}"
        ))),
    }
}

/// The time that a loop of 100 000 instructions takes in ring 0, at most: as many times that in
/// ring 3, and this much more.
const SLOWER: u32 = 10;
const SLACK: Duration = Duration::from_millis(5);

fn run_kernel_probe(kicker: &mpsc::Sender<Arc<dyn Kicker>>) -> Result<(), MachineError> {
    // mov ecx, 50000; 1: dec ecx; jnz 1b; mov ebx, 0xd0000000; mov [rbx], rax; jmp .
    const CODE: [u8; 19] = [
        0xb9, 0x50, 0xc3, 0, 0, 0xff, 0xc9, 0x75, 0xfc, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x03,
        0xeb, 0xfe,
    ];
    let new = create(MachineSpec::new(1, 16 * PAGE_SIZE), KvmOptions::default())?;
    write_guest(&new.vm.ram, &CODE)?;
    let mut vcpus = new.vcpus;
    let vcpu = &mut vcpus[0];
    let _ = kicker.send(vcpu.kicker());
    let mut best = |mode| {
        let mut best = Duration::MAX;
        for _ in 0..3 {
            vcpu.set_start(&StartState {
                mode,
                ..start_of_guest([0, 0])
            })?;
            let begin = Instant::now();
            match vcpu.run()? {
                Exit::MmioWrite { gpa, .. } if gpa == DOORBELL_GPA => {}
                other => {
                    return Err(MachineError::EngineUnavailable(format!(
                        "a guest in ring 0 left for an unexpected reason: {}",
                        described(&other)
                    )));
                }
            }
            best = best.min(begin.elapsed());
        }
        Ok(best)
    };
    let (program, kernel) = (best(StartMode::User)?, best(StartMode::Kernel64)?);
    if kernel <= program * SLOWER + SLACK {
        return Ok(());
    }
    Err(MachineError::EngineUnavailable(format!(
        "KVM interprets the kernels of its guests here: a loop takes {:.1} ms in ring 0, and {:.1} ms \
         in ring 3; an ordinary kernel needs a processor with VMX or SVM",
        kernel.as_secs_f64() * 1e3,
        program.as_secs_f64() * 1e3
    )))
}
