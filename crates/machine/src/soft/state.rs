//! A hart's state as bytes: fixed layout, little-endian, versioned.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `"PFHART64"` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | mode: 0 user, 1 supervisor |
//! | 16 | 256 | x0 to x31 |
//! | 272 | 8 each | pc, sstatus, sie, sip, stvec, scounteren, sscratch, sepc, scause, stval, instret |
//! | 360 | 8 | the VM's clock in timebase ticks, when the state was saved |
//!
//! 368 bytes in all. A state that is shorter, longer or impossible is refused. The clock belongs to
//! the VM, not to the hart, and is saved with each hart. Restoring moves the new VM's clock forward
//! to the latest one.

use crate::{MachineError, VcpuState};
use pageferry_hypervisor::hart::{HartState, Mode, NO_DEADLINE, RunState};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 8] = *b"PFHART64";
const VERSION: u32 = 1;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Encoded {
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

const _: () = assert!(size_of::<Encoded>() == 368 && size_of::<Encoded>() <= VcpuState::MAX_BYTES);

/// Encodes `state`, saved when the VM's clock was `time`.
pub(super) fn encode(state: &HartState, time: u64) -> VcpuState {
    let encoded = Encoded {
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
    VcpuState(encoded.as_bytes().to_vec())
}

/// Decodes the state and the clock.
pub(super) fn decode(bytes: &VcpuState) -> Result<(HartState, u64), MachineError> {
    let bad = MachineError::BadState;
    let bytes = bytes.0.as_slice();
    let encoded = Encoded::read_from_bytes(bytes).map_err(|_| {
        bad(format!(
            "it has {} bytes, but the state of an RV64 hart has {}",
            bytes.len(),
            size_of::<Encoded>()
        ))
    })?;
    if encoded.magic != MAGIC {
        return Err(bad(
            "it does not begin with the magic of an RV64 hart".into()
        ));
    }
    if encoded.version.get() != VERSION {
        let version = encoded.version;
        return Err(bad(format!("its version is {version}, expected {VERSION}")));
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
        satp: 0,
        stimecmp: NO_DEADLINE,
        run_state: RunState::Started,
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
        state
    }

    #[test]
    fn a_state_comes_back_as_it_was() {
        assert_eq!(decode(&encode(&busy(), 77)).unwrap(), (busy(), 77));
    }

    #[test]
    fn the_layout_is_the_documented_one() {
        let bytes = encode(&busy(), 0x1122_3344_5566_7788).0;
        assert_eq!(&bytes[..16], b"PFHART64\x01\0\0\0\0\0\0\0");
        assert_eq!(bytes[24..32], [1; 8], "x1");
        assert_eq!(bytes[272..280], 0x8000_0004u64.to_le_bytes(), "pc");
        assert_eq!(bytes[352..360], 99u64.to_le_bytes(), "instret");
        assert_eq!(bytes[360..], 0x1122_3344_5566_7788u64.to_le_bytes());
    }

    fn refused(change: impl Fn(&mut Vec<u8>)) -> String {
        let mut state = encode(&busy(), 0);
        change(&mut state.0);
        decode(&state).unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_state_is_refused_with_the_reason() {
        assert!(refused(|b| b.truncate(367)).contains("367 bytes"));
        assert!(refused(|b| b.push(0)).contains("369 bytes"));
        assert!(refused(|b| b[0] = b'X').contains("begin"));
        assert!(refused(|b| b[8] = 2).contains("version is 2"));
        assert!(refused(|b| b[12] = 3).contains("privilege mode"));
        assert!(refused(|b| b[16] = 1).contains("x0"));
        assert!(refused(|b| b[272] = 2).contains("pc"));
        assert!(refused(|b| b[280] = 1).contains("sstatus"));
    }

    proptest! {
        #[test]
        fn foreign_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..800)) {
            prop_assert!(decode(&VcpuState(bytes)).is_err());
        }

        #[test]
        fn damaged_states_never_panic(
            damage in prop::collection::vec((0usize..368, any::<u8>()), 1..8),
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
