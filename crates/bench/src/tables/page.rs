//! The HTML page of a comparison of page tables: bars for each operation, the verdicts, and the
//! table.

use super::{Operation, Report};
use crate::Operation as _;
use pageferry_charts::{escape, page as whole};
use std::fmt::Write;

/// The style of bars.
const BARS: &str = "
td { border: 0; padding: .1rem .6rem; } th { font-weight: 400; padding: .1rem .6rem; border: 0; }
td.ns { width: 5rem; text-align: right; } .bar { height: .9rem; background: #0072b2; border-radius: 2px; min-width: 1px; }
.floor .bar { background: #b9bec7; } .ours .bar { background: #d55e00; } .ours th { font-weight: 600; }
.absent .bar { background: none; border: 1px dashed #5b6270; box-sizing: border-box; }
";

/// One bar: the scheme's name, nanoseconds per page, and the CSS class.
struct Bar {
    name: String,
    value: f64,
    class: &'static str,
}

fn bars(report: &Report, operation: Operation) -> Vec<Bar> {
    let measured = report.schemes().into_iter().filter_map(|scheme| {
        let class = match scheme {
            s if s.starts_with("pageferry") => "ours",
            s if s.starts_with("floor") || s.starts_with('+') => "floor",
            _ => "peer",
        };
        Some(Bar {
            name: scheme.to_owned(),
            value: report.value(operation, scheme)?,
            class,
        })
    });
    let absent = report.extra.absent.iter().filter_map(|absent| {
        Some(Bar {
            name: format!("{}, elsewhere", absent.scheme),
            value: absent.value(operation)?,
            class: "absent",
        })
    });
    measured.chain(absent).collect()
}

/// The whole page.
#[must_use]
pub(crate) fn page(report: &Report) -> String {
    let about = format!(
        "Nanoseconds per page of 4 KiB, {} pages per thread, medians. With two threads, each thread's own time. Each \
         operation has its own scale. Grey: floors, which only store entries. Dashed: figures of another run.",
        report.extra.pages
    );
    let mut page = String::new();
    for operation in Operation::ALL {
        let bars = bars(report, operation);
        let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
        if longest <= 0.0 {
            continue;
        }
        // Writing to a string cannot fail.
        let _ = writeln!(page, "<h2>{}</h2>\n<table>", escape(operation.name()));
        for Bar { name, value, class } in bars {
            let _ = writeln!(
                page,
                "<tr class=\"{class}\"><th>{}</th><td class=\"ns\">{value:.1}</td>\
                 <td><div class=\"bar\" style=\"width: {:.1}%\"></div></td></tr>",
                escape(&name),
                100.0 * value / longest
            );
        }
        page.push_str("</table>\n");
    }
    let _ = writeln!(
        page,
        "<h2>All figures</h2>\n<pre>{}</pre>",
        escape(&report.to_string())
    );
    whole("Page tables", &about, &page, BARS)
}
