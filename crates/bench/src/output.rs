//! The output of a benchmark: rows as a table, as JSON and as an HTML page.

use crate::BenchError;
use crate::args::Common;
use crate::error::os;
use crate::row::{Row, quantity};
use pageferry_charts::escape;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, Write};
use std::path::Path;

/// What a benchmark has found.
#[derive(Debug, Default)]
pub(crate) struct Output {
    pub(crate) rows: Vec<Row>,
    /// What the table does not say, in lines.
    pub(crate) notes: Vec<String>,
}

impl From<Vec<Row>> for Output {
    fn from(rows: Vec<Row>) -> Self {
        Self {
            rows,
            ..Self::default()
        }
    }
}

impl Output {
    /// Prints the figures, and then writes the requested page. A page that cannot be written must
    /// not cost the figures.
    pub(crate) fn show(&self, flags: &Common) -> Result<(), BenchError> {
        if flags.json {
            print(&(json(&self.rows)? + "\n"))?;
        } else {
            print(&self.text())?;
        }
        match &flags.report {
            Some(path) => write(path, &self.page()),
            None => Ok(()),
        }
    }

    fn text(&self) -> String {
        let mut out = table(&self.rows);
        for note in &self.notes {
            out.push_str(note);
            out.push('\n');
        }
        out
    }

    /// Bars for the rows of each case, and the table.
    fn page(&self) -> String {
        let mut body = String::new();
        let mut cases: Vec<&str> = Vec::new();
        for row in &self.rows {
            if !cases.contains(&&*row.case) {
                cases.push(&row.case);
            }
        }
        for case in cases {
            let mut of_case: Vec<&Row> = self.rows.iter().filter(|row| row.case == case).collect();
            // A figure may come again with another baseline.
            let mut seen = BTreeSet::new();
            of_case.retain(|row| seen.insert(&row.subject));
            let longest = of_case.iter().map(|row| row.value).fold(0.0, f64::max);
            if of_case.len() < 2 || longest <= 0.0 {
                continue;
            }
            // Writing to a string cannot fail.
            let _ = writeln!(body, "<h2>{}</h2>\n<table>", escape(case));
            for row in of_case {
                let _ = writeln!(
                    body,
                    "<tr><th>{}</th><td class=\"value\">{}</td>\
                     <td><div class=\"bar\" style=\"width: {:.1}%\"></div></td></tr>",
                    escape(&row.subject),
                    row.figure(),
                    100.0 * row.value / longest
                );
            }
            body.push_str("</table>\n");
        }
        let _ = writeln!(
            body,
            "<h2>All figures</h2>\n<pre>{}</pre>",
            escape(&self.text())
        );
        let about = "Medians, each next to its baseline from the same run where it has one.";
        pageferry_charts::page("Figures", about, &body, BARS)
    }
}

/// The style of bars.
const BARS: &str = "
td, th { border: 0; padding: .1rem .6rem; } th { font-weight: 400; }
td.value { width: 7rem; text-align: right; } .bar { height: .9rem; background: #0072b2; border-radius: 2px; min-width: 1px; }
";

fn table(rows: &[Row]) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(
        out,
        "{:<26} {:<44} {:>14} {:>23} {:>3}  {:<6} {:<26} baseline",
        "case", "subject", "median", "min .. max", "n", "ratio", "target"
    );
    for row in rows {
        let ratio = row
            .ratio
            .map_or_else(String::new, |ratio| format!("{ratio:.2}"));
        let range = [row.min, row.max].map(|value| quantity(value, &row.unit));
        let verdict = match row.met {
            Some(true) => "met: ",
            Some(false) => "MISSED: ",
            None => "",
        };
        let _ = writeln!(
            out,
            "{:<26} {:<44} {:>14} {:>23} {:>3}  {ratio:<6} {:<26} {}",
            row.case,
            row.subject,
            row.figure(),
            range.join(" .. "),
            row.samples,
            format!("{verdict}{}", row.target.as_deref().unwrap_or("")),
            row.baseline.as_deref().unwrap_or(""),
        );
    }
    out
}

/// JSON for people.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<String, BenchError> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::from);
    text.map_err(os("cannot write the figures as JSON"))
}

/// Writes to stdout.
pub(crate) fn print(text: &str) -> Result<(), BenchError> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        // The reader has closed the pipe, so nothing is lost.
        Err(why) if why.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        done => done.map_err(os("cannot write the figures to stdout")),
    }
}

/// Writes a file whole, or not at all.
pub(crate) fn write(path: &Path, text: &str) -> Result<(), BenchError> {
    let wrote = pageferry_charts::replace_file(path, text);
    wrote.map_err(|why| BenchError::Setting(format!("cannot write {}: {why}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kit::Samples;
    use crate::row::{Bound, Conditions};

    #[test]
    fn the_table_and_the_page_say_whether_a_target_was_met() {
        let row =
            |subject| Samples::from_iter([6.0]).row("case", subject, "us", Conditions::default());
        let rows = vec![
            row("one").aiming_at(Bound::Below(7.0)),
            row("two").aiming_at(Bound::Below(5.0)),
        ];
        let output = Output {
            notes: vec!["a note".into()],
            ..rows.into()
        };
        let page = output.page();
        for text in [output.text(), page.clone()] {
            for part in ["met: &lt; 7.00 us", "MISSED: &lt; 5.00 us", "a note"] {
                let part = if text == page {
                    part.into()
                } else {
                    part.replace("&lt;", "<")
                };
                assert!(text.contains(&part), "{part} in {text}");
            }
        }
        assert_eq!(page.matches("class=\"bar\"").count(), 2);
    }
}
