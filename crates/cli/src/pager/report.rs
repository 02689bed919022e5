//! One restore as a self-contained HTML page.

use super::text::{rows, ways};
use pageferry_charts::{self as charts, Line, Timeline, escape, page as whole, scrolling, time};
use pageferry_pager::{Came, Status, VmStatus};
use std::fmt::Write;

/// The page.
///
/// # Errors
/// The drawing library's error.
pub(super) fn page(status: &Status) -> Result<String, String> {
    let value = serde_json::to_value(status).map_err(|why| why.to_string())?;
    let mut body = String::from("<h2>Summary</h2>\n<table>\n");
    for (name, value) in rows(&value) {
        let (name, value) = (escape(name), escape(&value));
        // Writing to a string cannot fail.
        let _ = writeln!(body, "<tr><th>{name}</th><td>{value}</td></tr>");
    }
    body.push_str("</table>\n");
    match &status.vm {
        Some(vm) => chart(vm, &mut body)?,
        None => body.push_str("<p>No VMM has connected yet.</p>\n"),
    }
    let about = "A VM that started before its memory was read.";
    let title = format!("Restore {}", escape(&status.id));
    Ok(whole(&title, about, &body, ""))
}

fn chart(vm: &VmStatus, body: &mut String) -> Result<(), String> {
    body.push_str("<h2>When its pages came</h2>\n");
    let (length, moments) = match &vm.timeline {
        Some(timeline) => timeline.moments(),
        None => Default::default(),
    };
    if moments.is_empty() {
        body.push_str("<p>No page has come yet.</p>\n");
        return Ok(());
    }
    let ms = length.as_secs_f64() * 1e3;
    let lines: Vec<_> = Came::ALL
        .into_iter()
        .enumerate()
        .filter(|(kind, _)| moments.iter().any(|moment| moment[*kind] > 0))
        .map(|(kind, came)| Line {
            name: came.name().to_owned(),
            points: (0..)
                .zip(&moments)
                .map(|(at, moment)| ((f64::from(at) + 0.5) * ms, moment[kind] as f64))
                .collect(),
        })
        .collect();
    let svg = charts::timeline(&Timeline {
        window: (0.0, moments.len() as f64 * ms),
        bands: &[],
        marked: None,
        since: "since this pager serves the VM",
        y_desc: &format!("pages in {}", time(ms * 1e3)),
        lines: &lines,
    })?;
    body.push_str(&scrolling(&svg));
    body.push_str("<h2>How long faults took</h2>\n<table>\n");
    body.push_str("<tr><th>way</th><td>faults</td><td>p50</td><td>p99</td><td>longest</td></tr>\n");
    for (way, times) in ways(vm).into_iter().filter(|(_, times)| times.faults > 0) {
        let [p50, p99, max] = [times.p50, times.p99, times.max].map(|ns| time(ns as f64 / 1e3));
        let _ = writeln!(
            body,
            "<tr><th>{way}</th><td>{}</td><td>{p50}</td><td>{p99}</td><td>{max}</td></tr>",
            times.faults
        );
    }
    body.push_str("</table>\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_pager::{Pager, Restore, Settings};

    #[test]
    fn a_restore_without_a_vm_has_a_page() {
        let scratch = std::env::temp_dir().join(format!("pageferry-page-{}", std::process::id()));
        std::fs::create_dir(&scratch).unwrap();
        // A name of a file is text of a user.
        let memory = scratch.join("<b>memory");
        std::fs::write(&memory, vec![7; 1 << 20]).unwrap();
        let pager = Pager::start(Settings {
            directory: scratch.join("state"),
            ..Settings::default()
        })
        .unwrap();
        let name = "web".parse().unwrap();
        let restore = Restore::new(&memory, scratch.join("socket"));
        pager.restore(&name, restore).unwrap();
        let page = page(&pager.status(&name).unwrap()).unwrap();
        assert!(page.contains("Restore web") && page.contains("waiting"));
        assert!(page.contains("&lt;b&gt;memory") && !page.contains("<b>memory"));
        pager.end(&name, false).unwrap();
        drop(pager);
        std::fs::remove_dir_all(scratch).unwrap();
    }
}
