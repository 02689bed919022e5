//! A run: every number of slots, every operation and every scheme, round by round.

use super::Operation;
use super::background::Order;
use super::host;
use super::input::{Keys, SlotSet};
use super::measure::{Input, Measured};
use super::scheme::Scheme;
use super::scheme::{ArcSwapArray, ArcSwapImbl, Floor, LockedTree, Memslots, VmMemory};
use crate::args::Common;
use crate::error::os;
use crate::kit::Samples;
use crate::row::{Bound, Conditions, Row};
use crate::schemes::{Aim, Figures, Sampler, Subjects, clock_overhead, measure};
use crate::{BenchError, cores, note};
use clap::value_parser;
use std::io;
use std::time::Duration;

/// `pageferry-bench slots`.
#[derive(Debug, clap::Args)]
pub(crate) struct SlotFlags {
    /// Numbers of slots [default: 10,30,50,100,509,8194,32764; with --quick 10,509]
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = value_parser!(u32).range(i64::from(SlotSet::MIN_SLOTS)..=i64::from(SlotSet::MAX_SLOTS)))]
    slots: Vec<u32>,
    #[command(flatten)]
    pub(crate) common: Common,
}

/// Measures all schemes.
///
/// Each round measures every operation once. For each operation the schemes take turns, so that a
/// disturbance of the machine affects all of them.
///
/// # Errors
/// If the system refuses address space, or a scheme gives a wrong answer.
pub(crate) fn slots(flags: &SlotFlags) -> Result<Vec<Row>, BenchError> {
    // The full numbers are those of the kernel's patch series.
    let (sizes, milliseconds): (&[u32], _) = match flags.common.quick {
        true => (&[10, 509], 2),
        false => (&[10, 30, 50, 100, 509, 8194, 32_764], 4),
    };
    let mut sizes = sizes.to_vec();
    if !flags.slots.is_empty() {
        sizes.clone_from(&flags.slots);
        sizes.sort_unstable();
        sizes.dedup();
    }
    let sample = Duration::from_millis(milliseconds);
    run(&sizes, flags.common.rounds(15, 5), sample)
}

/// Measures these numbers of slots. A sample of one operation has the length `sample`.
fn run(sizes: &[u32], rounds: u32, sample: Duration) -> Result<Vec<Row>, BenchError> {
    let refused = os("cannot reserve address space: raise the limit (ulimit -v)");
    let base = host::base().ok_or_else(|| refused(io::ErrorKind::OutOfMemory))?;
    let overhead = clock_overhead();
    let (mut rows, mut transfers) = (Vec::new(), Samples::default());
    for &slots in sizes {
        let set = SlotSet::new(slots, base, u64::from(slots));
        let input = Input {
            keys: Keys::new(&set, 1),
            order: Order::new(&set, 2),
            set,
            sampler: Sampler { sample, overhead },
        };
        note(&format!("{slots} slots: setting up"));
        let begin = |round: &str| {
            note(&format!("{slots} slots: {round}"));
            if let Some(cores) = cores::two() {
                transfers.push(cores::line_transfer_ns(cores));
            }
        };
        let mut subjects = subjects(&input.set);
        let figures = measure(&input, &mut subjects, Some(slots), 1..=rounds, begin)?;
        rows.extend(figures.rows(NOTE));
        rows.extend(judge(&figures, sizes.last() == Some(&slots)));
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

/// The aims at the largest number of slots. The floor has no protection, so its plain look-up is
/// the baseline of both operations.
const AIMS: [Aim<Operation>; 10] = {
    use Bound::AtMost;
    use Operation::{Add, AgainHeld, BesideWriter, ByGfn, ByGfnHeld, ByHva, Delete, Move, SetUp};
    [
        Aim::beside(ByGfn, 1.3, Floor::NAME, ByGfn),
        Aim::beside(ByGfnHeld, 1.3, Floor::NAME, ByGfn),
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
fn judge(figures: &Figures<Operation>, is_largest: bool) -> Vec<Row> {
    let operations = Operation::STEPS.into_iter().chain([Operation::Delete]);
    let beside = operations.map(|one| Aim::beside(one, 1.05, VmMemory::NAME, one));
    let aims = beside.chain(is_largest.then_some(AIMS).into_iter().flatten());
    figures.judge(Memslots::NAME, aims, NOTE)
}

/// All schemes with the slots of `set`, in the order of the rows.
fn subjects(set: &SlotSet) -> Subjects<Input> {
    vec![
        Box::new(Floor::new(set.slots())),
        Box::new(Measured::<Memslots>::new(set)),
        Box::new(Measured::<VmMemory>::new(set)),
        Box::new(Measured::<ArcSwapArray>::new(set)),
        Box::new(Measured::<LockedTree>::new(set)),
        Box::new(Measured::<ArcSwapImbl>::new(set)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_every_figure_of_every_scheme() {
        use crate::schemes::Operation as _;
        let rows = run(&[4, 40], 2, Duration::from_micros(200)).expect("a run");
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
            ArcSwapArray::NAME,
            LockedTree::NAME,
            ArcSwapImbl::NAME,
        ];
        for slots in [4, 40] {
            for operation in Operation::STEPS
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
        assert!(judged.clone().count() >= 16, "{rows:#?}");
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
}
