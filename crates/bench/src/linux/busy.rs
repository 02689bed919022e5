//! Whether Linux keeps its speed: mixed work for minutes.

use super::lines::{Line, Splitter, parse};
use super::{Guest, MEMORY, go_on, soft};
use crate::{BenchError, Bound, Conditions, Row, Samples, note};
use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

const BUSY: &str = "console=hvc0 panic=-1 quiet pf=busy";
const MINUTE: Duration = Duration::from_secs(60);
/// The length of a sample.
const SAMPLE: Duration = Duration::from_secs(5);
/// The longest wait for text.
const INTERVAL: Duration = Duration::from_millis(20);

/// The processor time of this process, in seconds. Time that others take does not count.
fn processor_s() -> f64 {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

impl Guest {
    /// Runs mixed work for `minutes`, which are at least 2. Returns a row of the first minute and
    /// one of the last.
    pub(super) fn busy_rows(&self, minutes: u32) -> Result<Vec<Row>, BenchError> {
        let (vm, console) = soft::start(&self.linux(BUSY), 1, MEMORY)?;
        let mut splitter = Splitter::default();
        let mut rounds_until = |until: Instant| -> Result<u64, BenchError> {
            let deadline = until + super::LIMIT;
            loop {
                for line in splitter.take(&console.read(INTERVAL)) {
                    match parse(&line)? {
                        Some(Line::Busy(rounds)) if Instant::now() >= until => {
                            return Ok(rounds);
                        }
                        Some(Line::Done) => {
                            let why = "this initrd has no mode pf=busy: build it again by \
                                       `cargo xtask guest-linux`";
                            return Err(BenchError::Setting(why.into()));
                        }
                        _ => {}
                    }
                }
                soft::check(&vm)?;
                go_on(deadline, "a round of Linux's work")?;
            }
        };
        // The first round has warmed up.
        let mut before = (rounds_until(Instant::now())?, processor_s());
        let mut rates = Vec::new();
        for minute in 1..=minutes {
            note(&format!("Linux is busy, minute {minute} of {minutes}"));
            let end = Instant::now() + MINUTE;
            let mut samples = Samples::default();
            while Instant::now() < end {
                let after = (rounds_until(Instant::now() + SAMPLE)?, processor_s());
                samples.push((after.0 - before.0) as f64 / (after.1 - before.1));
                before = after;
            }
            rates.push(samples);
        }
        let note = "rounds of mixed work (forks, execs, pipes, new pages, arithmetic) by this \
                    process's processor time";
        let row = |minute: usize, samples: &Samples| {
            let how = Conditions::here(1, MEMORY, note);
            let subject = format!("soft, 1 vCPU, minute {minute}");
            samples.row("linux.busy", subject, "rounds/s", how)
        };
        let (Some(first), Some(last)) = (rates.first(), rates.last()) else {
            return Ok(Vec::new());
        };
        let last = row(rates.len(), last)
            .against("minute 1", first.median())
            .aiming_at(Bound::RatioAtLeast(0.97));
        Ok(vec![row(1, first), last])
    }
}
