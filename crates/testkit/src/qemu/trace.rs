//! The stalls of QEMU's guest, from the trace points of the destination.
//!
//! **Mechanism.** A stall begins when QEMU's fault thread has read a fault
//! (`postcopy_ram_fault_thread_request`), and ends when the page is installed
//! (`postcopy_page_req_del`), so the time until the fault thread runs is not in it. Several vCPUs
//! may wait for one page. A fault whose page is not requested, since it has just come, is no stall.

use std::collections::HashMap;

/// The events that QEMU must trace.
pub(super) const EVENTS: [&str; 4] = [
    "postcopy_ram_fault_thread_request",
    "postcopy_page_req_del",
    "loadvm_postcopy_handle_run",
    "postcopy_ram_listen_thread_exit",
];

/// The figures in a trace.
#[derive(Debug, Default, PartialEq)]
pub struct Traced {
    /// The stalls in nanoseconds, ascending.
    pub stalls: Vec<u64>,
    /// The length of post-copy in seconds, once it has ended.
    pub total_s: Option<f64>,
}

/// Reads the lines of a trace, each `PID@SECONDS.MICROSECONDS:EVENT TEXT`. Other lines are skipped.
pub(super) fn read(text: &str) -> Traced {
    let mut waiting: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut traced = Traced::default();
    let mut began = None;
    for (at_ns, event, words) in text.lines().filter_map(parse) {
        match event {
            "loadvm_postcopy_handle_run" => began = began.or(Some(at_ns)),
            "postcopy_ram_listen_thread_exit" => {
                let length = began.map(|began| at_ns.saturating_sub(began));
                traced.total_s = length.map(|ns| ns as f64 / 1e9);
            }
            "postcopy_ram_fault_thread_request" if words.contains("rb=ram ") => {
                if let Some(page) = address(words, "HVA=0x") {
                    waiting.entry(page).or_default().push(at_ns);
                }
            }
            "postcopy_page_req_del" => {
                let page = address(words, "page req 0x");
                let starts = page.and_then(|page| waiting.remove(&page));
                let starts = starts.unwrap_or_default().into_iter();
                let stalls = starts.map(|start| at_ns.saturating_sub(start));
                traced.stalls.extend(stalls);
            }
            _ => {}
        }
    }
    traced.stalls.sort_unstable();
    traced
}

/// The time in nanoseconds, the event and the text of a line.
fn parse(line: &str) -> Option<(u64, &str, &str)> {
    let (_, rest) = line.split_once('@')?;
    let (time, rest) = rest.split_once(':')?;
    let (seconds, micros) = time.split_once('.')?;
    let (event, words) = rest.split_once(' ').unwrap_or((rest, ""));
    let seconds: u64 = seconds.parse().ok()?;
    let micros: u64 = micros.parse().ok()?;
    let at_us = seconds.checked_mul(1_000_000)?.checked_add(micros)?;
    Some((at_us.checked_mul(1000)?, event.trim(), words))
}

/// The page of the address behind `mark`.
fn address(words: &str, mark: &str) -> Option<u64> {
    let digits = words.split_once(mark)?.1.split(' ').next()?;
    Some(u64::from_str_radix(digits, 16).ok()? & !0xfff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_lasts_from_the_fault_to_the_page() {
        let text = "1@10.000000:loadvm_postcopy_handle_run \n\
            1@10.000100:postcopy_ram_fault_thread_request Request for HVA=0x7f0000001000 rb=ram offset=0x1000 pid=9\n\
            1@10.000150:postcopy_ram_fault_thread_request Request for HVA=0x7f0000001000 rb=ram offset=0x1000 pid=9\n\
            1@10.000200:postcopy_ram_fault_thread_request Request for HVA=0x7f0000002000 rb=ram offset=0x2000 pid=9\n\
            1@10.000250:postcopy_ram_fault_thread_request Request for HVA=0x7f0000003000 rb=virt.mrom offset=0x0 pid=9\n\
            2@10.000400:postcopy_page_req_del resolved page req 0x7f0000001000 total 0\n\
            2@10.000500:postcopy_page_req_del resolved page req 0x7f0000003000 total 0\n\
            2@12.500000:postcopy_ram_listen_thread_exit \n";
        let traced = read(text);
        assert_eq!(traced.stalls, [250_000, 300_000]);
        assert_eq!(traced.total_s, Some(2.5));
    }

    #[test]
    fn foreign_lines_are_skipped() {
        let text = "qemu: warning: a@b:c\n@.:\n1@99999999999999999999.1:x\n1@1.1\n\
            1@1.000001:postcopy_page_req_del resolved page req 0xzz total 0\n\u{fffd}";
        assert_eq!(read(text), Traced::default());
    }
}
