use super::*;
use crate::soft::{SoftMachine, SoftOptions};
use crate::{GuestRam, RamLayout};
use pageferry_hypervisor::VcpuCore;
use proptest::prelude::*;

const HARTS: usize = 2;
const SEIP: u64 = 1 << 9;

/// A controller, and the harts that it interrupts.
struct Board {
    plic: Arc<Plic>,
    cores: Vec<VcpuCore>,
    _machine: Arc<SoftMachine>,
}

impl Board {
    fn new() -> Self {
        let ram = GuestRam::new(RamLayout::for_memory(64 << 12).unwrap()).unwrap();
        let machine = SoftMachine::new(HARTS as u32, ram, SoftOptions::default()).unwrap();
        let cores: Vec<_> = (0..HARTS as u32)
            .map(|id| machine.vm.create_vcpu(id).unwrap())
            .collect();
        let harts = Arc::new(Harts::new(cores.iter().map(VcpuCore::kick_handle)));
        Self {
            plic: Plic::new(&harts),
            cores,
            _machine: machine,
        }
    }

    fn get(&self, offset: u64) -> u32 {
        self.plic.read(offset, 4) as u32
    }

    fn set(&self, offset: u64, value: u32) {
        self.plic.write(offset, value.into(), 4);
    }

    fn claim(&self, hart: u64) -> u32 {
        self.get(claim(hart))
    }

    fn complete(&self, hart: u64, source: u32) {
        self.set(claim(hart), source);
    }

    fn raise(&self, source: u32) {
        self.plic.line(source).expect("a source").raise();
    }

    /// Which harts have an external interrupt.
    fn interrupted(&self) -> [bool; HARTS] {
        std::array::from_fn(|hart| self.cores[hart].state().sip & SEIP != 0)
    }
}

fn enable(hart: u64) -> u64 {
    0x2000 + 0x80 * hart
}

fn threshold(hart: u64) -> u64 {
    0x20_0000 + 0x1000 * hart
}

fn claim(hart: u64) -> u64 {
    threshold(hart) + 4
}

#[test]
fn a_source_is_claimed_served_and_completed() {
    let board = Board::new();
    board.raise(5);
    assert_eq!(board.get(PENDING), 1 << 5);
    assert_eq!(board.claim(0), 0, "it is not enabled");
    board.set(enable(0), 1 << 5);
    assert_eq!((board.claim(0), board.interrupted()), (0, [false; 2]));
    board.set(4 * 5, 1);
    assert_eq!(board.interrupted(), [true, false]);
    assert_eq!(board.claim(1), 0, "it is enabled for the other hart");
    assert_eq!(board.claim(0), 5);
    assert_eq!((board.get(PENDING), board.claim(0)), (0, 0));
    assert_eq!(board.interrupted(), [false; 2]);
    // An edge in between is not lost, and comes when the first one is done.
    board.raise(5);
    assert_eq!((board.get(PENDING), board.claim(0)), (1 << 5, 0));
    assert_eq!(board.interrupted(), [false; 2]);
    for other in [0, 6, 32, 37, u32::MAX] {
        board.complete(0, other);
    }
    board.complete(1, 5);
    assert_eq!(board.interrupted(), [false; 2], "all of these are ignored");
    board.complete(0, 5);
    assert_eq!(board.interrupted(), [true, false]);
    assert_eq!(board.claim(0), 5);
}

#[test]
fn priorities_decide_and_thresholds_mask() {
    let board = Board::new();
    board.set(enable(0), u32::MAX);
    assert_eq!(board.get(enable(0)), !1, "there is no source 0");
    for (source, priority) in [(3, 2), (4, 7), (9, 2), (31, 15)] {
        board.set(4 * source, priority);
        board.raise(source as u32);
    }
    assert_eq!(board.get(4 * 31), 7, "a priority has three bits");
    board.set(threshold(0), 7);
    assert_eq!(board.interrupted(), [false; 2]);
    board.set(threshold(0), 6);
    assert_eq!(board.interrupted(), [true, false]);
    let claims: Vec<u32> = (0..5).map(|_| board.claim(0)).collect();
    assert_eq!(claims, [4, 31, 3, 9, 0], "the threshold masks no claim");
}

#[test]
fn a_claim_of_one_hart_ends_the_interrupt_of_the_other() {
    let board = Board::new();
    board.set(4, 1);
    board.set(enable(0), 2);
    board.set(enable(1), 2);
    board.raise(1);
    assert_eq!(board.interrupted(), [true; 2]);
    assert_eq!(board.claim(1), 1);
    assert_eq!(board.interrupted(), [false; 2]);
    board.raise(1);
    board.complete(1, 1);
    assert_eq!(board.interrupted(), [true; 2]);
    board.set(4, 0);
    assert_eq!(
        board.interrupted(),
        [false; 2],
        "priority 0 never interrupts"
    );
}

#[test]
fn other_offsets_and_widths_read_zero_and_take_nothing() {
    let board = Board::new();
    let before = board.plic.state().registers.clone();
    let last = PLIC.end - PLIC.start;
    let offsets = [
        0,
        2,
        0x80,
        PENDING,
        PENDING + 4,
        ENABLE + 4,
        enable(HARTS as u64),
        threshold(0) + 8,
        threshold(HARTS as u64),
        claim(HARTS as u64),
        last - 4,
        u64::MAX - 3,
    ];
    for offset in offsets {
        board.set(offset, u32::MAX);
        assert_eq!(board.get(offset), 0, "{offset:#x}");
    }
    for size in [1, 2, 8] {
        for offset in [4, enable(0), threshold(0), claim(0)] {
            board.plic.write(offset, u64::MAX, size);
            assert_eq!(
                board.plic.read(offset, size),
                0,
                "{size} bytes at {offset:#x}"
            );
        }
    }
    assert_eq!(board.plic.state().registers, before);
    assert!(board.plic.line(0).is_none() && board.plic.line(32).is_none());
    assert_eq!(Plic::offset(Gpa(PLIC.start - 1)), None);
    assert_eq!(Plic::offset(Gpa(PLIC.end)), None);
}

#[test]
fn the_state_travels_and_interrupts_where_it_arrives() {
    let (here, there) = (Board::new(), Board::new());
    here.set(4 * 7, 3);
    here.set(4 * 8, 2);
    here.set(enable(1), 1 << 7 | 1 << 8);
    here.set(threshold(0), 1);
    here.raise(7);
    here.raise(8);
    assert_eq!(here.claim(1), 7);
    let state = here.plic.save().unwrap();
    let apply = there.plic.decode(1, &state).unwrap();
    assert_eq!(there.get(4 * 7), 0, "nothing is applied yet");
    apply();
    there.plic.resume();
    assert_eq!(there.plic.save().unwrap(), state);
    assert_eq!(there.interrupted(), [false, true]);
    assert_eq!(
        (there.claim(1), there.claim(1)),
        (8, 0),
        "7 is being served"
    );
    // An interrupt that is over does not stay at a hart that was restored with it.
    let nothing = Board::new().plic.save().unwrap();
    there.raise(8);
    there.complete(1, 8);
    assert_eq!(there.interrupted(), [false, true]);
    there.plic.decode(1, &nothing).unwrap()();
    there.plic.resume();
    assert_eq!(there.interrupted(), [false; 2]);
}

#[test]
fn absurd_states_are_refused() {
    let good = Board::new().plic.save().unwrap();
    assert_eq!(good.len(), 56);
    let refused = |bytes: &[u8]| {
        let board = Board::new();
        let why = board.plic.decode(1, bytes).err().expect("it is absurd");
        why.to_string()
    };
    for len in [0, 1, 55, 57, 4096] {
        let mut bytes = good.clone();
        bytes.resize(len, 0);
        assert!(refused(&bytes).contains("expected 56"), "{len}");
    }
    for (at, value, says) in [
        (0, 1, "a source 0"),
        (4, 1, "a source 0"),
        (8, 1, "a source 0"),
        (48, 1, "a source 0"),
        (9, 8, "threshold of 8"),
        (39, 255, "threshold of 255"),
        (47, 1, "threshold of 16777216"),
        (52, 8, "threshold of 8"),
    ] {
        let mut bytes = good.clone();
        bytes[at] = value;
        let why = refused(&bytes);
        assert!(why.contains(says), "{at}: {why}");
    }
}

/// A PLIC by its specification, source by source.
#[derive(Default)]
struct Model {
    sources: [Source; 32],
    thresholds: [u32; HARTS],
}

#[derive(Clone, Copy, Default)]
struct Source {
    pending: bool,
    is_served: bool,
    priority: u32,
    enabled: [bool; HARTS],
}

impl Model {
    fn best(&self, hart: usize) -> u32 {
        let mut best = 0;
        for (index, source) in (0..).zip(&self.sources) {
            let waits = source.pending && !source.is_served && source.enabled[hart];
            if waits && source.priority > self.sources[best as usize].priority {
                best = index;
            }
        }
        best
    }

    fn interrupted(&self) -> [bool; HARTS] {
        std::array::from_fn(|hart| {
            let best = &self.sources[self.best(hart) as usize];
            best.priority > self.thresholds[hart]
        })
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Raise(u32),
    Claim(usize),
    Complete(usize, u32),
    Priority(u32, u32),
    Threshold(usize, u32),
    Enable(usize, u32),
    Move,
}

fn step() -> impl Strategy<Value = Step> {
    // Few sources, so that they meet.
    let source = prop_oneof![4 => 1..5_u32, 1 => 0..40_u32];
    let hart = 0..HARTS;
    let line = prop_oneof![1..5_u32, Just(31)];
    prop_oneof![
        4 => line.clone().prop_map(Step::Raise),
        4 => hart.clone().prop_map(Step::Claim),
        4 => (hart.clone(), source).prop_map(|(hart, source)| Step::Complete(hart, source)),
        2 => (line, 0..9_u32).prop_map(|(source, value)| Step::Priority(source, value)),
        1 => (hart.clone(), 0..9_u32).prop_map(|(hart, value)| Step::Threshold(hart, value)),
        2 => (hart, any::<u32>()).prop_map(|(hart, value)| Step::Enable(hart, value)),
        1 => Just(Step::Move),
    ]
}

proptest! {
    #[test]
    fn it_does_what_the_model_does(steps in prop::collection::vec(step(), 0..120)) {
        let (mut board, mut model) = (Board::new(), Model::default());
        for step in steps {
            match step {
                Step::Raise(source) => {
                    board.raise(source);
                    model.sources[source as usize].pending = true;
                }
                Step::Claim(hart) => {
                    let best = model.best(hart);
                    if best != 0 {
                        model.sources[best as usize].pending = false;
                        model.sources[best as usize].is_served = true;
                    }
                    prop_assert_eq!(board.claim(hart as u64), best);
                }
                Step::Complete(hart, source) => {
                    board.complete(hart as u64, source);
                    if let Some(source) = model.sources.get_mut(source as usize) {
                        source.is_served &= !source.enabled[hart];
                    }
                }
                Step::Priority(source, value) => {
                    board.set(4 * u64::from(source), value);
                    model.sources[source as usize].priority = value & 7;
                }
                Step::Threshold(hart, value) => {
                    board.set(threshold(hart as u64), value);
                    model.thresholds[hart] = value & 7;
                }
                Step::Enable(hart, value) => {
                    board.set(enable(hart as u64), value);
                    for (index, source) in (0..).zip(&mut model.sources).skip(1) {
                        source.enabled[hart] = value >> index & 1 != 0;
                    }
                }
                Step::Move => {
                    let state = board.plic.save().unwrap();
                    board = Board::new();
                    board.plic.decode(1, &state).unwrap()();
                    board.plic.resume();
                }
            }
            prop_assert_eq!(board.interrupted(), model.interrupted(), "after {:?}", step);
        }
    }

    #[test]
    fn foreign_states_never_panic(bytes in prop::collection::vec(0..10_u8, 56)) {
        let board = Board::new();
        if let Ok(apply) = board.plic.decode(1, &bytes) {
            apply();
            board.plic.resume();
            prop_assert_eq!(board.plic.save().unwrap(), bytes);
        }
    }
}
