//! A guest runs, leaves for the right reasons, and is kicked without a lost wake-up.

use crate::support::{DATA, Watchdog, machine, no_kvm, run, rung, start};
use pageferry_machine::{DOORBELL_GPA, Exit, MachineError, MachineSpec, Vcpu, kvm};
use pageferry_testkit::{LIMIT, wait_until};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// jmp .
const SPIN: [u8; 2] = [0xeb, 0xfe];

#[test]
fn a_probe_vm_runs_again_and_again() {
    if no_kvm() {
        return;
    }
    for _ in 0..20 {
        kvm::probe_vm().unwrap();
    }
}

#[test]
fn impossible_sizes_are_refused() {
    if no_kvm() {
        return;
    }
    for (vcpus, memory_bytes) in [(0, 4096), (1025, 4096), (1, 0), (1, 4095)] {
        let result = kvm::create(MachineSpec::new(vcpus, memory_bytes));
        assert!(
            matches!(result.err(), Some(MachineError::Layout(_))),
            "{vcpus} {memory_bytes}"
        );
    }
}

#[test]
fn mmio_of_every_size_leaves_with_its_value() {
    if no_kvm() {
        return;
    }
    let new = machine(1, 64);
    let mut vcpus = new.vcpus;
    // mov ebx, 0xd0000000; mov [rbx], dil; mov [rbx+2], di; mov [rbx+4], edi; mov [rbx+8], rdi
    // mov eax, 0; mov al, [rbx]; mov [rbx], rax; mov eax, [rbx+4]; mov [rbx], rax; jmp .
    let code = [
        0xbb, 0, 0, 0, 0xd0, 0x40, 0x88, 0x3b, 0x66, 0x89, 0x7b, 2, 0x89, 0x7b, 4, 0x48, 0x89,
        0x7b, 8, 0xb8, 0, 0, 0, 0, 0x8a, 0x03, 0x48, 0x89, 0x03, 0x8b, 0x43, 4, 0x48, 0x89, 0x03,
        0xeb, 0xfe,
    ];
    let value = 0x8182_8384_8586_8788;
    start(new.machine.ram(), vcpus[0].as_mut(), 0, &code, [value, 0]);
    let at = |offset| pageferry_addr::Gpa(DOORBELL_GPA.0 + offset);
    let expected = [
        Exit::MmioWrite {
            gpa: at(0),
            value: 0x88,
            size: 1,
        },
        Exit::MmioWrite {
            gpa: at(2),
            value: 0x8788,
            size: 2,
        },
        Exit::MmioWrite {
            gpa: at(4),
            value: 0x8586_8788,
            size: 4,
        },
        Exit::MmioWrite {
            gpa: at(8),
            value,
            size: 8,
        },
        Exit::MmioRead {
            gpa: at(0),
            size: 1,
        },
        Exit::MmioWrite {
            gpa: at(0),
            value: 0xff,
            size: 8,
        },
        Exit::MmioRead {
            gpa: at(4),
            size: 4,
        },
        Exit::MmioWrite {
            gpa: at(0),
            value: 0xffff_ffff,
            size: 8,
        },
    ];
    for exit in expected {
        assert_eq!(run(vcpus[0].as_mut()), exit);
    }
}

#[test]
fn a_triple_fault_is_an_error_that_says_where() {
    if no_kvm() {
        return;
    }
    let new = machine(1, 64);
    let mut vcpus = new.vcpus;
    start(
        new.machine.ram(),
        vcpus[0].as_mut(),
        0,
        &[0x0f, 0x0b],
        [0, 0],
    ); // ud2
    let watchdog = Watchdog::new(vcpus[0].kicker(), LIMIT);
    match vcpus[0].run() {
        Err(MachineError::Guest { vcpu: 0, why }) => {
            // KVM's module for AMD resets a vCPU that has shut down.
            let resets = std::path::Path::new("/sys/module/kvm_amd").exists();
            let place = if resets {
                "its position is not known"
            } else {
                "rip 0x5000"
            };
            assert!(why.contains("triple fault") && why.contains(place), "{why}");
        }
        other => panic!("{other:?}"),
    }
    assert!(!watchdog.fired());
}

#[test]
fn a_kick_before_the_first_entry_is_taken_once() {
    if no_kvm() {
        return;
    }
    let new = machine(1, 64);
    let mut vcpus = new.vcpus;
    let vcpu = vcpus[0].as_mut();
    // mov ebx, 0xd0000000; l: inc rdi; mov [rbx], rdi; jmp l
    let code = [
        0xbb, 0, 0, 0, 0xd0, 0x48, 0xff, 0xc7, 0x48, 0x89, 0x3b, 0xeb, 0xf8,
    ];
    start(new.machine.ram(), vcpu, 0, &code, [0, 0]);
    let kicker = vcpu.kicker();
    for round in 0..2000u64 {
        kicker.kick();
        kicker.kick();
        assert!(kicker.is_kicked());
        assert_eq!(run_briefly(vcpu), Exit::Kicked);
        assert!(!kicker.is_kicked());
        assert_eq!(
            rung(run_briefly(vcpu)),
            round + 1,
            "one exit for kicks that wait together"
        );
    }
}

/// Runs without a watchdog, for guests that store to the doorbell within microseconds.
fn run_briefly(vcpu: &mut dyn Vcpu) -> Exit {
    vcpu.run().unwrap()
}

#[test]
fn no_kick_is_lost_however_it_races_the_entry() {
    if no_kvm() {
        return;
    }
    const KICKS: u64 = 3000;
    let new = machine(1, 64);
    let mut vcpu = new.vcpus.into_iter().next().unwrap();
    start(
        new.machine.ram(),
        vcpu.as_mut(),
        0,
        &SPIN,
        [DATA.byte_offset(), 0],
    );
    let kicker = vcpu.kicker();
    let taken = Arc::new(AtomicU64::new(0));
    let runner = std::thread::spawn({
        let taken = Arc::clone(&taken);
        move || {
            while taken.load(Ordering::Acquire) < KICKS {
                assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
                taken.fetch_add(1, Ordering::AcqRel);
            }
        }
    });
    let mut latencies = Vec::new();
    for kick in 0..KICKS {
        // At once, or after a pause of varying length: at, before and behind the entry.
        for _ in 0..(kick % 64) * (kick % 7) * 40 {
            std::hint::spin_loop();
        }
        let before = taken.load(Ordering::Acquire);
        let begin = Instant::now();
        kicker.kick();
        wait_until("the exit of a kick", || {
            taken.load(Ordering::Acquire) > before
        });
        latencies.push(begin.elapsed());
    }
    runner.join().unwrap();
    assert_eq!(
        taken.load(Ordering::Acquire),
        KICKS,
        "an exit without a kick"
    );
    latencies.sort_unstable();
    println!(
        "kick to exit, seen by the kicker: p50 {:?}, p99 {:?}, max {:?}",
        latencies[latencies.len() / 2],
        latencies[latencies.len() * 99 / 100],
        latencies[latencies.len() - 1]
    );
}

#[test]
fn kicks_of_several_threads_at_once_each_get_an_exit_behind_them() {
    if no_kvm() {
        return;
    }
    let new = machine(1, 64);
    let mut vcpu = new.vcpus.into_iter().next().unwrap();
    start(new.machine.ram(), vcpu.as_mut(), 0, &SPIN, [0, 0]);
    let kicker = vcpu.kicker();
    let (exits, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let runner = std::thread::spawn({
        let (exits, stop) = (Arc::clone(&exits), Arc::clone(&stop));
        move || {
            while stop.load(Ordering::Acquire) < 3 {
                assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
                exits.fetch_add(1, Ordering::AcqRel);
            }
        }
    });
    let kickers: Vec<_> = (0..3)
        .map(|_| {
            let (exits, stop, kicker) =
                (Arc::clone(&exits), Arc::clone(&stop), Arc::clone(&kicker));
            std::thread::spawn(move || {
                for _ in 0..400 {
                    let before = exits.load(Ordering::Acquire);
                    kicker.kick();
                    wait_until("the exit of a kick", || {
                        exits.load(Ordering::Acquire) > before
                    });
                }
                stop.fetch_add(1, Ordering::AcqRel);
            })
        })
        .collect();
    for thread in kickers {
        thread.join().unwrap();
    }
    // The runner may have entered again before it could see the last stop. Kicks at full speed
    // would be a storm of signals that leaves the thread no time to end.
    wait_until("the end of the vCPU's thread", || {
        kicker.kick();
        std::thread::sleep(Duration::from_millis(1));
        runner.is_finished()
    });
    runner.join().unwrap();
    // The thread is gone: a kick signals nobody, and nothing happens.
    kicker.kick();
}
