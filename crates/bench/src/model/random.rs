//! Random numbers for a simulation: the same in every run with the same seed.

use super::Spread;

/// The generator `SplitMix64` (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number above 0 and at most 1.
    fn unit(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// A number below `bound`, or 0.
    pub(super) fn below(&mut self, bound: u32) -> u32 {
        // The upper half of the product: no further from uniform than one in 2^32.
        ((u64::from(bound) * (self.next() >> 32)) >> 32) as u32
    }

    /// One time of a distribution with this mean, in the mean's unit.
    pub(super) fn draw(&mut self, mean: f64, spread: Spread) -> f64 {
        match spread {
            Spread::Constant => mean,
            Spread::Uniform => mean * (0.5 + self.unit()),
            Spread::Exponential => -mean * self.unit().ln(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_below_their_bound() {
        let mut random = Random::new(9);
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[random.below(5) as usize] += 1;
        }
        assert!(seen.iter().all(|&count| count > 100), "{seen:?}");
        assert_eq!(random.below(0), 0);
    }

    #[test]
    fn every_distribution_has_its_mean_and_its_range() {
        for (spread, range) in [
            (Spread::Constant, 7.0..=7.0),
            (Spread::Uniform, 3.5..=10.5),
            (Spread::Exponential, 0.0..=f64::MAX),
        ] {
            let mut random = Random::new(1);
            let drawn: Vec<f64> = (0..100_000).map(|_| random.draw(7.0, spread)).collect();
            let mean = drawn.iter().sum::<f64>() / drawn.len() as f64;
            assert!((mean - 7.0).abs() < 0.1, "{spread:?}: {mean}");
            assert!(drawn.iter().all(|x| range.contains(x)), "{spread:?}");
        }
    }
}
