//! CPU models: files of `run --cpu`, and offers with a CPUID that this host lacks.

use crate::support::{Destination, Dir, Process};
use pageferry_harness::Vm;
use pageferry_machine::{CpuModel, Engine, MachineSpec, kvm};
use pageferry_migration::{Observer, Phase, Route, SourceConfig, SourceSession, SourceVm, migrate};
use pageferry_testkit::skip;
use std::sync::Mutex;

/// The first 4 KiB of a bzImage.
fn bzimage() -> Vec<u8> {
    let mut image = vec![0; 4096];
    image[0x1f1] = 1;
    image[0x202..0x206].copy_from_slice(b"HdrS");
    image[0x206..0x208].copy_from_slice(&0x20f_u16.to_le_bytes());
    image[0x211] = 1;
    image
}

#[test]
fn a_model_that_is_none_is_refused() {
    let dir = Dir::new();
    let [kernel, riscv, model, large, control] =
        ["kernel", "riscv", "model", "large", "vm"].map(|name| dir.path(name));
    std::fs::write(&kernel, bzimage()).unwrap();
    std::fs::write(&riscv, "x").unwrap();
    std::fs::write(&large, "#".repeat((64 << 10) + 1)).unwrap();
    let run = |kernel: &std::path::Path, cpu: &str| {
        let [control, kernel] = [&control, kernel].map(|path| path.to_str().unwrap());
        let run = ["run", "--memory", "16M", "--control", control];
        let cpu = ["--kernel", kernel, "--cpu", cpu];
        Process::start(&[&run[..], &cpu].concat(), &dir).end()
    };
    run(&kernel, "x86-64-v4").assert_failed(2, "expected host, x86-64-v2, x86-64-v3 or a file");
    run(&kernel, "x86-64-v4,poison").assert_failed(2, "cannot read the CPU model x86-64-v4");
    run(&kernel, large.to_str().unwrap()).assert_failed(2, "cannot read the CPU model");
    run(&riscv, "host").assert_failed(2, "--cpu is for x86-64 kernels");
    for (text, why) in [
        (&b"1 0 0 0 0"[..], "line 1 has 5 words, expected 6"),
        (b"# none\n", "expected all bits of 0x7808171"),
        (b"\xff", "invalid utf-8"),
    ] {
        std::fs::write(&model, text).unwrap();
        run(&kernel, model.to_str().unwrap()).assert_failed(2, why);
    }
}

/// The phases of a migration.
#[derive(Default)]
struct Phases(Mutex<Vec<Phase>>);

impl Observer for Phases {
    fn phase(&self, phase: Phase) {
        self.0.lock().unwrap().push(phase);
    }

    fn progress(&self, _: Phase, _: u64, _: u64) {}
}

/// The description of Linux on a PC with one vCPU and 16 MiB, and this CPUID.
fn description(cpuid: &[u8]) -> Vec<u8> {
    let head = [&b"PFGD"[..], &[2, 0, 2, 1], &1_u32.to_le_bytes()].concat();
    // It has no virtio devices.
    [&head[..], &(16_u64 << 20).to_le_bytes(), &[0], cpuid].concat()
}

const FORCED: &[&str] = &["--delivery", "poison"];

#[test]
fn an_offer_that_this_host_lacks_a_feature_of_is_refused_before_the_guest_stops() {
    if let Err(why) = kvm::probe_vm() {
        skip("kvm", why);
        return;
    }
    let spec = MachineSpec::new(1, 16 << 20);
    let cpuid = kvm::cpuid_of(&CpuModel::default(), 1).unwrap();
    let vm = Vm::create_for_linux(Engine::Kvm, spec, Some(&cpuid), None, Vec::new()).unwrap();
    let good = cpuid.to_bytes();
    // The fifth word of a leaf is EBX.
    let mut beyond = good.clone();
    let is_leaf_7 = |leaf: &&mut [u8]| leaf[..8] == [7, 0, 0, 0, 0, 0, 0, 0];
    let leaf_7 = beyond.chunks_mut(28).find(is_leaf_7).unwrap();
    // A bit that no processor has.
    leaf_7[18] |= 1 << 6;
    let hidden = kvm::cpuid_of(&CpuModel::default().for_poison(), 1).unwrap();
    let hidden = hidden.to_bytes();
    let bits = kvm::check_forced_poison(&cpuid).unwrap_err().to_string();
    assert!(bits.contains("(pv_tlb_flush)"), "{bits}");
    let mut offers = vec![
        (&[][..], &beyond[..], "CPUID leaf 0x7 EBX bit 22".to_owned()),
        (&[], &good[1..], "expected 1 to 256 leaves of 28".into()),
        (FORCED, &good, bits.clone()),
        // Without a CPUID, it would be that of this host.
        (FORCED, &[], bits),
    ];
    if kvm::probe_kernels().is_err() {
        // The last check: all else fits.
        let why = "KVM interprets the kernels of its guests here";
        offers.push((FORCED, &hidden, why.into()));
        offers.push((&[], &good, why.into()));
    }
    for (flags, cpuid, why) in offers {
        let destination = Destination::start_on_tcp(flags);
        let phases = Phases::default();
        let failure = migrate(
            &vm.running(),
            &Route::To(destination.address.parse().unwrap()),
            &description(cpuid),
            &SourceConfig::default(),
            &SourceSession::new().unwrap(),
            &phases,
        )
        .unwrap_err();
        assert!(failure.error.to_string().contains(&why), "{failure:?}");
        assert_eq!(failure.vm, SourceVm::Runs);
        let phases = phases.0.into_inner().unwrap();
        assert_eq!(phases, [Phase::Setup, Phase::Failed]);
        destination.process.wait_until_said(&why);
        destination.process.interrupt();
    }
}
