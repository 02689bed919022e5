//! The ways to page that a run compares, and their samples.

use super::missing::{Reading, Serving};
use super::plan::Plan;
use super::race::Race;
use super::report::Found;
use super::setting::DemandFlags;
use super::{HostRam, Scheme, machine, soft_touch};
use crate::row::cores;
use crate::{BenchError, Samples};
use pageferry_harness::deliveries_of;
use pageferry_machine::{Delivery, Engine};
use std::sync::Arc;
use std::time::Duration;

/// The part of a way's name that says how many userfaultfds it has.
fn shared_by(userfaultfds: u32) -> String {
    match userfaultfds {
        1 => String::new(),
        more => format!(", {more} userfaultfds"),
    }
}

/// One combination of engine, delivery, readers and locking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) engine: Engine,
    /// `None`: no page is missing.
    pub(crate) delivery: Option<Delivery>,
    /// `None`: the kernel's own locking.
    pub(crate) scheme: Option<Scheme>,
    pub(crate) reading: Reading,
}

impl Way {
    /// The name in tables.
    pub(crate) fn name(self) -> String {
        let pages = match self.delivery {
            None => "no userfault".to_owned(),
            Some(delivery) => delivery.to_string(),
        };
        let readers = match self.reading {
            _ if !self.has_readers() => String::new(),
            Reading::Plain => ", plain loop".into(),
            Reading::Streams {
                userfaultfds,
                readers,
            } => {
                let s = if readers == 1 { "" } else { "s" };
                format!("{}, {readers} reader{s}", shared_by(userfaultfds))
            }
        };
        let scheme = match self.scheme {
            Some(Scheme::Serialised) => ", serialised MMU",
            _ => "",
        };
        format!("{pages}{readers}{scheme}")
    }

    /// Whether the rate of `other` is compared with this one's: this is the plain loop, if readers
    /// are compared, or else the same without missing pages.
    pub(super) fn is_baseline_of(self, other: Self, compare_readers: bool) -> bool {
        let delivery = match other.delivery {
            None => return false,
            Some(_) if compare_readers && other.has_readers() => other.delivery,
            Some(_) => None,
        };
        (self.engine, self.scheme, self.delivery) == (other.engine, other.scheme, delivery)
            && (delivery.is_none() || self.reading == Reading::Plain)
    }

    /// Whether threads read events for most faults.
    fn has_readers(self) -> bool {
        matches!(self.delivery, Some(Delivery::Minor | Delivery::Missing))
    }

    /// One pass.
    pub(super) fn run(
        self,
        host: Option<&Arc<HostRam>>,
        plan: &Plan,
        delay: Duration,
        clock: bool,
    ) -> Result<Race<()>, BenchError> {
        let serving = Serving {
            delay,
            reading: self.reading,
            clock,
        };
        match (self.scheme, host) {
            (Some(scheme), Some(host)) => {
                soft_touch(host, plan, scheme, self.delivery.map(|_| serving))
            }
            _ => machine::touch(self.engine, plan, self.delivery, serving),
        }
    }
}

/// The wanted ways of an engine that this host has. The report gets those that it lacks.
pub(super) fn ways(engine: Engine, flags: &DemandFlags, found: &mut Found) -> Vec<Way> {
    let wanted: &[_] = match engine {
        Engine::Soft => &[None, Some(Delivery::Exit)],
        Engine::Kvm => &[
            None,
            Some(Delivery::Userfault),
            Some(Delivery::Poison),
            Some(Delivery::Minor),
            Some(Delivery::Missing),
        ],
    };
    let schemes = match engine {
        Engine::Soft => Scheme::ALL.map(Some).to_vec(),
        Engine::Kvm => vec![None],
    };
    let streams = |userfaultfds, readers| Reading::Streams {
        userfaultfds,
        readers,
    };
    let readings = if flags.compare_readers {
        vec![Reading::Plain, streams(1, 1), streams(1, 2), streams(2, 1)]
    } else {
        vec![streams(1, flags.readers.unwrap_or(1))]
    };
    let deliveries = deliveries_of(engine, flags.backing());
    let (mut ways, lacking) = (Vec::new(), found.lacking.len());
    for &delivery in wanted.iter().filter(|&&one| flags.wants(one)) {
        if let Some(delivery) = delivery.filter(|&one| !deliveries.contains(&one)) {
            // No released kernel has that one.
            if delivery != Delivery::Userfault {
                found.lacking.push((engine, delivery));
            }
            continue;
        }
        for &scheme in &schemes {
            let way = |&reading| Way {
                engine,
                delivery,
                scheme,
                reading,
            };
            let all = readings.iter().map(way);
            let has_readers = way(&Reading::Plain).has_readers();
            ways.extend(all.take(if has_readers { readings.len() } else { 1 }));
        }
    }
    // An engine may not know the wanted delivery at all.
    if let (true, Some(delivery)) = (ways.is_empty(), flags.wanted())
        && found.lacking.len() == lacking
    {
        found.lacking.push((engine, delivery));
    }
    ways
}

/// The samples of one way with one number of vCPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct WaySamples {
    /// Touches per second of all vCPUs together.
    pub(super) rate: Samples,
    /// Touches per second of one vCPU over its own time: the median of the vCPUs.
    pub(super) per_vcpu: Samples,
    /// Core time of a touch, in nanoseconds.
    pub(super) touch_ns: Samples,
    /// The median time from a fault on a missing page to the vCPU's next, in microseconds.
    pub(super) fault_us_p50: Samples,
    /// The 99th percentile.
    pub(super) fault_us_p99: Samples,
}

impl WaySamples {
    /// Adds a sample: whole passes, each with a new VM, until they took `least` together.
    pub(super) fn measure(
        &mut self,
        plan: &Plan,
        least: Duration,
        mut pass: impl FnMut() -> Result<Race<()>, BenchError>,
    ) -> Result<(), BenchError> {
        let mut all = pass()?;
        let mut passes = 1.0;
        while all.whole < least {
            let one = pass()?;
            all.whole += one.whole;
            for (sum, each) in all.each.iter_mut().zip(one.each) {
                *sum += each;
            }
            passes += 1.0;
        }
        let whole = all.whole.as_secs_f64();
        let busy = f64::from(plan.vcpus().min(cores()));
        let touches = passes * plan.touches() as f64;
        self.rate.push(touches / whole);
        let each: Samples = all
            .each
            .iter()
            .map(|one| passes * plan.each as f64 / one.as_secs_f64())
            .collect();
        self.per_vcpu.push(each.median());
        self.touch_ns.push(whole * 1e9 * busy / touches);
        Ok(())
    }

    /// Adds the quantiles of a pass with a clock.
    pub(super) fn add_faults(&mut self, race: &Race<()>) {
        let us: Samples = race.fault_ns.iter().map(|&ns| ns as f64 / 1e3).collect();
        if us.is_empty() {
            return;
        }
        self.fault_us_p50.push(us.quantile(0.5));
        self.fault_us_p99.push(us.quantile(0.99));
    }
}

#[cfg(test)]
mod tests {
    use super::super::flags;
    use super::*;
    use pageferry_guest::Isa;

    #[test]
    fn a_sample_repeats_whole_passes_until_it_is_long_enough() {
        let plan = Plan::new(Isa::Rv64, 2, 100, false).unwrap();
        let mut samples = WaySamples::default();
        let mut passes = 0;
        let pass = || {
            passes += 1;
            Ok(Race {
                whole: Duration::from_millis(80),
                each: vec![Duration::from_millis(40), Duration::from_millis(80)],
                ended_with: vec![(); 2],
                fault_ns: Vec::new(),
            })
        };
        samples
            .measure(&plan, Duration::from_millis(200), pass)
            .unwrap();
        assert_eq!(passes, 3);
        let close = |found: f64, wanted: f64| assert!((found / wanted - 1.0).abs() < 1e-9);
        close(samples.rate.median(), 600.0 / 0.24);
        close(samples.per_vcpu.median(), 300.0 / 0.12);
    }

    #[test]
    fn the_soft_engine_has_the_ways_that_are_wanted() {
        let check = |words, names: &[&str], lacking: usize| {
            let mut found = Found::default();
            let names_found: Vec<_> = ways(Engine::Soft, &flags(words), &mut found)
                .into_iter()
                .map(Way::name)
                .collect();
            assert_eq!(names_found, names);
            assert_eq!(found.lacking.len(), lacking);
        };
        let exits = ["exit", "exit, serialised MMU"];
        let none = ["no userfault", "no userfault, serialised MMU"];
        check("", &[none, exits].concat(), 0);
        check("-k", &exits, 0);
        check("-u none", &none, 0);
        check("-u minor", &[], 1);
    }

    #[test]
    fn only_fault_events_have_readers() {
        let way = |delivery, reading| Way {
            engine: Engine::Kvm,
            delivery: Some(delivery),
            scheme: None,
            reading,
        };
        let streams = |userfaultfds, readers| Reading::Streams {
            userfaultfds,
            readers,
        };
        let split = way(Delivery::Minor, streams(2, 3));
        assert_eq!(split.name(), "minor, 2 userfaultfds, 3 readers");
        assert_eq!(way(Delivery::Poison, streams(2, 3)).name(), "poison");
        let plain = way(Delivery::Minor, Reading::Plain);
        assert_eq!(plain.name(), "minor, plain loop");
    }
}
