//! A restore as users see it. As JSON it is the answer of `GET /restores/{id}`.

use crate::options::Restore;
use crate::timeline::{Came, Timeline};
use crate::vm::Vm;
use hdrhistogram::Histogram;
use pageferry_userfault::uffd::Features;
use serde::Serialize;
use std::sync::Arc;

/// The state of a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Phase {
    /// Its VMM has not connected yet.
    Waiting,
    /// Its VM is served.
    Serving,
    /// A page that its VM waits for cannot be read.
    Lost,
    /// It was taken over, and cannot be served: the reason is in `fault`.
    Failed,
    /// Its VMM has ended.
    Ended,
}

/// The cost of the pager's death.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Survival {
    /// Nothing: the service manager keeps the userfaultfd. The memory file is kept too, or at its
    /// path.
    #[default]
    Kept,
    /// Nothing: the next pager takes the userfaultfd out of the VMM, and the memory file is at its
    /// path.
    Taken,
    /// The VM, for this reason.
    Lost(String),
}

/// The times of faults, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Latency {
    /// The number of faults.
    pub faults: u64,
    /// The median.
    pub p50: u64,
    /// The 99th percentile.
    pub p99: u64,
    /// The longest.
    pub max: u64,
}

impl Latency {
    pub(crate) fn of(times: &Histogram<u64>) -> Self {
        Self {
            faults: times.len(),
            p50: times.value_at_quantile(0.5),
            p99: times.value_at_quantile(0.99),
            max: times.max(),
        }
    }
}

/// A restore, seen from outside.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Status {
    /// Its name.
    pub id: String,
    /// Its state.
    pub phase: Phase,
    /// Why it is lost, has failed, or refused the last handshake. Why an ended one was lost, or has
    /// no recording.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault: Option<String>,
    /// The request.
    pub restore: Restore,
    /// The VM, once its VMM has connected.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm: Option<VmStatus>,
}

/// A VM that is or was served. Pages are of `page_bytes` bytes.
#[derive(Clone, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct VmStatus {
    /// The process id of its VMM.
    pub pid: i32,
    /// The cost of the pager's death.
    pub death_of_pager: Survival,
    /// Whether the pager sees which pages the VM gives back. If not, they would get their old
    /// contents again.
    pub sees_removals: bool,
    /// The size of its pages in bytes.
    pub page_bytes: u64,
    /// All its pages.
    pub pages: u64,
    /// Pages that are there.
    pub resident: u64,
    /// Pages that are not there, and need the source.
    pub missing: u64,
    /// Pages that the VM has given back at least once.
    pub given_back: u64,
    /// Pages placed as zeros, since this pager serves the VM.
    pub zeros: u64,
    /// Pages placed beside a touched one.
    pub neighbours: u64,
    /// Pages placed because of a recording.
    pub replayed: u64,
    /// Pages of the recording that were left out as a sample, and are missing or were touched.
    pub sampled: u64,
    /// Those of them that were touched. The share of the others is an estimate of useless pages
    /// among the replayed ones.
    pub sampled_touched: u64,
    /// Pages loaded in the background.
    pub background: u64,
    /// Faults that wait for the source now.
    pub waiting: u64,
    /// Failed reads of the source.
    pub source_errors: u64,
    /// Calls that were repeated because a removal was under way.
    pub repeated: u64,
    /// Faults answered by zeros without a read.
    pub zero_faults: Latency,
    /// Faults whose bytes were at hand.
    pub at_hand_faults: Latency,
    /// Faults that waited for the source.
    pub read_faults: Latency,
    /// When its pages came.
    #[serde(skip)]
    pub timeline: Option<Arc<Timeline>>,
}

impl VmStatus {
    pub(crate) fn of(vm: &Vm) -> Self {
        let latency = |way| Latency::of(&vm.figures.times(way));
        let figures = &vm.figures;
        let (sampled, sampled_touched) = vm
            .sample
            .counts(|page| !vm.shared.placed().test(page) && !vm.shared.removed().test(page));
        Self {
            pid: vm.vmm.identity.pid,
            death_of_pager: vm.survival(),
            sees_removals: vm.uffd.features().contains(Features::EVENT_REMOVE),
            page_bytes: vm.regions.page_bytes(),
            pages: vm.regions.pages(),
            resident: vm.shared.placed().count(),
            missing: vm.missing(),
            given_back: vm.shared.removed().count(),
            zeros: figures.zeros.get(),
            neighbours: figures.neighbours.get(),
            replayed: figures.replayed.get(),
            sampled,
            sampled_touched,
            background: figures.background.get(),
            waiting: vm.fetch.waiting() as u64,
            source_errors: figures.source_errors.get(),
            repeated: figures.repeated.get(),
            zero_faults: latency(Came::Zero),
            at_hand_faults: latency(Came::AtHand),
            read_faults: latency(Came::Read),
            timeline: Some(Arc::clone(&figures.timeline)),
        }
    }
}
