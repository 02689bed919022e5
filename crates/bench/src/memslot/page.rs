//! The HTML page of `bench memslot`: a chart for each test, and the table.

use super::{Cell, MemslotReport, Test};
use crate::kit::charts::{self, Line};
use crate::kit::{self, escape, scrolling};
use std::fmt::Write;

/// The whole page.
///
/// # Errors
/// The drawing library's error.
pub fn page(report: &MemslotReport) -> Result<String, String> {
    let about = format!(
        "The tests of the kernel's memslot_perf_test on the soft hypervisor: time per run over the number of slots, both \
         logarithmic. array: the whole array is copied at every change, as in kernels before 5.17. scalable: Pageferry's \
         memory slots. Xeon: the kernel's own figures, from {}.",
        escape(report.xeon_source)
    );
    let mut body = String::new();
    for test in Test::ALL {
        let line = |name: &str, value: &dyn Fn(&Cell) -> Option<f64>| Line {
            name: name.to_owned(),
            points: report
                .of(test)
                .filter_map(|cell| Some((f64::from(cell.slots), value(cell)?)))
                .collect(),
        };
        let lines = [
            line("array", &|cell| Some(cell.array_copy.median)),
            line("scalable", &|cell| Some(cell.scalable.median)),
            line("Xeon before", &|cell| cell.xeon.map(|x| x.before_s)),
            line("Xeon after", &|cell| cell.xeon.map(|x| x.after_s)),
        ];
        if lines[0].points.is_empty() {
            continue;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(body, "<h2>{}</h2>", escape(test.name()));
        body.push_str(&scrolling(&charts::growth(&lines)?));
    }
    let _ = writeln!(
        body,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    Ok(kit::page("Memory slots", &about, &body, ""))
}
