//! `pageferry probe`: the features of this host, their meaning for Pageferry, and remedies for
//! missing ones.
//!
//! Each [`Finding`] comes from a trial, not from version numbers: the probe runs a VM, opens a
//! userfaultfd, creates a memfd. A child process tries the system calls, since a filter may kill
//! it. It changes nothing on the host.

pub(crate) mod calls;
mod hardware;
mod kernel;

use crate::args::ProbeArgs;
use crate::exit::Failure;
use crate::output;
use crate::vm::{deliveries_of, engine_that_receives};
use pageferry_machine::{Backing, Delivery, DeliveryTrial, Engine, EngineChoice, kvm};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// The grade of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Grade {
    /// Everything that Pageferry can use is there.
    Good,
    /// It works, but is slower or smaller.
    Limited,
    /// It is not there.
    Missing,
}

/// The result of one trial.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    /// The finding's stable name.
    name: &'static str,
    state: Grade,
    /// The feature found.
    found: String,
    /// Its meaning for Pageferry.
    means: String,
    /// A remedy, if something is missing.
    advice: Option<String>,
}

/// The choice of `auto`.
#[derive(Clone, Debug)]
struct Choice {
    engine: &'static str,
    because: String,
    /// The deliveries of that engine here.
    deliveries: Vec<&'static str>,
    /// For KVM: the trials that choose one of them.
    trials: Vec<DeliveryTrial>,
}

impl Choice {
    /// The delivery for a VM with a core for each vCPU.
    fn delivery(&self) -> Option<&'static str> {
        let measured = self.trials.first().and_then(fastest);
        measured.or(self.deliveries.first().copied())
    }
}

fn fastest(trial: &DeliveryTrial) -> Option<&'static str> {
    let (delivery, _) = trial.per_fault.first()?;
    Some(delivery.name())
}

/// Runs all trials and prints the findings.
///
/// # Errors
/// When not even the soft engine can be chosen.
pub(crate) fn probe(args: &ProbeArgs) -> Result<(), Failure> {
    if let Some(first) = args.calls_from {
        return calls::make_from(first).map_err(|e| Failure::os("cannot write", e));
    }
    // First: a filter that kills at a call would end the other trials, and this process.
    let calls = calls::try_all();
    let (findings, choice) = if calls.kills() {
        untried(calls.finding())
    } else {
        (all(calls.finding()), choose()?)
    };
    if args.json {
        let mut json = as_json(&findings, &choice);
        // They are read from files, by a call that may be the one.
        json["conditions"] = match calls.kills() {
            true => Value::Null,
            false => json!(crate::report::Conditions::here("none")),
        };
        output::json(&json);
    } else {
        output::result(&as_text(&findings, &choice));
    }
    Ok(())
}

/// The name of a finding, and the trial that makes it.
type Trial = (&'static str, fn() -> Finding);

/// The trials beside that of the system calls.
const TRIALS: [Trial; 13] = [
    ("kvm", kernel::kvm),
    ("kernels", kernel::kernels),
    ("dirty-log", kernel::dirty_log),
    ("userfaultfd", kernel::userfaultfd),
    ("kvm-userfault", kernel::kvm_userfault),
    ("privileges", kernel::privileges),
    ("memfd", kernel::memfd),
    ("seams", kernel::seams),
    ("backings", hardware::backings),
    ("huge-pages", hardware::huge_pages),
    ("transparent-huge-pages", hardware::transparent_huge_pages),
    ("cores", hardware::cores),
    ("memory", hardware::memory),
];

fn all(calls: Finding) -> Vec<Finding> {
    let others = TRIALS.iter().map(|(_, trial)| trial());
    std::iter::once(calls).chain(others).collect()
}

/// The findings where a filter would kill this process at the others, or at the choice.
fn untried(calls: Finding) -> (Vec<Finding>, Choice) {
    let why = "not tried: a filter kills the process";
    let others = TRIALS.map(|(name, _)| Finding {
        name,
        state: Grade::Missing,
        found: why.into(),
        means: "see system-calls".into(),
        advice: Some("change the filter first, and probe again".into()),
    });
    let choice = Choice {
        engine: Engine::Soft.name(),
        because: why.into(),
        deliveries: Vec::new(),
        trials: Vec::new(),
    };
    (std::iter::once(calls).chain(others).collect(), choice)
}

fn choose() -> Result<Choice, Failure> {
    let (engine, because) = engine_that_receives(EngineChoice::Auto)?;
    Ok(Choice {
        engine: engine.name(),
        because,
        deliveries: deliveries_of(engine, Backing::Shmem)
            .iter()
            .map(|d| d.name())
            .collect(),
        trials: match engine {
            Engine::Kvm => kvm::delivery_trials().map(Clone::clone).to_vec(),
            Engine::Soft => Vec::new(),
        },
    })
}

fn as_json(findings: &[Finding], choice: &Choice) -> Value {
    let findings: serde_json::Map<String, Value> = findings
        .iter()
        .map(|finding| (finding.name.into(), json!(finding)))
        .collect();
    json!({
        "findings": findings,
        "auto": {
            "engine": choice.engine,
            "because": choice.because,
            "delivery": choice.delivery(),
            "deliveries": choice.deliveries,
            "trials": choice.trials.iter().map(|trial| json!({
                "vcpus": trial.vcpus,
                "cores": trial.cores,
                "results": trial.per_fault.iter()
                    .map(|(delivery, time)| json!({"delivery": delivery.name(), "microseconds": us(*time)}))
                    .collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
        },
    })
}

/// A time in microseconds.
fn us(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn as_text(findings: &[Finding], choice: &Choice) -> String {
    let mut out = String::new();
    for finding in findings {
        let mark = match finding.state {
            Grade::Good => "ok",
            Grade::Limited => "limited",
            Grade::Missing => "missing",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{:<8} {}: {}", mark, finding.name, finding.found);
        let _ = writeln!(out, "         {}", finding.means);
        if let Some(advice) = &finding.advice {
            let _ = writeln!(out, "         -> {advice}");
        }
    }
    let delivery = choice.delivery().unwrap_or("none");
    let _ = writeln!(
        out,
        "\nauto chooses engine {} ({}) and fault delivery {delivery}",
        choice.engine, choice.because
    );
    for trial in &choice.trials {
        let _ = write!(
            out,
            "with {} vCPUs on {} cores, microseconds a page:",
            trial.vcpus, trial.cores
        );
        for (delivery, time) in &trial.per_fault {
            let _ = write!(out, " {delivery} {:.1}", us(*time));
        }
        out.push('\n');
    }
    if choice.deliveries.contains(&Delivery::Poison.name()) {
        out.push_str(
            "poison comes down to minor for a guest that can change its page tables unseen, such \
             as an operating system, unless --delivery poison asks for it\n",
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_missing_comes_with_advice() {
        for finding in [
            kernel::kvm(),
            kernel::dirty_log(),
            kernel::userfaultfd(),
            kernel::kvm_userfault(),
            kernel::memfd(),
            hardware::backings(),
            hardware::huge_pages(),
        ] {
            assert!(
                !finding.found.is_empty() && !finding.means.is_empty(),
                "{finding:?}"
            );
            if finding.state == Grade::Missing {
                assert!(finding.advice.is_some(), "{finding:?}");
            }
        }
    }

    #[test]
    fn the_soft_engine_is_always_there() {
        assert_eq!(
            deliveries_of(Engine::Soft, Backing::Shmem),
            [Delivery::Exit]
        );
    }
}
