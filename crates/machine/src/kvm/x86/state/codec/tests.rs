//! The codec against malformed bytes, and every part of the state against a real vCPU.

use super::*;
use crate::kvm::x86::machine::create_with;
use crate::kvm::x86::vm::{Irqchip, KvmOptions};
use crate::{MachineError, MachineSpec, StartMode, StartState, Vcpu};
use proptest::prelude::*;

fn parts() -> Parts {
    let cpuid = kvm_cpuid_entry2 {
        function: 7,
        ebx: 5,
        ..Default::default()
    };
    Parts {
        regs: kvm_regs {
            rip: 0x1234,
            r15: u64::MAX,
            ..Default::default()
        },
        special: Special::V2(kvm_sregs2 {
            cr3: 0x5000,
            ..Default::default()
        }),
        xcrs: kvm_xcrs::default(),
        xsave: (0..1024).collect(),
        debug: kvm_debugregs {
            dr7: 0x400,
            ..Default::default()
        },
        events: kvm_vcpu_events::default(),
        mp_state: kvm_mp_state::default(),
        msrs: vec![
            kvm_msr_entry {
                index: 0x10,
                data: 99,
                ..Default::default()
            };
            3
        ],
        cpuid: vec![cpuid; 2],
        lapic: None,
        tsc_khz: 2_600_000,
        tsc_offset: None,
        exits: vec![
            Exit::MmioWrite {
                gpa: Gpa(0xd000_0000),
                value: 7,
                size: 8,
            },
            Exit::MmioRead {
                gpa: Gpa(0xd000_0008),
                size: 1,
            },
        ],
        pages: Vec::new(),
    }
}

/// The offset of the header of section `tag` and the length of its body.
fn section(state: &[u8], tag: u16) -> (usize, usize) {
    let mut at = 8;
    loop {
        let len = u32::from_le_bytes(state[at + 4..at + 8].try_into().unwrap()) as usize;
        if u16::from_le_bytes([state[at], state[at + 1]]) == tag {
            return (at, len);
        }
        at += 8 + len;
    }
}

fn why(bytes: &[u8]) -> String {
    Parts::decode(&VcpuState(bytes.to_vec()))
        .map(drop)
        .unwrap_err()
}

/// A vCPU of a Linux on an AMD host, under load.
#[test]
fn a_state_of_this_version_is_read() {
    let state = VcpuState(include_bytes!("../../fixtures/vcpu-of-pc-v2.bin").to_vec());
    let parts = Parts::decode(&state).unwrap();
    assert_eq!(parts.encode(), state, "and written");
    assert!(parts.lapic.is_some() && parts.tsc_offset.is_some());
    let msr = |index| {
        parts
            .msrs
            .iter()
            .find(|msr| msr.index == index)
            .unwrap()
            .data
    };
    // The pages of its clock, of steal time and of the ends of interrupts came along.
    for register in [0x4b56_4d01, 0x4b56_4d03, 0x4b56_4d04] {
        let address = msr(register);
        assert_eq!(address & 1, 1, "{register:#x} is in use");
        let page = Gpa(address & !(PAGE_SIZE - 1));
        assert!(parts.pages.iter().any(|other| other.gpa == page), "{page}");
    }
}

#[test]
fn what_is_encoded_is_decoded() {
    let state = parts().encode();
    let back = Parts::decode(&state).unwrap();
    assert_eq!(back.encode(), state);
    assert_eq!(
        (back.regs.rip, back.xsave[1023], back.tsc_khz),
        (0x1234, 1023, 2_600_000)
    );
    assert_eq!(back.exits, parts().exits);
    assert!(state.0.len() < VcpuState::MAX_BYTES);
}

#[test]
fn the_first_bytes_are_fixed() {
    let state = parts().encode().0;
    assert_eq!(
        state[..16],
        [
            b'P', b'F', b'K', b'V', 1, 0, 11, 0, 1, 0, 0, 0, 144, 0, 0, 0
        ]
    );
}

#[test]
fn malformed_states_are_refused_with_the_reason() {
    let good = parts().encode().0;
    assert!(why(&[]).contains("ends early"));
    assert!(why(&good[..good.len() - 1]).contains("ends early"));
    assert!(why(&vec![0; VcpuState::MAX_BYTES + 1]).contains("more than"));
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert!(why(&with(0, b'X')).contains("not a state of the kvm engine"));
    assert!(why(&with(4, 9)).contains("version is 9"));
    assert!(why(&with(6, 10)).contains("follow the last section"));
    assert!(why(&with(6, 12)).contains("ends early"));
    assert!(why(&with(8, 77)).contains("section 77"));
    assert!(why(&with(10, 1)).contains("unknown"));
    let (xcrs, _) = section(&good, 4);
    assert!(why(&with(xcrs, 1)).contains("section 1 occurs twice"));
    assert!(why(&with(xcrs, 2)).contains("special registers twice"));
    assert!(why(&with(xcrs, 11)).contains("section 11 (LAPIC) has 392 bytes"));
    let (exits, _) = section(&good, 13);
    assert!(why(&with(exits + 8, 3)).contains("exit of kind 3"));
    assert!(why(&with(exits + 9, 9)).contains("9 bytes"));
}

#[test]
fn a_tsc_offset_and_port_accesses_travel() {
    let mut with = parts();
    with.tsc_offset = Some(u64::MAX - 5);
    with.exits = vec![
        Exit::PortWrite {
            port: 0x3f8,
            value: 0x41,
            size: 1,
        },
        Exit::PortRead {
            port: u16::MAX,
            size: 4,
        },
    ];
    let state = with.encode();
    let back = Parts::decode(&state).unwrap();
    assert_eq!(
        (back.tsc_offset, &back.exits),
        (with.tsc_offset, &with.exits)
    );
    let changed = |tag, at, byte| {
        let mut bytes = state.0.clone();
        let (start, _) = section(&bytes, tag);
        bytes[start + 8 + at] = byte;
        why(&bytes)
    };
    assert!(changed(13, 10, 1).contains("access to port 0x103f8"));
    assert!(changed(13, 1, 8).contains("exit of kind 3 and 8 bytes"));
    assert!(changed(13, 24 + 16, 1).contains("with value 0x1"));
    let mut cut = state.0.clone();
    let (start, _) = section(&cut, 14);
    cut.pop();
    cut[start + 4] = 7;
    assert!(why(&cut).contains("section 14 (TSC offset) has 7 bytes"));
}

/// The words for a section in messages.
fn part(tag: u16) -> &'static str {
    [
        "(registers)",
        "(special registers)",
        "(special registers)",
        "(extended control registers)",
        "(extended registers)",
        "(debug registers)",
        "(pending events)",
        "(multiprocessing state)",
        "(model-specific registers)",
        "(CPUID)",
        "(LAPIC)",
        "(TSC frequency)",
        "(exits to report)",
    ][usize::from(tag) - 1]
}

#[test]
fn a_section_that_is_missing_or_cut_is_refused() {
    let good = parts().encode().0;
    for tag in [1, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13] {
        let (at, len) = section(&good, tag);
        let mut without = good.clone();
        without.drain(at..at + 8 + len);
        without[6] -= 1;
        assert!(
            why(&without).contains("is missing"),
            "{tag}: {}",
            why(&without)
        );
        assert!(why(&without).contains(part(tag)), "{}", why(&without));
        let mut cut = good.clone();
        cut.remove(at + 8);
        cut[at + 4..at + 8].copy_from_slice(&(len as u32 - 1).to_le_bytes());
        assert!(why(&cut).contains("a wrong length"), "{tag}: {}", why(&cut));
        assert!(why(&cut).contains(part(tag)), "{}", why(&cut));
    }
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        prop_assert!(Parts::decode(&VcpuState(bytes)).is_err());
    }

    #[test]
    fn mutated_bytes_never_panic(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20)) {
        let mut bytes = parts().encode().0;
        for (at, byte) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = *byte;
        }
        // Decoding must not read past a cut, wherever it is.
        let cut = changes[0].0.index(bytes.len());
        let _ = Parts::decode(&VcpuState(bytes.clone()));
        prop_assert!(Parts::decode(&VcpuState(bytes[..cut].to_vec())).is_err());
    }
}

#[test]
fn pages_are_whole_aligned_and_few() {
    let mut many = parts();
    many.pages = [0x3000, 0x7000]
        .map(|gpa: u64| SharedPage {
            gpa: Gpa(gpa),
            bytes: Box::new([gpa.to_le_bytes()[1]; 4096]),
        })
        .into();
    let good = many.encode();
    assert_eq!(Parts::decode(&good).unwrap().pages, many.pages);
    let (header, length) = section(&good.0, Tag::Pages as u16);
    assert_eq!(length, 2 * SHARED_PAGE_BYTES);
    let mut unaligned = good.clone();
    unaligned.0[header + 8] = 1;
    let why = Parts::decode(&unaligned).unwrap_err();
    assert!(why.contains("is not the address of a page"), "{why}");
    many.pages = vec![many.pages[0].clone(); MAX_PAGES + 1];
    let why = Parts::decode(&many.encode()).unwrap_err();
    assert!(why.contains("a wrong length"), "{why}");
    let mut short = good.0;
    short.pop();
    short[header + 4..header + 8].copy_from_slice(&(length as u32 - 1).to_le_bytes());
    let why = Parts::decode(&VcpuState(short)).unwrap_err();
    assert!(why.contains("a wrong length"), "{why}");
}

fn skipped() -> bool {
    let missing = crate::kvm::probe_vm().err();
    missing.is_some_and(|why| pageferry_testkit::skip("kvm", why))
}

fn vcpu(irqchip: Irqchip) -> Box<dyn Vcpu> {
    let options = KvmOptions {
        irqchip,
        ..KvmOptions::default()
    };
    let new = create_with(MachineSpec::new(1, 64 << 10), options).unwrap();
    let mut vcpu = new.vcpus.into_iter().next().unwrap();
    vcpu.set_start(&StartState {
        entry: 0x5000,
        stack: 0x8000,
        args: [1, 2],
        tables: Gpa(0x1000),
        mode: StartMode::User,
    })
    .unwrap();
    vcpu
}

/// The state without the MSRs that change by themselves.
fn timeless(mut parts: Parts) -> Parts {
    for msr in &mut parts.msrs {
        // TSC, the two that mirror it, and Hyper-V's two counts of time: HV_X64_MSR_VP_RUNTIME,
        // which moves with the ticks of the caller's thread, and HV_X64_MSR_TIME_REF_COUNT.
        if matches!(msr.index, 0x10 | 0xe7 | 0xe8 | 0x4000_0010 | 0x4000_0020) {
            msr.data = 0;
        }
    }
    parts
}

#[test]
fn every_part_moves_to_another_vcpu() {
    if skipped() {
        return;
    }
    for irqchip in [Irqchip::None, Irqchip::Kernel] {
        let mut parts = Parts::decode(&vcpu(irqchip).save().unwrap()).unwrap();
        assert_eq!(parts.lapic.is_some(), irqchip == Irqchip::Kernel);
        // A value in every register.
        let regs = &mut parts.regs;
        (regs.rax, regs.rbx, regs.rcx, regs.rdx) = (1, 2, 3, 4);
        (regs.rsi, regs.rdi, regs.rsp, regs.rbp) = (5, 6, 7, 8);
        (regs.r8, regs.r9, regs.r10, regs.r11) = (9, 10, 11, 12);
        (regs.r12, regs.r13, regs.r14, regs.r15) = (13, 14, 15, u64::MAX);
        regs.rflags |= 0xd5;
        let Special::V2(sregs) = &mut parts.special else {
            panic!("this kernel has KVM_GET_SREGS2")
        };
        (sregs.fs.base, sregs.gs.base, sregs.cr2) = (0x1111, 0x2222, 0x3333);
        parts.debug.db = [0x10, 0x20, 0x30, 0x40];
        (parts.debug.dr6, parts.debug.dr7) = (0xffff_0ff1, 0x401);
        for msr in &mut parts.msrs {
            match msr.index {
                0x174..=0x176 => msr.data = 0x100 + u64::from(msr.index),
                0xc000_0081 => msr.data = 0x0023_0010_0000_0000,
                0xc000_0082 | 0xc000_0083 | 0xc000_0102 => {
                    msr.data = 0x8000 + u64::from(msr.index & 0xff);
                }
                0xc000_0084 => msr.data = 0x4_7700,
                _ => {}
            }
        }
        // x87 control word and XMM0..15 of the legacy area. XSTATE_BV says that x87 and SSE are
        // there.
        parts.xsave[0] = 0x037f;
        for (i, word) in parts.xsave[40..104].iter_mut().enumerate() {
            *word = 0x0101_0101 * (i as u32 + 1);
        }
        parts.xsave[128] |= 3;
        if parts.xcrs.xcrs[0].value & 4 != 0 {
            // The upper halves of YMM0..15 are at byte 576 of the uncompacted layout.
            parts.xsave[128] |= 4;
            for (i, word) in parts.xsave[144..208].iter_mut().enumerate() {
                *word = 0x0202_0202 * (i as u32 + 1);
            }
        }
        // A copy of the value that is not restored as such.
        parts.tsc_offset = None;
        let wanted = timeless(parts.clone()).encode();

        let mut destination = vcpu(irqchip);
        destination.restore(&parts.encode()).unwrap();
        let saved = Parts::decode(&destination.save().unwrap()).unwrap();
        let got = timeless(saved).encode();
        for tag in 1..=13 {
            if tag == 2 || (tag == 11 && irqchip == Irqchip::None) {
                continue;
            }
            let ((a, a_len), (b, b_len)) = (section(&wanted.0, tag), section(&got.0, tag));
            assert_eq!(
                wanted.0[a..a + 8 + a_len],
                got.0[b..b + 8 + b_len],
                "section {tag}, {irqchip:?}"
            );
        }
    }
}

#[test]
fn a_state_that_this_machine_cannot_have_is_refused() {
    if skipped() {
        return;
    }
    let refusal = |state: &VcpuState| match vcpu(Irqchip::None).restore(state) {
        Err(MachineError::BadState(why)) => why,
        other => panic!("{other:?}"),
    };
    let good = Parts::decode(&vcpu(Irqchip::None).save().unwrap()).unwrap();
    let with_lapic = vcpu(Irqchip::Kernel).save().unwrap();
    assert!(refusal(&with_lapic).contains("LAPIC"));
    assert!(vcpu(Irqchip::None).check(&with_lapic).is_err());
    vcpu(Irqchip::None).check(&good.encode()).unwrap();
    let with = |change: &dyn Fn(&mut Parts)| {
        let mut parts = good.clone();
        change(&mut parts);
        refusal(&parts.encode())
    };
    let lacking = with(&|p| {
        for leaf in &mut p.cpuid {
            leaf.edx |= if leaf.function == 1 { 1 << 10 } else { 0 }; // reserved
        }
    });
    assert!(
        lacking.contains("does not offer: CPUID leaf 0x1 EDX bit 10"),
        "{lacking}"
    );
    let lacking = with(&|p| p.msrs.retain(|msr| msr.index != 0xc000_0082));
    assert!(lacking.contains("0xc0000082 is missing"), "{lacking}");
    let refused = with(&|p| {
        for msr in &mut p.msrs {
            msr.data = if msr.index == 0xc000_0082 {
                0x8000_0000_0000_0000
            } else {
                msr.data
            }; // not canonical
        }
    });
    assert!(
        refused.contains("refuses the value 0x8000000000000000 of its model-specific register"),
        "{refused}"
    );
    let refused = with(&|p| match &mut p.special {
        Special::V1(s) => s.cr4 = u64::MAX,
        Special::V2(s) => s.cr4 = u64::MAX,
    });
    assert!(refused.contains("special registers"), "{refused}");
    let refused = with(&|p| p.xsave[128] = 1 << 31);
    assert!(refused.contains("extended registers"), "{refused}");
}

#[test]
fn saving_and_restoring_is_quick() {
    if skipped() {
        return;
    }
    let (mut source, mut destination) = (vcpu(Irqchip::None), vcpu(Irqchip::None));
    let mut times = Vec::new();
    for _ in 0..200 {
        let begin = std::time::Instant::now();
        let state = source.save().unwrap();
        let saved = begin.elapsed();
        destination.restore(&state).unwrap();
        times.push((saved, begin.elapsed() - saved, state.0.len()));
    }
    times.sort_unstable();
    let (save, restore, bytes) = times[times.len() / 2];
    println!("save {save:?}, restore {restore:?}, {bytes} bytes");
    // A millisecond each would already be too long for a switch-over; the limit is fifty of them.
    assert!(save.as_millis() < 50 && restore.as_millis() < 50);
}
