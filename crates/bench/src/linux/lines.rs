//! The lines of the guest's first process (`lab/guest-linux/init.c`).

use crate::BenchError;

/// The case of the first process's start.
pub(super) const UP: &str = "linux.up";

/// What a line that begins with `PF` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// The nanoseconds that something takes by the guest's clock, and its case.
    Time(&'static str, u64),
    /// The arithmetic loop: its nanoseconds, and what it has computed.
    Loop(u64, u64),
    /// Rounds of mixed work that are done.
    Busy(u64),
    /// The time of an instruction that leaves the guest, in nanoseconds.
    Exit(u64),
    /// Reads of a disk: the time in nanoseconds, and the blocks that were read in it.
    Reads(u64, u64),
    /// The work is done.
    Done,
    /// A line of another kind of work.
    Other,
}

/// Reads a line of the console. `None`: it is not the first process's, but the kernel's.
///
/// # Errors
/// [`BenchError::WrongValue`] if the guest has found something wrong. [`BenchError::Stopped`] for a
/// line that the first process does not write.
pub(super) fn parse(line: &str) -> Result<Option<Line>, BenchError> {
    let Some(rest) = line.strip_prefix("PF ") else {
        return Ok(None);
    };
    let words: Vec<&str> = rest.split_whitespace().collect();
    let time = |case, ns: &str| Some(Line::Time(case, ns.parse().ok()?));
    let read = match words.as_slice() {
        ["FAIL", what @ ..] => {
            let what = what.join(" ");
            return Err(BenchError::WrongValue(format!(
                "Linux reports a failure of '{what}'"
            )));
        }
        ["up", ns] => time(UP, ns),
        ["fork", ns] => time("linux.fork", ns),
        ["exec", ns] => time("linux.exec", ns),
        ["pipe", ns] => time("linux.pipe", ns),
        ["touch", ns] => time("linux.touch", ns),
        ["loop", ns, result] => {
            let result = u64::from_str_radix(result, 16).ok();
            ns.parse()
                .ok()
                .zip(result)
                .map(|(ns, result)| Line::Loop(ns, result))
        }
        ["busy", _, rounds] => rounds.parse().ok().map(Line::Busy),
        ["exit", ns] => ns.parse().ok().map(Line::Exit),
        ["reads", ns, blocks] => {
            let both = ns.parse().ok().zip(blocks.parse().ok());
            both.map(|(ns, blocks)| Line::Reads(ns, blocks))
        }
        ["load" | "md5" | "net", _, wrong] => match wrong.parse::<u64>() {
            Ok(0) => Some(Line::Other),
            Ok(wrong) => {
                let why = format!("Linux found wrong contents {wrong} times");
                return Err(BenchError::WrongValue(why));
            }
            Err(_) => None,
        },
        ["done"] => Some(Line::Done),
        ["tick" | "check" | "storm" | "torture", ..] => Some(Line::Other),
        _ => None,
    };
    match read {
        Some(line) => Ok(Some(line)),
        None => Err(BenchError::Stopped(format!(
            "its first process wrote '{line}': expected a line of lab/guest-linux/init.c"
        ))),
    }
}

/// Cuts what a console writes into lines.
#[derive(Default)]
pub(super) struct Splitter(Vec<u8>);

impl Splitter {
    /// The longest line that is kept. The first process writes shorter ones.
    const LONGEST: usize = 4096;

    /// Takes more of the text. Returns the lines that are whole now.
    pub(super) fn take(&mut self, text: &[u8]) -> Vec<String> {
        self.0.extend(text);
        let mut lines = Vec::new();
        while let Some(end) = self.0.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.0.drain(..=end).collect();
            lines.push(String::from_utf8_lossy(&line).trim().to_owned());
        }
        if self.0.len() > Self::LONGEST {
            self.0.clear();
        }
        lines
    }

    /// Takes more of the text of a load. Returns how many lines of the first process are whole now.
    ///
    /// # Errors
    /// As [`parse`], and if the load has ended.
    pub(super) fn seen(&mut self, text: &[u8]) -> Result<u32, BenchError> {
        let mut seen = 0;
        for line in self.take(text) {
            match parse(&line)? {
                Some(Line::Done) => return Err(BenchError::Stopped("its load ended".into())),
                Some(_) => seen += 1,
                None => {}
            }
        }
        Ok(seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_of_the_first_process_is_read() {
        let read = |line: &str| parse(line).expect("a good line");
        assert_eq!(read("PF up 262793200"), Some(Line::Time(UP, 262_793_200)));
        for task in ["fork", "exec", "pipe", "touch"] {
            match read(&format!("PF {task} 7")) {
                Some(Line::Time(case, 7)) => assert_eq!(case, format!("linux.{task}")),
                other => panic!("{task} is {other:?}"),
            }
        }
        let looped = Line::Loop(9, 0xd85e_ef52_1f96_32d3);
        assert_eq!(read("PF loop 9 d85eef521f9632d3"), Some(looped));
        assert_eq!(read("PF busy 9 12"), Some(Line::Busy(12)));
        assert_eq!(read("PF exit 7"), Some(Line::Exit(7)));
        assert_eq!(read("PF reads 9 12"), Some(Line::Reads(9, 12)));
        assert_eq!(read("PF load 4000 0"), Some(Line::Other));
        assert_eq!(read("PF tick 5 6"), Some(Line::Other));
        assert_eq!(read("PF done"), Some(Line::Done));
        assert_eq!(read("[    1.6] reboot: Power down"), None);
        assert_eq!(read(""), None);
    }

    #[test]
    fn a_malformed_line_is_told() {
        for bad in [
            "PF ",
            "PF up",
            "PF up x",
            "PF up -1",
            "PF fork 1 2",
            "PF loop 1",
            "PF loop 1 xyz",
            "PF loop 99999999999999999999 1",
            "PF busy 1",
            "PF exit x",
            "PF reads 1",
            "PF load 1 many",
            "PF done now",
            "PF what 1",
        ] {
            let why = parse(bad).expect_err(bad).to_string();
            assert!(why.contains("init.c") && why.contains(bad.trim()), "{why}");
        }
    }

    #[test]
    fn what_the_guest_finds_wrong_is_a_wrong_value() {
        for bad in ["PF FAIL fork or exec", "PF load 500 3", "PF md5 5 1"] {
            let why = parse(bad).expect_err(bad);
            assert!(matches!(why, BenchError::WrongValue(_)), "{why}");
        }
    }

    #[test]
    fn text_comes_in_any_pieces() {
        let mut splitter = Splitter::default();
        assert!(splitter.take(b"PF u").is_empty());
        assert_eq!(splitter.take(b"p 12\r\nPF d"), ["PF up 12"]);
        assert_eq!(splitter.take(b"one\n\n"), ["PF done", ""]);
        assert!(splitter.take(&[0xff; 10_000]).is_empty());
        assert_eq!(splitter.take(b"\nPF done\n"), ["", "PF done"]);
    }
}
