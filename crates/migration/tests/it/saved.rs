//! VMs on disk: their states without memory.

use crate::support::{WorkloadVm, kvm_usable};
use pageferry_machine::{AccessError, Engine};
use pageferry_migration::{MAX_SAVED_BYTES, MigrationError, SavedVm, Stopped};
use pageferry_testkit::wait_until;

const MEMORY: u64 = 8 << 20;

fn engines(test: &str) -> Vec<Engine> {
    let mut engines = vec![Engine::Soft];
    engines.extend(kvm_usable(test).then_some(Engine::Kvm));
    engines
}

fn saved(vm: &WorkloadVm) -> SavedVm {
    let stopped = Stopped::new(vm.running()).unwrap();
    stopped.save(b"guest").unwrap()
}

fn visits(vm: &WorkloadVm) -> u64 {
    vm.control(0).done
}

#[test]
fn a_stopped_vm_stands_still_and_runs_on() {
    for engine in engines("saved::a_stopped_vm") {
        let vm = WorkloadVm::booted(engine, 2, MEMORY);
        wait_until("work", || visits(&vm) > 100);
        let stopped = Stopped::new(vm.running()).unwrap();
        let before = visits(&vm);
        let written = vm.machine.ram().try_write(pageferry_addr::RamPage(1), &[1]);
        assert_eq!(written, Err(AccessError::Frozen));
        let first = stopped.save(b"guest").unwrap();
        assert!(!first.is_paused());
        assert_eq!(visits(&vm), before);
        drop(stopped);
        wait_until("work", || visits(&vm) > before);
        vm.threads.pause(pageferry_testkit::LIMIT).unwrap();
        assert!(saved(&vm).is_paused());
        assert!(vm.threads.is_paused(), "it stays paused");
    }
}

#[test]
fn states_survive_the_file_and_every_damage_is_found() {
    for engine in engines("saved::states") {
        let vm = WorkloadVm::booted(engine, 2, MEMORY);
        let bytes = saved(&vm).encode().unwrap();
        assert!((bytes.len() as u64) < MAX_SAVED_BYTES);
        let read = SavedVm::decode(&bytes).unwrap();
        assert_eq!(read.encode().unwrap(), bytes);
        assert_eq!(read.offer().guest, b"guest");
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x10;
            assert!(SavedVm::decode(&bad).is_err(), "byte {at}");
        }
        for len in (0..bytes.len()).step_by(7) {
            assert!(SavedVm::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        let longer = [&bytes[..], &bytes[8..]].concat();
        assert!(SavedVm::decode(&longer).is_err());
    }
}

#[test]
fn only_the_same_machine_takes_the_states() {
    let soft = saved(&WorkloadVm::booted(Engine::Soft, 2, MEMORY));
    for (vcpus, memory, part) in [(3, MEMORY, "2 vCPUs"), (2, 2 * MEMORY, "bytes of memory")] {
        let other = WorkloadVm::empty(Engine::Soft, vcpus, memory);
        match soft.load(&other.running()) {
            Err(MigrationError::Mismatch(why)) => assert!(why.contains(part), "{why}"),
            loaded => panic!("{loaded:?}"),
        }
    }
    if kvm_usable("saved::only_the_same_machine") {
        let other = WorkloadVm::empty(Engine::Kvm, 2, MEMORY);
        match soft.load(&other.running()) {
            Err(MigrationError::Mismatch(why)) => assert!(why.contains("engine is soft"), "{why}"),
            loaded => panic!("{loaded:?}"),
        }
    }
    let same = WorkloadVm::empty(Engine::Soft, 2, MEMORY);
    soft.load(&same.running()).unwrap();
}
