//! The harts that a call names.

/// A set of harts: those of `mask`, counted from `base`, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HartMask {
    mask: u64,
    base: u64,
}

/// The base that names all harts (SBI 2.0, section 3.1).
const ALL: u64 = u64::MAX;

impl HartMask {
    /// The set that a call names, or `None` if it names a hart that is not below `harts`.
    pub(crate) fn new(mask: u64, base: u64, harts: u32) -> Option<Self> {
        let highest = u64::from(u64::BITS - 1 - mask.leading_zeros().min(u64::BITS - 1));
        let valid = base == ALL
            || mask == 0 && base < u64::from(harts)
            || mask != 0
                && base
                    .checked_add(highest)
                    .is_some_and(|hart| hart < u64::from(harts));
        valid.then_some(Self { mask, base })
    }

    /// Whether the set has `hart`.
    ///
    /// ```
    /// use pageferry_sbi::HartMask;
    ///
    /// assert!(HartMask::ALL.has(1000));
    /// ```
    #[must_use]
    pub const fn has(self, hart: u32) -> bool {
        if self.base == ALL {
            return true;
        }
        match (hart as u64).checked_sub(self.base) {
            Some(bit) if bit < u64::BITS as u64 => self.mask >> bit & 1 != 0,
            _ => false,
        }
    }

    /// All harts.
    pub const ALL: Self = Self { mask: 0, base: ALL };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against the definition: bit `i` of the mask is hart `base + i`.
        #[test]
        fn a_set_is_what_its_bits_say(
            mask in prop_oneof![any::<u64>(), 0..16u64],
            base in prop_oneof![any::<u64>(), 0..200u64],
            harts in 1..200u32,
        ) {
            let named = |i: u32| mask >> i & 1 != 0;
            let exists = |i: u32| base.checked_add(i.into()).is_some_and(|h| h < harts.into());
            let valid = (0..64).all(|i| !named(i) || exists(i))
                && (mask != 0 || base < harts.into());
            let set = HartMask::new(mask, base, harts);
            if base != u64::MAX {
                prop_assert_eq!(set.is_some(), valid);
                for hart in 0..harts {
                    let wanted = (0..64).any(|i| named(i) && base.checked_add(i.into()) == Some(hart.into()));
                    prop_assert_eq!(set.is_some_and(|set| set.has(hart)), valid && wanted);
                }
            }
        }
    }

    #[test]
    fn a_base_of_ones_names_all() {
        let set = HartMask::new(0, u64::MAX, 3).unwrap();
        assert!((0..3).all(|hart| set.has(hart)));
    }
}
