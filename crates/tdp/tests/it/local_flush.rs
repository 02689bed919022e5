//! A vCPU's own TLB after a fault. It keeps every entry that the format's hardware may keep, unless
//! the fault asks to invalidate it. The access must still succeed.

use crate::platform::{Hooked, fault, new, range, target};
use pageferry_addr::Gfn;
use pageferry_tdp::format::{
    Access, Arm64Ipa48, Ept4, Ept4NoAd, Format, Npt4, Sv48x4Svade, Sv48x4Svadu, TlbAfterFault,
};
use pageferry_tdp::{Fault, Mapped, Worker};

const AT: Gfn = Gfn(0x42);

/// The TLB's contents for [`AT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cached {
    Nothing,
    Absent,
    Leaf(Access),
}

struct Vcpu<F: Format> {
    worker: Worker<F, Hooked>,
    tlb: Cached,
}

impl<F: Format> Vcpu<F> {
    /// Whether the hardware allows the access. It walks only if its TLB has no entry.
    fn access(&mut self, access: Access) -> bool {
        if self.tlb == Cached::Nothing {
            let found = self.worker.walk(AT);
            self.tlb = found.map_or(Cached::Absent, |found| Cached::Leaf(found.leaf.access));
        }
        let allowed = match self.tlb {
            Cached::Leaf(cached) => cached.write || !access.write,
            _ => false,
        };
        if !allowed {
            let keeps = match F::TLB_AFTER_FAULT {
                TlbAfterFault::Forgets => false,
                TlbAfterFault::KeepsDenied => self.tlb != Cached::Absent,
                TlbAfterFault::KeepsAbsent => true,
            };
            if !keeps {
                self.tlb = Cached::Nothing;
            }
        }
        allowed
    }

    /// Accesses and faults until the access succeeds. Returns the number of faults.
    fn run(&mut self, access: Access, fix: impl Fn(&mut Worker<F, Hooked>) -> Mapped) -> u32 {
        for faults in 0..4 {
            if self.access(access) {
                return faults;
            }
            if fix(&mut self.worker).local_flush {
                self.tlb = Cached::Nothing;
            }
        }
        panic!("{} faults for ever with {:?} in its TLB", F::NAME, self.tlb);
    }
}

fn a_vcpu_gets_on<F: Format>() {
    let mmu = new::<F>();
    let tlb = Cached::Nothing;
    let mut vcpus = [(); 2].map(|()| Vcpu {
        worker: mmu.worker(),
        tlb,
    });
    let read_only = pageferry_tdp::Target {
        access: Access::READ,
        ..target(7, 1)
    };
    let load = |worker: &mut _| fault(worker, AT.0, Access::READ, read_only).unwrap();
    let store = |worker: &mut _| fault(worker, AT.0, Access::READ_WRITE, target(7, 1)).unwrap();
    let again = |worker: &mut Worker<F, Hooked>| {
        let fault = Fault {
            gfn: AT,
            access: Access::READ_WRITE,
        };
        worker.fast_fault(fault, &()).expect("the class allows it")
    };
    for vcpu in &mut vcpus {
        assert!(vcpu.run(Access::READ, load) <= 1);
    }
    // One vCPU makes the leaf writable, and the other finds it writable. Both TLBs have it
    // read-only.
    for vcpu in &mut vcpus {
        assert_eq!(vcpu.run(Access::READ_WRITE, store), 1);
    }
    // The same by the fast path. A flush of the permission leaves the leaf in the TLBs.
    vcpus[0].worker.write_protect(range(AT.0, 1), &());
    for vcpu in &mut vcpus {
        vcpu.tlb = Cached::Leaf(Access::READ);
        assert_eq!(vcpu.run(Access::READ_WRITE, again), 1);
    }
}

macro_rules! of_formats {
    ($($name:ident: $format:ty),+ $(,)?) => { $(
        #[test] fn $name() { a_vcpu_gets_on::<$format>(); }
    )+ };
}

of_formats!(
    ept4: Ept4,
    ept4_no_ad: Ept4NoAd,
    npt4: Npt4,
    arm64: Arm64Ipa48<false>,
    arm64_hafdbs: Arm64Ipa48<true>,
    sv48x4_svade: Sv48x4Svade,
    sv48x4_svadu: Sv48x4Svadu,
);
