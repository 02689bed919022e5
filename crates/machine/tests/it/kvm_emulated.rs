//! KVM's own accesses to missing memory: instructions with one operand outside RAM, which KVM
//! emulates, so that KVM itself walks the guest's tables for the other operand.
//!
//! On an empty page KVM sleeps until the page is there. On a poison marker its access fails. If
//! that happens in a walk, KVM injects a page fault that the guest's tables do not justify.

use crate::kvm_userfault::{Source, armed, bytes_of, drop_mapping, no_delivery, pages_of};
use crate::place::placing;
use crate::support::{DATA, Watchdog, machine, no_kvm, start, word};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::{DOORBELL_GPA, Delivery, Exit, FaultEvents, GuestRam, NewMachine, Vcpu};
use pageferry_testkit::{LIMIT, Stop};
use pageferry_userfault::PageBitmap;
use std::sync::Arc;

/// The tables of [`FAR`]: one of each level, and a second last one for the next 2 MiB.
const POINTERS: RamPage = DATA;
const DIRECTORY: RamPage = RamPage(DATA.0 + 1);
const LEAVES: [RamPage; 2] = [RamPage(DATA.0 + 2), RamPage(DATA.0 + 3)];
/// The last page below `FAR` + 2 MiB, and the first above.
const OPERANDS: [RamPage; 2] = [RamPage(DATA.0 + 4), RamPage(DATA.0 + 5)];
const PAGES: u64 = DATA.0 + 6;

/// An address that only the tables above translate: no instruction but the tested one walks them.
const FAR: u64 = 1 << 39;
/// The end of the first page of [`OPERANDS`].
const EDGE: u64 = FAR + (2 << 20);
/// An address outside RAM. A load from it gives ones.
const DEVICE: u64 = DOORBELL_GPA.0 + PAGE_SIZE;

/// An instruction that KVM emulates, with rdi and rsi as its arguments. Then it rings the doorbell
/// with 1: `mov ebx,0xd0000000; mov eax,1; mov [rbx],rax; jmp .`
struct Instruction {
    name: &'static str,
    code: &'static [u8],
    /// Whether the argument rsi is the address in RAM, not rdi.
    reads_ram: bool,
    /// The bytes of the operand in RAM lie from here below rdi or rsi, if not from it.
    below: u64,
}

const INSTRUCTIONS: [Instruction; 3] = [
    Instruction {
        name: "movsq from a device",
        code: &[0x48, 0xa5],
        reads_ram: false,
        below: 0,
    },
    Instruction {
        name: "movsq to a device",
        code: &[0x48, 0xa5],
        reads_ram: true,
        below: 0,
    },
    Instruction {
        // mov rsp,rdi; push [rsi]
        name: "push from a device",
        code: &[0x48, 0x89, 0xfc, 0xff, 0x36],
        reads_ram: false,
        below: 8,
    },
];
const RING: [u8; 15] = [
    0xbb, 0, 0, 0, 0xd0, 0xb8, 1, 0, 0, 0, 0x48, 0x89, 0x03, 0xeb, 0xfe,
];

fn write_far_tables(ram: &GuestRam) {
    const TABLE: u64 = 0x67;
    let entry = |page: RamPage, index: u64, to: RamPage| {
        let value = to.byte_offset() | TABLE;
        placing(ram).write_at(page, index * 8, &value.to_le_bytes());
    };
    entry(RamPage(1), 1, POINTERS);
    entry(POINTERS, 0, DIRECTORY);
    entry(DIRECTORY, 0, LEAVES[0]);
    entry(DIRECTORY, 1, LEAVES[1]);
    entry(LEAVES[0], 511, OPERANDS[0]);
    entry(LEAVES[1], 0, OPERANDS[1]);
    for page in OPERANDS {
        placing(ram).write(page, &bytes_of(page));
    }
}

/// An armed machine, whose vCPU is at an instruction.
struct Guest {
    new: NewMachine,
    ram: Arc<GuestRam>,
    missing: Arc<PageBitmap>,
    events: Box<dyn FaultEvents>,
}

/// A machine whose vCPU is at `instruction`, with the operand in RAM at `at`. None if this host
/// lacks the delivery.
fn guest(delivery: Delivery, instruction: &Instruction, at: u64) -> Option<Guest> {
    let mut new = machine(1, PAGES);
    if no_delivery(new.machine.as_ref(), delivery) {
        return None;
    }
    let ram = Arc::clone(new.machine.ram());
    let (missing, events) = armed(new.machine.as_ref(), delivery);
    write_far_tables(&ram);
    let operand = at + instruction.below;
    let args = if instruction.reads_ram {
        [DEVICE, operand]
    } else {
        [operand, DEVICE]
    };
    let code = [instruction.code, &RING].concat();
    start(&ram, new.vcpus[0].as_mut(), 0, &code, args);
    Some(Guest {
        new,
        ram,
        missing,
        events,
    })
}

/// Runs a vCPU until it rings. Returns what it stored to the device, if it did.
fn run_until_it_rings(vcpu: &mut dyn Vcpu, what: &str, fault: impl Fn(RamPage)) -> Option<u64> {
    let watchdog = Watchdog::new(vcpu.kicker(), LIMIT);
    let mut stored = None;
    loop {
        match vcpu.run().unwrap_or_else(|e| panic!("{what}: {e}")) {
            Exit::MemoryFault { page, .. } => fault(page),
            Exit::MmioRead { .. } => {}
            Exit::MmioWrite { gpa, value: 1, .. } if gpa == DOORBELL_GPA => return stored,
            Exit::MmioWrite { gpa, value, .. } if gpa.0 == DEVICE => stored = Some(value),
            Exit::Kicked => assert!(!watchdog.fired(), "{what} hangs"),
            other => panic!("{what}: {other:?}"),
        }
    }
}

/// Runs `instruction` with its operand at `at` in RAM, while the pages `gone` are missing. Returns
/// what it stored to the device, if it did.
fn emulate(
    delivery: Delivery,
    instruction: &Instruction,
    at: u64,
    gone: &[RamPage],
) -> Option<(Arc<GuestRam>, Option<u64>)> {
    let Guest {
        mut new,
        ram,
        missing,
        events,
    } = guest(delivery, instruction, at)?;
    let pages = pages_of(&ram, PAGES);
    for &page in gone {
        placing(&ram).write(page, &[0x5a; PAGE_SIZE as usize]);
        missing.set(page);
    }
    new.machine.begin_postcopy().unwrap();
    let source = Source::new(Arc::clone(&new.machine), missing, pages);
    let stop = Stop::new();
    let stored = std::thread::scope(|scope| {
        let _stop = stop.on_drop();
        scope.spawn(|| source.serve(events, &stop));
        // To its end, so that all markers are there that this delivery sets.
        let assist = new
            .machine
            .assist_postcopy(&|| false, &|page| source.bring(page));
        assist.unwrap();
        let what = format!("{delivery}, {}, {gone:?}", instruction.name);
        run_until_it_rings(new.vcpus[0].as_mut(), &what, |page| source.fault(page))
    });
    gone.iter().for_each(|&page| source.fault(page));
    new.machine.disarm_userfault().unwrap();
    Some((ram, stored))
}

/// The eight bytes at `at`, below or across [`EDGE`].
fn bytes_at(ram: &GuestRam, at: u64) -> u64 {
    let offset = (PAGE_SIZE - (EDGE - at)) as usize;
    let mut bytes = [0; 2 * PAGE_SIZE as usize];
    for (page, bytes) in OPERANDS.iter().zip(bytes.chunks_mut(PAGE_SIZE as usize)) {
        ram.try_read(*page, bytes).unwrap();
    }
    u64::from_le_bytes(std::array::from_fn(|i| bytes[offset + i]))
}

/// Each instruction with each table missing alone, then with all, then with its operands too.
fn emulate_all(delivery: Delivery) {
    let tables = [POINTERS, DIRECTORY, LEAVES[0], LEAVES[1]];
    let mut cases: Vec<Vec<RamPage>> = tables.iter().map(|&table| vec![table]).collect();
    cases.push(tables.to_vec());
    cases.push(OPERANDS.to_vec());
    cases.push([&tables[..], &OPERANDS].concat());
    for instruction in &INSTRUCTIONS {
        // Inside a page, and across two pages whose last tables differ.
        for at in [EDGE - 16, EDGE - 4] {
            for gone in &cases {
                let Some((ram, stored)) = emulate(delivery, instruction, at, gone) else {
                    return;
                };
                let what = format!("{delivery}, {}, {gone:?}", instruction.name);
                let expected = if instruction.reads_ram {
                    stored.unwrap_or_else(|| panic!("{what}: nothing was stored"))
                } else {
                    u64::MAX
                };
                assert_eq!(bytes_at(&ram, at), expected, "{what}, at {at:#x}");
                if instruction.reads_ram && at == EDGE - 4 {
                    let first = word(&ram, OPERANDS[0], 511) >> 32;
                    assert_eq!(expected & 0xffff_ffff, first, "{what}");
                }
            }
        }
    }
}

#[test]
fn emulated_instructions_find_missing_tables_by_poison() {
    if !no_kvm() {
        emulate_all(Delivery::Poison);
    }
}

#[test]
fn emulated_instructions_find_missing_tables_without_markers() {
    if !no_kvm() {
        emulate_all(Delivery::Userfault);
        emulate_all(Delivery::Minor);
        emulate_all(Delivery::Missing);
    }
}

/// A marker that was set late, on a page that was there, and that nothing replaced before the
/// delivery ended.
#[test]
fn a_stale_marker_does_not_stop_an_emulated_instruction() {
    if no_kvm() {
        return;
    }
    for instruction in &INSTRUCTIONS {
        let at = EDGE - 4;
        let Some(mut guest) = guest(Delivery::Poison, instruction, at) else {
            return;
        };
        let machine = &guest.new.machine;
        machine.begin_postcopy().unwrap();
        for page in OPERANDS {
            guest.missing.set(page);
            machine.install(page, 1).unwrap();
            drop_mapping(&guest.ram, page.0);
        }
        machine.assist_postcopy(&|| false, &|_| {}).unwrap();
        for page in OPERANDS {
            guest.missing.clear(page);
        }
        machine.disarm_userfault().unwrap();
        let before = bytes_at(&guest.ram, at);
        let what = instruction.name;
        let stored = run_until_it_rings(guest.new.vcpus[0].as_mut(), what, |page| {
            panic!("{what}: {page:?} is not missing")
        });
        let after = bytes_at(&guest.ram, at);
        if instruction.reads_ram {
            assert_eq!((stored, after), (Some(before), before), "{what}");
        } else {
            assert_eq!((stored, after), (None, u64::MAX), "{what}");
        }
    }
}
