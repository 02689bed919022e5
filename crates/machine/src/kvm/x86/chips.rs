//! The interrupt controllers and timers of a PC, as a [`Device`]: two PICs, IOAPIC, PIT, and KVM's
//! clock for guests.
//!
//! The state is the kernel's structures one after another (`struct kvm_irqchip` three times,
//! `struct kvm_pit_state2`, `struct kvm_clock_data`). The LAPICs are parts of the vCPUs' states,
//! which are loaded before: the IOAPIC then passes its pending interrupts on to them.

use super::clock::Moved;
use super::plain::{Plain, bytes_of, from_bytes};
use super::shared::VmShared;
use crate::{Apply, Device, Interrupt, MachineError};
use kvm_bindings::{
    KVM_CLOCK_REALTIME, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    kvm_clock_data, kvm_irqchip, kvm_pit_state2,
};
use rustix::event::{EventfdFlags, eventfd};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, PoisonError};

/// The controllers, in the order of the state.
const CONTROLLERS: [u32; 3] = [
    KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE,
    KVM_IRQCHIP_IOAPIC,
];
const STATE_BYTES: usize = CONTROLLERS.len() * size_of::<kvm_irqchip>()
    + size_of::<kvm_pit_state2>()
    + size_of::<kvm_clock_data>();

fn os(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> MachineError {
    move |e| MachineError::os(what, std::io::Error::from_raw_os_error(e.errno()))
}

/// See the module.
pub(super) struct Chips(pub(super) Arc<VmShared>);

impl Device for Chips {
    fn name(&self) -> &str {
        "kvm.chips"
    }

    fn version(&self) -> u32 {
        1
    }

    fn pause(&self) -> Result<(), MachineError> {
        // They do nothing for vCPUs that stand still but to count time.
        Ok(())
    }

    fn resume(&self) {}

    fn save(&self) -> Result<Vec<u8>, MachineError> {
        let vm = &self.0.vm;
        let mut state = Vec::with_capacity(STATE_BYTES);
        for chip_id in CONTROLLERS {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.get_irqchip(&mut chip)
                .map_err(os("cannot read an interrupt controller"))?;
            state.extend_from_slice(bytes_of(&chip));
        }
        let pit = vm.get_pit2().map_err(os("cannot read the timer"))?;
        state.extend_from_slice(bytes_of(&pit));
        let clock = vm.get_clock().map_err(os("cannot read the clock"))?;
        state.extend_from_slice(bytes_of(&clock));
        Ok(state)
    }

    fn decode<'a>(&'a self, _: u32, bytes: &[u8]) -> Result<Apply<'a>, MachineError> {
        if bytes.len() != STATE_BYTES {
            return Err(MachineError::Device(format!(
                "{} bytes for interrupt controllers and timers, expected {STATE_BYTES}",
                bytes.len()
            )));
        }
        let mut rest = bytes;
        let mut chips = Vec::with_capacity(CONTROLLERS.len());
        for wanted in CONTROLLERS {
            let chip: kvm_irqchip = take(&mut rest);
            if chip.chip_id != wanted {
                return Err(MachineError::Device(format!(
                    "interrupt controller {} comes where {wanted} is expected",
                    chip.chip_id
                )));
            }
            chips.push(chip);
        }
        let pit: kvm_pit_state2 = take(&mut rest);
        let there: kvm_clock_data = take(&mut rest);
        Ok(Box::new(move || {
            let vm = &self.0.vm;
            // KVM refuses an unknown controller only, and a VM without any.
            let _ = set_clock(vm, &there);
            if let Ok(here) = vm.get_clock() {
                let moved = Moved { there, here };
                *self.0.clock.lock().unwrap_or_else(PoisonError::into_inner) = Some(moved);
            }
            let _ = vm.set_pit2(&pit);
            for chip in &chips {
                let _ = vm.set_irqchip(chip);
            }
        }))
    }
}

/// The next structure of a state whose length was checked.
fn take<T: Plain>(rest: &mut &[u8]) -> T {
    let (head, tail) = rest.split_at(size_of::<T>());
    *rest = tail;
    from_bytes(head).expect("as many bytes as the structure has")
}

/// Sets the guest's clock, which goes on by the difference of real time if both hosts know it.
fn set_clock(vm: &kvm_ioctls::VmFd, there: &kvm_clock_data) -> Result<(), kvm_ioctls::Error> {
    let mut clock = kvm_clock_data {
        clock: there.clock,
        flags: there.flags & KVM_CLOCK_REALTIME,
        realtime: there.realtime,
        ..Default::default()
    };
    vm.set_clock(&clock).or_else(|_| {
        // Before Linux 5.16.
        clock.flags = 0;
        vm.set_clock(&clock)
    })
}

/// An interrupt line of KVM's controllers.
struct Line(OwnedFd);

impl Interrupt for Line {
    fn raise(&self) {
        // An eventfd takes as many signals as anyone can send.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

/// Connects an interrupt line; see [`crate::Machine::interrupt`].
///
/// # Errors
/// When the kernel refuses.
pub(super) fn line(vm: &VmShared, gsi: u32) -> Result<Arc<dyn Interrupt>, MachineError> {
    const WHAT: &str = "cannot connect an interrupt line";
    let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        .map_err(|e| MachineError::os(WHAT, e))?;
    super::sys::irqfd(&vm.vm, event.as_fd(), gsi).map_err(|e| MachineError::os(WHAT, e))?;
    Ok(Arc::new(Line(event)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::x86::state::Parts;
    use crate::kvm::x86::vm::{self, Irqchip, KvmOptions};
    use crate::{MachineSpec, Vcpu, VcpuState};

    fn machine() -> Option<(Chips, Vec<Box<dyn Vcpu>>)> {
        let missing = crate::kvm::probe_vm().err();
        if missing.is_some_and(|why| pageferry_testkit::skip("kvm", why)) {
            return None;
        }
        let options = KvmOptions {
            irqchip: Irqchip::Kernel,
            ..KvmOptions::default()
        };
        let new = vm::create(MachineSpec::new(2, 1 << 20), options).unwrap();
        Some((Chips(new.vm), new.vcpus))
    }

    /// The structure `index` of a state.
    fn controller(state: &[u8], index: usize) -> &[u8] {
        let bytes = size_of::<kvm_irqchip>();
        &state[index * bytes..(index + 1) * bytes]
    }

    fn clock(state: &[u8]) -> kvm_clock_data {
        from_bytes(&state[STATE_BYTES - size_of::<kvm_clock_data>()..]).unwrap()
    }

    #[test]
    fn controllers_and_clock_go_on_elsewhere() {
        let (Some((here, _)), Some((there, _))) = (machine(), machine()) else {
            return;
        };
        let mut chip = kvm_irqchip {
            chip_id: KVM_IRQCHIP_IOAPIC,
            ..Default::default()
        };
        here.0.vm.get_irqchip(&mut chip).unwrap();
        let mut bytes = bytes_of(&chip).to_vec();
        // The redirection of line 4 (`struct kvm_ioapic_state`): vector 0x31, not masked.
        bytes[8 + 24 + 4 * 8..][..8].copy_from_slice(&0x31_u64.to_le_bytes());
        here.0.vm.set_irqchip(&from_bytes(&bytes).unwrap()).unwrap();
        let mut set = here.0.vm.get_clock().unwrap();
        (set.clock, set.flags) = (5_000_000_000_000, 0);
        here.0.vm.set_clock(&set).unwrap();
        let state = here.save().unwrap();
        let waited = std::time::Duration::from_millis(50);
        std::thread::sleep(waited);
        there.decode(1, &state).unwrap()();
        let again = there.save().unwrap();
        for index in 0..CONTROLLERS.len() {
            assert!(
                controller(&state, index) == controller(&again, index),
                "{index}"
            );
        }
        let (before, after) = (clock(&state), clock(&again));
        assert!(before.clock >= 5_000_000_000_000);
        assert!(after.clock >= before.clock, "{before:?} {after:?}");
        if before.flags & KVM_CLOCK_REALTIME != 0 {
            let passed = after.clock - before.clock;
            assert!(
                u128::from(passed) >= waited.as_nanos(),
                "{before:?} {after:?}"
            );
        }
    }

    /// Those of a Linux on an AMD host, under load.
    #[test]
    fn a_state_of_this_version_is_read() {
        let Some((there, _)) = machine() else {
            return;
        };
        let state = include_bytes!("fixtures/chips-v1.bin");
        there.decode(1, state).unwrap()();
        let again = there.save().unwrap();
        for index in 0..CONTROLLERS.len() {
            assert!(
                controller(state, index) == controller(&again, index),
                "{index}"
            );
        }
        assert!(clock(&again).clock >= clock(state).clock);
    }

    #[test]
    fn the_tscs_of_all_vcpus_go_on_by_as_much() {
        let (Some((here, mut vcpus)), Some((there, mut moved))) = (machine(), machine()) else {
            return;
        };
        let tsc = |state: &VcpuState| {
            let parts = Parts::decode(state).unwrap();
            let tsc = parts.msrs.iter().find(|msr| msr.index == 0x10);
            (tsc.unwrap().data, parts.tsc_offset, parts.tsc_khz)
        };
        let save = |vcpu: &mut Box<dyn Vcpu>| vcpu.save().unwrap();
        let states: Vec<_> = vcpus.iter_mut().map(save).collect();
        let chips = here.save().unwrap();
        let before: Vec<_> = states.iter().map(tsc).collect();
        let waited = std::time::Duration::from_millis(50);
        std::thread::sleep(waited);
        for (vcpu, state) in moved.iter_mut().zip(&states) {
            vcpu.restore(state).unwrap();
        }
        there.decode(1, &chips).unwrap()();
        let after: Vec<_> = moved.iter_mut().map(|vcpu| tsc(&save(vcpu))).collect();
        // The guest stood still before the first vCPU was saved, and TSCs stay equal to that one's.
        let (start, _, khz) = before[0];
        for after in &after {
            assert!(after.0 > start, "{before:?} {after:?}");
            if clock(&chips).flags & KVM_CLOCK_REALTIME != 0 {
                // 1 % for the precision of the frequency.
                let ticks = u64::from(khz) * waited.as_millis() as u64;
                assert!(after.0 - start > ticks / 100 * 99, "{before:?} {after:?}");
            }
        }
        let equal = |all: &[(u64, Option<u64>, u32)]| all[0].1 == all[1].1;
        assert!(!equal(&before) || equal(&after), "{before:?} {after:?}");
    }

    #[test]
    fn bytes_that_are_no_state_are_refused() {
        let Some((chips, _)) = machine() else {
            return;
        };
        let state = chips.save().unwrap();
        let why = |bytes: &[u8]| chips.decode(1, bytes).err().unwrap().to_string();
        assert!(why(&state[1..]).contains(&format!("expected {STATE_BYTES}")));
        assert!(why(&[]).contains("0 bytes"));
        let mut other = state;
        other[0] = 2;
        assert!(why(&other).contains("interrupt controller 2 comes where 0 is expected"));
    }
}
