//! The guest's clock and its TSCs, moved to another host.
//!
//! The guest reads time from its TSC, and from KVM's clock, which is computed of the TSC. Both go
//! on over a blackout by the same time, or the guest calls its TSC unstable. KVM moves its clock by
//! the difference of the two hosts' real time (`KVM_CLOCK_REALTIME`). The TSC of each vCPU follows
//! here, by as much as KVM's clock went on. The formula is that of
//! `Documentation/virt/kvm/devices/vcpu.rst` ("4.1 ATTRIBUTE: KVM_VCPU_TSC_OFFSET").
//!
//! The offsets of all vCPUs change by the same number, so the TSCs stay as equal as they were.
//! Where a host does not tell its own TSC, or scales the guest's, a TSC goes on from its value at
//! the source. KVM's clock then does not go on over the blackout either, or is corrected by KVM.

use super::{msr, sys};
use crate::MachineError;
use kvm_bindings::{KVM_CLOCK_HOST_TSC, kvm_clock_data};
use kvm_ioctls::VcpuFd;

/// KVM's clock when it was read at the source, and then here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moved {
    pub(super) there: kvm_clock_data,
    pub(super) here: kvm_clock_data,
}

impl Moved {
    /// The ticks of a TSC of `khz` between the two.
    fn ticks(&self, khz: u32) -> u64 {
        let passed = self.here.clock.saturating_sub(self.there.clock);
        let ticks = u128::from(passed) * u128::from(khz) / 1_000_000;
        ticks as u64
    }

    /// The offset here of a TSC that had the offset `there`, and `khz`. `None` if one of the hosts
    /// did not tell its own TSC.
    fn offset(&self, there: u64, khz: u32) -> Option<u64> {
        let told = |clock: &kvm_clock_data| clock.flags & KVM_CLOCK_HOST_TSC != 0;
        (told(&self.there) && told(&self.here)).then(|| {
            let at_source = self.there.host_tsc.wrapping_add(there);
            let now = at_source.wrapping_add(self.ticks(khz));
            now.wrapping_sub(self.here.host_tsc)
        })
    }
}

/// The TSC of a vCPU from another host, until it is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tsc {
    /// Its offset at the source. `None` if it was scaled there, or is here.
    pub(super) offset: Option<u64>,
    /// The value at which the LAPIC's timer fires, or 0.
    pub(super) deadline: u64,
    pub(super) khz: u32,
}

impl Tsc {
    /// Sets the TSC of a vCPU whose VM has moved. It touches no guest memory.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(super) fn set(&self, fd: &VcpuFd, moved: &Moved) -> Result<(), MachineError> {
        let Some(offset) = self.offset.and_then(|there| moved.offset(there, self.khz)) else {
            return Ok(());
        };
        sys::set_tsc_offset(fd, offset).map_err(|e| MachineError::os("cannot set a TSC", e))?;
        if self.deadline != 0 {
            // KVM has converted it by the TSC as it was.
            msr::set_one(fd, msr::TSC_DEADLINE, self.deadline)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(clock: u64, host_tsc: u64) -> kvm_clock_data {
        kvm_clock_data {
            clock,
            host_tsc,
            flags: KVM_CLOCK_HOST_TSC,
            ..Default::default()
        }
    }

    #[test]
    fn a_tsc_goes_on_by_the_time_that_the_clock_did() {
        // 2 GHz. The source had been up for longer than the destination.
        let moved = Moved {
            there: clock(1_000_000_000, 90_000_000_000),
            here: clock(1_250_000_000, 7_000_000_000),
        };
        let at_source = 90_000_000_000_u64.wrapping_add(u64::MAX - 87_999_999_999);
        assert_eq!(at_source, 2_000_000_000);
        let offset = moved.offset(u64::MAX - 87_999_999_999, 2_000_000).unwrap();
        assert_eq!(7_000_000_000_u64.wrapping_add(offset), 2_500_000_000);
    }

    #[test]
    fn a_clock_that_did_not_go_on_holds_the_tsc() {
        let moved = Moved {
            there: clock(5, 100),
            here: clock(5, 300),
        };
        assert_eq!(moved.offset(1000, 3_000_000), Some(800));
        // Bytes from another process may say anything.
        let back = Moved {
            there: clock(u64::MAX, 100),
            here: clock(5, 300),
        };
        assert_eq!(back.ticks(u32::MAX), 0);
        let far = Moved {
            there: clock(0, 100),
            here: clock(u64::MAX, 300),
        };
        assert!(far.offset(0, u32::MAX).is_some());
    }

    #[test]
    fn a_host_that_does_not_tell_its_tsc_gives_no_offset() {
        let mut moved = Moved {
            there: clock(1, 100),
            here: clock(2, 300),
        };
        moved.there.flags = 0;
        assert_eq!(moved.offset(0, 1000), None);
    }
}
