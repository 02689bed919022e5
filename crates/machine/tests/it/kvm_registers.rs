//! A guest's writes of the registers that name memory, which KVM then accesses itself. While pages
//! are missing, such a write brings them first, by an exit on the vCPU's own thread.

use crate::kvm_userfault::{Source, armed, bytes_of, no_delivery, pages_of};
use crate::support::{CODE, DATA, machine_with, no_kvm, rung, word};
use pageferry_addr::{Gpa, PAGE_SIZE, RamPage};
use pageferry_machine::{
    Access, Delivery, Exit, FaultEvents, GuestRam, NewMachine, StartMode, StartState, Vcpu, kvm,
};
use pageferry_testkit::LIMIT;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};

const DELIVERIES: [Delivery; 3] = [Delivery::Minor, Delivery::Missing, Delivery::Poison];
const CLOCKS: [u32; 2] = [0x12, 0x4b56_4d01];
const WALL_CLOCKS: [u32; 2] = [0x11, 0x4b56_4d00];
const STEAL_TIME: u32 = 0x4b56_4d03;
const PV_EOI: u32 = 0x4b56_4d04;
/// The pages of the structures.
const SECOND: RamPage = RamPage(DATA.0 + 1);
const PAGES: u64 = DATA.0 + 2;

/// rdi: the value, rsi: the register. Writes it in ring 0, and rings.
///
/// ```text
/// mov ecx,esi; mov eax,edi; mov rdx,rdi; shr rdx,32; wrmsr
/// mov ebx,0xd0000000; mov eax,1; mov [rbx],rax; jmp .
/// ```
const WRITE: [u8; 28] = [
    0x89, 0xf1, 0x89, 0xf8, 0x48, 0x89, 0xfa, 0x48, 0xc1, 0xea, 0x20, 0x0f, 0x30, 0xbb, 0, 0, 0,
    0xd0, 0xb8, 1, 0, 0, 0, 0x48, 0x89, 0x03, 0xeb, 0xfe,
];

/// An armed machine whose vCPU is about to write a register, with the pages of the structures
/// missing.
struct Guest {
    new: NewMachine,
    ram: Arc<GuestRam>,
    source: Source,
    events: Box<dyn FaultEvents>,
    _limit: Sender<()>,
}

fn write_next(vcpu: &mut dyn Vcpu, register: u32, value: u64) {
    let start = StartState {
        entry: CODE.byte_offset(),
        stack: 0xf000,
        args: [value, register.into()],
        tables: Gpa(0x1000),
        mode: StartMode::Kernel64,
    };
    vcpu.set_start(&start).unwrap();
}

fn guest(delivery: Delivery, register: u32, value: u64) -> Option<Guest> {
    let mut new = machine_with(1, PAGES, kvm::Irqchip::Kernel);
    if no_delivery(new.machine.as_ref(), delivery) {
        return None;
    }
    let ram = Arc::clone(new.machine.ram());
    ram.try_write(CODE, &WRITE).unwrap();
    let (missing, events) = armed(new.machine.as_ref(), delivery);
    write_next(new.vcpus[0].as_mut(), register, value);
    let low = pages_of(&ram, DATA.0);
    missing.set(DATA);
    missing.set(SECOND);
    new.machine.begin_postcopy().unwrap();
    new.machine.assist_postcopy(&|| false, &|_| {}).unwrap();
    let (limit, done) = channel();
    let (machine, kicker) = (Arc::clone(&new.machine), new.vcpus[0].kicker());
    // A kick alone does not end a sleep of KVM itself.
    std::thread::spawn(move || {
        if done.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            machine.abandon();
            kicker.kick();
        }
    });
    let source = Source::new(Arc::clone(&new.machine), missing, low);
    // The pages that are here do not send events.
    (0..DATA.0).for_each(|page| source.fault(RamPage(page)));
    Some(Guest {
        new,
        ram,
        source,
        events,
        _limit: limit,
    })
}

impl Guest {
    /// Runs until the guest rings. Returns the pages that it has left the guest for.
    fn run(&mut self) -> Vec<RamPage> {
        let vcpu = self.new.vcpus[0].as_mut();
        let mut brought = Vec::new();
        loop {
            match vcpu.run().unwrap() {
                Exit::MemoryFault { page, access } => {
                    assert_eq!(access, Access::Write);
                    brought.push(page);
                    self.source.fault(page);
                }
                Exit::Kicked => panic!("the guest hangs"),
                exit => {
                    assert_eq!(rung(exit), 1);
                    return brought;
                }
            }
        }
    }

    /// KVM has found no page empty.
    fn assert_no_event(&mut self, what: &str) {
        assert!(self.events.next().unwrap().is_none(), "{what}");
    }
}

#[test]
fn a_write_of_a_register_brings_its_page() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        let registers = CLOCKS.into_iter().chain(WALL_CLOCKS);
        for register in registers.chain([STEAL_TIME, PV_EOI]) {
            let what = format!("{delivery}, {register:#x}");
            let is_wall = WALL_CLOCKS.contains(&register);
            let value = DATA.byte_offset() | u64::from(!is_wall);
            let Some(mut guest) = guest(delivery, register, value) else {
                break;
            };
            assert_eq!(guest.run(), [DATA], "{what}");
            guest.assert_no_event(&what);
            // The bytes came, and KVM has written its structure. PV EOI waits for an interrupt.
            let last = PAGE_SIZE as usize / 8 - 1;
            assert_eq!(word(&guest.ram, DATA, last), DATA.byte_offset(), "{what}");
            let written = (0..8).any(|at| word(&guest.ram, DATA, at) != own_word(at));
            assert_eq!(written, register != PV_EOI, "{what}");
            // A wall clock is written once.
            let state = guest.new.vcpus[0].save().unwrap();
            let travel = guest.new.machine.state_pages(&state);
            assert_eq!(travel == [DATA], !is_wall, "{what}: {travel:?}");
        }
    }
}

/// The word of [`bytes_of`] the structure's page.
fn own_word(at: usize) -> u64 {
    let bytes = bytes_of(DATA);
    u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().unwrap())
}

#[test]
fn a_structure_across_a_border_brings_both_pages_and_travels_with_both() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        for (register, offset) in [
            (CLOCKS[0], 0xff1),
            (CLOCKS[1], 0xff1),
            (WALL_CLOCKS[0], 0xff8),
            (WALL_CLOCKS[1], 0xff8),
        ] {
            let what = format!("{delivery}, {register:#x}");
            let Some(mut guest) = guest(delivery, register, DATA.byte_offset() + offset) else {
                break;
            };
            assert_eq!(guest.run(), [DATA, SECOND], "{what}");
            guest.assert_no_event(&what);
            let state = guest.new.vcpus[0].save().unwrap();
            let travel = guest.new.machine.state_pages(&state);
            if CLOCKS.contains(&register) {
                assert_eq!(travel, [DATA, SECOND], "{what}");
            } else {
                assert_eq!(travel, [], "{what}");
                // The nanoseconds are in the second page.
                assert_ne!(word(&guest.ram, SECOND, 0), SECOND.byte_offset(), "{what}");
            }
        }
    }
}

#[test]
fn a_register_of_memory_that_is_here_or_nowhere_brings_nothing() {
    if no_kvm() {
        return;
    }
    let beyond = PAGES * PAGE_SIZE;
    for delivery in DELIVERIES {
        for (register, value) in [
            (CLOCKS[1], beyond | 1),
            (CLOCKS[1], 0x0fff_ffff_f001),
            (CLOCKS[1], u64::MAX),
            (WALL_CLOCKS[1], beyond),
            (WALL_CLOCKS[1], u64::MAX - 3),
            (STEAL_TIME, beyond | 1),
            (STEAL_TIME, 0x8001),
            (PV_EOI, 0x8001),
            // Bit 0 is clear: nothing is there.
            (CLOCKS[1], DATA.byte_offset()),
            (STEAL_TIME, DATA.byte_offset()),
            (PV_EOI, DATA.byte_offset()),
            (WALL_CLOCKS[1], 0),
        ] {
            let what = format!("{delivery}, {register:#x} = {value:#x}");
            let Some(mut guest) = guest(delivery, register, value) else {
                break;
            };
            assert_eq!(guest.run(), [], "{what}");
            guest.assert_no_event(&what);
        }
    }
}

/// A value that KVM refuses is an exception in the guest, which here is a triple fault.
#[test]
fn a_value_that_kvm_refuses_is_an_exception() {
    if no_kvm() {
        return;
    }
    for (register, value) in [
        (STEAL_TIME, DATA.byte_offset() | 3),
        (PV_EOI, (PAGES * PAGE_SIZE) | 1),
    ] {
        let Some(mut guest) = guest(Delivery::Minor, register, value) else {
            return;
        };
        let vcpu = guest.new.vcpus[0].as_mut();
        let why = loop {
            match vcpu.run() {
                Ok(Exit::MemoryFault { page, .. }) => guest.source.fault(page),
                Ok(exit) => panic!("{register:#x} = {value:#x}: {exit:?}"),
                Err(why) => break why.to_string(),
            }
        };
        assert!(why.contains("triple fault"), "{why}");
    }
}

#[test]
fn a_vcpu_that_waits_for_the_page_of_a_register_can_be_kicked_but_not_saved() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        let value = DATA.byte_offset() | 1;
        let Some(mut guest) = guest(delivery, CLOCKS[1], value) else {
            continue;
        };
        let vcpu = guest.new.vcpus[0].as_mut();
        let fault = Exit::MemoryFault {
            page: DATA,
            access: Access::Write,
        };
        assert_eq!(vcpu.run().unwrap(), fault);
        vcpu.kicker().kick();
        assert_eq!(vcpu.run().unwrap(), Exit::Kicked);
        let why = vcpu.save().unwrap_err().to_string();
        assert!(why.contains("waits for a missing page"), "{why}");
        guest.source.fault(DATA);
        // The write is part of the state, and then the guest goes on.
        let state = vcpu.save().unwrap();
        assert_eq!(guest.new.machine.state_pages(&state), [DATA]);
        assert_eq!(guest.run(), []);
    }
}

#[test]
fn a_disarmed_machine_leaves_such_writes_to_kvm() {
    if no_kvm() {
        return;
    }
    for delivery in DELIVERIES {
        let value = DATA.byte_offset() | 1;
        let Some(mut guest) = guest(delivery, CLOCKS[1], value) else {
            continue;
        };
        // The write has left the guest when the last page comes.
        let exit = guest.new.vcpus[0].run().unwrap();
        assert!(matches!(exit, Exit::MemoryFault { page: DATA, .. }));
        guest.source.fault(DATA);
        guest.source.fault(SECOND);
        guest.new.machine.disarm_userfault().unwrap();
        assert_eq!(guest.run(), []);
        assert_ne!(word(&guest.ram, DATA, 3), 0, "KVM has written the clock");
        write_next(
            guest.new.vcpus[0].as_mut(),
            CLOCKS[1],
            SECOND.byte_offset() | 1,
        );
        assert_eq!(guest.run(), []);
        assert_ne!(word(&guest.ram, SECOND, 3), 0, "KVM has written the clock");
    }
}
