//! Cheap random numbers that are the same in every run.

pub(crate) use pageferry_testkit::Random;

/// A number above 0.0 and at most 1.0, in steps of 2^-53.
pub(crate) const fn unit(random: &mut Random) -> f64 {
    ((random.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
}

/// Shuffles `items` (Fisher and Yates).
pub(crate) fn shuffle<T>(random: &mut Random, items: &mut [T]) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<u32> = (0..100).collect();
        shuffle(&mut Random::new(1), &mut items);
        assert!(items.windows(2).any(|pair| pair[0] > pair[1]));
        items.sort_unstable();
        assert!(items.iter().copied().eq(0..100));
    }
}
