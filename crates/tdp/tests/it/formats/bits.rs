//! Entries computed by hand. Each comment gives the values of the fields, low bits first.

use pageferry_addr::{Gfn, Pfn};
use pageferry_tdp::format::{
    Access, Arm64Ipa40, Arm64Ipa44, Arm64Ipa48, Arm64Stage2, EntryLayout, Ept4, Ept4NoAd, Ept5,
    Ept5NoAd, Format, Leaf, Meaning, MemoryType, Npt4, Npt5, Sv48x4Svade, Sv48x4Svadu, Sv57x4Svade,
    Sv57x4Svadu, Writes,
};

const fn leaf(pfn: u64, access: Access, memory: MemoryType, writes: Writes) -> Leaf {
    Leaf {
        pfn: Pfn(pfn),
        access,
        memory,
        accessed: true,
        dirty: access.write,
        writes,
    }
}

const fn ordinary(pfn: u64) -> Leaf {
    leaf(pfn, Access::ALL, MemoryType::WriteBack, Writes::Allowed)
}

const fn clean(leaf: Leaf) -> Leaf {
    Leaf {
        dirty: false,
        ..leaf
    }
}

const fn unused(leaf: Leaf) -> Leaf {
    Leaf {
        accessed: false,
        ..leaf
    }
}

const DEVICE: Leaf = unused(leaf(
    1,
    Access::READ,
    MemoryType::Device,
    Writes::HostForbids,
));
const COMBINING: Leaf = leaf(
    0x4_0000,
    Access::READ_EXECUTE,
    MemoryType::WriteCombining,
    Writes::MmuForbids,
);
const LOGGED: Leaf = leaf(
    1,
    Access::READ_WRITE,
    MemoryType::WriteBack,
    Writes::AllowedLoggedByFault,
);

/// Checks encoding and decoding of each `(level, leaf, entry)`.
#[track_caller]
fn check<F: Format>(rows: &[(u32, Leaf, u64)]) {
    for &(level, leaf, entry) in rows {
        let made = F::leaf(leaf, level);
        assert_eq!(
            made,
            entry,
            "{}: {leaf:?} is {made:#018x}, not {entry:#018x}",
            F::NAME
        );
        assert_eq!(
            F::decode(entry, level),
            Some(Meaning::Leaf(leaf)),
            "{} {entry:#x}",
            F::NAME
        );
        assert!(F::is_leaf(entry, level) && !F::is_table(entry, level));
        assert!(!F::is_frozen(entry) && !F::is_mmio(entry));
    }
}

#[track_caller]
fn check_table<F: Format>(table: u64, entry: u64) {
    assert_eq!(F::table(Pfn(table)), entry, "{}", F::NAME);
    for level in 2..=F::LEVELS {
        assert_eq!(
            F::decode(entry, level),
            Some(Meaning::Table { table: Pfn(table) })
        );
        assert!(F::is_table(entry, level) && !F::is_leaf(entry, level));
    }
    assert_eq!(F::table_pfn(entry), Pfn(table));
    assert_eq!(F::table_address(entry), table << 12);
    assert!(!F::is_table(entry, 1));
}

#[track_caller]
fn check_mmio<F: Format>(gfn: u64, generation: u64, entry: u64) {
    let made = F::mmio(Gfn(gfn), generation);
    assert_eq!(made, entry, "{}: {made:#018x}", F::NAME);
    assert_eq!(
        (F::mmio_gfn(entry), F::mmio_generation(entry)),
        (Gfn(gfn), generation)
    );
    assert!(F::is_mmio(entry) && !F::is_present(entry));
}

#[test]
fn ept_with_accessed_and_dirty_flags() {
    fn rows<F: Format>() {
        check::<F>(&[
            // R 0, W 1, X 2; write-back 5:3 = 6, ignore PAT 6; A 8, D 9; ours: present 11, writes
            // 53:52 = 3.
            (1, ordinary(0x1_2345), 0x0030_0000_1234_5b77),
            (1, clean(ordinary(0x1_2345)), 0x0030_0000_1234_5977),
            (1, unused(ordinary(0x1_2345)), 0x0030_0000_1234_5a77),
            // The same with 7 = 1: a page of level 2 or 3.
            (2, ordinary(0x1_2200), 0x0030_0000_1220_0bf7),
            (3, ordinary(0x4_0000), 0x0030_0000_4000_0bf7),
            // R 0; uncacheable 5:3 = 0; present 11; writes 53:52 = 0.
            (1, DEVICE, 0x0000_0000_0000_1801),
            // R 0, X 2; write-combining 5:3 = 1; page 7; A 8; present 11; writes 53:52 = 1.
            (3, COMBINING, 0x0010_0000_4000_098d),
            // R 0, W 1; write-back, ignore PAT; A 8, D 9; present 11; writes 53:52 = 2.
            (1, LOGGED, 0x0020_0000_0000_1b73),
            // All bits of the frame: 51:12.
            (1, ordinary(0xff_ffff_ffff), 0x003f_ffff_ffff_fb77),
        ]);
        // R 0, W 1, X 2; A 8; present 11.
        check_table::<F>(0xa_bcde, 0x0000_0000_abcd_e907);
        check_table::<F>(0xff_ffff_ffff, 0x000f_ffff_ffff_f907);
    }
    rows::<Ept4>();
    rows::<Ept5>();
    assert_eq!(Ept4::HARDWARE_UPDATES, 0x300);
}

#[test]
fn ept_without_accessed_and_dirty_flags() {
    fn rows<F: Format>() {
        check::<F>(&[
            (1, ordinary(0x1_2345), 0x0030_0000_1234_5877),
            (2, ordinary(0x1_2200), 0x0030_0000_1220_08f7),
            (3, COMBINING, 0x0010_0000_4000_088d),
            (1, LOGGED, 0x0020_0000_0000_1873),
            // Not accessed: 2:0 = 0, read permission saved in 54; uncacheable; present 11.
            (1, DEVICE, 0x0040_0000_0000_1800),
            // The same with execute permission saved in 56, write-combining, page 7, writes 53:52
            // = 1.
            (3, unused(COMBINING), 0x0150_0000_4000_0888),
        ]);
        check_table::<F>(0xa_bcde, 0x0000_0000_abcd_e807);
    }
    rows::<Ept4NoAd>();
    rows::<Ept5NoAd>();
    assert_eq!(Ept4NoAd::HARDWARE_UPDATES, 0);
    // A leaf that is writable and not accessed cannot be expressed. A fault makes it writable.
    let tracked = 0x0170_0000_1234_5870;
    assert_eq!(Ept4NoAd::leaf(unused(ordinary(0x1_2345)), 1), tracked);
    assert_eq!(Ept4NoAd::clear_accessed(0x0030_0000_1234_5877), tracked);
    assert_eq!(Ept4NoAd::set_accessed(tracked), 0x0030_0000_1234_5875);
    assert_eq!(
        Ept4NoAd::make_writable(tracked),
        Some(0x0030_0000_1234_5877)
    );
}

#[test]
fn nested_paging() {
    fn rows<F: Format>() {
        check::<F>(&[
            // P 0, R/W 1, U/S 2; PWT 3 and PCD 4 = 0; A 5, D 6; ours: writes 10:9 = 3; NX 63 = 0.
            (1, ordinary(0x1_2345), 0x0000_0000_1234_5667),
            (1, clean(ordinary(0x1_2345)), 0x0000_0000_1234_5627),
            (1, unused(ordinary(0x1_2345)), 0x0000_0000_1234_5647),
            // PS 7.
            (2, ordinary(0x1_2200), 0x0000_0000_1220_06e7),
            (3, ordinary(0x4_0000), 0x0000_0000_4000_06e7),
            // P 0, U/S 2; PWT 3, PCD 4 (PAT entry 3, UC); NX 63.
            (1, DEVICE, 0x8000_0000_0000_101d),
            // P 0, U/S 2; PCD 4 (PAT entry 2, UC-); A 5; PS 7; writes 10:9 = 1.
            (3, COMBINING, 0x0000_0000_4000_02b5),
            // P 0, R/W 1, U/S 2; A 5, D 6; writes 10:9 = 2; NX 63.
            (1, LOGGED, 0x8000_0000_0000_1467),
            (1, ordinary(0xff_ffff_ffff), 0x000f_ffff_ffff_f667),
        ]);
        // P 0, R/W 1, U/S 2; A 5.
        check_table::<F>(0xa_bcde, 0x0000_0000_abcd_e027);
        check_table::<F>(0xff_ffff_ffff, 0x000f_ffff_ffff_f027);
    }
    rows::<Npt4>();
    rows::<Npt5>();
    assert_eq!(Npt4::HARDWARE_UPDATES, 0x60);
}

#[test]
fn riscv_with_svadu() {
    fn rows<F: Format>() {
        check::<F>(&[
            // V 0, R 1, W 2, X 3, U 4, A 6, D 7; RSW 9:8 = 3; frame 53:10; PBMT 62:61 = 0.
            (1, ordinary(0x1_2345), 0x0000_0000_048d_17df),
            (1, clean(ordinary(0x1_2345)), 0x0000_0000_048d_175f),
            (1, unused(ordinary(0x1_2345)), 0x0000_0000_048d_179f),
            (2, ordinary(0x1_2200), 0x0000_0000_0488_03df),
            (3, ordinary(0x4_0000), 0x0000_0000_1000_03df),
            // V 0, R 1, U 4; RSW 0; PBMT 2.
            (1, DEVICE, 0x4000_0000_0000_0413),
            // V 0, R 1, X 3, U 4, A 6; RSW 1; PBMT 1.
            (3, COMBINING, 0x2000_0000_1000_015b),
            // V 0, R 1, W 2, U 4, A 6, D 7; RSW 2.
            (1, LOGGED, 0x0000_0000_0000_06d7),
            (1, ordinary(0xfff_ffff_ffff), 0x003f_ffff_ffff_ffdf),
        ]);
        // V 0.
        check_table::<F>(0xa_bcde, 0x0000_0000_2af3_7801);
        check_table::<F>(0xfff_ffff_ffff, 0x003f_ffff_ffff_fc01);
    }
    rows::<Sv48x4Svadu>();
    rows::<Sv57x4Svadu>();
    assert_eq!(Sv48x4Svadu::HARDWARE_UPDATES, 0xc0);
}

#[test]
fn riscv_without_svadu() {
    fn rows<F: Format>() {
        check::<F>(&[
            (1, ordinary(0x1_2345), 0x0000_0000_048d_17df),
            (1, unused(ordinary(0x1_2345)), 0x0000_0000_048d_179f),
            (1, DEVICE, 0x4000_0000_0000_0413),
            (3, COMBINING, 0x2000_0000_1000_015b),
            (1, LOGGED, 0x0000_0000_0000_06d7),
        ]);
        check_table::<F>(0xa_bcde, 0x0000_0000_2af3_7801);
    }
    rows::<Sv48x4Svade>();
    rows::<Sv57x4Svade>();
    assert_eq!(Sv48x4Svade::HARDWARE_UPDATES, 0);
    // W and D come and go together.
    let writable = 0x0000_0000_048d_17df;
    assert_eq!(Sv48x4Svade::clear_dirty(writable), 0x0000_0000_048d_175b);
    assert_eq!(
        Sv48x4Svade::make_writable(0x0000_0000_048d_175b),
        Some(writable)
    );
}

#[test]
fn riscv_permissions_decide_the_kind() {
    // Table "Encoding of PTE R/W/X fields": R = W = X = 0 points to a table. All else is a leaf or
    // reserved.
    for low in 0..16u64 {
        let (valid, any) = (low & 1 != 0, low & 0b1110 != 0);
        assert_eq!(Sv48x4Svadu::is_leaf(low, 2), valid && any);
        assert_eq!(Sv48x4Svadu::is_table(low, 2), valid && !any);
    }
}

#[test]
fn arm64_with_hardware_management() {
    fn rows<F: Format>() {
        check::<F>(&[
            // Valid 0, page 1; MemAttr 5:2 = 6; S2AP 7:6 = 3; SH 9:8 = 3; AF 10; DBM 51; XN 54:53
            // = 0; ours: writes 57:56 = 3.
            (1, ordinary(0x1_2345), 0x0308_0000_1234_57db),
            // S2AP = 1 with DBM: writable and clean.
            (1, clean(ordinary(0x1_2345)), 0x0308_0000_1234_575b),
            (1, unused(ordinary(0x1_2345)), 0x0308_0000_1234_53db),
            // Bit 1 clear: a block.
            (2, ordinary(0x1_2200), 0x0308_0000_1220_07d9),
            (3, ordinary(0x4_0000), 0x0308_0000_4000_07d9),
            // Valid 0, page 1; MemAttr 1; S2AP 1; SH 3; XN 2.
            (1, DEVICE, 0x0040_0000_0000_1347),
            // Valid 0, block; MemAttr 5; S2AP 1; SH 3; AF 10; writes 57:56 = 1.
            (3, COMBINING, 0x0100_0000_4000_0755),
            // Valid 0, page 1; MemAttr 6; S2AP 3; SH 3; AF 10; DBM 51; XN 2; writes 57:56 = 2.
            (1, LOGGED, 0x0248_0000_0000_17db),
            (1, ordinary(0xf_ffff_ffff), 0x0308_ffff_ffff_f7db),
        ]);
        // Valid 0, table 1.
        check_table::<F>(0xa_bcde, 0x0000_0000_abcd_e003);
        check_table::<F>(0xf_ffff_ffff, 0x0000_ffff_ffff_f003);
    }
    rows::<Arm64Ipa40<true>>();
    rows::<Arm64Ipa44<true>>();
    rows::<Arm64Ipa48<true>>();
    assert_eq!(Arm64Ipa48::<true>::HARDWARE_UPDATES, 0x480);
}

#[test]
fn arm64_without_hardware_management() {
    fn rows<F: Format>() {
        check::<F>(&[
            (1, ordinary(0x1_2345), 0x0300_0000_1234_57db),
            (1, unused(ordinary(0x1_2345)), 0x0300_0000_1234_53db),
            (2, ordinary(0x1_2200), 0x0300_0000_1220_07d9),
            (1, DEVICE, 0x0040_0000_0000_1347),
            (3, COMBINING, 0x0100_0000_4000_0755),
            (1, LOGGED, 0x0240_0000_0000_17db),
        ]);
        check_table::<F>(0xa_bcde, 0x0000_0000_abcd_e003);
    }
    rows::<Arm64Ipa40<false>>();
    rows::<Arm64Ipa44<false>>();
    rows::<Arm64Ipa48<false>>();
    assert_eq!(Arm64Ipa48::<false>::HARDWARE_UPDATES, 0);
}

#[test]
fn arm64_without_forced_write_back() {
    check::<Arm64Stage2<40, false, false>>(&[
        // MemAttr 5:2 = 15.
        (1, ordinary(0x1_2345), 0x0300_0000_1234_57ff),
        (1, DEVICE, 0x0040_0000_0000_1347),
        (3, COMBINING, 0x0100_0000_4000_0755),
    ]);
}

#[test]
fn what_translates_nothing() {
    fn rows<F: Format>() {
        assert_eq!((F::NON_PRESENT, F::FROZEN), (0, 0x1a0));
        // MMIO 3; generation 9:4 = 5, 62:52 = 0x48d; inverted guest frame 51:12.
        check_mmio::<F>(0xf_ee00, 0x1_2345, 0x48df_ffff_011f_f058);
        check_mmio::<F>(0, 0, 0x000f_ffff_ffff_f008);
        check_mmio::<F>(0, 0x1_ffff, 0x7fff_ffff_ffff_f3f8);
        assert_eq!(F::MMIO_GENERATION_BITS, 17);
        assert_eq!(
            F::mmio(Gfn(7), 1 << 17 | 9),
            F::mmio(Gfn(7), 9),
            "a generation too large is cut"
        );
    }
    rows::<Ept4>();
    rows::<Ept5NoAd>();
    rows::<Npt5>();
    rows::<Sv48x4Svade>();
    rows::<Arm64Ipa48<true>>();
    // An entry that EPT takes as present is no marker.
    assert!(!Ept4::is_mmio(0x48df_ffff_011f_f058 | 1 << 2));
    // Sv57x4: generation 9:4 = 5, 62:59 = 0xb; inverted guest frame 58:12.
    check_mmio::<Sv57x4Svade>(0x4000_0000_fee0, 0x2c5, 0x5bff_ffff_f011_f058);
    assert_eq!(Sv57x4Svade::MMIO_GENERATION_BITS, 10);
}

#[test]
fn how_the_hardware_behaves() {
    use pageferry_tdp::format::{AccessedBy, DirtyBy, TlbAfterFault};
    fn rows<F: Format>(
        accessed: AccessedBy,
        dirty: DirtyBy,
        break_before_make: bool,
        after_fault: TlbAfterFault,
    ) {
        assert_eq!(
            (F::ACCESSED_BY, F::DIRTY_BY),
            (accessed, dirty),
            "{}",
            F::NAME
        );
        assert_eq!(F::BREAK_BEFORE_MAKE, break_before_make, "{}", F::NAME);
        assert_eq!(F::TLB_AFTER_FAULT, after_fault, "{}", F::NAME);
    }
    rows::<Ept4>(
        AccessedBy::Hardware,
        DirtyBy::Hardware,
        false,
        TlbAfterFault::Forgets,
    );
    rows::<Ept4NoAd>(
        AccessedBy::SavedPermissions,
        DirtyBy::WriteProtection,
        false,
        TlbAfterFault::Forgets,
    );
    rows::<Npt4>(
        AccessedBy::Hardware,
        DirtyBy::Hardware,
        false,
        TlbAfterFault::Forgets,
    );
    rows::<Sv48x4Svadu>(
        AccessedBy::Hardware,
        DirtyBy::Hardware,
        false,
        TlbAfterFault::KeepsAbsent,
    );
    rows::<Sv48x4Svade>(
        AccessedBy::FaultOnClear,
        DirtyBy::WriteProtection,
        false,
        TlbAfterFault::KeepsAbsent,
    );
    rows::<Arm64Ipa48<true>>(
        AccessedBy::Hardware,
        DirtyBy::Hardware,
        true,
        TlbAfterFault::KeepsDenied,
    );
    rows::<Arm64Ipa48<false>>(
        AccessedBy::FaultOnClear,
        DirtyBy::WriteProtection,
        true,
        TlbAfterFault::KeepsDenied,
    );
}
