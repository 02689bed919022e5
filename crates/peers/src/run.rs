//! A whole run: every number of slots, every operation, every scheme, round by round.

use crate::clock::{self, Sampler};
use crate::company::{self, Order};
use crate::host;
use crate::layout::{Keys, Layout};
use crate::operation::Operation;
use crate::report::{Figure, Report};
use crate::scheme::{
    ArcSwapArray, ArcSwapImbl, Floor, LockedTree, Memslots, RecordFloor, VmMemory,
};
use crate::subject::{Stage, Subject, Whole};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What to measure and for how long.
#[derive(Clone, Debug)]
pub struct Config {
    /// The numbers of slots, each in [`Layout::MIN_SLOTS`]`..=`[`Layout::MAX_SLOTS`].
    pub sizes: Vec<u32>,
    /// How often everything is measured; figures are medians over the rounds. At least one.
    pub rounds: u32,
    /// How long one sample of one operation runs.
    pub sample: Duration,
}

impl Default for Config {
    /// The numbers of slots of the kernel series' tables, about a minute in all.
    fn default() -> Self {
        Self {
            sizes: vec![10, 30, 50, 100, 509, 8194, 32_764],
            rounds: 15,
            sample: Duration::from_millis(4),
        }
    }
}

impl Config {
    /// A few seconds, to see that everything works; its figures are noisier.
    #[must_use]
    pub fn quick() -> Self {
        Self {
            sizes: vec![10, 509],
            rounds: 5,
            sample: Duration::from_millis(2),
        }
    }
}

/// Why there is no report.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// No layout has so many slots.
    #[error("cannot measure {0} slots: from {min} to {max} it can be", min = Layout::MIN_SLOTS, max = Layout::MAX_SLOTS)]
    Slots(u32),
    /// Neither slots nor rounds.
    #[error("nothing to measure: at least one number of slots and one round are needed")]
    Nothing,
    /// No address space for the slots.
    #[error("the system refuses {bytes} bytes of address space (an address-space limit?)", bytes = host::RESERVED_BYTES)]
    AddressSpace,
}

/// Measures all schemes and says how it goes on through `progress`.
///
/// Everything is measured once a round, and inside a round operation by operation: the schemes take turns,
/// so that a disturbance of the machine meets all of them.
///
/// # Errors
/// Where `config` asks for what cannot be measured, or the system refuses address space.
pub fn run(config: &Config, progress: &mut dyn FnMut(&str)) -> Result<Report, RunError> {
    if config.sizes.is_empty() || config.rounds == 0 {
        return Err(RunError::Nothing);
    }
    let possible = Layout::MIN_SLOTS..=Layout::MAX_SLOTS;
    if let Some(&size) = config.sizes.iter().find(|size| !possible.contains(size)) {
        return Err(RunError::Slots(size));
    }
    let base = host::base().ok_or(RunError::AddressSpace)?;
    let (start, overhead) = (Instant::now(), clock::overhead());
    let (mut figures, mut transfers) = (Vec::new(), Vec::new());
    for &slots in &config.sizes {
        let layout = Layout::new(slots, base, u64::from(slots));
        let stage = Stage {
            keys: Keys::new(&layout, 1),
            order: Order::new(&layout, 2),
            layout,
            sampler: Sampler {
                sample: config.sample,
                overhead,
            },
        };
        progress(&format!("{slots} slots: setting up"));
        let mut subjects = subjects(&stage.layout);
        let mut samples = vec![BTreeMap::<Operation, Vec<f64>>::new(); subjects.len()];
        for round in 1..=config.rounds {
            progress(&format!(
                "{slots} slots: round {round} of {}",
                config.rounds
            ));
            transfers.extend(company::line_transfer(overhead));
            for step in Operation::STEPS {
                for (subject, samples) in subjects.iter_mut().zip(&mut samples) {
                    subject.measure(step, &stage, &mut |operation, sample| {
                        samples.entry(operation).or_default().push(sample);
                    });
                }
            }
        }
        for (subject, samples) in subjects.iter().zip(samples) {
            for (operation, samples) in samples {
                figures.push(Figure::of(operation, subject.name(), slots, samples));
            }
        }
    }
    Ok(Report::new(figures, transfers, start.elapsed()))
}

/// All schemes with the slots of `layout`, in the order of a table's rows.
fn subjects(layout: &Layout) -> Vec<Box<dyn Subject>> {
    vec![
        Box::new(Floor::new(layout.slots())),
        Box::new(RecordFloor::new(layout.slots())),
        Box::new(Whole::<Memslots>::new(layout)),
        Box::new(Whole::<VmMemory>::new(layout)),
        Box::new(Whole::<ArcSwapArray>::new(layout)),
        Box::new(Whole::<LockedTree>::new(layout)),
        Box::new(Whole::<ArcSwapImbl>::new(layout)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheme::Scheme;

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
        // Where this machine is too busy to run two threads at once, they have no figures.
        let company = [Operation::Add, Operation::Delete, Operation::Move];
        let company = [
            &company[..],
            &[Operation::BesideWriter, Operation::WriterRate],
        ]
        .concat();
        let peers = [
            VmMemory::NAME,
            ArcSwapArray::NAME,
            LockedTree::NAME,
            ArcSwapImbl::NAME,
        ];
        for slots in report.sizes() {
            for operation in Operation::ALL.iter().filter(|o| !company.contains(o)) {
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
