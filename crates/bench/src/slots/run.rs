//! A run: every number of slots, every operation and every scheme, round by round.

use super::Operation;
use super::background::{self, Order};
use super::host;
use super::input::{Keys, SlotSet};
use super::measure::{Input, Measured};
use super::scheme::Scheme;
use super::scheme::{
    ArcSwapArray, ArcSwapImbl, ArrayCopy, Floor, LockedTree, Memslots, RecordFloor, VmMemory,
};
use crate::kit::Samples;
use crate::note;
use crate::row::{Bound, Conditions, Row};
use crate::schemes::{Aim, Figures, Rounds, RunError, Sampler, Subjects, clock_overhead, measure};
use std::time::Duration;

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// The numbers of slots, each in [`SlotSet::MIN_SLOTS`]`..=`[`SlotSet::MAX_SLOTS`].
    pub(crate) sizes: Vec<u32>,
    /// The number of rounds, at least 1. Figures are medians over the rounds.
    pub(crate) rounds: u32,
    /// The length of one sample of one operation.
    pub(crate) sample: Duration,
}

impl Default for Config {
    /// The numbers of slots of the kernel's patch series, 15 rounds: about a minute.
    fn default() -> Self {
        Self {
            sizes: vec![10, 30, 50, 100, 509, 8194, 32_764],
            rounds: 15,
            sample: Duration::from_millis(4),
        }
    }
}

impl Config {
    /// A few seconds: a check that everything works. Its figures are noisier.
    #[must_use]
    pub(crate) fn quick() -> Self {
        Self {
            sizes: vec![10, 509],
            rounds: 5,
            sample: Duration::from_millis(2),
        }
    }
}

/// Measures all schemes.
///
/// Each round measures every operation once. For each operation the schemes take turns, so that a
/// disturbance of the machine affects all of them.
///
/// # Errors
/// If `config` cannot be measured, or the system refuses address space.
pub(crate) fn run(config: &Config) -> Result<Vec<Row>, RunError> {
    if config.sizes.is_empty() || config.rounds == 0 {
        return Err(RunError::Nothing);
    }
    let possible = SlotSet::MIN_SLOTS..=SlotSet::MAX_SLOTS;
    if let Some(&size) = config.sizes.iter().find(|size| !possible.contains(size)) {
        return Err(RunError::Slots(size));
    }
    let base = host::base().ok_or(RunError::AddressSpace)?;
    let overhead = clock_overhead();
    let (mut rows, mut transfers) = (Vec::new(), Samples::default());
    for &slots in &config.sizes {
        let set = SlotSet::new(slots, base, u64::from(slots));
        let input = Input {
            keys: Keys::new(&set, 1),
            order: Order::new(&set, 2),
            set,
            sampler: Sampler {
                sample: config.sample,
                overhead,
            },
        };
        note(&format!("{slots} slots: setting up"));
        let rounds = Rounds {
            counted: config.rounds,
            warm_up: false,
        };
        let begin = |round: &str| {
            note(&format!("{slots} slots: {round}"));
            if let Some(ns) = background::line_transfer(overhead) {
                transfers.push(ns);
            }
        };
        let mut subjects = subjects(&input.set);
        let figures = measure(&input, &mut subjects, Some(slots), rounds, begin)?;
        rows.extend(figures.rows(NOTE));
        rows.extend(judge(
            &figures,
            slots,
            config.sizes.iter().max() == Some(&slots),
        ));
    }
    if !transfers.is_empty() {
        let note = "from core to core; all figures with two threads depend on it";
        let how = Conditions::here(0, 0, note);
        rows.push(transfers.row("slots.line_transfer", "a cache line", "ns", how));
    }
    Ok(rows)
}

/// The conditions of all figures.
const NOTE: &str = "held: inside one guard; first: one slot only; add, delete, move: while another \
                    thread looks up frames; beside_writer: by gfn while another thread writes";

/// The aims at the largest number of slots. Both floors of a look-up count: one returns an address,
/// the other a record, as ours does. A floor has no protection, so its plain look-up is the
/// baseline of both operations.
const AIMS: [Aim<Operation>; 12] = {
    use Bound::AtMost;
    use Operation::{Add, AgainHeld, BesideWriter, ByGfn, ByGfnHeld, ByHva, Delete, Move, SetUp};
    [
        Aim::beside(ByGfn, 1.3, Floor::NAME, ByGfn),
        Aim::beside(ByGfnHeld, 1.3, Floor::NAME, ByGfn),
        Aim::beside(ByGfn, 1.3, RecordFloor::NAME, ByGfn),
        Aim::beside(ByGfnHeld, 1.3, RecordFloor::NAME, ByGfn),
        Aim::of(AgainHeld, AtMost(2.0)),
        Aim::of(ByHva, AtMost(150.0)),
        Aim::of(Add, AtMost(500.0)),
        Aim::of(Delete, AtMost(800.0)),
        Aim::of(Move, AtMost(800.0)),
        Aim::of(SetUp, AtMost(12.0)),
        Aim::of(BesideWriter, AtMost(100.0)),
        Aim::beside(BesideWriter, 2.5, Memslots::NAME, ByGfn),
    ]
};

/// The rows of our aims. At any number of slots, no operation may lose to vm-memory's.
fn judge(figures: &Figures<Operation>, slots: u32, is_largest: bool) -> Vec<Row> {
    let operations = Operation::ALL
        .into_iter()
        .filter(|one| *one != Operation::WriterRate);
    let beside = operations.map(|one| Aim::beside(one, 1.05, VmMemory::NAME, one));
    let aims = beside.chain(is_largest.then_some(AIMS).into_iter().flatten());
    figures.judge(Memslots::NAME, Some(slots), aims, NOTE)
}

/// All schemes with the slots of `set`, in the order of the rows.
fn subjects(set: &SlotSet) -> Subjects<Input> {
    vec![
        Box::new(Floor::new(set.slots())),
        Box::new(RecordFloor::new(set.slots())),
        Box::new(Measured::<Memslots>::new(set)),
        Box::new(Measured::<VmMemory>::new(set)),
        Box::new(Measured::<ArrayCopy>::new(set)),
        Box::new(Measured::<ArcSwapArray>::new(set)),
        Box::new(Measured::<LockedTree>::new(set)),
        Box::new(Measured::<ArcSwapImbl>::new(set)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(sizes: &[u32]) -> Config {
        Config {
            sizes: sizes.to_vec(),
            rounds: 2,
            sample: Duration::from_micros(200),
        }
    }

    #[test]
    fn a_run_has_every_figure_of_every_scheme() {
        use crate::schemes::Operation as _;
        let rows = run(&tiny(&[4, 40])).expect("a run");
        let has = |operation: Operation, scheme: &str, slots: u32| {
            let subject = format!("{scheme}, {slots} slots");
            rows.iter()
                .any(|row| row.case == operation.case() && row.subject == subject)
        };
        // If this machine is too busy to run two threads at once, there are no figures with two
        // threads.
        use Operation::{Add, BesideWriter, ById, Delete, Move, WriterRate};
        let background = [Add, Delete, Move, BesideWriter, WriterRate];
        let peers = [
            VmMemory::NAME,
            ArrayCopy::NAME,
            ArcSwapArray::NAME,
            LockedTree::NAME,
            ArcSwapImbl::NAME,
        ];
        for slots in [4, 40] {
            for operation in Operation::ALL
                .into_iter()
                .filter(|o| !background.contains(o))
            {
                assert!(has(operation, Memslots::NAME, slots), "{operation:?}");
                for scheme in peers {
                    let expected = operation != ById;
                    assert_eq!(
                        has(operation, scheme, slots),
                        expected,
                        "{operation:?} of {scheme}"
                    );
                }
            }
        }
        let judged = rows.iter().filter(|row| row.met.is_some());
        assert!(judged.clone().count() >= 18, "{rows:#?}");
        assert!(
            judged
                .clone()
                .all(|row| row.subject.starts_with(Memslots::NAME))
        );
        let floors = judged.filter(|row| row.baseline.as_deref() == Some(Floor::NAME));
        assert_eq!(floors.count(), 1, "and one of another operation");
        assert!(!has(Add, Floor::NAME, 40));
        assert!(rows.iter().all(|row| row.value > 0.0 && row.min <= row.max));
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let refused = |config| run(&config).err();
        assert_eq!(refused(tiny(&[])), Some(RunError::Nothing));
        let nothing = Config {
            rounds: 0,
            ..tiny(&[10])
        };
        assert_eq!(refused(nothing), Some(RunError::Nothing));
        assert_eq!(refused(tiny(&[10, 3])), Some(RunError::Slots(3)));
        assert_eq!(refused(tiny(&[32_765])), Some(RunError::Slots(32_765)));
    }
}
