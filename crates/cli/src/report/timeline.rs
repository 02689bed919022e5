//! The guest's speed over time, from samples of its progress.

use crate::sampler::Sample;
use pageferry_charts::Line;

/// Milliseconds of `at_ns` from `origin_ns`.
pub(super) fn ms_from(origin_ns: u64, at_ns: u64) -> f64 {
    (at_ns as f64 - origin_ns as f64) / 1e6
}

/// The known progress of vCPU `vcpu`, as points in time.
fn progress(samples: &[Sample], vcpu: usize) -> Vec<(u64, u64)> {
    samples
        .iter()
        .filter_map(|sample| Some((sample.at_ns, (*sample.done.get(vcpu)?)?)))
        .collect()
}

/// The progress at `at_ns`, linear between two samples; `None` outside all samples.
fn at(progress: &[(u64, u64)], at_ns: u64) -> Option<f64> {
    let next = progress.partition_point(|point| point.0 < at_ns);
    let (t1, d1) = *progress.get(next)?;
    if t1 == at_ns {
        return Some(d1 as f64);
    }
    let (t0, d0) = *progress.get(next.checked_sub(1)?)?;
    let share = (at_ns - t0) as f64 / (t1 - t0) as f64;
    Some(d0 as f64 + share * (d1 as f64 - d0 as f64))
}

/// Each vCPU's speed from `from_ns` to `to_ns` in `bins` steps. With more than `most` vCPUs, the
/// sum of their speeds as one line. A line's points are milliseconds from `from_ns` and pages per
/// second.
pub(super) fn speeds(
    samples: &[Sample],
    vcpus: usize,
    from_ns: u64,
    to_ns: u64,
    bins: u64,
    most: usize,
) -> Vec<Line> {
    let width = (to_ns.saturating_sub(from_ns) / bins.max(1)).max(1);
    let of = |vcpu: usize| -> Vec<(f64, f64)> {
        let progress = progress(samples, vcpu);
        (0..bins)
            .filter_map(|bin| {
                let start = from_ns + bin * width;
                let pages = at(&progress, start + width)? - at(&progress, start)?;
                let middle = ms_from(from_ns, start + width / 2);
                Some((middle, pages.max(0.0) * 1e9 / width as f64))
            })
            .collect()
    };
    if vcpus <= most {
        return (0..vcpus)
            .map(|vcpu| Line {
                name: format!("vCPU {vcpu}"),
                points: of(vcpu),
            })
            .collect();
    }
    let mut sum: Vec<(f64, f64)> = Vec::new();
    for points in (0..vcpus).map(of) {
        for (x, y) in points {
            match sum.iter_mut().find(|point| point.0 == x) {
                Some(point) => point.1 += y,
                None => sum.push((x, y)),
            }
        }
    }
    sum.sort_by(|a, b| a.0.total_cmp(&b.0));
    vec![Line {
        name: format!("all {vcpus} vCPUs"),
        points: sum,
    }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at_ms: u64, done: u64) -> Sample {
        Sample {
            at_ns: at_ms * 1_000_000,
            done: vec![Some(done), None],
        }
    }

    #[test]
    fn a_steady_guest_has_a_level_line_and_a_stop_shows() {
        let mut samples: Vec<Sample> = (0..=10).map(|i| sample(i, i * 5)).collect();
        samples.extend((11..=20).map(|i| sample(i, 50)));
        let series = speeds(&samples, 1, 0, 20_000_000, 20, 8);
        assert_eq!(series.len(), 1);
        assert_eq!(series[0].points.len(), 20);
        for (x, y) in &series[0].points {
            let wanted = if *x < 10.0 { 5000.0 } else { 0.0 };
            assert!((y - wanted).abs() < 1.0, "{y} at {x}");
        }
    }

    #[test]
    fn unknown_progress_gives_no_points() {
        let samples = [sample(0, 0), sample(10, 10)];
        let series = speeds(&samples, 2, 0, 10_000_000, 5, 8);
        assert!(series[1].points.is_empty());
        assert_eq!(at(&[(5, 1)], 4), None);
        assert_eq!(at(&[(5, 1)], 6), None);
    }

    #[test]
    fn many_vcpus_become_one_line() {
        let samples: Vec<Sample> = (0..=2)
            .map(|i| Sample {
                at_ns: i * 1_000_000,
                done: vec![Some(i); 9],
            })
            .collect();
        let series = speeds(&samples, 9, 0, 2_000_000, 2, 8);
        assert_eq!(series.len(), 1);
        assert!(
            series[0]
                .points
                .iter()
                .all(|point| (point.1 - 9000.0).abs() < 1.0)
        );
    }
}
