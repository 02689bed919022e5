//! A guest whose devices interrupt it: the controller at its addresses, and a hart that waits.

use crate::start::start_at;
use pageferry_addr::RamPage;
use pageferry_machine::soft::{self, SoftOptions};
use pageferry_machine::{
    DOORBELL_GPA, Device, Exit, Machine, MachineSpec, NewMachine, Vcpu, board,
};
use pageferry_testkit::LIMIT;
use pageferry_testkit::rv64::{A0, A1, WFI, bne, csrs, ld, li, sd, slli};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

const SOURCE: u32 = 17;
/// `sie`, and its bit of external interrupts.
const SIE: u32 = 0x104;
const EXTERNAL: u32 = 1 << 9;

/// `sw` and `lw` for `sd` and `ld`: funct3 is 2 instead of 3.
const fn word(access: u32) -> u32 {
    access & !(1 << 12)
}

/// The register gets an address above 2^31.
fn address(register: u32, address: u64) -> Vec<u32> {
    let [high, low] = li(register, (address >> 1) as u32);
    vec![high, low, slli(register, register, 1)]
}

fn store(offset: u64, value: u32) -> Vec<u32> {
    let [high, low] = li(A0, value);
    let at = address(A1, board::PLIC.start + offset);
    [at, vec![high, low, word(sd(A0, A1))]].concat()
}

/// The guest rings with the source that it claims, and waits again.
fn machine() -> NewMachine {
    let options = SoftOptions {
        interrupts: true,
        ..SoftOptions::default()
    };
    let new = soft::create_with(MachineSpec::new(1, 1 << 20), options).unwrap();
    let [high, low] = li(A0, EXTERNAL);
    let mut code = [
        store(4 * u64::from(SOURCE), 1),
        store(0x2000, 1 << SOURCE),
        vec![high, low, csrs(SIE, A0)],
    ]
    .concat();
    let again = code.len();
    code.push(WFI);
    code.extend(address(A1, board::PLIC.start + 0x20_0004));
    code.push(word(ld(A0, A1)));
    code.push(word(sd(A0, A1)));
    code.extend(address(A1, DOORBELL_GPA.0));
    code.push(sd(A0, A1));
    let back = -4 * (code.len() - again) as i32;
    code.push(bne(A1, 0, back));
    let code: Vec<u8> = code.into_iter().flat_map(u32::to_le_bytes).collect();
    new.machine.ram().try_write(RamPage(0), &code).unwrap();
    new
}

fn started() -> NewMachine {
    let mut new = machine();
    start_at(&mut *new.vcpus[0], 0);
    new
}

/// Runs the vCPU until it rings, with a limit.
fn rang(vcpu: &mut Box<dyn Vcpu>) -> u64 {
    let kicker = vcpu.kicker();
    let (done, late) = channel::<()>();
    std::thread::spawn(move || {
        if late.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
            kicker.kick();
        }
    });
    let exit = vcpu.run().unwrap();
    drop(done);
    match exit {
        Exit::MmioWrite { gpa, value, .. } if gpa == DOORBELL_GPA => value,
        other => panic!("{other:?}"),
    }
}

fn controller(machine: &dyn Machine) -> Arc<dyn Device> {
    let mut devices = machine.devices().into_iter();
    devices.find(|device| device.name() == "plic").unwrap()
}

#[test]
fn a_device_wakes_a_hart_that_waits() {
    let mut new = started();
    let line = new.machine.interrupt(SOURCE).unwrap();
    for _ in 0..20 {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(3));
                line.raise();
            });
            assert_eq!(rang(&mut new.vcpus[0]), u64::from(SOURCE));
        });
    }
}

/// The edge comes behind the save of the hart's state, as devices pause behind the vCPUs.
#[test]
fn an_interrupt_that_waits_goes_along() {
    let (mut here, mut there) = (started(), machine());
    here.machine.interrupt(SOURCE).unwrap().raise();
    assert_eq!(rang(&mut here.vcpus[0]), u64::from(SOURCE));
    let vcpu = here.vcpus[0].save().unwrap();
    here.machine.interrupt(SOURCE).unwrap().raise();
    let state = controller(&*here.machine).save().unwrap();
    there.vcpus[0].restore(&vcpu).unwrap();
    let device = controller(&*there.machine);
    device.decode(device.version(), &state).unwrap()();
    device.resume();
    assert_eq!(rang(&mut there.vcpus[0]), u64::from(SOURCE));
}

#[test]
fn only_a_machine_for_devices_has_a_controller() {
    let new = soft::create(MachineSpec::new(1, 1 << 20)).unwrap();
    assert!(new.machine.interrupt(SOURCE).is_err());
    assert_eq!(new.machine.devices().len(), 1, "the console");
    let new = machine();
    for line in [0, 32, u32::MAX] {
        let why = new.machine.interrupt(line).err().unwrap().to_string();
        assert!(why.contains("expected 1 to 31"), "{why}");
    }
}
