//! Calls against a platform that records what it is asked for.

use pageferry_sbi::{
    Call, Fence, HartMask, HartStatus, Memory, Next, Platform, Reset, ResetKind, StartError, error,
    serve,
};
use proptest::prelude::*;

const RAM: u64 = 0x10_0000;
const MISSING: u64 = 0x8000;

/// The effects of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Effect {
    Timer(u64),
    Ipi(Vec<u32>),
    Fence(Vec<u32>, Fence),
    Start(u32, u64, u64),
    Write(u64, u64),
    Byte(u8),
    Read(u64, u64),
}

struct Recorder {
    harts: u32,
    broken: bool,
    effects: Vec<Effect>,
}

/// The page that must come first.
#[derive(Debug, PartialEq, Eq)]
struct Again(u64);

impl Recorder {
    fn named(&self, harts: HartMask) -> Vec<u32> {
        (0..self.harts).filter(|hart| harts.has(*hart)).collect()
    }

    fn present(address: u64, bytes: u64) -> Result<(), Again> {
        if (address..address + bytes).contains(&MISSING) {
            return Err(Again(MISSING));
        }
        Ok(())
    }
}

impl Platform for Recorder {
    type Again = Again;

    fn harts(&self) -> u32 {
        self.harts
    }

    fn set_timer(&mut self, deadline: u64) {
        self.effects.push(Effect::Timer(deadline));
    }

    fn send_ipi(&mut self, harts: HartMask) {
        let named = self.named(harts);
        self.effects.push(Effect::Ipi(named));
    }

    fn fence(&mut self, harts: HartMask, fence: Fence) {
        let named = self.named(harts);
        self.effects.push(Effect::Fence(named, fence));
    }

    fn start(&mut self, hart: u32, entry: u64, opaque: u64) -> Result<(), StartError> {
        assert!(hart < self.harts, "only harts that exist");
        if hart == 0 {
            return Err(StartError::NotStopped);
        }
        if entry >= RAM {
            return Err(StartError::Address);
        }
        self.effects.push(Effect::Start(hart, entry, opaque));
        Ok(())
    }

    fn status(&self, hart: u32) -> HartStatus {
        assert!(hart < self.harts, "only harts that exist");
        match hart {
            0 => HartStatus::Started,
            1 => HartStatus::Stopped,
            2 => HartStatus::StartPending,
            _ => HartStatus::Suspended,
        }
    }

    fn is_ram(&self, address: u64, bytes: u64) -> bool {
        address.checked_add(bytes).is_some_and(|end| end <= RAM)
    }

    fn console_write(&mut self, address: u64, bytes: u64) -> Memory<u64, Again> {
        assert!(self.is_ram(address, bytes) && bytes > 0, "only RAM");
        Self::present(address, bytes)?;
        if self.broken {
            return Ok(None);
        }
        self.effects.push(Effect::Write(address, bytes));
        Ok(Some(bytes.min(10)))
    }

    fn console_write_byte(&mut self, byte: u8) -> bool {
        if !self.broken {
            self.effects.push(Effect::Byte(byte));
        }
        !self.broken
    }

    fn console_read(&mut self, address: u64, bytes: u64) -> Memory<u64, Again> {
        assert!(self.is_ram(address, bytes) && bytes > 0, "only RAM");
        Self::present(address, bytes)?;
        if self.broken {
            return Ok(None);
        }
        self.effects.push(Effect::Read(address, bytes));
        Ok(Some(3))
    }
}

fn recorder() -> Recorder {
    Recorder {
        harts: 4,
        broken: false,
        effects: Vec::new(),
    }
}

/// The answer to a call of `a0` to `a4`, and its effects.
fn call(extension: u64, function: u64, args: &[u64]) -> (Next, Vec<Effect>) {
    let mut platform = recorder();
    let next = serve(&make(extension, function, args), &mut platform);
    (next.expect("all pages are here"), platform.effects)
}

fn make(extension: u64, function: u64, args: &[u64]) -> Call {
    let mut a = [0; 8];
    a[..args.len()].copy_from_slice(args);
    a[6] = function;
    a[7] = extension;
    Call::from_registers(a)
}

fn gives(value: u64) -> Next {
    Next::Return { error: 0, value }
}

fn refused(error: i64) -> (Next, Vec<Effect>) {
    (Next::Return { error, value: 0 }, vec![])
}

const TIME: u64 = 0x5449_4d45;
const IPI: u64 = 0x73_5049;
const RFENCE: u64 = 0x5246_4e43;
const HSM: u64 = 0x48_534d;
const SRST: u64 = 0x5352_5354;
const DBCN: u64 = 0x4442_434e;
const ALL: u64 = u64::MAX;

#[test]
fn base_says_what_there_is() {
    assert_eq!(call(0x10, 0, &[]), (gives(0x0200_0000), vec![]), "SBI 2.0");
    for there in [0x10, TIME, IPI, RFENCE, HSM, SRST, DBCN] {
        assert_eq!(call(0x10, 3, &[there]).0, gives(1), "{there:#x}");
    }
    for absent in [0, 1, 0x5050, 0x504d55, 0x5355_5350, ALL] {
        assert_eq!(call(0x10, 3, &[absent]).0, gives(0), "{absent:#x}");
        assert_eq!(call(absent, 0, &[]), refused(error::NOT_SUPPORTED));
    }
    for function in 4..=6 {
        assert_eq!(call(0x10, function, &[]).0, gives(0));
    }
    assert_eq!(call(0x10, 7, &[]), refused(error::NOT_SUPPORTED));
}

#[test]
fn the_timer_is_set() {
    assert_eq!(call(TIME, 0, &[77]), (gives(0), vec![Effect::Timer(77)]));
    assert_eq!(call(TIME, 1, &[77]), refused(error::NOT_SUPPORTED));
}

#[test]
fn interrupts_go_to_the_harts_of_the_mask() {
    let sent = |harts: &[u32]| (gives(0), vec![Effect::Ipi(harts.to_vec())]);
    assert_eq!(call(IPI, 0, &[0b101, 0]), sent(&[0, 2]));
    assert_eq!(call(IPI, 0, &[0b101, 1]), sent(&[1, 3]));
    assert_eq!(call(IPI, 0, &[0, ALL]), sent(&[0, 1, 2, 3]));
    for (mask, base) in [
        (0b1_0000, 0),
        (1, 4),
        (0b1000, 1),
        (1, ALL - 1),
        (1 << 63, 0),
    ] {
        assert_eq!(call(IPI, 0, &[mask, base]), refused(error::INVALID_PARAM));
    }
    assert_eq!(call(IPI, 1, &[1, 0]), refused(error::NOT_SUPPORTED));
}

#[test]
fn fences_go_to_the_harts_of_the_mask() {
    let fence = |fence| (gives(0), vec![Effect::Fence(vec![1, 2], fence)]);
    let range = |asid| Fence::Translations {
        start: 0x1000,
        bytes: 0x3000,
        asid,
    };
    assert_eq!(call(RFENCE, 0, &[3, 1]), fence(Fence::Code));
    let args = [3, 1, 0x1000, 0x3000, 9];
    assert_eq!(call(RFENCE, 1, &args), fence(range(None)));
    assert_eq!(call(RFENCE, 2, &args), fence(range(Some(9))));
    assert_eq!(call(RFENCE, 1, &[3, 3]), refused(error::INVALID_PARAM));
    for function in 3..=7 {
        let answer = call(RFENCE, function, &args);
        assert_eq!(answer, refused(error::NOT_SUPPORTED), "no hypervisor");
    }
}

#[test]
fn harts_start_stop_and_suspend() {
    assert_eq!(
        call(HSM, 0, &[1, 0x2000, 5]),
        (gives(0), vec![Effect::Start(1, 0x2000, 5)])
    );
    let starts = |hart, entry| call(HSM, 0, &[hart, entry, 5]);
    assert_eq!(starts(0, 0x2000), refused(error::ALREADY_AVAILABLE));
    assert_eq!(starts(1, RAM), refused(error::INVALID_ADDRESS));
    for absent in [4, 1 << 32, ALL] {
        assert_eq!(starts(absent, 0), refused(error::INVALID_PARAM));
        assert_eq!(call(HSM, 2, &[absent]), refused(error::INVALID_PARAM));
    }
    assert_eq!(call(HSM, 1, &[]).0, Next::Stop);
    let states: Vec<Next> = (0..4).map(|hart| call(HSM, 2, &[hart]).0).collect();
    assert_eq!(states, [0, 1, 2, 4].map(gives));
    assert_eq!(call(HSM, 3, &[0]).0, Next::Suspend { resume: None });
    let lost = 0x8000_0000;
    assert_eq!(
        call(HSM, 3, &[lost, 0x3000, 6]).0,
        Next::Suspend {
            resume: Some((0x3000, 6))
        }
    );
    for address in [RAM, 0x3002, ALL] {
        assert_eq!(
            call(HSM, 3, &[lost, address, 6]),
            refused(error::INVALID_ADDRESS)
        );
    }
    assert_eq!(call(HSM, 3, &[1]), refused(error::INVALID_PARAM));
    assert_eq!(call(HSM, 3, &[0x1000_0000]), refused(error::NOT_SUPPORTED));
    assert_eq!(call(HSM, 4, &[]), refused(error::NOT_SUPPORTED));
}

#[test]
fn a_guest_ends_itself() {
    let end = |kind, failure| (Next::Reset(Reset { kind, failure }), vec![]);
    assert_eq!(call(SRST, 0, &[0, 0]), end(ResetKind::Shutdown, false));
    assert_eq!(call(SRST, 0, &[0, 1]), end(ResetKind::Shutdown, true));
    assert_eq!(call(SRST, 0, &[1, 0]), end(ResetKind::Reboot, false));
    assert_eq!(call(SRST, 0, &[2, 0]), end(ResetKind::Reboot, false));
    for bad in [[3, 0], [0, 2], [0xefff_ffff, 0]] {
        assert_eq!(call(SRST, 0, &bad), refused(error::INVALID_PARAM));
    }
    for unknown in [[0xf000_0000, 0], [0, 0xe000_0000]] {
        assert_eq!(call(SRST, 0, &unknown), refused(error::NOT_SUPPORTED));
    }
}

#[test]
fn the_console_reads_and_writes_ram_only() {
    let written = vec![Effect::Write(0x4000, 50)];
    assert_eq!(call(DBCN, 0, &[50, 0x4000, 0]), (gives(10), written));
    let read = vec![Effect::Read(0x4000, 50)];
    assert_eq!(call(DBCN, 1, &[50, 0x4000, 0]), (gives(3), read));
    let byte = vec![Effect::Byte(0x41)];
    assert_eq!(call(DBCN, 2, &[0x1_0041]), (gives(0), byte));
    for function in [0, 1] {
        assert_eq!(call(DBCN, function, &[0, 0x4000, 0]), (gives(0), vec![]));
        for bad in [
            [1, RAM, 0],
            [2, RAM - 1, 0],
            [2, ALL, 0],
            [ALL, 2, 0],
            [1, 0, 1],
        ] {
            assert_eq!(call(DBCN, function, &bad), refused(error::INVALID_PARAM));
        }
    }
    assert_eq!(call(DBCN, 3, &[]), refused(error::NOT_SUPPORTED));
}

#[test]
fn a_console_that_fails_is_told_so() {
    for (function, args) in [(0, [5, 0x4000]), (1, [5, 0x4000]), (2, [65, 0])] {
        let mut platform = Recorder {
            broken: true,
            ..recorder()
        };
        let next = serve(&make(DBCN, function, &args), &mut platform);
        let failed = Next::Return {
            error: error::FAILED,
            value: 0,
        };
        assert_eq!(next, Ok(failed));
    }
}

#[test]
fn a_missing_page_comes_first() {
    for function in [0, 1] {
        let mut platform = recorder();
        let next = serve(&make(DBCN, function, &[16, MISSING - 4]), &mut platform);
        assert_eq!(next, Err(Again(MISSING)));
        assert_eq!(platform.effects, []);
    }
}

fn register() -> impl Strategy<Value = u64> {
    prop_oneof![
        any::<u64>(),
        0..8u64,
        Just(MISSING),
        (0..64u32).prop_map(|bit| 1 << bit),
        (1..1000u64).prop_map(u64::wrapping_neg),
    ]
}

proptest! {
    /// The recorder panics if it is asked for what is not there.
    #[test]
    fn any_registers_are_answered_and_a_refusal_has_no_effect(
        extension in prop_oneof![
            prop::sample::select(vec![0x10, TIME, IPI, RFENCE, HSM, SRST, DBCN]),
            register(),
        ],
        function in prop_oneof![0..8u64, register()],
        args in prop::collection::vec(register(), 6),
    ) {
        let mut platform = recorder();
        let next = serve(&make(extension, function, &args), &mut platform);
        match next {
            Ok(Next::Return { error: 0, .. }) => prop_assert!(platform.effects.len() <= 1),
            Ok(Next::Return { error, value }) => {
                prop_assert!((-9..0).contains(&error));
                prop_assert_eq!((value, platform.effects), (0, vec![]));
            }
            Ok(_) | Err(_) => prop_assert_eq!(platform.effects, vec![]),
        }
    }
}
