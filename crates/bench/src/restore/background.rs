//! Loading all memory at a rate, beside a VM that touches pages.

use super::drop_cache;
use super::paced::{self, Paced};
use super::vmm::{Memory, Restored};
use crate::error::os;
use crate::peer::Peer;
use crate::{BenchError, Bound, Conditions, Row, Samples, rounds};
use pageferry_pager::{Background, Name, Pager, Restore, Settings};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::path::Path;
use std::time::{Duration, Instant};

/// The time between two touches.
const PACE: Duration = Duration::from_millis(1);
/// The time of a run without background load.
const IDLE: Duration = Duration::from_secs(1);
/// The time after which a load counts as stuck.
const LIMIT: Duration = Duration::from_secs(120);

/// Measures a load of `bytes` bytes, in `repeat` rounds.
pub(super) fn measure(
    repeat: u32,
    scratch: &Path,
    (memory, bytes): (&Path, u64),
) -> Result<Vec<Row>, BenchError> {
    let [mut plain, mut rate, mut idle, mut busy] = [(); 4].map(|()| Samples::default());
    for _ in rounds(repeat, "background load") {
        let speed = bytes as f64 / read_all(memory)?.as_secs_f64();
        plain.push(speed);
        let (_, p99_us) = one(scratch, (memory, bytes), None)?;
        idle.push(p99_us);
        let most = NonZeroU64::new((speed * 0.8) as u64);
        let (took, p99_us) = one(scratch, (memory, bytes), most)?;
        rate.push(bytes as f64 / took.as_secs_f64());
        busy.push(p99_us);
    }
    let note = format!("no guest; one thread touches a page each {PACE:?}; the file is cold");
    let row = |samples: &Samples, case, subject: &str, unit| {
        let conditions = Conditions::here(0, bytes, note.clone());
        samples.row(case, subject, unit, conditions)
    };
    Ok(vec![
        row(&plain, "restore.load", "plain sequential read", "B/s"),
        row(&rate, "restore.load", "pager, background", "B/s")
            .against("plain sequential read", plain.median())
            .aiming_at(Bound::RatioAtLeast(0.76)),
        row(&idle, "restore.load_p99", "without background load", "us"),
        row(&busy, "restore.load_p99", "beside background load", "us")
            .against("without background load", idle.median())
            .aiming_at(Bound::RatioAtMost(2.0)),
    ])
}

/// The time of a plain read of the whole file.
fn read_all(memory: &Path) -> Result<Duration, BenchError> {
    let mut file = opened_cold(memory)?;
    let began = Instant::now();
    let mut buffer = vec![0; 1 << 20];
    while io::Read::read(&mut file, &mut buffer).map_err(os("cannot read the memory file"))? > 0 {}
    Ok(began.elapsed())
}

/// The memory file, of which nothing is in the page cache.
fn opened_cold(memory: &Path) -> Result<File, BenchError> {
    let file = File::open(memory).map_err(os("cannot open the memory file"))?;
    drop_cache(&file)?;
    Ok(file)
}

/// One VM: the time until all memory was there, and the 99th percentile of its touches in
/// microseconds.
fn one(
    scratch: &Path,
    (memory, bytes): (&Path, u64),
    most: Option<NonZeroU64>,
) -> Result<(Duration, f64), BenchError> {
    let settings = Settings {
        directory: scratch.join("state"),
        ..Settings::default()
    };
    opened_cold(memory)?;
    let pager = Pager::start(settings).map_err(BenchError::peer)?;
    let name: Name = "load".parse().map_err(BenchError::peer)?;
    let socket = scratch.join("socket");
    let mut restore = Restore::new(memory, &socket);
    restore.background = most.map_or(Background::Off, Background::Rate);
    pager.restore(&name, restore).map_err(BenchError::peer)?;
    let mut vmm = Peer::start(&Paced {
        vm: Restored {
            memory: Memory::Pager(socket),
            bytes,
            working_set: bytes,
            threads: 1,
        },
        pace: PACE,
    })?;
    vmm.expect("ready")?;
    let began = Instant::now();
    vmm.send_line("count")?;
    loop {
        let missing = pager
            .status(&name)
            .and_then(|status| Some(status.vm?.missing));
        let is_over = match most {
            Some(_) => missing == Some(0),
            None => began.elapsed() >= IDLE,
        };
        if is_over {
            break;
        }
        if began.elapsed() > LIMIT {
            return Err(BenchError::peer("the memory was not loaded in time"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let took = began.elapsed();
    let touches = paced::end(&mut vmm)?;
    drop(vmm);
    if !pager.wait_ended(&name, super::END) {
        return Err(BenchError::peer(
            "the pager has not noticed the end of its VMM",
        ));
    }
    Ok((took, touches.p99_us))
}
