//! The charts of the HTML page, as SVG.

use super::timeline::{Series, ms_from};
use super::{PhaseAt, Stalls};
use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const SIZE: (u32, u32) = (960, 380);
/// Width of the legend's column.
const KEY_WIDTH: u32 = 140;
const INK: RGBColor = RGBColor(40, 44, 52);
const GRID: RGBColor = RGBColor(226, 229, 234);
const FONT: &str = "sans-serif";
/// Told apart by most people with impaired colour vision (Okabe and Ito, "Color Universal Design", 2008).
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(120, 94, 240),
    RGBColor(60, 60, 60),
];

/// How many series can be told apart.
pub(super) const MAX_SERIES: usize = COLOURS.len();

type Drawn<T> = Result<T, String>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn say(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn draw(size: (u32, u32), paint: impl FnOnce(&Area<'_>) -> Drawn<()>) -> Drawn<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(say)?;
        paint(&area)?;
        area.present().map_err(say)?;
    }
    // Scales with the page; the backend gives it a fixed size only.
    let (width, height) = size;
    let fixed = format!("<svg width=\"{width}\" height=\"{height}\"");
    Ok(svg.replacen(&fixed, "<svg class=\"chart\" role=\"img\"", 1))
}

fn small() -> TextStyle<'static> {
    (FONT, 16).into_font().color(&INK)
}

/// A power of ten in microseconds, with its unit.
fn decade(log_us: f64) -> String {
    match log_us.round() as i32 {
        power @ ..0 => format!("{} ns", 10i64.pow((power + 3).max(0) as u32)),
        power @ 0..3 => format!("{} us", 10i64.pow(power as u32)),
        power @ 3..6 => format!("{} ms", 10i64.pow((power - 3) as u32)),
        power => format!("{} s", 10i64.pow((power - 6).min(12) as u32)),
    }
}

/// The histogram of stalls: both axes logarithmic, quantiles marked.
pub(super) fn stalls(stalls: &Stalls) -> Drawn<String> {
    let buckets = stalls.buckets();
    let (Some(first), Some(last)) = (buckets.first(), buckets.last()) else {
        return Err("there was no stall to draw".into());
    };
    let (left, right) = (first.from_us.log10().floor(), last.to_us.log10().ceil());
    let most = buckets.iter().map(|b| b.count).max().unwrap_or(1) as f64;
    let bottom = -0.3; // a bar of one is visible
    let top = most.log10().ceil().max(1.0);
    draw(SIZE, |area| {
        let (plot, key) = area.split_horizontally(SIZE.0 - KEY_WIDTH);
        let mut chart = ChartBuilder::on(&plot)
            .margin(14)
            .margin_right(36)
            .x_label_area_size(46)
            .y_label_area_size(76)
            .build_cartesian_2d(left..right, bottom..top + 0.25)
            .map_err(say)?;
        chart
            .configure_mesh()
            .x_labels((right - left) as usize + 1)
            .y_labels(top as usize + 1)
            .x_label_formatter(&|x| {
                if x.fract().abs() < 1e-6 {
                    decade(*x)
                } else {
                    String::new()
                }
            })
            .y_label_formatter(&|y| {
                if y.fract().abs() < 1e-6 {
                    format!("{}", 10f64.powf(*y))
                } else {
                    String::new()
                }
            })
            .x_desc("stall: from the fault to the vCPU running again (logarithmic)")
            .y_desc("faults (logarithmic)")
            .axis_style(INK)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(small())
            .axis_desc_style(small())
            .draw()
            .map_err(say)?;
        let bars = buckets.iter().filter(|b| b.count > 0).map(|b| {
            let corners = [
                (b.from_us.log10(), bottom),
                (b.to_us.log10(), (b.count as f64).log10()),
            ];
            let mut bar = Rectangle::new(corners, COLOURS[0].mix(0.75).filled());
            bar.set_margin(0, 0, 1, 1);
            bar
        });
        chart.draw_series(bars).map_err(say)?;
        let mut entries = Vec::new();
        let marks = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];
        for (index, (name, share)) in marks.into_iter().enumerate() {
            let us = stalls.quantile_us(share);
            let x = us.max(1e-3).log10();
            let colour = COLOURS[1 + index];
            chart
                .draw_series(LineSeries::new(
                    [(x, bottom), (x, top + 0.25)],
                    colour.stroke_width(2),
                ))
                .map_err(say)?;
            entries.push(Entry::line(
                format!("{name} {}", super::table::micros(us)),
                colour,
            ));
        }
        legend(&key, &entries)
    })
}

/// One line of a legend.
struct Entry {
    name: String,
    style: ShapeStyle,
}

impl Entry {
    fn line(name: impl Into<String>, colour: RGBColor) -> Self {
        Self {
            name: name.into(),
            style: colour.stroke_width(3),
        }
    }
}

/// The legend, in a column of its own, so that it hides nothing.
fn legend(area: &Area<'_>, entries: &[Entry]) -> Drawn<()> {
    for (index, entry) in entries.iter().enumerate() {
        let y = 22 + index as i32 * 22;
        if entry.style.filled {
            area.draw(&Rectangle::new([(4, y - 6), (22, y + 6)], entry.style))
                .map_err(say)?;
        } else {
            area.draw(&PathElement::new([(4, y), (22, y)], entry.style))
                .map_err(say)?;
        }
        let text = small().pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(entry.name.clone(), (28, y), text))
            .map_err(say)?;
    }
    Ok(())
}

/// A line of [`growth`] and of [`linear`].
pub(super) struct Line {
    pub(super) name: String,
    /// For [`growth`] number and seconds, both above 0; for [`linear`] none below 0.
    pub(super) points: Vec<(f64, f64)>,
}

/// Seconds over numbers: both axes logarithmic. Lines without points are left out.
pub(super) fn growth(lines: &[Line]) -> Drawn<String> {
    let logs = |line: &Line| -> Vec<(f64, f64)> {
        let log = |&(number, seconds): &(f64, f64)| (number.log10(), (seconds * 1e6).log10());
        line.points.iter().map(log).collect()
    };
    let all: Vec<(f64, f64)> = lines.iter().flat_map(logs).collect();
    let ends = |of: fn(&(f64, f64)) -> f64| {
        let values = all.iter().map(of);
        let low = values.clone().fold(f64::INFINITY, f64::min).floor();
        (
            low,
            values
                .fold(f64::NEG_INFINITY, f64::max)
                .ceil()
                .max(low + 1.0),
        )
    };
    if all.is_empty() || all.iter().any(|(x, y)| !x.is_finite() || !y.is_finite()) {
        return Err("there is nothing to draw".into());
    }
    let ((left, right), (bottom, top)) = (ends(|point| point.0), ends(|point| point.1));
    let whole = |value: &f64, shown: String| {
        if value.fract().abs() < 1e-6 {
            shown
        } else {
            String::new()
        }
    };
    draw(SIZE, |area| {
        let (plot, key) = area.split_horizontally(SIZE.0 - KEY_WIDTH);
        let mut chart = ChartBuilder::on(&plot)
            .margin(14)
            .margin_right(36)
            .x_label_area_size(46)
            .y_label_area_size(76)
            .build_cartesian_2d(left..right, bottom..top)
            .map_err(say)?;
        chart
            .configure_mesh()
            .x_labels((right - left) as usize + 1)
            .y_labels((top - bottom) as usize + 1)
            .x_label_formatter(&|x| whole(x, thousands(10f64.powf(*x))))
            .y_label_formatter(&|y| whole(y, decade(*y)))
            .x_desc("slots (logarithmic)")
            .y_desc("time a run (logarithmic)")
            .axis_style(INK)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(small())
            .axis_desc_style(small())
            .draw()
            .map_err(say)?;
        let mut entries = Vec::new();
        let shown = lines
            .iter()
            .enumerate()
            .filter(|(_, l)| !l.points.is_empty());
        for (index, line) in shown {
            let colour = COLOURS[index % MAX_SERIES];
            let points = logs(line);
            chart
                .draw_series(LineSeries::new(
                    points.iter().copied(),
                    colour.stroke_width(2),
                ))
                .map_err(say)?;
            let dots = points.iter().map(|&at| Circle::new(at, 3, colour.filled()));
            chart.draw_series(dots).map_err(say)?;
            entries.push(Entry::line(line.name.clone(), colour));
        }
        legend(&key, &entries)
    })
}

/// A chart whose axes both begin at 0.
pub(super) struct Linear<'a> {
    /// What stands above it: a title and a line below that.
    pub(super) title: Option<(&'a str, &'a str)>,
    pub(super) x_desc: &'a str,
    pub(super) y_desc: &'a str,
    pub(super) lines: &'a [Line],
}

/// Lines over two linear axes.
pub(super) fn linear(chart: &Linear<'_>) -> Drawn<String> {
    /// Height of the title with its line.
    const TITLE: u32 = 56;
    let points = || chart.lines.iter().flat_map(|line| &line.points);
    let sane = |&(x, y): &(f64, f64)| x.is_finite() && y.is_finite() && x >= 0.0 && y >= 0.0;
    if points().next().is_none() || !points().all(sane) {
        return Err("there is nothing to draw".into());
    }
    let most = |of: fn(&(f64, f64)) -> f64| points().map(of).fold(f64::MIN_POSITIVE, f64::max);
    let (right, top) = (most(|point| point.0) * 1.02, most(|point| point.1) * 1.05);
    let above = if chart.title.is_some() { TITLE } else { 0 };
    draw((SIZE.0, SIZE.1 + above), |area| {
        let (head, below) = area.split_vertically(above);
        if let Some((title, line)) = chart.title {
            let large = (FONT, 20).into_font().color(&INK);
            head.draw(&Text::new(title.to_owned(), (14, 8), large))
                .map_err(say)?;
            head.draw(&Text::new(line.to_owned(), (14, 34), small()))
                .map_err(say)?;
        }
        let (plot, key) = below.split_horizontally(SIZE.0 - KEY_WIDTH);
        let mut built = ChartBuilder::on(&plot)
            .margin(14)
            .margin_right(36)
            .x_label_area_size(46)
            .y_label_area_size(96)
            .build_cartesian_2d(0.0..right, 0.0..top)
            .map_err(say)?;
        built
            .configure_mesh()
            .x_labels(10)
            .y_labels(8)
            .x_label_formatter(&|x| thousands(*x))
            .y_label_formatter(&|y| {
                if top < 10.0 {
                    format!("{y:.1}")
                } else {
                    thousands(*y)
                }
            })
            .x_desc(chart.x_desc)
            .y_desc(chart.y_desc)
            .axis_style(INK)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(small())
            .axis_desc_style(small())
            .draw()
            .map_err(say)?;
        let mut entries = Vec::new();
        for (index, line) in chart.lines.iter().enumerate() {
            let colour = COLOURS[index % MAX_SERIES];
            let points = line.points.iter().copied();
            built
                .draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))
                .map_err(say)?;
            built
                .draw_series(points.map(|at| Circle::new(at, 3, colour.filled())))
                .map_err(say)?;
            entries.push(Entry::line(line.name.clone(), colour));
        }
        legend(&key, &entries)
    })
}

/// What is drawn behind a timeline.
pub(super) struct Backdrop<'a> {
    /// The moment that is 0 on the time axis.
    pub(super) origin_ns: u64,
    /// The time axis in milliseconds.
    pub(super) window: (f64, f64),
    /// The phases, in order.
    pub(super) phases: &'a [PhaseAt],
    /// The blackout's start and end.
    pub(super) blackout: Option<(u64, u64)>,
    /// How wide the chart is said to be for readers.
    pub(super) x_desc: &'a str,
}

/// Speed over time, a line a series, the phases as bands and the blackout in grey.
pub(super) fn timeline(series: &[Series], back: &Backdrop<'_>) -> Drawn<String> {
    let (left, right) = back.window;
    let highest = series
        .iter()
        .flat_map(|s| &s.points)
        .map(|point| point.1)
        .fold(1.0, f64::max);
    let top = highest * 1.12;
    draw(SIZE, |area| {
        let (plot, key) = area.split_horizontally(SIZE.0 - KEY_WIDTH);
        let mut chart = ChartBuilder::on(&plot)
            .margin(14)
            .margin_right(36)
            .x_label_area_size(46)
            .y_label_area_size(76)
            .build_cartesian_2d(left..right, 0.0..top)
            .map_err(say)?;
        let mut entries = Vec::new();
        let bands = bands(back, right);
        for (index, (from, to, _)) in bands.iter().enumerate() {
            let shade = if index % 2 == 0 {
                RGBColor(246, 248, 251)
            } else {
                RGBColor(236, 240, 246)
            };
            let corners = [(from.max(left), 0.0), (to.min(right), top)];
            chart
                .draw_series([Rectangle::new(corners, shade.filled())])
                .map_err(say)?;
        }
        if let Some((from, to)) = back.blackout {
            let (from, to) = (ms_from(back.origin_ns, from), ms_from(back.origin_ns, to));
            // At least two pixels wide, so that it is seen on any scale.
            let to = to.max(from + (right - left) * 2.0 / f64::from(SIZE.0));
            let red = RGBColor(214, 39, 40);
            let style = red.mix(0.35).filled();
            chart
                .draw_series([Rectangle::new([(from, 0.0), (to, top)], style)])
                .map_err(say)?;
            entries.push(Entry {
                name: "blackout".into(),
                style,
            });
        }
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(12)
            .y_labels(6)
            .y_label_formatter(&|y| thousands(*y))
            .x_label_formatter(&|x| format!("{x}"))
            .x_desc(back.x_desc)
            .y_desc("pages rewritten a second")
            .axis_style(INK)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            .label_style(small())
            .axis_desc_style(small())
            .draw()
            .map_err(say)?;
        for (index, one) in series.iter().enumerate() {
            let colour = COLOURS[index % MAX_SERIES];
            chart
                .draw_series(LineSeries::new(
                    one.points.iter().copied(),
                    colour.stroke_width(1),
                ))
                .map_err(say)?;
            entries.push(Entry::line(one.name.clone(), colour));
        }
        let anchor = small().pos(Pos::new(HPos::Left, VPos::Top));
        for (from, to, name) in &bands {
            let (from, to) = (from.max(left), to.min(right));
            // Names that would not fit their band are left to the table of phases.
            let pixels = (to - from) / (right - left) * f64::from(SIZE.0 - KEY_WIDTH - 126);
            if pixels > name.len() as f64 * 7.5 {
                let at = (from + (right - left) * 0.004, top * 0.995);
                chart
                    .draw_series([Text::new(name.clone(), at, anchor.clone())])
                    .map_err(say)?;
            }
        }
        legend(&key, &entries)
    })
}

/// The phases as stretches of the time axis.
fn bands(back: &Backdrop<'_>, right: f64) -> Vec<(f64, f64, String)> {
    let starts: Vec<f64> = back
        .phases
        .iter()
        .map(|p| ms_from(back.origin_ns, p.at_ns))
        .collect();
    let ends = starts.iter().skip(1).copied().chain([right]);
    starts
        .iter()
        .zip(ends)
        .zip(back.phases)
        .filter(|((from, to), phase)| {
            phase.name != "completed" && to > from && **from < right && *to > back.window.0
        })
        .map(|((from, to), phase)| (*from, to, phase.label.clone()))
        .collect()
}

/// A number with a comma every three digits.
fn thousands(value: f64) -> String {
    let digits = format!("{:.0}", value.max(0.0));
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_draws_each_line_that_has_points() {
        let line = |name: &str, points: &[(f64, f64)]| Line {
            name: name.into(),
            points: points.to_vec(),
        };
        let lines = [
            line("one", &[(10.0, 1e-4), (32_764.0, 1.5)]),
            line("none", &[]),
            line("two", &[(10.0, 2e-4)]),
        ];
        let svg = growth(&lines).expect("a chart");
        assert_eq!(svg.matches("<circle").count(), 3);
        for shown in ["one", "two", "10,000", "100 us", "1 s"] {
            assert!(svg.contains(shown), "{shown}");
        }
        assert!(!svg.contains("none\n"));
        assert!(growth(&[]).is_err());
        assert!(growth(&[line("zero", &[(10.0, 0.0)])]).is_err());
    }

    #[test]
    fn linear_charts_have_their_title_and_begin_at_0() {
        let lines = [Line {
            name: "one".into(),
            points: vec![(1.0, 20.0), (416.0, 1500.0)],
        }];
        let chart = |lines| {
            linear(&Linear {
                title: Some(("above", "MODELLED below")),
                x_desc: "vCPUs",
                y_desc: "milliseconds",
                lines,
            })
        };
        let svg = chart(&lines).expect("a chart");
        assert_eq!(svg.matches("<circle").count(), 2);
        for shown in ["above", "MODELLED below", "vCPUs", "1,000", "one"] {
            assert!(svg.contains(shown), "{shown}");
        }
        assert!(chart(&[]).is_err());
        let below = Line {
            name: "below 0".into(),
            points: vec![(1.0, -1.0)],
        };
        assert!(chart(&[below]).is_err());
    }

    #[test]
    fn axis_labels_have_units() {
        assert_eq!(decade(0.0), "1 us");
        assert_eq!(decade(2.0), "100 us");
        assert_eq!(decade(3.0), "1 ms");
        assert_eq!(decade(6.0), "1 s");
        assert_eq!(decade(-1.0), "100 ns");
        assert_eq!(thousands(1234567.0), "1,234,567");
        assert_eq!(thousands(12.0), "12");
    }
}
