//! `pageferry bench demand-paging`: first touches of many vCPUs at once, and the model of many
//! more.

use super::args::DemandFlags;
use super::{engines, show};
use crate::exit::{Exit, Failure};
use crate::output;
use crate::vm::check_host_memory;
use pageferry_bench::demand_paging::DemandSetting;
use pageferry_bench::model::ModelSetting;
use pageferry_machine::{Engine, EngineChoice};

/// Measures or models, prints the figures, and writes the requested page.
///
/// # Errors
/// The failure of the measurement. A wrong value of a guest is a failed verification.
pub(super) fn demand_paging(flags: &DemandFlags) -> Result<(), Failure> {
    if flags.model {
        return model(flags);
    }
    let setting = setting(flags)?;
    let largest = setting
        .largest_bytes()
        .map_err(|why| Failure::new(Exit::Usage, why.to_string()))?;
    check_host_memory(largest, 1)?;
    let figures =
        pageferry_bench::demand_paging::demand_paging(&setting, &mut |doing| output::note(doing))?;
    let report = flags.report.as_deref();
    show(
        &figures,
        flags.json,
        report,
        pageferry_bench::demand_paging::page,
    )
}

fn model(flags: &DemandFlags) -> Result<(), Failure> {
    let setting = model_setting(flags);
    check_host_memory(setting.memory_per_vcpu.saturating_mul(2), 1)?;
    let figures = pageferry_bench::model::model(&setting, &mut |doing| output::note(doing))?;
    let report = flags.report.as_deref();
    let alone = report.is_some_and(|path| path.extension().is_some_and(|end| end == "svg"));
    let draw = if alone {
        pageferry_bench::model::figure
    } else {
        pageferry_bench::model::page
    };
    show(&figures, flags.json, report, draw)
}

/// The numbers of vCPUs in order, each once.
fn in_order(mut vcpus: Vec<u32>) -> Vec<u32> {
    vcpus.sort_unstable();
    vcpus.dedup();
    vcpus
}

fn setting(flags: &DemandFlags) -> Result<DemandSetting, Failure> {
    if flags.engine == EngineChoice::Auto && super::is_kvm_required() {
        pageferry_machine::select(EngineChoice::Only(Engine::Kvm))?;
    }
    let vcpus = if flags.vcpus.is_empty() {
        DemandSetting::default_vcpus()
    } else {
        flags.vcpus.clone()
    };
    Ok(DemandSetting {
        engines: engines(flags.engine)?,
        vcpus: in_order(vcpus),
        memory_per_vcpu: flags.memory_per_vcpu,
        overlap: flags.overlap,
        around: flags.around,
        repeat: flags.repeat.unwrap_or(5),
    })
}

fn model_setting(flags: &DemandFlags) -> ModelSetting {
    let mut setting = ModelSetting::default();
    if !flags.vcpus.is_empty() {
        setting.vcpus = in_order(flags.vcpus.clone());
    }
    if let Some(bytes) = flags.memory_per_vcpu {
        setting.memory_per_vcpu = bytes;
    }
    if let Some(bytes) = flags.total_memory {
        setting.total_memory = bytes;
    }
    setting.repeat = flags.repeat.unwrap_or(setting.repeat);
    setting.seed = flags.seed.unwrap_or(setting.seed);
    setting
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> DemandFlags {
        DemandFlags {
            engine: EngineChoice::Only(Engine::Soft),
            vcpus: vec![8, 1, 8],
            memory_per_vcpu: None,
            overlap: true,
            around: 1,
            repeat: None,
            model: false,
            total_memory: None,
            seed: None,
            json: false,
            report: None,
        }
    }

    #[test]
    fn numbers_of_vcpus_are_put_in_order() {
        let setting = setting(&flags()).unwrap_or_else(|_| panic!("soft runs everywhere"));
        assert_eq!((setting.vcpus, setting.repeat), (vec![1, 8], 5));
        assert!(setting.overlap);
        let all = DemandFlags {
            vcpus: Vec::new(),
            ..flags()
        };
        let setting = super::setting(&all).unwrap_or_else(|_| panic!("soft runs everywhere"));
        assert_eq!(setting.vcpus, [1, 2, 4, 8, 16, 32, 64]);
    }

    #[test]
    fn the_model_has_the_talks_vcpus_unless_others_are_named() {
        assert_eq!(model_setting(&flags()).vcpus, [1, 8]);
        let all = DemandFlags {
            vcpus: Vec::new(),
            seed: Some(7),
            total_memory: Some(1 << 40),
            ..flags()
        };
        let setting = model_setting(&all);
        assert_eq!(setting.vcpus.last(), Some(&416));
        assert_eq!((setting.seed, setting.total_memory), (7, 1 << 40));
        assert_eq!(setting.repeat, ModelSetting::default().repeat);
    }
}
