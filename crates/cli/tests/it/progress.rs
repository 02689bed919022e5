//! The progress on a terminal: one line that fits, and log lines that leave it whole.

use crate::support::{Destination, PAGEFERRY, Process, Source, held_link, status, wait_during};
use pageferry_testkit::{skip, wait_for};
use std::process::Command;

/// What a terminal of `columns` shows in the end, and the widest that its last row was after it was
/// written with a percentage.
fn rows(stream: &str, columns: usize) -> (Vec<String>, usize) {
    let mut rows = vec![Vec::<char>::new()];
    let (mut row, mut column, mut widest) = (0_usize, 0, 0);
    let mut chars = stream.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '\r' => column = 0,
            '\n' => row += 1,
            '\u{1b}' if chars.next_if_eq(&'[').is_some() => {
                let mut number = String::new();
                let end = loop {
                    match chars.next() {
                        Some(end) if end.is_ascii_alphabetic() => break end,
                        Some(char) => number.push(char),
                        None => return (Vec::new(), widest),
                    }
                };
                let number = number.parse().unwrap_or(1);
                match end {
                    'A' => row = row.saturating_sub(number),
                    'B' => row += number,
                    'K' if number == 2 => rows[row].clear(),
                    'K' => rows[row].truncate(column),
                    _ => {}
                }
            }
            char if char.is_control() => {}
            char => {
                if column == columns {
                    (row, column) = (row + 1, 0);
                }
                if rows.len() <= row {
                    rows.resize(row + 1, Vec::new());
                }
                let line = &mut rows[row];
                line.resize(line.len().max(column + 1), ' ');
                line[column] = char;
                column += 1;
                if char == '%' {
                    widest = widest.max(line.len());
                }
            }
        }
        if rows.len() <= row {
            rows.resize(row + 1, Vec::new());
        }
    }
    let text = |row: Vec<char>| row.into_iter().collect::<String>().trim_end().to_owned();
    (rows.into_iter().map(text).collect(), widest)
}

/// Runs `pageferry` on a terminal with so many columns.
fn on_terminal(args: &[&str], columns: usize) -> Process {
    let quoted = args.iter().map(|arg| format!(" '{arg}'"));
    let line = format!(
        "stty cols {columns}; '{PAGEFERRY}'{}",
        quoted.collect::<String>()
    );
    let mut command = Command::new("script");
    command.args(["-qec", &line, "/dev/null"]);
    Process::spawn(command)
}

fn has_script(test: &str) -> bool {
    let found = Command::new("script").arg("--version").output();
    let missing = found.err();
    !missing.is_some_and(|why| skip("script", format_args!("{test}: no script(1): {why}")))
}

#[test]
fn the_progress_is_one_line_and_log_lines_leave_it_whole() {
    if !has_script("the_progress_is_one_line_and_log_lines_leave_it_whole") {
        return;
    }
    for columns in [40, 100] {
        let source = Source::start("16M");
        source.wait_until_all_is_written();
        let dir = crate::support::Dir::new();
        let socket = dir.path("vm");
        let args = [
            "--log",
            "info",
            "receive",
            "--listen",
            "127.0.0.1:0",
            "--control",
        ];
        let destination = on_terminal(&[&args[..], &[socket.to_str().unwrap()]].concat(), columns);
        let address = destination.wait_until_said("listening on tcp:");
        let shaper = held_link(address.trim());
        let to = shaper.addr().to_string();
        let mut migrate = source.migrate_with(&to, &["--precopy-passes", "0"]);
        wait_during(&mut migrate, "the time left", || {
            destination.said().contains(" s left").then_some(())
        });
        shaper.throttle(None);
        migrate.end().assert_ok();
        wait_for("the VM", || {
            (status(&socket)?["state"] == "running").then_some(())
        });
        crate::support::pageferry(&["quit", "--vm", socket.to_str().unwrap()]).assert_ok();
        let ended = destination.end();
        ended.assert_ok();
        let (shown, widest) = rows(&ended.stdout, columns);
        let log = shown.iter().filter(|row| row.contains(" INFO "));
        let mut lines = 0;
        for row in log {
            assert!(row.starts_with("20"), "{row:?} in {shown:#?}");
            assert!(!row.contains('%'), "{row:?}");
            lines += 1;
        }
        assert!(lines >= 3, "{shown:#?}");
        let result = |start| shown.iter().any(|row| row.starts_with(start));
        assert!(result("listening on tcp:"), "{shown:#?}");
        assert!(ended.stdout.contains("post-copy"), "{ended:?}");
        assert!(ended.stdout.contains("/s"), "no rate: {ended:?}");
        assert!(ended.stdout.contains(" s left"), "no time left: {ended:?}");
        assert!(
            0 < widest && widest < columns,
            "{widest} of {columns}: {shown:#?}"
        );
    }
}

#[test]
fn elsewhere_the_progress_is_plain_lines() {
    let source = Source::start("16M");
    let destination = Destination::start(&[]);
    let moved = source.migrate(&destination.address).end();
    moved.assert_ok();
    for part in [" s] setup", "pre-copy", "switch-over", "post-copy"] {
        assert!(moved.stderr.contains(part), "{part} in {moved:?}");
    }
    assert!(!moved.stderr.contains(['\r', '\u{1b}']), "{moved:?}");
}
