//! `pageferry bench memslot`: memory slots on our hypervisor.

use super::args::MemslotFlags;
use super::show;
use crate::exit::Failure;
use crate::output;
use pageferry_bench::memslot::MemslotSetting;

/// Measures, prints the figures, and writes the requested page.
///
/// # Errors
/// The failure of the measurement. A wrong value of a guest is a failed verification.
pub(super) fn memslot(flags: &MemslotFlags) -> Result<(), Failure> {
    let figures = pageferry_bench::memslot::memslot(&setting(flags), &mut |doing| {
        output::note(doing);
    })?;
    let report = flags.report.as_deref();
    show(&figures, flags.json, report, pageferry_bench::memslot::page)
}

fn setting(flags: &MemslotFlags) -> MemslotSetting {
    let mut setting = if flags.quick {
        MemslotSetting::quick(flags.repeat)
    } else {
        MemslotSetting::full(flags.repeat)
    };
    if !flags.slots.is_empty() {
        setting.sizes.clone_from(&flags.slots);
        setting.sizes.sort_unstable();
        setting.sizes.dedup();
    }
    setting.require_kvm = super::is_kvm_required();
    setting
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags() -> MemslotFlags {
        MemslotFlags {
            quick: true,
            slots: Vec::new(),
            repeat: 4,
            json: false,
            report: None,
        }
    }

    #[test]
    fn quick_has_two_sizes_unless_others_are_named() {
        let setting = setting(&flags());
        assert_eq!((setting.sizes, setting.repeat), (vec![10, 509], 4));
        let named = MemslotFlags {
            slots: vec![30, 10, 30],
            ..flags()
        };
        assert_eq!(super::setting(&named).sizes, [10, 30]);
        let full = MemslotFlags {
            quick: false,
            ..flags()
        };
        assert_eq!(super::setting(&full).sizes.last(), Some(&32_764));
    }
}
