//! Times from a distribution. The same seed gives the same times.

use super::Spread;
use crate::kit::{Random, unit};

/// A time from a distribution with this mean, in the mean's unit.
pub(super) fn draw(random: &mut Random, mean: f64, spread: Spread) -> f64 {
    match spread {
        Spread::Constant => mean,
        Spread::Uniform => mean * (0.5 + unit(random)),
        Spread::Exponential => -mean * unit(random).ln(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_distribution_has_its_mean_and_its_range() {
        for (spread, range) in [
            (Spread::Constant, 7.0..=7.0),
            (Spread::Uniform, 3.5..=10.5),
            (Spread::Exponential, 0.0..=f64::MAX),
        ] {
            let mut random = Random::new(1);
            let drawn: Vec<f64> = (0..100_000)
                .map(|_| draw(&mut random, 7.0, spread))
                .collect();
            let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
            assert!((mean - 7.0).abs() < 0.1, "{spread:?}: {mean}");
            assert!(drawn.iter().all(|x| range.contains(x)), "{spread:?}");
        }
    }
}
