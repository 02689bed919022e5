//! The page-table formats against their specifications.
//!
//! - `bits` compares entries computed by hand from the manuals.
//! - `hardware` is a second reading of the manuals: a model of each processor's behaviour. It
//!   checks the entries that the crate makes.
//! - `meaning` checks that entries and meanings map one to one, and that each change of an entry is
//!   the change of its meaning.

mod bits;
mod geometry;
mod hardware;
mod join;
mod meaning;
mod roots;
mod strategy;

/// Makes a separate test of `$check::<F>()` for each format.
macro_rules! for_each_format {
    ($($check:ident),+ $(,)?) => { $(mod $check {
        use pageferry_tdp::format as f;
        #[test] fn ept4() { super::$check::<f::Ept4>(); }
        #[test] fn ept4_no_ad() { super::$check::<f::Ept4NoAd>(); }
        #[test] fn ept5() { super::$check::<f::Ept5>(); }
        #[test] fn ept5_no_ad() { super::$check::<f::Ept5NoAd>(); }
        #[test] fn npt4() { super::$check::<f::Npt4>(); }
        #[test] fn npt5() { super::$check::<f::Npt5>(); }
        #[test] fn sv48x4_svadu() { super::$check::<f::Sv48x4Svadu>(); }
        #[test] fn sv48x4_svade() { super::$check::<f::Sv48x4Svade>(); }
        #[test] fn sv57x4_svadu() { super::$check::<f::Sv57x4Svadu>(); }
        #[test] fn sv57x4_svade() { super::$check::<f::Sv57x4Svade>(); }
        #[test] fn arm64_40() { super::$check::<f::Arm64Ipa40<false>>(); }
        #[test] fn arm64_40_hafdbs() { super::$check::<f::Arm64Ipa40<true>>(); }
        #[test] fn arm64_44_hafdbs() { super::$check::<f::Arm64Ipa44<true>>(); }
        #[test] fn arm64_48() { super::$check::<f::Arm64Ipa48<false>>(); }
        #[test] fn arm64_48_without_fwb() { super::$check::<f::Arm64Stage2<48, true, false>>(); }
    })+ };
}
pub(crate) use for_each_format;
