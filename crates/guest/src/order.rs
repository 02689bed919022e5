//! The order in which a vCPU visits the pages of its share.
//!
//! **Guarantee.** In every pass every page is visited exactly once, and passes differ.
//!
//! **Mechanism.** A linear congruential generator modulo a power of two has its full period if its
//! increment is odd and its multiplier is 1 modulo 4 (Hull and Dobell, "Random Number Generators",
//! SIAM Review 4, 1962). The low bits of such a generator alternate, so its state is passed through
//! the bijection `s ^ (s >> shift)`. Values outside the share are skipped. The start and the
//! increment of a pass are a hash of the pass number and the vCPU.

use crate::params::{FILL_MULTIPLIER, GOLDEN, ORDER_MULTIPLIER, tag};

/// The modulus and the output shift for a number of pages. Guest and model use the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OrderParams {
    pub(crate) mask: u64,
    pub(crate) shift: u32,
}

impl OrderParams {
    pub(crate) fn new(pages: u64) -> Self {
        let modulus = pages.next_power_of_two();
        Self {
            mask: modulus - 1,
            shift: (modulus.trailing_zeros() / 2).max(1),
        }
    }
}

/// The positions of one pass, in the order of their visits: a permutation of `0..pages`.
///
/// ```
/// use pageferry_guest::Order;
///
/// let mut positions: Vec<u64> = Order::new(0, 1, 10).collect();
/// positions.sort_unstable();
/// assert_eq!(positions, (0..10).collect::<Vec<_>>());
/// ```
#[derive(Clone, Debug)]
pub struct Order {
    params: OrderParams,
    pages: u64,
    left: u64,
    increment: u64,
    state: u64,
    steps: u64,
}

impl Order {
    /// The order of pass `pass` (from 1) of vCPU `vcpu` over `pages` pages.
    #[must_use]
    pub fn new(vcpu: u32, pass: u64, pages: u64) -> Self {
        let params = OrderParams::new(pages);
        let mut seed = pass.wrapping_mul(GOLDEN).wrapping_add(tag(vcpu));
        seed ^= seed >> 32;
        seed = seed.wrapping_mul(FILL_MULTIPLIER);
        seed ^= seed >> 29;
        Self {
            params,
            pages,
            left: pages,
            increment: (seed >> 32) | 1,
            state: seed & params.mask,
            steps: 0,
        }
    }

    /// The same order with no visit left.
    pub(crate) fn finished(mut self) -> Self {
        self.left = 0;
        self
    }

    /// The generator's state.
    #[must_use]
    pub fn state(&self) -> u64 {
        self.state
    }

    /// The number of generator steps: one for each visit, and one for each skipped value.
    #[must_use]
    pub fn steps(&self) -> u64 {
        self.steps
    }
}

impl Iterator for Order {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        loop {
            self.steps += 1;
            self.state = self
                .state
                .wrapping_mul(ORDER_MULTIPLIER)
                .wrapping_add(self.increment)
                & self.params.mask;
            let position = self.state ^ (self.state >> self.params.shift);
            if position < self.pages {
                return Some(position);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_pass_visits_every_page_once(
            vcpu in 0..1024_u32, pass in 1..u64::MAX, pages in 1..5000_u64,
        ) {
            let mut seen = vec![false; pages as usize];
            for position in Order::new(vcpu, pass, pages) {
                prop_assert!(!seen[position as usize]);
                seen[position as usize] = true;
            }
            prop_assert!(seen.iter().all(|&seen| seen));
        }

        #[test]
        fn passes_and_vcpus_differ(vcpu in 0..1023_u32, pass in 1..u64::MAX - 1, pages in 64..5000_u64) {
            let order = |vcpu, pass| Order::new(vcpu, pass, pages).collect::<Vec<_>>();
            prop_assert_ne!(order(vcpu, pass), order(vcpu, pass + 1));
            prop_assert_ne!(order(vcpu, pass), order(vcpu + 1, pass));
        }
    }

    #[test]
    fn the_modulus_is_the_next_power_of_two() {
        assert_eq!(OrderParams::new(1), OrderParams { mask: 0, shift: 1 });
        assert_eq!(
            OrderParams::new(1000),
            OrderParams {
                mask: 1023,
                shift: 5
            }
        );
        assert_eq!(
            OrderParams::new(1024),
            OrderParams {
                mask: 1023,
                shift: 5
            }
        );
    }
}
