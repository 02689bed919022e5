//! The parts of all charts: picture, legend, axes, lines and labels.

use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

pub(super) const SIZE: (u32, u32) = (960, 380);
/// Width of the legend's column, in pixels.
pub(super) const KEY_WIDTH: u32 = 170;
const INK: RGBColor = RGBColor(40, 44, 52);
const GRID: RGBColor = RGBColor(226, 229, 234);
const FONT: &str = "sans-serif";
/// Most people with impaired colour vision can tell these apart (Okabe and Ito, "Color Universal
/// Design", 2008).
pub(super) const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(230, 159, 0),
    RGBColor(120, 94, 240),
    RGBColor(60, 60, 60),
];

/// The number of lines with different colours. Further lines repeat the colours.
pub const MAX_SERIES: usize = COLOURS.len();

/// The result of drawing. The error is a sentence for the user.
pub type Drawn<T> = Result<T, String>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

pub(super) fn message(error: impl std::fmt::Display) -> String {
    error.to_string()
}

pub(super) fn draw(size: (u32, u32), paint: impl FnOnce(&Area<'_>) -> Drawn<()>) -> Drawn<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        area.fill(&WHITE).map_err(message)?;
        paint(&area)?;
        area.present().map_err(message)?;
    }
    // The picture must scale with the page, but the backend writes a fixed size.
    let (width, height) = size;
    let fixed = format!("<svg width=\"{width}\" height=\"{height}\"");
    Ok(svg.replacen(&fixed, "<svg class=\"chart\" role=\"img\"", 1))
}

/// Splits the picture into the chart's area and the legend's.
pub(super) fn with_key<'a>(area: &Area<'a>) -> (Area<'a>, Area<'a>) {
    area.split_horizontally(SIZE.0 - KEY_WIDTH)
}

/// A chart without axes yet. `left` is the width of the vertical axis' labels, in pixels.
pub(super) fn chart<'a, 'b>(
    area: &'a Area<'b>,
    left: u32,
    x: Range<f64>,
    y: Range<f64>,
) -> Drawn<Chart<'a, 'b>> {
    ChartBuilder::on(area)
        .margin(14)
        .margin_right(36)
        .x_label_area_size(46)
        .y_label_area_size(left)
        .build_cartesian_2d(x, y)
        .map_err(message)
}

/// The labels of an axis.
pub(super) struct Axis<'a> {
    pub(super) labels: usize,
    pub(super) label: &'a dyn Fn(&f64) -> String,
    pub(super) desc: &'a str,
}

/// Draws both axes and the horizontal grid lines, and with `upright` also the vertical ones.
pub(super) fn axes(
    chart: &mut Chart<'_, '_>,
    x: &Axis<'_>,
    y: &Axis<'_>,
    upright: bool,
) -> Drawn<()> {
    let mut mesh = chart.configure_mesh();
    if !upright {
        mesh.disable_x_mesh();
    }
    mesh.x_labels(x.labels)
        .y_labels(y.labels)
        .x_label_formatter(x.label)
        .y_label_formatter(y.label)
        .x_desc(x.desc)
        .y_desc(y.desc)
        .axis_style(INK)
        .bold_line_style(GRID)
        .light_line_style(TRANSPARENT)
        .label_style(small())
        .axis_desc_style(small())
        .draw()
        .map_err(message)
}

/// Draws a line that is `width` pixels wide.
pub(super) fn line(
    chart: &mut Chart<'_, '_>,
    points: impl IntoIterator<Item = (f64, f64)>,
    colour: RGBColor,
    width: u32,
) -> Drawn<()> {
    let style = colour.stroke_width(width);
    let series = LineSeries::new(points, style);
    chart.draw_series(series).map_err(message)?;
    Ok(())
}

pub(super) fn small() -> TextStyle<'static> {
    (FONT, 16).into_font().color(&INK)
}

/// The label of 10^`log_us` microseconds, with a suitable unit.
pub(super) fn decade(log_us: f64) -> String {
    match log_us.round() as i32 {
        power @ ..0 => format!("{} ns", 10i64.pow((power + 3).max(0) as u32)),
        power @ 0..3 => format!("{} us", 10i64.pow(power as u32)),
        power @ 3..6 => format!("{} ms", 10i64.pow((power - 3) as u32)),
        power => format!("{} s", 10i64.pow((power - 6).min(12) as u32)),
    }
}

/// The label of a logarithmic axis: empty between whole powers.
pub(super) fn whole(value: &f64, shown: impl FnOnce() -> String) -> String {
    if value.fract().abs() < 1e-6 {
        shown()
    } else {
        String::new()
    }
}

/// One entry of a legend.
pub(super) struct LegendEntry {
    pub(super) name: String,
    pub(super) style: ShapeStyle,
}

impl LegendEntry {
    pub(super) fn line(name: impl Into<String>, colour: RGBColor) -> Self {
        Self {
            name: name.into(),
            style: colour.stroke_width(3),
        }
    }
}

/// Draws the legend into its own column, so that it hides nothing.
pub(super) fn legend(area: &Area<'_>, entries: &[LegendEntry]) -> Drawn<()> {
    for (index, entry) in entries.iter().enumerate() {
        let y = 22 + index as i32 * 22;
        if entry.style.filled {
            area.draw(&Rectangle::new([(4, y - 6), (22, y + 6)], entry.style))
                .map_err(message)?;
        } else {
            area.draw(&PathElement::new([(4, y), (22, y)], entry.style))
                .map_err(message)?;
        }
        let text = small().pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(entry.name.clone(), (28, y), text))
            .map_err(message)?;
    }
    Ok(())
}

/// Formats a number with a comma every three digits.
pub(super) fn thousands(value: f64) -> String {
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
