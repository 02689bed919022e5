//! `pageferry-bench demand-paging`: first touches of many vCPUs at once, and the model of many
//! more.

use super::check_host_memory;
use super::engines;
use crate::BenchError;
use crate::args::{DemandFlags, Userfault};
use crate::demand_paging::{self, DemandSetting, Paging};
use crate::model::ModelSetting;
use pageferry_machine::{Engine, EngineChoice};
use std::time::Duration;

/// Measures or models, prints the figures, and writes the requested page.
pub(super) fn demand_paging(flags: &DemandFlags) -> Result<(), BenchError> {
    if flags.model {
        return model(flags);
    }
    let setting = setting(flags)?;
    let largest = setting
        .largest_bytes()
        .map_err(|why| BenchError::Setting(why.to_string()))?;
    check_host_memory(largest, 1)?;
    let output = demand_paging::demand_paging(&setting)?;
    output.show(flags.json, flags.report.as_deref())
}

fn model(flags: &DemandFlags) -> Result<(), BenchError> {
    let setting = model_setting(flags);
    check_host_memory(setting.memory_per_vcpu.saturating_mul(2), 1)?;
    let output = crate::model::model(&setting)?;
    output.show(flags.json, flags.report.as_deref())
}

/// The numbers of vCPUs in order, each once.
fn in_order(mut vcpus: Vec<u32>) -> Vec<u32> {
    vcpus.sort_unstable();
    vcpus.dedup();
    vcpus
}

fn setting(flags: &DemandFlags) -> Result<DemandSetting, BenchError> {
    if flags.engine == EngineChoice::Auto && super::is_kvm_required() {
        pageferry_machine::select(EngineChoice::Only(Engine::Kvm))?;
    }
    let default = DemandSetting::default();
    let vcpus = match (flags.vcpus.is_empty(), flags.matrix) {
        (true, true) => vec![2, 8, 64],
        (true, false) => default.vcpus,
        (false, _) => flags.vcpus.clone(),
    };
    let selftest = &flags.selftest;
    Ok(DemandSetting {
        engines: engines(flags.engine)?,
        vcpus: in_order(vcpus),
        memory_per_vcpu: flags.memory_per_vcpu,
        overlap: flags.overlap,
        around: flags.around,
        repeat: flags.repeat.unwrap_or(default.repeat),
        sample: if flags.quick {
            Duration::ZERO
        } else {
            default.sample
        },
        paging: paging(flags)?,
        readers: selftest.readers.unwrap_or(default.readers),
        compare_readers: flags.compare_readers,
        backing: selftest.backing.unwrap_or(default.backing),
        delay: Duration::from_micros(selftest.delay_us.unwrap_or(0)),
        selftest_lines: !flags.vcpus.is_empty()
            || flags.memory_per_vcpu.is_some()
            || flags.overlap
            || selftest.backing.is_some()
            || selftest.userfault.is_some()
            || selftest.single_userfaultfd
            || selftest.readers.is_some()
            || selftest.kvm_userfault
            || selftest.delay_us.is_some(),
    })
}

/// The ways that `-u`, `-k` and `--matrix` choose.
fn paging(flags: &DemandFlags) -> Result<Paging, BenchError> {
    let selftest = &flags.selftest;
    Ok(match (selftest.userfault, selftest.kvm_userfault) {
        _ if flags.matrix => Paging::Tables,
        (None, false) => Paging::All,
        (Some(Userfault::None), false) => Paging::Present,
        (Some(Userfault::Missing), false) => Paging::Missing,
        (Some(Userfault::Minor), false) => Paging::Minor,
        (None | Some(Userfault::None | Userfault::Minor), true) => Paging::Exits,
        (Some(Userfault::Missing), true) => {
            let why = "exits (-k) need memory without missing faults: leave out -u missing";
            return Err(BenchError::Setting(why.into()));
        }
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
            quick: false,
            matrix: false,
            compare_readers: false,
            selftest: crate::args::SelftestFlags::default(),
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
        assert!(setting.overlap && setting.selftest_lines);
        assert_eq!(setting.sample, Duration::from_millis(200));
        let all = DemandFlags {
            vcpus: Vec::new(),
            ..flags()
        };
        let setting = super::setting(&all).unwrap_or_else(|_| panic!("soft runs everywhere"));
        assert_eq!(setting.vcpus, [1, 2, 4, 8, 16, 32, 64]);
    }

    #[test]
    fn the_options_of_the_kernels_test_choose_the_ways() {
        let of = |userfault, kvm_userfault| {
            let mut flags = flags();
            flags.selftest.userfault = userfault;
            flags.selftest.kvm_userfault = kvm_userfault;
            paging(&flags).map_err(|failure| failure.exit_code())
        };
        assert_eq!(of(None, false), Ok(Paging::All));
        assert_eq!(of(Some(Userfault::None), false), Ok(Paging::Present));
        assert_eq!(of(Some(Userfault::Missing), false), Ok(Paging::Missing));
        assert_eq!(of(Some(Userfault::Minor), false), Ok(Paging::Minor));
        assert_eq!(of(None, true), Ok(Paging::Exits));
        assert_eq!(of(Some(Userfault::Minor), true), Ok(Paging::Exits));
        assert_eq!(of(Some(Userfault::Missing), true), Err(2));
    }

    #[test]
    fn the_matrix_has_the_vcpus_of_the_series() {
        let matrix = DemandFlags {
            vcpus: Vec::new(),
            overlap: false,
            matrix: true,
            ..flags()
        };
        let setting = setting(&matrix).unwrap_or_else(|_| panic!("soft runs everywhere"));
        assert_eq!(setting.vcpus, [2, 8, 64]);
        assert_eq!(setting.paging, Paging::Tables);
        assert!(!setting.selftest_lines);
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
