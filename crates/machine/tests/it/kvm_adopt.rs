//! Guests of KVM in memory that a VMM has made.

use crate::adopt::{MIB, adopt, memfd, region};
use crate::support::{no_kvm, run, rung, start, write_tables};
use pageferry_addr::RamPage;
use pageferry_machine::MachineError;
use pageferry_machine::kvm::{self, KvmOptions};
use pageferry_userfault::PageBitmap;
use rustix::fs::MemfdFlags;

#[test]
fn a_guest_of_kvm_runs_in_adopted_memory() {
    if no_kvm() {
        return;
    }
    let fd = memfd(3 * MIB, MemfdFlags::empty()).unwrap();
    let regions = vec![region(0, MIB, &fd, 2 * MIB), region(64 * MIB, MIB, &fd, 0)];
    let (mut new, _) = kvm::create_on(1, adopt(regions).unwrap(), KvmOptions::default()).unwrap();
    let ram = new.machine.ram();
    write_tables(ram);
    new.machine.set_dirty_log(true).unwrap();
    // mov [rdi],rsi; mov ebx,0xd0000000; mov [rbx],rsi; jmp .
    let code = [
        0x48, 0x89, 0x37, 0xbb, 0, 0, 0, 0xd0, 0x48, 0x89, 0x33, 0xeb, 0xfe,
    ];
    let vcpu = &mut *new.vcpus[0];
    start(ram, vcpu, 0, &code, [64 * MIB + 8192, 77]);
    assert_eq!(rung(run(vcpu)), 77);
    let mut word = [0; 8];
    rustix::io::pread(&fd, &mut word, 8192).unwrap();
    assert_eq!(u64::from_le_bytes(word), 77);
    let dirty = PageBitmap::new(512);
    new.machine.harvest_dirty(&dirty, true).unwrap();
    assert!(dirty.test(RamPage(258)), "a page of the second region");
}

#[test]
fn kvm_takes_no_memory_where_a_pc_has_other_things() {
    let reaches = |start: u64, bytes| {
        let fd = memfd(bytes, MemfdFlags::empty()).unwrap();
        let ram = adopt(vec![region(start, bytes, &fd, 0)]).unwrap();
        match kvm::create_on(1, ram, KvmOptions::default()) {
            Err(MachineError::Layout(why)) => Some(why.to_string()),
            // Made, or refused by a host without KVM.
            _ => None,
        }
    };
    for (start, bytes) in [
        (0xfebf_f000, 2 * MIB),
        (0xffff_f000, 8192),
        (0xfee0_0000, 4096),
    ] {
        let why = reaches(start, bytes).expect("it reaches there");
        assert!(why.contains("0xfec00000..0x100000000"), "{why}");
    }
    assert_eq!(reaches(0xfec0_0000 - MIB, MIB), None);
    assert_eq!(reaches(1 << 32, MIB), None);
}
