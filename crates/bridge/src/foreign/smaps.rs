//! The mappings of a VMM's process, as the kernel describes them.

use rustix::process::Pid;
use std::fs::File;
use std::io::Read as _;
use std::str::SplitAsciiWhitespace;

/// The longest description of all mappings: the kernel's limit is 65 530 of them.
const MAX_SMAPS: u64 = 256 << 20;

/// The text of `/proc/PID/smaps`. A mapping that was not read may be of any kind, so the text is
/// whole, or `None`.
pub(crate) fn read(pid: Pid) -> Option<String> {
    let file = File::open(format!("/proc/{}/smaps", pid.as_raw_nonzero())).ok()?;
    let mut text = String::new();
    let length = file.take(MAX_SMAPS).read_to_string(&mut text).ok()?;
    ((length as u64) < MAX_SMAPS).then_some(text)
}

/// All fields of all mappings: the line of the mapping, the field's name with its colon, and its
/// words.
pub(crate) fn fields(smaps: &str) -> impl Iterator<Item = (&str, &str, SplitAsciiWhitespace<'_>)> {
    let mut mapping = "";
    smaps.lines().filter_map(move |line| {
        let mut words = line.split_ascii_whitespace();
        let name = words.next()?;
        if !name.ends_with(':') {
            mapping = line;
            return None;
        }
        Some((mapping, name, words))
    })
}
