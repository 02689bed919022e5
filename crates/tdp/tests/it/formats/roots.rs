//! The values of root registers, computed by hand from the manuals.

use pageferry_addr::Pfn;
use pageferry_tdp::format::{
    Arm64Ipa40, Arm64Ipa44, Arm64Ipa48, Arm64Stage2, Ept4, Ept4NoAd, Ept5, Ept5NoAd, EptWalks,
    Npt4, Npt5, Sv48x4Svade, Sv48x4Svadu, Sv57x4Svadu,
};
use std::panic::catch_unwind;

const ROOT: Pfn = Pfn(0x12_3454);

/// Write-back is 6; a walk length of 4 is 3 at bit 3, one of 5 is 4; bit 6 is A/D.
#[test]
fn ept_pointers() {
    use EptWalks::{Uncacheable, WriteBack};
    assert_eq!(Ept4::eptp(ROOT, WriteBack), 0x1_2345_405e);
    assert_eq!(Ept4NoAd::eptp(ROOT, WriteBack), 0x1_2345_401e);
    assert_eq!(Ept5::eptp(ROOT, WriteBack), 0x1_2345_4066);
    assert_eq!(Ept5NoAd::eptp(ROOT, WriteBack), 0x1_2345_4026);
    assert_eq!(Ept4::eptp(ROOT, Uncacheable), 0x1_2345_4058);
    assert_eq!(
        Ept4::eptp(Pfn(0xff_ffff_ffff), WriteBack),
        0xf_ffff_ffff_f05e
    );
}

#[test]
fn nested_cr3() {
    assert_eq!(Npt4::n_cr3(ROOT), 0x1_2345_4000);
    assert_eq!(Npt5::n_cr3(Pfn(0xff_ffff_ffff)), 0xf_ffff_ffff_f000);
}

/// MODE is 9 for Sv48x4, 10 for Sv57x4.
#[test]
fn hgatp() {
    assert_eq!(Sv48x4Svadu::hgatp(ROOT, 0), 0x9000_0000_0012_3454);
    assert_eq!(Sv48x4Svade::hgatp(ROOT, 1), 0x9000_1000_0012_3454);
    assert_eq!(Sv57x4Svadu::hgatp(ROOT, 0x3fff), 0xa3ff_f000_0012_3454);
    let last = Pfn(0xfff_ffff_fffc);
    assert_eq!(Sv48x4Svadu::hgatp(last, 0x3fff), 0x93ff_ffff_ffff_fffc);
}

#[test]
fn vttbr_el2_and_vtcr_el2() {
    assert_eq!(
        Arm64Ipa48::<true>::vttbr_el2(ROOT, 0xabcd),
        0xabcd_0001_2345_4000
    );
    assert_eq!(Arm64Ipa44::<true>::vttbr_el2(ROOT, 0), 0x1_2345_4000);
    assert_eq!(Arm64Ipa40::<false>::vttbr_el2(ROOT, 7), 0x7_0001_2345_4000);
    // T0SZ 16, 20 and 24; SL0 2 with four levels, 1 with three.
    assert_eq!(Arm64Ipa48::<false>::VTCR_EL2, 0x8000_3590);
    assert_eq!(Arm64Ipa44::<false>::VTCR_EL2, 0x8000_3594);
    assert_eq!(Arm64Ipa40::<false>::VTCR_EL2, 0x8000_3558);
    assert_eq!(Arm64Ipa48::<true>::VTCR_EL2, 0x8060_3590);
}

#[track_caller]
fn refused(value: impl FnOnce() -> u64 + std::panic::UnwindSafe, says: &str) {
    let why = catch_unwind(value).expect_err("refused");
    let why = why.downcast::<String>().unwrap();
    assert!(why.contains(says), "{why}");
}

#[test]
fn frames_that_cannot_be_roots_are_refused() {
    let all = "expected a frame below";
    refused(|| Ept4::eptp(Pfn(1 << 40), EptWalks::WriteBack), all);
    refused(|| Npt4::n_cr3(Pfn(1 << 40)), all);
    refused(|| Sv48x4Svadu::hgatp(Pfn(1 << 44), 0), all);
    refused(|| Arm64Ipa48::<true>::vttbr_el2(Pfn(1 << 36), 0), all);
    // A root of 16 KiB, and one of sixteen concatenated tables.
    refused(
        || Sv57x4Svadu::hgatp(Pfn(0x1002), 0),
        "a multiple of 4 frames",
    );
    refused(
        || Arm64Stage2::<43, true, true>::vttbr_el2(Pfn(0x1008), 0),
        "a multiple of 16",
    );
    refused(
        || Sv48x4Svadu::hgatp(ROOT, 1 << 14),
        "expected one below 16384",
    );
}
