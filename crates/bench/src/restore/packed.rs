//! Packed snapshots: how fast they are made, and the price of diffs on diffs.

use crate::error::os;
use crate::kit::Random;
use crate::{BenchError, Bound, Conditions, Row, Samples, note, rounds};
use pageferry_pager::{PackedSource, Source};
use pageferry_snapshot::{Input, Options, Snapshot, pack};
use std::fs::File;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// The diffs on the base.
const DEPTH: u64 = 10;
/// The pages of 64 KiB that a diff changes, out of so many.
const CHANGED: u64 = 64;
const CHUNK: u64 = 64 << 10;

/// Measures packing, opening and reading, in `repeat` rounds.
pub(super) fn measure(repeat: u32, bytes: u64, scratch: &Path) -> Result<Vec<Row>, BenchError> {
    note("packing snapshots");
    let memory = scratch.join("mixed");
    write_mixed(&memory, bytes).map_err(os("cannot write a memory file"))?;
    let mut speed = Samples::default();
    for round in 0..repeat {
        let packed = scratch.join(format!("packed-{round}"));
        let began = Instant::now();
        packed_of(&memory, &packed, None)?;
        speed.push(bytes as f64 / began.elapsed().as_secs_f64());
        let _ = std::fs::remove_file(packed);
    }
    let deep = deep(&memory, bytes, scratch)?;
    let flat = scratch.join("flat");
    packed_of(&memory, &flat, None)?;

    let [mut first, mut deep_all, mut flat_all] = [(); 3].map(|()| Samples::default());
    for _ in rounds(repeat, format!("reading a snapshot {DEPTH} diffs deep")) {
        let began = Instant::now();
        let source = PackedSource::open(&deep).map_err(BenchError::peer)?;
        source.read(0, &mut [0; 4096]).map_err(BenchError::peer)?;
        first.push(began.elapsed().as_secs_f64() * 1e3);
        for (path, all) in [(&deep, &mut deep_all), (&flat, &mut flat_all)] {
            let source = PackedSource::open(path).map_err(BenchError::peer)?;
            let began = Instant::now();
            let mut buffer = vec![0; CHUNK as usize];
            for at in (0..bytes).step_by(CHUNK as usize) {
                source.read(at, &mut buffer).map_err(BenchError::peer)?;
            }
            all.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    let note = "half of memory is noise, a quarter repeats itself, a quarter is zero";
    let row = |samples: &Samples, case, subject: &str, unit| {
        let conditions = Conditions::here(0, bytes, note.to_owned());
        samples.row(case, subject, unit, conditions)
    };
    let flat = "flat snapshot";
    Ok(vec![
        row(&speed, "snapshot.pack", "lz4, with its fsync", "B/s").aiming_at(Bound::AtLeast(1e9)),
        row(&first, "snapshot.first_page", "10 diffs deep", "ms").aiming_at(Bound::Below(10.0)),
        row(&flat_all, "snapshot.read", flat, "ms"),
        row(&deep_all, "snapshot.read", "10 diffs deep", "ms")
            .against(flat, flat_all.median())
            .aiming_at(Bound::RatioAtMost(1.05)),
    ])
}

fn packed_of(memory: &Path, packed: &Path, base: Option<&Snapshot>) -> Result<(), BenchError> {
    let file = File::open(memory).map_err(os("the memory file"))?;
    let options = Options {
        base,
        ..Options::default()
    };
    let on = &mut |_, _| ControlFlow::Continue(());
    pack(Input::File(&file), packed, options, on).map_err(BenchError::peer)?;
    Ok(())
}

/// A snapshot with diffs, of which each changes another part of the memory. The memory file ends as
/// the last one.
fn deep(memory: &Path, bytes: u64, scratch: &Path) -> Result<PathBuf, BenchError> {
    let os_failed = os("cannot change the memory file");
    let mut newest = scratch.join("deep-0");
    packed_of(memory, &newest, None)?;
    let file = File::options()
        .write(true)
        .open(memory)
        .map_err(os_failed)?;
    for diff in 1..=DEPTH {
        let mut random = Random::new(diff);
        for at in (diff * CHUNK..bytes).step_by((CHANGED * CHUNK) as usize) {
            let word = random.next() | 1;
            file.write_all_at(&word.to_ne_bytes(), at)
                .map_err(os_failed)?;
        }
        let base = Snapshot::open(&newest).map_err(BenchError::peer)?;
        newest = scratch.join(format!("deep-{diff}"));
        packed_of(memory, &newest, Some(&base))?;
    }
    Ok(newest)
}

/// Writes a memory file with parts of 1 MiB: two of noise, one of repeated text, one of zeros.
fn write_mixed(path: &Path, bytes: u64) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(bytes)?;
    let mut random = Random::new(2);
    let mut part = vec![0_u8; 1 << 20];
    for at in (0..bytes).step_by(part.len()) {
        match (at >> 20) % 4 {
            0 | 1 => {
                for word in part.chunks_exact_mut(8) {
                    word.copy_from_slice(&random.next().to_ne_bytes());
                }
            }
            2 => {
                let line = format!("{:>40} is what a page cache holds: text.\n", random.next());
                for (to, from) in part.iter_mut().zip(line.bytes().cycle()) {
                    *to = from;
                }
            }
            _ => continue,
        }
        let len = (bytes - at).min(part.len() as u64) as usize;
        file.write_all_at(&part[..len], at)?;
    }
    file.sync_all()
}
