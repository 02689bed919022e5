//! Texts and bytes of CPU models, good and malformed.

use super::*;
use proptest::prelude::*;

const GOOD: &str = "\
# The least that a kernel needs.
0x1 0 0 0 0 07808171   # FPU to SSE2

80000001 0x0 0 0 0 20000800
";

fn refusal(text: &str) -> String {
    CpuModel::from_text(text).unwrap_err().to_string()
}

#[test]
fn names_are_models_and_others_are_none() {
    assert_eq!(CpuModel::named("host"), Some(CpuModel::default()));
    let [v2, v3] = ["x86-64-v2", "x86-64-v3"].map(|name| CpuModel::named(name).unwrap());
    let avx2 = |model: &CpuModel| find(&model.required, 7, 0).map(|leaf| leaf.registers[1]);
    assert_eq!((avx2(&v2), avx2(&v3)), (None, Some(0x128)));
    for name in ["", "HOST", "x86-64-v1", "x86-64-v4", "x86-64-v2 "] {
        assert_eq!(CpuModel::named(name), None);
    }
    // A level shows all that it requires.
    for model in [v2, v3] {
        let most = model.most.as_ref().unwrap();
        for leaf in &model.required {
            let shown = find(most, leaf.function, leaf.index).unwrap().registers;
            assert!((0..4).all(|reg| leaf.registers[reg] & !shown[reg] == 0));
        }
    }
}

#[test]
fn comments_blank_lines_and_prefixes_are_taken() {
    let model = CpuModel::from_text(GOOD).unwrap();
    let most = model.most.unwrap();
    assert_eq!(most.len(), 2);
    assert_eq!(find(&most, 1, 0).unwrap().registers[3], 0x0780_8171);
    assert_eq!(model.required, []);
}

#[test]
fn malformed_texts_are_refused_by_line() {
    for (line, says) in [
        ("7 0 0 0 0", "line 5 has 5 words, expected 6: LEAF SUBLEAF"),
        ("7 0 0 0 0 0 0", "line 5 has 7 words"),
        ("7 0 0 0 0 g", "line 5 has 'g', expected a hexadecimal"),
        ("7 0 0 0 0 +1", "line 5 has '+1'"),
        ("7 0 0 0 0 -1", "line 5 has '-1'"),
        ("7 0 0 0 0 0x", "line 5 has '0x'"),
        ("7 0 0 0 0 100000000", "line 5 has '100000000'"),
        ("7 0 0 0 0 \u{1b}[2J", "line 5 has '\\u{1b}[2J'"),
        ("1 0 0 0 0 0", "line 5 repeats leaf 0x1.0"),
    ] {
        let why = refusal(&format!("{GOOD}{line}"));
        assert!(why.contains(says), "{why}");
    }
    let long = format!("{GOOD}7 0 0 0 0 {}", "x".repeat(1000));
    assert!(refusal(&long).len() < 100);
}

#[test]
fn a_text_without_what_every_processor_has_is_refused() {
    for (text, says) in [
        (
            "",
            "it has EDX = 0x0 in leaf 0x1, expected all bits of 0x7808171",
        ),
        ("1 0 0 0 0 07808171", "leaf 0x80000001"),
        ("1 0 0 0 0 03808171", "EDX = 0x3808171 in leaf 0x1"),
    ] {
        let why = refusal(text);
        assert!(why.contains(says), "{why}");
    }
}

#[test]
fn leaves_are_bounded() {
    let leaf = |index: usize| format!("f00 {index:x} 0 0 0 0\n");
    let text = |leaves| GOOD.to_owned() + &(0..leaves).map(leaf).collect::<String>();
    CpuModel::from_text(&text(MAX_LEAVES - 2)).unwrap();
    let why = refusal(&text(MAX_LEAVES - 1));
    assert_eq!(
        why,
        "line 259 is beyond 256 leaves, expected at most so many"
    );
}

#[test]
fn bytes_that_are_no_cpuid_are_refused() {
    let leaf = |words: [u32; 7]| words.map(u32::to_le_bytes).concat();
    let good = leaf([7, 0, 1, 0, 0x20, 0, 0]);
    let decoded = Cpuid::from_bytes(&good).unwrap();
    assert_eq!(decoded.leaves()[0].registers, [0, 0x20, 0, 0]);
    assert_eq!(decoded.to_bytes(), good);
    let many: Vec<u8> = (0..257)
        .flat_map(|at| leaf([at, 0, 0, 0, 0, 0, 0]))
        .collect();
    assert_eq!(Cpuid::from_bytes(&many[28..]).unwrap().leaves().len(), 256);
    for (bytes, says) in [
        (&[][..], "0 bytes, expected 1 to 256 leaves of 28"),
        (&good[..27], "27 bytes"),
        (&[&good[..], &[0]].concat(), "29 bytes"),
        (&many, "7196 bytes"),
        (&leaf([7, 0, 2, 0, 0, 0, 0]), "leaf 0x7.0 with flags 0x2"),
        (&leaf([7, 1, 0, 0, 0, 0, 0]), "leaf 0x7.1 with flags 0x0"),
        (&[&good[..], &good].concat(), "leaf 0x7.0 with flags 0x1"),
    ] {
        let why = Cpuid::from_bytes(bytes).unwrap_err().to_string();
        assert!(why.contains(says), "{why}");
    }
}

proptest! {
    #[test]
    fn texts_are_read_as_written(
        rows in prop::collection::btree_map((2..64_u32, 0..4_u32), any::<[u32; 4]>(), 0..80),
        comment in "[ 0-9a-fx#]{0,20}",
    ) {
        let mut text = GOOD.to_owned();
        for ((function, index), [a, b, c, d]) in &rows {
            text += &format!("\t{function:X} {index:x}  0x{a:08x} {b:x} {c:X} {d:x}#{comment}\n");
        }
        let most = CpuModel::from_text(&text).unwrap().most.unwrap();
        prop_assert_eq!(most.len(), rows.len() + 2);
        for ((function, index), registers) in rows {
            prop_assert_eq!(find(&most, function, index).unwrap().registers, registers);
        }
    }

    #[test]
    fn any_text_and_any_bytes_are_read_without_a_panic(
        text in "\\PC{0,200}",
        near in "[ 0-9a-fx#\n]{0,200}",
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let _ = CpuModel::from_text(&text);
        let _ = CpuModel::from_text(&format!("{GOOD}{near}"));
        if let Ok(cpuid) = Cpuid::from_bytes(&bytes) {
            prop_assert_eq!(cpuid.to_bytes(), bytes);
        }
    }
}
