//! A self-contained HTML page: no script, no other file, no network.

/// The style of all pages. It follows the reader's choice of a dark or a light page, and fits small
/// screens.
///
/// Charts are drawn in the colours of a light page. The rules for dark pages name those colours as
/// the drawing library writes them.
const STYLE: &str = "
:root { color-scheme: light dark; --ink: #282c34; --page: #fff; --soft: #5b6270; --rule: #e2e5ea; --good: #00734f; --bad: #b3261e; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; }
p.sub { color: var(--soft); margin-top: .2rem; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .3rem .6rem; border-bottom: 1px solid var(--rule); overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; width: 13rem; }
pre { font-size: 11px; overflow-x: auto; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 4px; }
.chart { display: block; width: 100%; height: auto; min-width: 640px; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
@media (prefers-color-scheme: dark) {
:root { --ink: #d7dae0; --page: #16181d; --soft: #9aa3b2; --rule: #343942; --good: #4cc79b; --bad: #ff8a80; }
.chart text { fill: var(--ink); }
.chart [fill=\"#FFFFFF\"] { fill: var(--page); }
.chart [fill=\"#F6F8FB\"] { fill: #1b1e24; } .chart [fill=\"#ECF0F6\"] { fill: #242932; }
.chart [stroke=\"#282C34\"], .chart [stroke=\"#3C3C3C\"] { stroke: var(--ink); } .chart [fill=\"#3C3C3C\"] { fill: var(--ink); }
.chart [stroke=\"#E2E5EA\"] { stroke: var(--rule); }
.chart [stroke=\"#0072B2\"] { stroke: #4aa8e0; } .chart [fill=\"#0072B2\"] { fill: #4aa8e0; }
}
@media (max-width: 600px) {
body { margin: 1rem auto; padding: 0 .7rem; } h1 { font-size: 1.3rem; }
th, td { display: block; width: auto; padding: .1rem 0; border: 0; } th { padding-top: .4rem; }
tr { border-bottom: 1px solid var(--rule); display: block; padding-bottom: .3rem; }
}
";

/// A page: title, introduction (HTML), body (HTML), and style rules in addition to `STYLE`.
#[must_use]
pub fn page(title: &str, about: &str, body: &str, style: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Pageferry: {title}</title>\n<style>{STYLE}{style}</style>\n\
         </head>\n<body>\n<h1>{title}</h1>\n<p class=\"sub\">{about}</p>\n{body}</body>\n</html>\n"
    )
}

/// Wraps a chart (SVG) for a page. On a narrow page the chart scrolls instead of shrinking.
#[must_use]
pub fn scrolling(svg: &str) -> String {
    format!("<div class=\"scroll\">{svg}</div>\n")
}

/// Escapes `text` for HTML.
#[must_use]
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
        .replace('"', "&quot;")
}
