//! `linux`: its rows, and what it refuses.

use crate::support::{BENCH, Ended, bench, ended};
use pageferry_testkit::guest_linux;
use serde_json::Value;
use std::process::Command;
use std::sync::OnceLock;

/// The program, which finds the guest that the tests run. `None` if there is none.
fn with_guest(words: &[&str]) -> Option<Ended> {
    let [kernel, _] = guest_linux()?;
    let folder = kernel.parent().expect("a file is in a folder");
    let mut command = Command::new(BENCH);
    command.args(words).env("PAGEFERRY_GUEST_LINUX", folder);
    Some(ended(&mut command))
}

/// The rows of the shortest run, which all tests share. `None` if there is no guest.
pub(crate) fn quick() -> Option<&'static Value> {
    static ROWS: OnceLock<Option<Value>> = OnceLock::new();
    let run = || {
        let ended = with_guest(&["linux", "--quick", "--json"])?;
        Some(ended.json())
    };
    ROWS.get_or_init(run).as_ref()
}

#[test]
fn every_row_has_a_figure() {
    let Some(json) = quick() else {
        return;
    };
    let rows = json.as_array().expect("an array of rows");
    for case in ["linux.up", "linux.exec", "linux.loop", "linux.blackout"] {
        let row = rows.iter().find(|row| row["case"] == case);
        let row = row.unwrap_or_else(|| panic!("no {case} in {json}"));
        assert!(row["value"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["samples"], 1);
    }
    let bare = rows.iter().find(|row| row["case"] == "bare.loop");
    assert!(bare.is_some_and(|bare| bare["target"].is_null()));
}

#[test]
fn without_a_guest_one_sentence_says_how_to_build_one() {
    let dir = tempfile::tempdir().expect("a folder");
    let absent = dir.path().join("absent");
    let file = absent.to_str().expect("a UTF-8 path");
    let named = ["linux", "--kernel", file, "--initrd", file];
    bench(&named).assert_failed(2, "cargo xtask guest-linux");
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() {
    let fails = |more: &[&str], part: &str| {
        bench(&[&["linux"], more].concat()).assert_failed(2, part);
    };
    fails(&["--kernel", "Image"], "arguments were not provided");
    fails(&["--minutes", "1"], "1 is not in 2..=1440");
    fails(&["--repeat", "0"], "0 is not in 1..=1000");
    fails(&["--peer", "bochs"], "bochs");
    fails(&["--peer-program", "q"], "arguments were not provided");
}

#[test]
fn a_kernel_for_another_machine_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let (kernel, initrd) = (dir.path().join("Image"), dir.path().join("initrd.gz"));
    std::fs::write(&kernel, "no kernel").expect("written");
    std::fs::write(&initrd, "no initrd").expect("written");
    let words = [&kernel, &initrd].map(|path| path.to_str().expect("a UTF-8 path"));
    let named = ["linux", "--kernel", words[0], "--initrd", words[1]];
    bench(&named).assert_failed(2, "kernel");
}
