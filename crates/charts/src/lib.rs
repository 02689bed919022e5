//! How does a report look?
//!
//! **Guarantee.** A chart is an SVG, and a page is one file without scripts that needs no network.
//! A file is written whole or not at all.
//!
//! **Mechanism.** plotters draws the charts. The style of the pages names the charts' colours, so
//! that they follow the reader's choice of a dark or a light page.
//!
//! **Neighbours.** Nothing of this project is below. The reports of the command line and of the
//! benchmarks are above.

mod file;
mod frame;
mod page;

use self::frame::{
    Axis, COLOURS, KEY_WIDTH, LegendEntry, SIZE, axes, chart, decade, draw, legend, line, message,
    small, thousands, whole, with_key,
};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub use file::replace_file;
pub use frame::{Drawn, MAX_SERIES};
pub use page::{escape, page, scrolling};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// One bar of a [`histogram`]: the values from `from_us` up to, but not including, `to_us`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bucket {
    /// The lower end, included, in microseconds; above 0.
    pub from_us: f64,
    /// The upper end, not included, in microseconds; above `from_us`.
    pub to_us: f64,
    /// The number of values in this range.
    pub count: u64,
}

/// Draws a histogram with two logarithmic axes. `buckets` are in ascending order. `marks` are
/// vertical lines: a name and a position in microseconds, above 0.
///
/// # Errors
/// If there is nothing to draw, or a coordinate is out of range.
pub fn histogram(
    buckets: &[Bucket],
    marks: &[(String, f64)],
    x_desc: &str,
    y_desc: &str,
) -> Drawn<String> {
    let (Some(first), Some(last)) = (buckets.first(), buckets.last()) else {
        return Err("there is nothing to draw".into());
    };
    let (left, right) = (first.from_us.log10().floor(), last.to_us.log10().ceil());
    let most = buckets.iter().map(|b| b.count).max().unwrap_or(1) as f64;
    let bottom = -0.3; // so that a bar of one is visible
    let top = most.log10().ceil().max(1.0);
    draw(SIZE, |area| {
        let (plot, key) = with_key(area);
        let mut chart = chart(&plot, 76, left..right, bottom..top + 0.25)?;
        let x = Axis {
            labels: (right - left) as usize + 1,
            label: &|x| whole(x, || decade(*x)),
            desc: x_desc,
        };
        let y = Axis {
            labels: top as usize + 1,
            label: &|y| whole(y, || format!("{}", 10f64.powf(*y))),
            desc: y_desc,
        };
        axes(&mut chart, &x, &y, true)?;
        let bars = buckets.iter().filter(|b| b.count > 0).map(|b| {
            let corners = [
                (b.from_us.log10(), bottom),
                (b.to_us.log10(), (b.count as f64).log10()),
            ];
            let mut bar = Rectangle::new(corners, COLOURS[0].mix(0.75).filled());
            bar.set_margin(0, 0, 1, 1);
            bar
        });
        chart.draw_series(bars).map_err(message)?;
        let mut entries = Vec::new();
        for (index, (name, us)) in marks.iter().enumerate() {
            let x = us.max(1e-3).log10();
            let colour = COLOURS[(1 + index) % MAX_SERIES];
            line(&mut chart, [(x, bottom), (x, top + 0.25)], colour, 2)?;
            entries.push(LegendEntry::line(name.clone(), colour));
        }
        legend(&key, &entries)
    })
}

/// A line of a chart, or a series of figures.
#[derive(Clone, Debug, PartialEq)]
pub struct Line {
    /// The name in the legend.
    pub name: String,
    /// The points, in the units of the chart's axes.
    pub points: Vec<(f64, f64)>,
}

/// A named interval of the time axis.
#[derive(Clone, Debug, PartialEq)]
pub struct Band {
    /// The start, in milliseconds of the time axis.
    pub from_ms: f64,
    /// The end, in milliseconds of the time axis; not before `from_ms`.
    pub to_ms: f64,
    /// The name.
    pub name: String,
}

/// A chart of a rate over time.
#[derive(Clone, Debug)]
pub struct Timeline<'a> {
    /// The first and the last instant that are shown, in milliseconds.
    pub window: (f64, f64),
    /// The phases, in ascending order. They are drawn as bands behind the lines.
    pub bands: &'a [Band],
    /// The interval that is drawn in red. The legend shows its length.
    pub marked: Option<Band>,
    /// The event at which the time axis begins, such as `since the migration began`.
    pub since: &'a str,
    /// The label of the vertical axis, with its unit.
    pub y_desc: &'a str,
    /// The lines: milliseconds of the time axis, and values in the unit of `y_desc`.
    pub lines: &'a [Line],
}

/// Formats `us` microseconds with three or four digits, in us, ms or s.
#[must_use]
pub fn time(us: f64) -> String {
    match us {
        us if us >= 1e6 => format!("{:.2} s", us / 1e6),
        us if us >= 1e4 => format!("{:.1} ms", us / 1e3),
        us if us >= 1e3 => format!("{:.2} ms", us / 1e3),
        us if us >= 100.0 => format!("{us:.0} us"),
        us => format!("{us:.1} us"),
    }
}

/// If a time axis reaches this many milliseconds, it counts seconds.
const SECONDS_FROM: f64 = 2000.0;
/// The number of rows for the names of bands.
const NAME_ROWS: usize = 4;
/// The width of a letter in a band's name, in pixels.
const LETTER: f64 = 8.0;

/// Draws phases as bands, the marked interval in red, and the lines.
///
/// # Errors
/// The drawing library's error.
pub fn timeline(of: &Timeline<'_>) -> Drawn<String> {
    let (left, right) = of.window;
    let points = of.lines.iter().flat_map(|line| &line.points);
    let top = points.map(|point| point.1).fold(1.0, f64::max) * 1.12;
    let seconds = left.abs().max(right.abs()) >= SECONDS_FROM;
    draw(SIZE, |area| {
        let (plot, key) = with_key(area);
        let mut chart = chart(&plot, 76, left..right, 0.0..top)?;
        let mut entries = Vec::new();
        for (index, band) in of.bands.iter().enumerate() {
            let shade = if index % 2 == 0 {
                RGBColor(246, 248, 251)
            } else {
                RGBColor(236, 240, 246)
            };
            let corners = [(band.from_ms.max(left), 0.0), (band.to_ms.min(right), top)];
            chart
                .draw_series([Rectangle::new(corners, shade.filled())])
                .map_err(message)?;
        }
        if let Some(marked) = &of.marked {
            // At least two pixels wide, so that it is visible on any scale.
            let least = (right - left) * 2.0 / f64::from(SIZE.0);
            let to = marked.to_ms.max(marked.from_ms + least);
            let style = RGBColor(214, 39, 40).mix(0.35).filled();
            chart
                .draw_series([Rectangle::new([(marked.from_ms, 0.0), (to, top)], style)])
                .map_err(message)?;
            let length = time((marked.to_ms - marked.from_ms) * 1e3);
            entries.push(LegendEntry {
                name: format!("{} {length}", marked.name),
                style,
            });
        }
        let unit = if seconds { "seconds" } else { "milliseconds" };
        let desc = format!("{unit} {}", of.since);
        let x = Axis {
            labels: 12,
            label: &|x| {
                if seconds {
                    format!("{}", x / 1e3)
                } else {
                    format!("{x}")
                }
            },
            desc: &desc,
        };
        let y = Axis {
            labels: 6,
            label: &|y| thousands(*y),
            desc: of.y_desc,
        };
        axes(&mut chart, &x, &y, false)?;
        for (index, one) in of.lines.iter().enumerate() {
            let colour = COLOURS[index % MAX_SERIES];
            line(&mut chart, one.points.iter().copied(), colour, 1)?;
            entries.push(LegendEntry::line(one.name.clone(), colour));
        }
        let width = f64::from(SIZE.0 - KEY_WIDTH - 126);
        for (name, row, start) in placed(of.bands, of.window, width) {
            let at = (
                left + (right - left) * (start + 4.0) / width,
                top * (0.995 - 0.06 * row as f64),
            );
            let anchor = small().pos(Pos::new(HPos::Left, VPos::Top));
            chart
                .draw_series([Text::new(name.to_owned(), at, anchor)])
                .map_err(message)?;
        }
        legend(&key, &entries)
    })
}

/// The position of each band's name: the first row with enough room, and the first pixel there.
/// Names that fit into no row are left out.
fn placed(bands: &[Band], (left, right): (f64, f64), width: f64) -> Vec<(&str, usize, f64)> {
    let mut ends = [f64::NEG_INFINITY; NAME_ROWS];
    let mut all = Vec::new();
    for band in bands {
        let needed = band.name.len() as f64 * LETTER;
        let begin = (band.from_ms.max(left) - left) / (right - left) * width;
        // A name that would cross the right edge moves to the left.
        let begin = begin.min(width - needed).max(0.0);
        if let Some(row) = ends.iter().position(|end| *end <= begin) {
            ends[row] = begin + needed;
            all.push((band.name.as_str(), row, begin));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn band(from_ms: f64, to_ms: f64, name: &str) -> Band {
        Band {
            from_ms,
            to_ms,
            name: name.into(),
        }
    }

    #[test]
    fn a_timeline_names_every_phase_and_the_marked_stretch_with_its_length() {
        // Post-copy takes three hundredths of the axis, so its name does not fit into its band.
        let bands = [
            band(0.0, 2900.0, "pre-copy pass 1"),
            band(2900.0, 2905.0, "switch-over"),
            band(2905.0, 3000.0, "post-copy"),
        ];
        let svg = |window| {
            timeline(&Timeline {
                window,
                bands: &bands,
                marked: Some(band(2901.0, 2902.41, "blackout")),
                since: "since the migration began",
                y_desc: "pages a second",
                lines: &[],
            })
            .expect("a chart")
        };
        let long = svg((0.0, 3000.0));
        for shown in [
            "pre-copy pass 1",
            "switch-over",
            "post-copy",
            "blackout 1.41 ms",
            "seconds since the migration began",
            ">\n2.5\n<",
        ] {
            assert!(long.contains(shown), "{shown} in\n{long}");
        }
        let short = svg((0.0, 300.0));
        assert!(short.contains("milliseconds since") && short.contains(">\n250\n<"));
    }

    #[test]
    fn names_of_bands_never_overlap_in_a_row() {
        let bands: Vec<Band> = (0..30)
            .map(|n| band(f64::from(n), f64::from(n + 1), "post-copy"))
            .collect();
        let placed = placed(&bands, (0.0, 30.0), 600.0);
        assert!(placed.len() >= NAME_ROWS);
        for (index, (name, row, begin)) in placed.iter().enumerate() {
            assert!(*row < NAME_ROWS && *begin >= 0.0);
            let next = placed[index + 1..].iter().find(|other| other.1 == *row);
            assert!(next.is_none_or(|next| next.2 >= begin + name.len() as f64 * LETTER));
        }
    }
}
