//! A run: every number of slots, every operation and every scheme, round by round.

use super::Report;
use super::background::{self, Order};
use super::host;
use super::input::{Keys, SlotSet};
use super::measure::{Input, Measured};
use super::scheme::{
    ArcSwapArray, ArcSwapImbl, ArrayCopy, Floor, LockedTree, Memslots, RecordFloor, VmMemory,
};
use crate::clock::{self, Sampler};
use crate::run::{Rounds, RunError, Subjects, measure};
use std::time::{Duration, Instant};

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

/// Measures all schemes, and reports to `progress`.
///
/// Each round measures every operation once. For each operation the schemes take turns, so that a
/// disturbance of the machine affects all of them.
///
/// # Errors
/// If `config` cannot be measured, or the system refuses address space.
pub(crate) fn run(config: &Config, progress: &mut dyn FnMut(&str)) -> Result<Report, RunError> {
    if config.sizes.is_empty() || config.rounds == 0 {
        return Err(RunError::Nothing);
    }
    let possible = SlotSet::MIN_SLOTS..=SlotSet::MAX_SLOTS;
    if let Some(&size) = config.sizes.iter().find(|size| !possible.contains(size)) {
        return Err(RunError::Slots(size));
    }
    let base = host::base().ok_or(RunError::AddressSpace)?;
    let (start, overhead) = (Instant::now(), clock::overhead());
    let (mut figures, mut transfers) = (Vec::new(), Vec::new());
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
        progress(&format!("{slots} slots: setting up"));
        let rounds = Rounds {
            counted: config.rounds,
            warm_up: false,
        };
        let begin = |round: &str| {
            progress(&format!("{slots} slots: {round}"));
            transfers.extend(background::line_transfer(overhead));
        };
        let mut subjects = subjects(&input.set);
        figures.extend(measure(&input, &mut subjects, Some(slots), rounds, begin)?);
    }
    Ok(Report::new(figures, transfers, start.elapsed()))
}

/// All schemes with the slots of `set`, in the order of the table's rows.
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
    use super::super::Operation;
    use super::super::scheme::Scheme;
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
        let mut said = Vec::new();
        let report = run(&tiny(&[4, 40]), &mut |doing| said.push(doing.to_owned())).expect("a run");
        assert_eq!(said.len(), 6, "{said:?}");
        assert_eq!(report.sizes(), [4, 40]);
        // If this machine is too busy to run two threads at once, there are no figures with two
        // threads.
        let background = [Operation::Add, Operation::Delete, Operation::Move];
        let background = [
            &background[..],
            &[Operation::BesideWriter, Operation::WriterRate],
        ]
        .concat();
        let peers = [
            VmMemory::NAME,
            ArrayCopy::NAME,
            ArcSwapArray::NAME,
            LockedTree::NAME,
            ArcSwapImbl::NAME,
        ];
        for slots in report.sizes() {
            for operation in Operation::ALL.iter().filter(|o| !background.contains(o)) {
                let has = |scheme| report.value(*operation, scheme, slots).is_some();
                assert!(has(Memslots::NAME), "{operation:?}");
                for scheme in peers {
                    assert_eq!(
                        has(scheme),
                        *operation != Operation::ById,
                        "{operation:?} of {scheme}"
                    );
                }
            }
        }
        assert!(report.verdicts.len() >= 7, "{:#?}", report.verdicts);
        assert!(report.value(Operation::ByGfn, Floor::NAME, 40).is_some());
        assert!(
            report
                .value(Operation::ByGfn, RecordFloor::NAME, 40)
                .is_some()
        );
        assert!(report.value(Operation::Add, Floor::NAME, 40).is_none());
        assert!(
            report
                .figures
                .iter()
                .all(|figure| figure.value > 0.0 && figure.min <= figure.max)
        );
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let refused = |config| run(&config, &mut |_| ()).err();
        assert_eq!(refused(tiny(&[])), Some(RunError::Nothing));
        assert_eq!(
            refused(Config {
                rounds: 0,
                ..tiny(&[10])
            }),
            Some(RunError::Nothing)
        );
        assert_eq!(refused(tiny(&[10, 3])), Some(RunError::Slots(3)));
        assert_eq!(refused(tiny(&[32_765])), Some(RunError::Slots(32_765)));
    }
}
