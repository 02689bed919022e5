//! `bench memslot`: the cost of memory slots in a hypervisor, with two schemes, next to the
//! kernel's own figures.
//!
//! **Guarantee.** Both schemes run the same six tests with the same guest, hypervisor and host
//! memory, and take turns. Every run checks the guest's stores. A wrong value ends the benchmark
//! with an error.
//!
//! **Mechanism.** The tests are those of `memslot_perf_test` in the kernel's selftests, with its
//! sizes (`trial`). A `test_vm` is a VM with its slots. Its only vCPU runs RV64 code (`program`) on
//! its own thread. One VM has the slots of `pageferry-memslot`. The other has the kernel's scheme
//! before it had trees (`array_copy`). A sample is a run of some milliseconds, or one run of the
//! test if that takes longer. Figures are medians.
//!
//! **Neighbours.** Below: the hypervisor and the slots. The command line prints [`MemslotReport`].

mod array_copy;
pub(crate) mod host;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod kvm;
#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
#[path = "absent.rs"]
mod kvm;
mod page;
pub(crate) mod program;
mod report;
mod series;
mod split;
mod test_vm;
#[cfg(test)]
mod tests;
mod trial;

pub use page::page;
pub use report::{Call, CallCost, Cell, MemslotReport};
pub use series::{SOURCE, Xeon, xeon};

use crate::BenchError;
use crate::kit::{Figure, Samples};
use array_copy::ArrayCopy;
use host::SlotMemory;
use kvm::RealKvm;
use pageferry_hypervisor::{Memslots, Scalable, SlotData};
use pageferry_machine::MachineError;
use serde::Serialize;
use split::Split;
use std::sync::Arc;
use std::time::{Duration, Instant};
use test_vm::TestVm;

/// The kernel's old scheme on our hypervisor.
type Copying = ArrayCopy<SlotData>;

/// One of the six tests of the kernel's `memslot_perf_test`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Test {
    /// The guest writes to each page of one half of 32 MiB while the host unmaps the other half;
    /// then the halves swap.
    Map,
    /// The guest writes to one page of one half of 128 MiB, and the host unmaps that half page by
    /// page; then the other half.
    Unmap,
    /// As [`Self::Unmap`], in chunks of 2 MiB, or of a slot if that is smaller.
    UnmapChunked,
    /// The last slot of 512 MiB moves away and back while the guest writes to pages on both sides
    /// of its start.
    MoveActive,
    /// As [`Self::MoveActive`], but the guest writes only to pages below the slot.
    MoveInactive,
    /// All slots of 512 MiB are created.
    SlotSetup,
}

impl Test {
    /// All tests, in the order of the tables of the kernel's patch series.
    pub const ALL: [Self; 6] = [
        Self::Map,
        Self::Unmap,
        Self::UnmapChunked,
        Self::MoveActive,
        Self::MoveInactive,
        Self::SlotSetup,
    ];

    /// The name in the patch series' tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Map => "Map",
            Self::Unmap => "Unmap",
            Self::UnmapChunked => "Unmap 2M",
            Self::MoveActive => "Move active",
            Self::MoveInactive => "Move inactive",
            Self::SlotSetup => "Slot setup",
        }
    }

    /// The number of pages of the test's memory: its area, and one page for synchronisation.
    const fn pages(self) -> u64 {
        1 + match self {
            Self::Map => trial::MAP_PAGES,
            Self::Unmap | Self::UnmapChunked => trial::UNMAP_PAGES,
            Self::MoveActive | Self::MoveInactive | Self::SlotSetup => trial::ALL_PAGES,
        }
    }

    /// Whether the test is possible with `slots` slots: each slot needs a page.
    #[must_use]
    pub fn possible(self, slots: u32) -> bool {
        Split::new(slots, self.pages()).is_some()
    }
}

/// The settings of the benchmark.
#[derive(Clone, Debug)]
pub struct MemslotSetting {
    /// The numbers of slots, from [`MemslotSetting::MIN_SLOTS`] to [`MemslotSetting::MAX_SLOTS`].
    pub sizes: Vec<u32>,
    /// The smallest number of samples of a figure, at least 1.
    pub repeat: u32,
    /// The shortest time of a sample.
    pub sample: Duration,
    /// A test gets more samples until this time has passed, up to 20 times `repeat`.
    pub spend: Duration,
    /// Whether the run fails if KVM cannot be measured.
    pub require_kvm: bool,
}

impl MemslotSetting {
    /// The smallest number of slots: one slot must lie below the one that moves.
    pub const MIN_SLOTS: u32 = 3;
    /// The largest number of slots, on KVM and here.
    pub const MAX_SLOTS: u32 = 32_764;

    /// The sizes of the patch series. With 3 samples a run takes one to two minutes.
    #[must_use]
    pub fn full(repeat: u32) -> Self {
        Self {
            sizes: vec![10, 30, 50, 100, 509, 8194, 32_764],
            repeat,
            sample: Duration::from_millis(15),
            spend: Duration::from_millis(1200),
            require_kvm: false,
        }
    }

    /// Two sizes and some seconds: a check that everything works. Its figures are noisier.
    #[must_use]
    pub fn quick(repeat: u32) -> Self {
        Self {
            sizes: vec![10, 509],
            sample: Duration::from_millis(5),
            spend: Duration::from_millis(200),
            ..Self::full(repeat)
        }
    }
}

/// The number of moves, there and back, in one sample of a bare call.
const CALLS: u32 = 50;

/// Runs all tests.
///
/// # Errors
/// [`BenchError::WrongValue`] if a guest's value is in the wrong place. [`BenchError::Setting`] if
/// these settings cannot be measured. Other errors if the host refuses something.
pub fn memslot(
    setting: &MemslotSetting,
    progress: &mut dyn FnMut(&str),
) -> Result<MemslotReport, BenchError> {
    let possible = MemslotSetting::MIN_SLOTS..=MemslotSetting::MAX_SLOTS;
    if setting.repeat == 0 || setting.sizes.is_empty() {
        return Err(BenchError::Setting(
            "nothing to measure: no sizes or no samples".into(),
        ));
    }
    if let Some(slots) = setting.sizes.iter().find(|slots| !possible.contains(slots)) {
        return Err(BenchError::Setting(format!(
            "cannot measure {slots} slots: expected {} to {}",
            possible.start(),
            possible.end()
        )));
    }
    let began = Instant::now();
    let real = RealKvm::open();
    if setting.require_kvm {
        required(&real)?;
    }
    let host = test_vm::host(1 + trial::ALL_PAGES)?;
    let (mut cells, mut calls) = (Vec::new(), Vec::new());
    let ends = [setting.sizes.iter().min(), setting.sizes.iter().max()];
    for slots in &setting.sizes {
        let bench = Bench {
            setting,
            host: &host,
            slots: *slots,
        };
        for tests in [&[Test::Map][..], &[Test::Unmap, Test::UnmapChunked]] {
            if !tests[0].possible(*slots) {
                continue;
            }
            let copying = bench.test_vm::<Copying>(tests[0].pages())?;
            let scalable = bench.test_vm::<Scalable>(tests[0].pages())?;
            for &test in tests {
                cells.push(bench.test(test, &copying, &scalable, progress)?);
            }
        }
        let (set_up, copying, scalable) = bench.set_up(progress)?;
        for test in [Test::MoveActive, Test::MoveInactive] {
            cells.push(bench.test(test, &copying, &scalable, progress)?);
        }
        if ends.contains(&Some(slots)) {
            calls.extend(bench.calls(
                &set_up,
                &copying,
                &scalable,
                real.as_ref().ok(),
                progress,
            )?);
        }
        cells.push(set_up);
    }
    cells.sort_by_key(|cell| (cell.slots, cell.test));
    Ok(MemslotReport::new(
        cells,
        calls,
        real.err(),
        began.elapsed(),
    ))
}

/// The tests with one number of slots.
struct Bench<'a> {
    setting: &'a MemslotSetting,
    host: &'a Arc<SlotMemory>,
    slots: u32,
}

/// Samples of the copied array and of `pageferry-memslot`, in this order.
type Pair = [Samples; 2];

impl Bench<'_> {
    fn test_vm<M: Memslots>(&self, pages: u64) -> Result<TestVm<M>, BenchError> {
        let split = Split::new(self.slots, pages).expect("a test that is possible");
        TestVm::new(self.host, split)
    }

    /// Takes samples of both schemes in turns. Each scheme goes first in every other turn.
    fn turns(
        &self,
        mut take: impl FnMut(bool) -> Result<f64, BenchError>,
    ) -> Result<Pair, BenchError> {
        let began = Instant::now();
        let mut pair = Pair::default();
        let MemslotSetting { repeat, spend, .. } = *self.setting;
        for turn in 0..20 * repeat {
            if turn >= repeat && began.elapsed() >= spend {
                break;
            }
            for scalable in [turn % 2 == 1, turn % 2 == 0] {
                let sample = take(scalable)?;
                pair[usize::from(scalable)].push(sample);
            }
        }
        Ok(pair)
    }

    fn test(
        &self,
        test: Test,
        copying: &TestVm<Copying>,
        scalable: &TestVm<Scalable>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<Cell, BenchError> {
        progress(&format!("{} slots: {}", self.slots, test.name()));
        let sample = self.setting.sample;
        let pair = self.turns(|ours| {
            if ours {
                trial::sample(scalable, test, sample)
            } else {
                trial::sample(copying, test, sample)
            }
        })?;
        Ok(Cell::new(test, self.slots, &pair))
    }

    /// Measures the set-up, and returns the last VM of each scheme.
    fn set_up(
        &self,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(Cell, TestVm<Copying>, TestVm<Scalable>), BenchError> {
        progress(&format!("{} slots: {}", self.slots, Test::SlotSetup.name()));
        let pages = Test::SlotSetup.pages();
        let (mut copying, mut scalable) = (None, None);
        let pair = self.turns(|ours| {
            // The previous VM is dropped first, so that no measurement includes that.
            if ours {
                drop(scalable.take());
                let test_vm = scalable.insert(self.test_vm::<Scalable>(pages)?);
                trial::sample(test_vm, Test::SlotSetup, Duration::ZERO)
            } else {
                drop(copying.take());
                let test_vm = copying.insert(self.test_vm::<Copying>(pages)?);
                trial::sample(test_vm, Test::SlotSetup, Duration::ZERO)
            }
        })?;
        let cell = Cell::new(Test::SlotSetup, self.slots, &pair);
        let test_vms = copying.zip(scalable);
        let (copying, scalable) = test_vms.expect("there was a turn, and each makes both");
        Ok((cell, copying, scalable))
    }

    /// The costs of the calls while no vCPU runs, with both schemes and on KVM.
    fn calls(
        &self,
        set_up: &Cell,
        copying: &TestVm<Copying>,
        scalable: &TestVm<Scalable>,
        real: Option<&RealKvm>,
        progress: &mut dyn FnMut(&str),
    ) -> Result<[CallCost; 2], BenchError> {
        progress(&format!("{} slots: bare calls", self.slots));
        let (mut setups, mut vm) = (Samples::default(), None);
        if let Some(real) = real {
            let slots = self.slots.min(real.max_slots());
            let split = Split::new(slots, Test::SlotSetup.pages());
            let split = split.ok_or_else(|| {
                BenchError::Setting(format!(
                    "KVM allows only {slots} slots per VM, which is too few"
                ))
            })?;
            for _ in 0..self.setting.repeat.min(3) {
                drop(vm.take());
                let (new, took) = real.set_up(self.host, split)?;
                setups.push(took.as_secs_f64());
                vm = Some(new);
            }
        }
        let mut moves = [(); 3].map(|()| Samples::default());
        for _ in 0..self.setting.repeat.max(5) {
            moves[0].push(per_call(|| trial::move_once(copying))?);
            moves[1].push(per_call(|| trial::move_once(scalable))?);
            if let Some(vm) = &vm {
                moves[2].push(per_call(|| vm.move_once())?);
            }
        }
        let kvm_slots = real.map(|real| self.slots.min(real.max_slots()));
        let cost = |call, array_copy, scalable, kvm: &Samples| CallCost {
            call,
            slots: self.slots,
            array_copy,
            scalable,
            kvm: (!kvm.is_empty()).then(|| Figure::of(kvm)),
            kvm_slots,
        };
        let [copied, ours, kernels] = moves;
        Ok([
            cost(Call::Move, Figure::of(&copied), Figure::of(&ours), &kernels),
            cost(Call::SetUp, set_up.array_copy, set_up.scalable, &setups),
        ])
    }
}

/// Seconds per move, over [`CALLS`] moves there and back.
fn per_call(mut there_and_back: impl FnMut() -> Result<(), BenchError>) -> Result<f64, BenchError> {
    there_and_back()?;
    let began = Instant::now();
    for _ in 0..CALLS {
        there_and_back()?;
    }
    Ok(began.elapsed().as_secs_f64() / f64::from(2 * CALLS))
}

/// # Errors
/// If KVM cannot be measured.
fn required<K>(kvm: &Result<K, String>) -> Result<(), BenchError> {
    match kvm {
        Ok(_) => Ok(()),
        Err(why) => Err(MachineError::EngineUnavailable(why.clone()).into()),
    }
}

fn wrong(what: String) -> BenchError {
    BenchError::WrongValue(what)
}
