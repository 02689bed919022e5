//! The page of `bench memslot`: a chart for each test, and the table.

use super::charts::{self, Line};
use super::html::{STYLE, escape};
use pageferry_bench::memslot::{Cell, MemslotReport, Test};
use std::fmt::Write;

/// The whole page.
///
/// # Errors
/// What the drawing failed at.
pub(crate) fn slots_page(report: &MemslotReport) -> Result<String, String> {
    let mut page = String::new();
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Pageferry: memory slots</title>\n<style>{STYLE}\npre {{ font-size: 11px; overflow-x: auto; }}</style>\n\
         </head>\n<body>\n<h1>Memory slots</h1>\n<p class=\"sub\">The tests of the kernel's memslot_perf_test on the soft \
         hypervisor: seconds a run over the number of slots, both logarithmic. Array: copied at every change, as in \
         kernels before 5.17; scalable: Pageferry's memory slots. The kernel's own figures: {}.</p>\n",
        escape(report.xeon_source)
    );
    for test in Test::ALL {
        let line = |name: &str, value: &dyn Fn(&Cell) -> Option<f64>| Line {
            name: name.to_owned(),
            points: report
                .of(test)
                .filter_map(|cell| Some((f64::from(cell.slots), value(cell)?)))
                .collect(),
        };
        let lines = [
            line("array", &|cell| Some(cell.array_copy.median_s)),
            line("scalable", &|cell| Some(cell.scalable.median_s)),
            line("Xeon before", &|cell| cell.xeon.map(|x| x.before_s)),
            line("Xeon after", &|cell| cell.xeon.map(|x| x.after_s)),
        ];
        if lines[0].points.is_empty() {
            continue;
        }
        let _ = writeln!(page, "<h2>{}</h2>", escape(test.name()));
        page.push_str(&charts::growth(&lines)?);
    }
    let _ = write!(
        page,
        "<h2>All figures</h2>\n<pre>{}</pre>\n</body>\n</html>\n",
        escape(&report.to_string())
    );
    Ok(page)
}
