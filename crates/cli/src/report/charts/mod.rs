//! The charts of the HTML page, as SVG.

mod frame;

use self::frame::{
    Axis, COLOURS, Drawn, Entry, KEY_WIDTH, SIZE, axes, chart, decade, dotted, draw, legend, line,
    say, small, text, thousands, whole, with_key,
};
use super::timeline::{Series, ms_from};
use super::{PhaseAt, Stalls};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

pub(super) use self::frame::MAX_SERIES;

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
        let (plot, key) = with_key(area);
        let mut chart = chart(&plot, 76, left..right, bottom..top + 0.25)?;
        let x = Axis {
            labels: (right - left) as usize + 1,
            label: &|x| whole(x, || decade(*x)),
            desc: "stall: from the fault to the vCPU running again (logarithmic)",
        };
        let y = Axis {
            labels: top as usize + 1,
            label: &|y| whole(y, || format!("{}", 10f64.powf(*y))),
            desc: "faults (logarithmic)",
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
        chart.draw_series(bars).map_err(say)?;
        let mut entries = Vec::new();
        let marks = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];
        for (index, (name, share)) in marks.into_iter().enumerate() {
            let us = stalls.quantile_us(share);
            let x = us.max(1e-3).log10();
            let colour = COLOURS[1 + index];
            line(&mut chart, [(x, bottom), (x, top + 0.25)], colour, 2)?;
            entries.push(Entry::line(
                format!("{name} {}", super::table::micros(us)),
                colour,
            ));
        }
        legend(&key, &entries)
    })
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
    draw(SIZE, |area| {
        let (plot, key) = with_key(area);
        let mut chart = chart(&plot, 76, left..right, bottom..top)?;
        let x = Axis {
            labels: (right - left) as usize + 1,
            label: &|x| whole(x, || thousands(10f64.powf(*x))),
            desc: "slots (logarithmic)",
        };
        let y = Axis {
            labels: (top - bottom) as usize + 1,
            label: &|y| whole(y, || decade(*y)),
            desc: "time a run (logarithmic)",
        };
        axes(&mut chart, &x, &y, true)?;
        let shown = lines
            .iter()
            .enumerate()
            .filter(|(_, l)| !l.points.is_empty());
        let shown = shown.map(|(index, line)| (index, line.name.as_str(), logs(line)));
        legend(&key, &dotted(&mut chart, shown)?)
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
pub(super) fn linear(of: &Linear<'_>) -> Drawn<String> {
    /// Height of the title with its line.
    const TITLE: u32 = 56;
    let points = || of.lines.iter().flat_map(|line| &line.points);
    let sane = |&(x, y): &(f64, f64)| x.is_finite() && y.is_finite() && x >= 0.0 && y >= 0.0;
    if points().next().is_none() || !points().all(sane) {
        return Err("there is nothing to draw".into());
    }
    let most = |part: fn(&(f64, f64)) -> f64| points().map(part).fold(f64::MIN_POSITIVE, f64::max);
    let (right, top) = (most(|point| point.0) * 1.02, most(|point| point.1) * 1.05);
    let above = if of.title.is_some() { TITLE } else { 0 };
    draw((SIZE.0, SIZE.1 + above), |area| {
        let (head, below) = area.split_vertically(above);
        if let Some((title, line)) = of.title {
            head.draw(&Text::new(title.to_owned(), (14, 8), text(20)))
                .map_err(say)?;
            head.draw(&Text::new(line.to_owned(), (14, 34), small()))
                .map_err(say)?;
        }
        let (plot, key) = with_key(&below);
        let mut chart = chart(&plot, 96, 0.0..right, 0.0..top)?;
        let x = Axis {
            labels: 10,
            label: &|x| thousands(*x),
            desc: of.x_desc,
        };
        let y = Axis {
            labels: 8,
            label: &|y| {
                if top < 10.0 {
                    format!("{y:.1}")
                } else {
                    thousands(*y)
                }
            },
            desc: of.y_desc,
        };
        axes(&mut chart, &x, &y, true)?;
        let lines = of.lines.iter().enumerate();
        let lines = lines.map(|(index, line)| (index, line.name.as_str(), line.points.clone()));
        legend(&key, &dotted(&mut chart, lines)?)
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
        let (plot, key) = with_key(area);
        let mut chart = chart(&plot, 76, left..right, 0.0..top)?;
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
        let x = Axis {
            labels: 12,
            label: &|x| format!("{x}"),
            desc: back.x_desc,
        };
        let y = Axis {
            labels: 6,
            label: &|y| thousands(*y),
            desc: "pages rewritten a second",
        };
        axes(&mut chart, &x, &y, false)?;
        for (index, one) in series.iter().enumerate() {
            let colour = COLOURS[index % MAX_SERIES];
            line(&mut chart, one.points.iter().copied(), colour, 1)?;
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
}
