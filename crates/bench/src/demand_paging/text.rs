//! The results as text: the table, the lines of `demand_paging_test`, and the tables of the KVM
//! Userfault series.

use super::report::{Cell, DemandReport};
use crate::kit::Figure;
use pageferry_machine::Backing;
use std::fmt;

/// Formats a number with three digits and a prefix.
pub(crate) fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        v if v >= 999.5e6 => (value / 1e9, " G"),
        v if v >= 999.5e3 => (value / 1e6, " M"),
        v if v >= 999.5 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let digits = match scaled {
        v if v >= 99.95 => 0,
        v if v >= 9.995 => 1,
        _ => 2,
    };
    format!("{scaled:.digits$}{unit}")
}

impl fmt::Display for DemandReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let which = if self.overlap {
            "of guest memory"
        } else {
            "of its own part of guest memory"
        };
        writeln!(
            f,
            "Each vCPU stores to one word of each page {which}. Medians (min .. max). {} cores, {:.0} s in all.\n\
             Host memory is allocated before. A missing page is installed by copying 4 KiB. ns/touch: core time, including \
             the guest's\ninstructions. If there is a core for each vCPU, each is pinned to its own. p50, p99: microseconds \
             from a fault on a missing\npage to the same vCPU's next, as the serving threads see both; from a pass of \
             its own; none with overlap.\nOne userfaultfd serves all vCPUs, unless a row says otherwise.",
            self.cores, self.seconds
        )?;
        if self.backing != Backing::Shmem.name() {
            writeln!(f, "Guest memory is {}.", self.backing)?;
        }
        if self.delay_us > 0 {
            writeln!(
                f,
                "A thread sleeps {} us before it installs a missing page.",
                self.delay_us
            )?;
        }
        if self.around > 1 {
            writeln!(
                f,
                "A fault installs the missing pages of the aligned block of {} around its page.",
                self.around
            )?;
        }
        self.write_cells(f)?;
        for cell in self.cells.iter().filter(|cell| cell.noisy) {
            writeln!(
                f,
                "Noisy: {}, {}, {} vCPUs: the samples spread {:.0} % of their median (30 % at most is good).",
                cell.engine, cell.mode, cell.vcpus, cell.spread_percent
            )?;
        }
        for unmeasured in &self.unmeasured {
            writeln!(f, "Not measured: {}: {}.", unmeasured.what, unmeasured.why)?;
        }
        self.write_readers(f)?;
        if self.tables {
            self.write_tables(f)?;
        }
        if self.selftest_lines {
            self.cells
                .iter()
                .try_for_each(|cell| write_selftest(f, cell))?;
        }
        Ok(())
    }
}

impl DemandReport {
    fn write_cells(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<6} {:<34} {:>5} {:>10} {:>10} {:>21} {:>12} {:>10} {:>19} {:>8} {:>8} {:>7} {:>3}",
            "engine",
            "missing pages",
            "vCPUs",
            "pages each",
            "pages/s",
            "",
            "per vCPU",
            "ns/touch",
            "",
            "p50 us",
            "p99 us",
            "scaling",
            "n"
        )?;
        for cell in &self.cells {
            let range =
                |figure: &Figure| format!("({} .. {})", short(figure.min), short(figure.max));
            let us = |figure: &Option<Figure>| {
                figure.map_or_else(|| "-".into(), |figure| short(figure.median))
            };
            writeln!(
                f,
                "{:<6} {:<34} {:>5} {:>10} {:>10} {:>21} {:>12} {:>10} {:>19} {:>8} {:>8} {:>7} {:>3}",
                cell.engine,
                cell.mode,
                cell.vcpus,
                cell.pages_each,
                short(cell.pages_per_s.median),
                range(&cell.pages_per_s),
                short(cell.pages_per_s_vcpu.median),
                short(cell.ns_per_touch.median),
                range(&cell.ns_per_touch),
                us(&cell.fault_us_p50),
                us(&cell.fault_us_p99),
                format!("{:.2} x", cell.scaling),
                cell.pages_per_s.samples
            )?;
        }
        Ok(())
    }

    /// The rates of other readers in relation to the plain loop's.
    fn write_readers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for cell in &self.cells {
            if let Some(plain) = self
                .plain_loop(cell)
                .filter(|plain| plain.mode != cell.mode)
            {
                writeln!(
                    f,
                    "{}, {}, {} vCPUs: {:.2} x the plain loop",
                    cell.engine,
                    cell.mode,
                    cell.vcpus,
                    cell.pages_per_s.median / plain.pages_per_s.median
                )?;
            }
        }
        Ok(())
    }

    /// Pages per second and vCPU, by mode and number of vCPUs: a table for each engine.
    fn write_tables(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut above = "";
        for (engine, mode) in self.modes() {
            let cells = || self.of(engine, mode);
            if engine != above {
                above = engine;
                write!(f, "\n== {engine}: pages/s of each vCPU ==\n{:<36}", "vcpus")?;
                cells().try_for_each(|cell| write!(f, "{:>12}", cell.vcpus))?;
                writeln!(f)?;
            }
            write!(f, "  {mode:<34}")?;
            cells().try_for_each(|cell| write!(f, "{:>12.0}", cell.test_rate()))?;
            writeln!(f)?;
        }
        Ok(())
    }
}

/// The lines of `demand_paging_test` (tools/testing/selftests/kvm, Linux 6.12), with its names,
/// units and digits. The time is that of one pass.
fn write_selftest(f: &mut fmt::Formatter<'_>, cell: &Cell) -> fmt::Result {
    let rate = cell.test_rate();
    writeln!(
        f,
        "\n{}, {}, {} vCPUs\nTotal guest execution time:\t{:.9}s\n\
         Per-vcpu demand paging rate:\t{rate:.6} pgs/sec/vcpu\n\
         Overall demand paging rate:\t{:.6} pgs/sec",
        cell.engine,
        cell.mode,
        cell.vcpus,
        cell.pages_each as f64 / rate,
        cell.pages_per_s.median
    )
}
