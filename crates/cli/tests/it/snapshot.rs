//! `pageferry snapshot`: files of other VMMs go in and come out, and damage is named.

use crate::support::{Dir, Ended, Process};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Runs `pageferry snapshot` with the words of `line`. A word that begins with `@` is a file of the
/// directory.
#[track_caller]
pub(crate) fn snapshot(dir: &Dir, line: &str) -> Ended {
    start(dir, line).end()
}

fn start(dir: &Dir, line: &str) -> Process {
    let file = |name: &str| dir.path(name).to_str().unwrap().to_owned();
    let word = |word: &str| match word.split_once('@') {
        Some((before, name)) => format!("{before}{}", file(name)),
        None => word.to_owned(),
    };
    let words: Vec<String> = line.split(' ').map(word).collect();
    Process::start(&[vec!["snapshot".to_owned()], words].concat(), dir)
}

/// Pages that each have their own number, with some of zeros.
fn memory(pages: u64) -> Vec<u8> {
    let page = |number: u64| match number % 4 {
        0 => vec![0; 4096],
        _ => number.to_le_bytes().repeat(512),
    };
    (1..=pages).flat_map(page).collect()
}

/// A full memory file, a sparse diff, and the memory of both. The diff writes pages 3 and 40.
pub(crate) fn files(dir: &Dir) -> (Vec<u8>, Vec<u8>) {
    let full = memory(64);
    std::fs::write(dir.path("full.mem"), &full).unwrap();
    let mut merged = full.clone();
    let diff = File::create(dir.path("diff.mem")).unwrap();
    diff.set_len(full.len() as u64).unwrap();
    for page in [3, 40] {
        let at = page * 4096;
        merged[at..at + 4096].fill(page as u8);
        diff.write_all_at(&merged[at..at + 4096], at as u64)
            .unwrap();
    }
    std::fs::write(dir.path("vmstate"), b"opaque").unwrap();
    (full, merged)
}

#[track_caller]
fn assert_file(dir: &Dir, name: &str, bytes: &[u8]) {
    assert!(std::fs::read(dir.path(name)).unwrap() == bytes, "{name}");
}

#[test]
fn files_come_out_as_they_went_in() {
    let dir = Dir::new();
    let (full, merged) = files(&dir);
    snapshot(&dir, "pack @full.mem @full --chunk 16K --compression zstd").assert_ok();
    snapshot(
        &dir,
        "pack --base @full @diff.mem @diff --state @vmstate --state b=@vmstate",
    )
    .assert_ok();
    snapshot(&dir, "unpack @full @1.mem").assert_ok();
    assert_file(&dir, "1.mem", &full);
    snapshot(&dir, "unpack @diff @2.mem").assert_ok();
    assert_file(&dir, "2.mem", &merged);
    let ended = snapshot(&dir, "unpack @diff @3.mem --diff --json");
    ended.assert_ok();
    assert_eq!(ended.json()["written_bytes"], 2 * 4096);
    assert_file(&dir, "3.mem", &std::fs::read(dir.path("diff.mem")).unwrap());
    std::fs::create_dir(dir.path("states")).unwrap();
    snapshot(&dir, "unpack @diff --states @states").assert_ok();
    assert_file(&dir, "states/vmstate", b"opaque");
    assert_file(&dir, "states/b", b"opaque");
    snapshot(&dir, "verify @diff").assert_ok();
    let info = snapshot(&dir, "info @diff");
    info.assert_ok();
    for part in ["base", "16 of 16 KiB", "in bases", "vmstate, 6 B"] {
        assert!(info.stdout.contains(part), "{part}: {}", info.stdout);
    }
    assert!(info.stdout.contains(dir.path("full").to_str().unwrap()));
}

#[test]
fn a_diff_of_whole_memories_is_small() {
    let dir = Dir::new();
    let (_, merged) = files(&dir);
    std::fs::write(dir.path("merged.mem"), &merged).unwrap();
    snapshot(&dir, "pack @full.mem @a").assert_ok();
    snapshot(&dir, "pack @merged.mem @b").assert_ok();
    snapshot(&dir, "diff @a @merged.mem @of-file").assert_ok();
    snapshot(&dir, "diff @a @b @of-packed --packed").assert_ok();
    for name in ["of-file", "of-packed"] {
        let ended = snapshot(&dir, &format!("unpack @{name} @{name}.mem --diff --json"));
        ended.assert_ok();
        assert_eq!(ended.json()["written_bytes"], 2 * 4096, "{name}");
        snapshot(&dir, &format!("unpack @{name} @{name}.whole")).assert_ok();
        assert_file(&dir, &format!("{name}.whole"), &merged);
    }
}

#[test]
fn a_snapshot_that_is_not_expected_is_refused() {
    let dir = Dir::new();
    files(&dir);
    snapshot(
        &dir,
        "pack @full.mem @packed --vmm firecracker --vmm-version 1.16.1 --cpu T2CL",
    )
    .assert_ok();
    let labels = ["vmm firecracker", "version 1.16.1", "cpu T2CL"];
    let all = labels.map(|label| format!(" --expect-{label}")).concat();
    snapshot(&dir, &format!("unpack @packed @1.mem{all}")).assert_ok();
    for (flag, part) in [
        ("vmm qemu", "the VMM of"),
        ("version 2", "is '1.16.1': expected '2'"),
        ("cpu T2A", "the CPU of"),
    ] {
        let ended = snapshot(&dir, &format!("unpack @packed @2.mem --expect-{flag}"));
        ended.assert_failed(8, part);
        assert!(!dir.path("2.mem").exists());
    }
}

/// A copy has filled the holes of a diff.
#[test]
fn zeros_of_a_diff_that_may_be_filled_holes_are_refused() {
    let dir = Dir::new();
    files(&dir);
    snapshot(&dir, "pack @full.mem @full").assert_ok();
    let copy = std::fs::read(dir.path("diff.mem")).unwrap();
    std::fs::write(dir.path("copy.mem"), copy).unwrap();
    let pack = "pack --base @full @copy.mem @out --json";
    snapshot(&dir, pack).assert_failed(2, "--zeros-are-data");
    assert!(!dir.path("out").exists());
    let ended = snapshot(&dir, &format!("{pack} --zeros-are-data"));
    ended.assert_ok();
    // Of the 48 pages of the base that are not zeros, the diff has one.
    assert_eq!(ended.json()["zeroed_pages"], 47);
    let ended = snapshot(&dir, "pack --base @full @diff.mem @diff");
    ended.assert_ok();
    let said = "0 pages of zeros replace others";
    assert!(ended.stdout.contains(said), "{}", ended.stdout);
}

#[test]
fn labels_of_others_give_a_terminal_no_orders() {
    let dir = Dir::new();
    files(&dir);
    let label = "\x1b]0;x\x07\x1b[2J\u{9b}31m";
    snapshot(&dir, &format!("pack @full.mem @packed --vmm {label}")).assert_ok();
    let info = snapshot(&dir, "info @packed");
    info.assert_ok();
    let refused = snapshot(&dir, "unpack @packed @out --expect-vmm x");
    refused.assert_failed(8, "the VMM of");
    for text in [&info.stdout, &refused.stderr] {
        assert!(text.contains("\\u{1b}]0;x"), "{text}");
        assert!(
            !text.chars().any(|c| c.is_control() && c != '\n'),
            "{text:?}"
        );
    }
}

#[test]
fn damage_ends_with_its_own_code_and_names_the_chunk() {
    let dir = Dir::new();
    let (full, _) = files(&dir);
    snapshot(&dir, "pack @full.mem @packed --chunk 4K").assert_ok();
    let packed = File::options()
        .write(true)
        .open(dir.path("packed"))
        .unwrap();
    // The first stored byte: that of the first chunk.
    packed.write_all_at(&[0xff], 72).unwrap();
    let part = "chunk 0 (memory offset 0x0)";
    let ended = snapshot(&dir, "verify @packed --json");
    ended.assert_failed(7, part);
    assert_eq!(ended.json()["damaged"], 1);
    snapshot(&dir, "unpack @packed @1.mem").assert_failed(7, part);
    assert!(!dir.path("1.mem").exists());
    packed.set_len(full.len() as u64 / 64).unwrap();
    for command in ["verify @packed", "info @packed", "unpack @packed @1.mem"] {
        snapshot(&dir, command).assert_failed(7, "truncated");
    }
}

#[test]
fn files_that_do_not_serve_are_named() {
    let dir = Dir::new();
    files(&dir);
    std::fs::write(dir.path("odd"), [0; 5000]).unwrap();
    mknodat(CWD, dir.path("fifo"), FileType::Fifo, Mode::RUSR, 0).unwrap();
    snapshot(&dir, "pack @full.mem @full").assert_ok();
    snapshot(&dir, "pack --base @full @diff.mem @diff").assert_ok();
    for (line, part) in [
        ("pack @none @out", "cannot read"),
        ("pack @fifo @out", "it is not a regular file"),
        ("pack @odd @out", "multiple of 4096"),
        ("pack @full.mem @full", "there is a file already"),
        ("pack @full.mem @none/out", "cannot write"),
        ("pack @full.mem @out --state @none", "none"),
        (
            "pack --base @full.mem @diff.mem @out",
            "not a packed snapshot",
        ),
        (
            "pack --base @full @diff.mem @out --chunk 4K",
            "chunks of its base",
        ),
        ("diff @full @full @out", "equal lengths"),
        ("info @full.mem", "not a packed snapshot"),
        ("unpack @full @full.mem", "there is a file already"),
    ] {
        let part = part.replace("chunks of its base", "a diff has those of its base");
        snapshot(&dir, line).assert_failed(2, &part);
        assert!(!dir.path("out").exists(), "{line}");
    }
    for line in [
        "pack @full.mem",
        "unpack @full",
        "unpack @full --diff",
        "pack a b --chunk 3K",
    ] {
        assert_eq!(snapshot(&dir, line).code, Some(2), "{line}");
    }
    std::fs::create_dir(dir.path("elsewhere")).unwrap();
    std::fs::rename(dir.path("full"), dir.path("elsewhere/full")).unwrap();
    snapshot(&dir, "info @diff").assert_failed(2, "is missing");
    snapshot(&dir, "info @diff --base-dir @elsewhere").assert_ok();
}

fn parts(dir: &Path) -> usize {
    let names = std::fs::read_dir(dir).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".part")).count()
}

#[test]
fn ctrl_c_leaves_no_partial_file() {
    let dir = Dir::new();
    // So many chunks of a hole that it takes long, and no disk.
    let hole = File::create(dir.path("hole")).unwrap();
    hole.set_len(256 << 30).unwrap();
    let pack = start(&dir, "pack @hole @out --chunk 4K");
    pack.wait_until_said("] pack");
    pageferry_testkit::wait_until("the partial file", || parts(&dir.path("")) == 1);
    pack.interrupt();
    pack.end().assert_failed(9, "cancelled");
    assert_eq!(parts(&dir.path("")), 0);
    assert!(!dir.path("out").exists());
}
