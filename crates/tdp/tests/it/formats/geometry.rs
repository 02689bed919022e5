//! The entries that an address selects.

use super::for_each_format;
use super::strategy::run;
use pageferry_addr::{Gfn, PageSize};
use pageferry_tdp::format::{
    Arm64Ipa40, Arm64Ipa44, Arm64Ipa48, Arm64Stage2, Ept4, Ept5, Format, Npt4, Npt5, Sv48x4Svadu,
    Sv57x4Svade,
};

#[track_caller]
fn check<F: Format>(levels: u32, root_entries: usize, guest_bits: u32, host_bits: u32) {
    assert_eq!(F::LEVELS, levels, "{}", F::NAME);
    assert_eq!(F::entries(levels), root_entries, "{}", F::NAME);
    assert_eq!(F::ROOT_BYTES, 8 * root_entries, "{}", F::NAME);
    assert_eq!(F::GFN_LIMIT.0, 1 << (guest_bits - 12), "{}", F::NAME);
    assert_eq!(F::PFN_LIMIT.0, 1 << (host_bits - 12), "{}", F::NAME);
    for level in 1..levels {
        assert_eq!(F::entries(level), 512);
    }
}

#[test]
fn roots_and_limits() {
    check::<Ept4>(4, 512, 48, 52);
    // Five levels index 57 bits, but guest-physical addresses have 52.
    check::<Ept5>(5, 512, 52, 52);
    check::<Npt4>(4, 512, 48, 52);
    check::<Npt5>(5, 512, 52, 52);
    check::<Sv48x4Svadu>(4, 2048, 50, 56);
    check::<Sv57x4Svade>(5, 2048, 59, 56);
    check::<Arm64Stage2<33, false, true>>(3, 8, 33, 48);
    check::<Arm64Ipa40<true>>(3, 1024, 40, 48);
    check::<Arm64Stage2<43, false, true>>(3, 8192, 43, 48);
    check::<Arm64Ipa44<true>>(4, 32, 44, 48);
    check::<Arm64Ipa48<false>>(4, 512, 48, 48);
}

for_each_format!(
    leaf_levels,
    indices_make_up_the_frame_number,
    each_bit_picks_at_one_level
);

fn leaf_levels<F: Format>() {
    for size in PageSize::ALL {
        assert!(F::may_hold_leaves(size.level()));
        assert_eq!(F::frames_per_entry(size.level()), size.pages());
    }
    assert!(!F::may_hold_leaves(0) && !F::may_hold_leaves(4) && !F::may_hold_leaves(5));
}

fn indices_make_up_the_frame_number<F: Format>() {
    run(0..F::GFN_LIMIT.0, |gfn| {
        let mut sum = 0;
        for level in 1..=F::LEVELS {
            let index = F::index(Gfn(gfn), level);
            assert!(index < F::entries(level));
            sum += index as u64 * F::frames_per_entry(level);
        }
        assert_eq!(sum, gfn);
        Ok(())
    });
}

fn each_bit_picks_at_one_level<F: Format>() {
    for bit in 0..F::GFN_BITS {
        let its_level = (bit / 9 + 1).min(F::LEVELS);
        for level in 1..=F::LEVELS {
            let expected = if level == its_level {
                1 << (bit - 9 * (level - 1))
            } else {
                0
            };
            assert_eq!(
                F::index(Gfn(1 << bit), level),
                expected,
                "bit {bit}, level {level}"
            );
        }
    }
}
