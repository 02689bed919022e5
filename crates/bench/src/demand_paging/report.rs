//! The results of a run, as rows.

use super::setting::DemandFlags;
use super::way::{Way, WaySamples};
use crate::Samples;
use crate::output::Output;
use crate::row::{Conditions, Row};
use pageferry_machine::{Delivery, Engine};

/// A rate whose samples spread more than this part of the median is called noisy.
const NOISY: f64 = 0.30;

/// The samples of one way with one number of vCPUs.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) way: Way,
    pub(super) vcpus: u32,
    /// The pages that each vCPU touched.
    pub(super) pages_each: u64,
    pub(super) memory_bytes: u64,
    pub(super) samples: WaySamples,
}

/// The results of a run. All of them are measured.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// By engine, number of vCPUs, delivery and scheme.
    pub(super) cells: Vec<Cell>,
    /// The ways that this host does not have.
    pub(super) lacking: Vec<(Engine, Delivery)>,
}

impl Cell {
    fn name(&self) -> String {
        format!("{}, {}", self.way.engine, self.way.name())
    }

    fn rate(&self) -> f64 {
        self.samples.rate.median()
    }

    /// The spread of the rate: largest less smallest sample, to the median.
    pub(super) fn spread(&self) -> f64 {
        let rate = &self.samples.rate;
        (rate.quantile(1.0) - rate.quantile(0.0)) / rate.median()
    }

    fn conditions(&self, note: &str) -> Conditions {
        let here = Conditions::here(self.vcpus, self.memory_bytes, note);
        here.with_delivery(self.way.delivery)
    }

    /// The lines of `demand_paging_test` (tools/testing/selftests/kvm, Linux 6.12), with its names,
    /// units and digits. The time is that of one pass.
    fn selftest(&self) -> String {
        let rate = self.rate() / f64::from(self.vcpus);
        format!(
            "\n{}, {} vCPUs\nTotal guest execution time:\t{:.9}s\n\
             Per-vcpu demand paging rate:\t{rate:.6} pgs/sec/vcpu\n\
             Overall demand paging rate:\t{:.6} pgs/sec",
            self.name(),
            self.vcpus,
            self.pages_each as f64 / rate,
            self.rate()
        )
    }
}

impl Found {
    /// The rows, and what the table does not say.
    pub(super) fn output(&self, flags: &DemandFlags) -> Output {
        let mut notes: Vec<String> = self
            .lacking
            .iter()
            .map(|(engine, delivery)| {
                format!("Not measured: {engine} by {delivery}: `pageferry probe` prints the reason")
            })
            .collect();
        if flags.has_selftest_lines() {
            notes.extend(self.cells.iter().map(Cell::selftest));
        }
        Output {
            rows: self
                .cells
                .iter()
                .flat_map(|cell| self.rows(cell, flags))
                .collect(),
            notes,
        }
    }

    /// The rows of a cell. The ratio of a rate is to the plain loop, if readers are compared, and
    /// else to the run without missing pages. The ratio of the scaling is to the fewest vCPUs.
    fn rows(&self, cell: &Cell, flags: &DemandFlags) -> Vec<Row> {
        let subject = format!("{}, {} vCPUs", cell.name(), cell.vcpus);
        let row = |case: &'static str, unit, samples: &Samples, note: &str| {
            samples.row(case, subject.clone(), unit, cell.conditions(note))
        };
        let mut note = format!(
            "each vCPU stores to one word of each page {}; {}, {} us a fetch; spread \
             {:.0} %",
            if flags.overlap {
                "of all"
            } else {
                "of its own"
            },
            flags.backing(),
            flags.delay().as_micros(),
            100.0 * cell.spread()
        );
        if cell.spread() > NOISY {
            note.push_str(": other work disturbed this run");
        }
        let samples = &cell.samples;
        let mut rate = row("demand_paging.rate", "pages/s", &samples.rate, &note);
        let baseline = self.cells.iter().find(|other| {
            let compared = flags.compare_readers;
            other.vcpus == cell.vcpus && other.way.is_baseline_of(cell.way, compared)
        });
        if let Some(other) = baseline {
            rate = rate.against(other.way.name(), other.rate());
        }
        let mut rows = vec![rate];
        let first = self.cells.iter().find(|other| other.way == cell.way);
        if let Some(first) = first.filter(|first| first.vcpus != cell.vcpus) {
            let scaling = row(
                "demand_paging.scaling",
                "pages/s",
                &samples.rate,
                "the same rate",
            );
            rows.push(scaling.against(format!("{} vCPUs", first.vcpus), first.rate()));
        }
        let own = "a vCPU in its own time, the median of the vCPUs";
        rows.push(row(
            "demand_paging.rate_vcpu",
            "pages/s",
            &samples.per_vcpu,
            own,
        ));
        let core = "core time of a touch, with the guest's instructions";
        rows.push(row("demand_paging.touch", "ns", &samples.touch_ns, core));
        let fault = "from a fault to the same vCPU's next, as the serving threads see both; from a \
                     pass of its own";
        for (case, us) in [
            ("demand_paging.fault_p50", &samples.fault_us_p50),
            ("demand_paging.fault_p99", &samples.fault_us_p99),
        ] {
            if !us.is_empty() {
                rows.push(row(case, "us", us, fault));
            }
        }
        rows
    }
}
