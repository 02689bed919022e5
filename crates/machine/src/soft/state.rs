//! A hart's state as bytes: fixed layout, little-endian, versioned.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `"PFHART64"` |
//! | 8 | 4 | version: 2, or 1 from older sources |
//! | 12 | 4 | mode: 0 user, 1 supervisor |
//! | 16 | 256 | x0 to x31 |
//! | 272 | 8 each | pc, sstatus, sie, sip, stvec, scounteren, sscratch, sepc, scause, stval, instret |
//! | 360 | 8 | the VM's clock in timebase ticks, when the state was saved |
//!
//! | 368 | 8 | satp |
//! | 376 | 8 | stimecmp: the time of the timer, all ones for none |
//! | 384 | 4 | hart state: 0 started, 1 stopped, 2 suspended |
//! | 388 | 4 | 0 |
//!
//! 392 bytes in all. Version 1 ends at offset 368: such a hart had no translation and no timer, and
//! was started. This version writes 2 and reads both. A state that is shorter, longer or impossible
//! is refused. The clock belongs to the VM, not to the hart, and is saved with each hart. Restoring
//! moves the new VM's clock forward to the latest one.

use crate::{MachineError, VcpuState};
use pageferry_hypervisor::hart::{HartState, Mode, NO_DEADLINE, RunState};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"PFHART64";
const VERSION: u32 = 2;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Version1 {
    magic: [u8; 8],
    version: U32,
    mode: U32,
    x: [U64; 32],
    pc: U64,
    sstatus: U64,
    sie: U64,
    sip: U64,
    stvec: U64,
    scounteren: U64,
    sscratch: U64,
    sepc: U64,
    scause: U64,
    stval: U64,
    instret: U64,
    time: U64,
}

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Version2 {
    first: Version1,
    satp: U64,
    stimecmp: U64,
    run_state: U32,
    reserved: U32,
}

const _: () = assert!(size_of::<Version1>() == 368 && size_of::<Version2>() == 392);
const _: () = assert!(size_of::<Version2>() <= VcpuState::MAX_BYTES);

/// Encodes `state`, saved when the VM's clock was `time`.
pub(super) fn encode(state: &HartState, time: u64) -> VcpuState {
    let first = Version1 {
        magic: MAGIC,
        version: VERSION.into(),
        mode: match state.mode {
            Mode::User => 0,
            Mode::Supervisor => 1,
        }
        .into(),
        x: state.x.map(U64::new),
        pc: state.pc.into(),
        sstatus: state.sstatus.into(),
        sie: state.sie.into(),
        sip: state.sip.into(),
        stvec: state.stvec.into(),
        scounteren: state.scounteren.into(),
        sscratch: state.sscratch.into(),
        sepc: state.sepc.into(),
        scause: state.scause.into(),
        stval: state.stval.into(),
        instret: state.instret.into(),
        time: time.into(),
    };
    let encoded = Version2 {
        first,
        satp: state.satp.into(),
        stimecmp: state.stimecmp.into(),
        run_state: match state.run_state {
            RunState::Started => 0,
            RunState::Stopped => 1,
            RunState::Suspended => 2,
        }
        .into(),
        reserved: 0.into(),
    };
    VcpuState(encoded.as_bytes().to_vec())
}

/// The error for bytes of a wrong length.
fn wrong_length(bytes: &[u8], version: u32, expected: usize) -> MachineError {
    let has = bytes.len();
    MachineError::BadState(format!(
        "it has {has} bytes, but version {version} of the state of an RV64 hart has {expected}"
    ))
}

/// The fields of both versions, those of version 1 completed.
fn fields(bytes: &[u8]) -> Result<Version2, MachineError> {
    let bad = MachineError::BadState;
    let Ok((head, _)) = <[u8; 12]>::read_from_prefix(bytes) else {
        return Err(wrong_length(bytes, VERSION, size_of::<Version2>()));
    };
    let [magic @ .., v0, v1, v2, v3] = head;
    if magic != MAGIC {
        return Err(bad(
            "it does not begin with the magic of an RV64 hart".into()
        ));
    }
    match u32::from_le_bytes([v0, v1, v2, v3]) {
        1 => Ok(Version2 {
            first: Version1::read_from_bytes(bytes)
                .map_err(|_| wrong_length(bytes, 1, size_of::<Version1>()))?,
            satp: 0.into(),
            stimecmp: NO_DEADLINE.into(),
            run_state: 0.into(),
            reserved: 0.into(),
        }),
        2 => Version2::read_from_bytes(bytes)
            .map_err(|_| wrong_length(bytes, 2, size_of::<Version2>())),
        other => Err(bad(format!("its version is {other}, expected 1 or 2"))),
    }
}

/// Decodes the state and the clock.
pub(super) fn decode(bytes: &VcpuState) -> Result<(HartState, u64), MachineError> {
    let bad = MachineError::BadState;
    let all = fields(&bytes.0)?;
    let encoded = all.first;
    let run_state = match all.run_state.get() {
        0 => RunState::Started,
        1 => RunState::Stopped,
        2 => RunState::Suspended,
        other => {
            return Err(bad(format!(
                "unknown hart state {other}: expected 0 (started), 1 (stopped) or 2 (suspended)"
            )));
        }
    };
    if all.reserved.get() != 0 {
        let reserved = all.reserved;
        return Err(bad(format!("its last word is {reserved}, must be 0")));
    }
    let mode = match encoded.mode.get() {
        0 => Mode::User,
        1 => Mode::Supervisor,
        other => {
            return Err(bad(format!(
                "unknown privilege mode {other}: expected 0 (user) or 1 (supervisor)"
            )));
        }
    };
    let state = HartState {
        x: encoded.x.map(U64::get),
        pc: encoded.pc.get(),
        mode,
        sstatus: encoded.sstatus.get(),
        sie: encoded.sie.get(),
        sip: encoded.sip.get(),
        stvec: encoded.stvec.get(),
        scounteren: encoded.scounteren.get(),
        sscratch: encoded.sscratch.get(),
        sepc: encoded.sepc.get(),
        scause: encoded.scause.get(),
        stval: encoded.stval.get(),
        satp: all.satp.get(),
        stimecmp: all.stimecmp.get(),
        run_state,
        instret: encoded.instret.get(),
    };
    state.validate().map_err(|e| bad(e.to_string()))?;
    Ok((state, encoded.time.get()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_hypervisor::hart::Hart;
    use proptest::prelude::*;

    fn busy() -> HartState {
        let mut state = Hart::new().state();
        state.x = core::array::from_fn(|i| i as u64 * 0x0101_0101_0101_0101);
        state.pc = 0x8000_0004;
        state.mode = Mode::User;
        state.stvec = 0x8000_1001;
        state.scounteren = 7;
        state.sscratch = u64::MAX;
        state.sepc = 0x8000_0008;
        state.scause = 8;
        state.stval = 3;
        state.instret = 99;
        state.satp = 9 << 60 | 5 << 44 | 0x8_1234;
        state.stimecmp = 123_456_789;
        state.run_state = RunState::Suspended;
        state
    }

    const FIXTURE_1: &[u8] = include_bytes!("fixtures/hart-v1.bin");
    const FIXTURE_2: &[u8] = include_bytes!("fixtures/hart-v2.bin");

    #[test]
    fn states_of_every_version_are_read() {
        let (state, time) = decode(&VcpuState(FIXTURE_2.to_vec())).unwrap();
        assert_eq!((state, time), (busy(), 77));
        assert_eq!(encode(&state, time).0, FIXTURE_2, "and written");
        let (state, time) = decode(&VcpuState(FIXTURE_1.to_vec())).unwrap();
        let first = HartState {
            satp: 0,
            stimecmp: NO_DEADLINE,
            run_state: RunState::Started,
            ..busy()
        };
        assert_eq!((state, time), (first, 77));
    }

    #[test]
    fn every_hart_state_comes_back() {
        for run_state in [RunState::Started, RunState::Stopped, RunState::Suspended] {
            let state = HartState {
                run_state,
                ..busy()
            };
            assert_eq!(decode(&encode(&state, 0)).unwrap(), (state, 0));
        }
    }

    #[test]
    fn a_state_comes_back_as_it_was() {
        assert_eq!(decode(&encode(&busy(), 77)).unwrap(), (busy(), 77));
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = encode(&busy(), 0x1122_3344_5566_7788).0;
        assert_eq!(&bytes[..16], b"PFHART64\x02\0\0\0\0\0\0\0");
        assert_eq!(bytes[24..32], [1; 8], "x1");
        assert_eq!(bytes[272..280], 0x8000_0004u64.to_le_bytes(), "pc");
        assert_eq!(bytes[352..360], 99u64.to_le_bytes(), "instret");
        assert_eq!(bytes[360..368], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(
            bytes[368..376],
            (9 << 60 | 5 << 44 | 0x8_1234u64).to_le_bytes()
        );
        assert_eq!(bytes[376..384], 123_456_789u64.to_le_bytes(), "stimecmp");
        assert_eq!(bytes[384..], [2, 0, 0, 0, 0, 0, 0, 0], "suspended");
    }

    fn refused(change: impl Fn(&mut Vec<u8>)) -> String {
        let mut state = encode(&busy(), 0);
        change(&mut state.0);
        decode(&state).unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_state_is_refused_with_the_reason() {
        assert!(refused(|b| b.truncate(11)).contains("11 bytes"));
        assert!(refused(|b| b.truncate(368)).contains("368 bytes"));
        assert!(refused(|b| b.push(0)).contains("393 bytes"));
        assert!(refused(|b| b[0] = b'X').contains("begin"));
        assert!(refused(|b| b[8] = 3).contains("version is 3"));
        assert!(refused(|b| b[8] = 1).contains("version 1"), "of 392 bytes");
        assert!(refused(|b| b[12] = 3).contains("privilege mode"));
        assert!(refused(|b| b[16] = 1).contains("x0"));
        assert!(refused(|b| b[272] = 2).contains("pc"));
        assert!(refused(|b| b[280] = 1).contains("sstatus"));
        for mode in (1..8).chain(10..16) {
            assert!(refused(|b| b[375] = mode << 4).contains("satp"), "{mode}");
        }
        assert!(
            refused(|b| b[374] |= 0x20).contains("satp"),
            "a tenth bit of ASID"
        );
        assert!(refused(|b| b[375] = 0).contains("satp"), "Bare with fields");
        for byte in 384..388 {
            assert!(refused(|b| b[byte] = 3).contains("hart state"), "{byte}");
        }
        assert!(refused(|b| b[388] = 1).contains("last word"));
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..800)) {
            prop_assert!(decode(&VcpuState(bytes)).is_err());
        }

        #[test]
        fn damaged_states_never_panic(
            damage in prop::collection::vec((0usize..392, any::<u8>()), 1..8),
        ) {
            let mut state = encode(&busy(), 5);
            for (at, value) in damage {
                state.0[at] = value;
            }
            // An accepted state encodes to the same bytes.
            if let Ok((hart, time)) = decode(&state) {
                prop_assert_eq!(encode(&hart, time), state);
            }
        }
    }
}
