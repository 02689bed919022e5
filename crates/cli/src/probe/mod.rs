//! `pageferry probe`: the features of this host, their meaning for Pageferry, and remedies for
//! missing ones.
//!
//! Each [`Finding`] comes from a trial, not from version numbers: the probe runs a VM, opens a
//! userfaultfd, creates a memfd. It changes nothing on the host.

mod hardware;
mod kernel;

use crate::args::ProbeArgs;
use crate::exit::Failure;
use crate::output;
use crate::vm::{deliveries_of, engine_that_receives};
use pageferry_machine::EngineChoice;
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt::Write;

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
#[derive(Clone, Debug, Serialize)]
struct Choice {
    engine: &'static str,
    because: String,
    /// The deliveries of that engine here, best first.
    deliveries: Vec<&'static str>,
}

/// Runs all trials and prints the findings.
///
/// # Errors
/// When not even the soft engine can be chosen.
pub(crate) fn probe(args: &ProbeArgs) -> Result<(), Failure> {
    let findings = vec![
        kernel::kvm(),
        kernel::userfaultfd(),
        kernel::privileges(),
        kernel::memfd(),
        hardware::huge_pages(),
        hardware::transparent_huge_pages(),
        hardware::cores(),
        hardware::memory(),
    ];
    let choice = choose()?;
    if args.json {
        output::json(&as_json(&findings, &choice));
    } else {
        output::result(&as_text(&findings, &choice));
    }
    Ok(())
}

fn choose() -> Result<Choice, Failure> {
    let (engine, because) = engine_that_receives(EngineChoice::Auto)?;
    Ok(Choice {
        engine: engine.name(),
        because,
        deliveries: deliveries_of(engine).iter().map(|d| d.name()).collect(),
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
            "delivery": choice.deliveries.first(),
            "deliveries": choice.deliveries,
        },
        "conditions": crate::report::Conditions::here("none"),
    })
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
    let delivery = choice.deliveries.first().unwrap_or(&"none");
    let _ = writeln!(
        out,
        "\nauto chooses engine {} ({}) and fault delivery {delivery}",
        choice.engine, choice.because
    );
    if choice.deliveries.len() > 1 {
        let _ = writeln!(
            out,
            "other deliveries here: {}",
            choice.deliveries[1..].join(", ")
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_machine::{Delivery, Engine};

    #[test]
    fn whatever_is_missing_comes_with_advice() {
        for finding in [
            kernel::kvm(),
            kernel::userfaultfd(),
            kernel::memfd(),
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
        assert_eq!(deliveries_of(Engine::Soft), [Delivery::Exit]);
    }
}
