//! The results of the model, with its inputs and its errors. All that is modelled says so.

use super::{Model, PageDelivery, QueueTimes, RealRun};
use crate::Samples;
use crate::demand_paging::Scheme;
use crate::row::{Conditions, Row, cores};
use pageferry_addr::PAGE_SIZE;

impl Model {
    pub(super) fn notes(&self) -> Vec<String> {
        vec![
            format!(
                "MODEL, not a measurement: demand paging with a core for each vCPU, from times \
                 measured in this run on {} cores. Seed: {}.",
                cores(),
                self.seed
            ),
            "The talk's figures, not modelled here: 98 % of the time waiting for the lock, 89 % of \
             the time saved (Ben Gardon, \"Improving MMU Scalability in x86 KVM\", KVM Forum 2019: \
             KVM with a 416-vCPU, 12 TiB VM)."
                .into(),
            "Left out: memory bandwidth, sockets, the host's own locks, overlapping touches. To the \
             parallel MMU's disadvantage, all vCPUs link new tables through one cache line."
                .into(),
        ]
    }

    pub(super) fn input_rows(&self) -> Vec<Row> {
        let inputs = self.parts.inputs().into_iter().map(|(case, samples)| {
            let how = Conditions::here(1, self.memory_per_vcpu, "soft engine, measured");
            samples.row(case, "an input of the model", "ns", how)
        });
        inputs.collect()
    }

    /// The model next to a real run: nanoseconds per page of a vCPU.
    pub(super) fn check_row(&self, run: &RealRun, measured_ns: &Samples) -> Row {
        let &RealRun {
            delivery,
            scheme,
            vcpus,
        } = run;
        let subject = format!("MODELLED: {}, {scheme}, {vcpus} vCPUs", delivery.name());
        let note = match (delivery, scheme, vcpus) {
            (PageDelivery::None, Scheme::Parallel, 1) => {
                "modelled; the guest's time is derived from this run"
            }
            _ => "modelled, next to real runs",
        };
        let how = Conditions::here(vcpus, self.memory_per_vcpu, note);
        let rate = self.simulate(delivery, scheme, vcpus).pages_per_s();
        Samples::from_iter([f64::from(vcpus) * 1e9 / rate])
            .row("model.check", subject, "ns", how)
            .against("measured", measured_ns.median())
    }

    /// Both schemes with one number of vCPUs. The ratio of `parallel` is to `serialised`.
    pub(super) fn point_rows(&self, delivery: PageDelivery, vcpus: u32) -> Vec<Row> {
        let row = |case: &'static str, scheme: Scheme, unit, value: f64| {
            let name = delivery.name();
            let subject = format!("MODELLED: {name}, {scheme}, {vcpus} vCPUs");
            let note = format!("modelled, a core for each vCPU, seed {}", self.seed);
            let how = Conditions::here(vcpus, self.memory_per_vcpu, note);
            Samples::from_iter([value]).row(case, subject, unit, how)
        };
        let [parallel, serialised] =
            Scheme::ALL.map(|scheme| self.simulate(delivery, scheme, vcpus));
        let figures = |times: &QueueTimes| {
            let seconds = |bytes: u64| (bytes / PAGE_SIZE) as f64 / times.pages_per_s();
            [
                (
                    "model.time",
                    "s",
                    seconds(self.memory_per_vcpu * u64::from(vcpus)),
                ),
                ("model.rate", "pages/s", times.pages_per_s()),
                ("model.waiting", "%", times.waiting_percent()),
                ("model.total_time", "s", seconds(self.total_memory)),
            ]
        };
        let mut rows = Vec::new();
        for (ours, theirs) in figures(&parallel).into_iter().zip(figures(&serialised)) {
            let (case, unit, value) = ours;
            let parallel = row(case, Scheme::Parallel, unit, value);
            rows.push(parallel.against("serialised", theirs.2));
            rows.push(row(case, Scheme::Serialised, unit, theirs.2));
        }
        rows
    }
}
