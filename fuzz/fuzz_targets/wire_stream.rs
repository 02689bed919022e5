//! Frames of control and bulk channels: no panic and no unbounded allocation on any bytes, and what
//! is accepted encodes to the same bytes.
//!
//! The first byte of the input chooses the side and the channel, the next eight the memory's size;
//! a frame follows.

use pageferry_migration::wire::{
    DESCRIPTOR_BYTES, Frame, FrameHeader, FrameType, HEADER_BYTES, MAX_CONFIRMED_PAGES,
    MAX_DATA_PAGES, MAX_MISSING_RUNS, MAX_RUNS, MissingRuns, Role, RunKind, RunList, Side,
    WireError,
};
use xxhash_rust::xxh3::xxh3_64;

pub(crate) fn run(data: &[u8]) {
    let Some((&side, rest)) = data.split_first() else {
        return;
    };
    let Some((memory, frame)) = rest.split_first_chunk::<8>() else {
        return;
    };
    let from = if side & 1 == 0 {
        Side::Source
    } else {
        Side::Destination
    };
    let on = Role::ALL[usize::from(side >> 1) % Role::ALL.len()];
    let memory_pages = u64::from_le_bytes(*memory);
    read(frame, from, on, memory_pages);
    let mut sealed = frame.to_vec();
    if seal(&mut sealed).is_some() {
        read(&sealed, from, on, memory_pages);
    }
}

fn read(bytes: &[u8], from: Side, on: Role, memory_pages: u64) {
    if let Err(error) = try_read(bytes, from, on, memory_pages) {
        let _ = error.to_string();
    }
}

fn try_read(bytes: &[u8], from: Side, on: Role, memory_pages: u64) -> Result<(), WireError> {
    let Some((head, payload)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Ok(());
    };
    let header = FrameHeader::decode(head, from, on)?;
    assert!(header.frame_type.is_sent_by(from) && header.frame_type.is_sent_on(on));
    let payload = &payload[..payload.len().min(header.payload_len as usize)];
    if header.frame_type != FrameType::Pages {
        let frame = Frame::decode(&header, payload, memory_pages)?;
        let mut again = Vec::new();
        frame
            .encode(&mut again)
            .expect("what was decoded can be encoded");
        assert_eq!(again, bytes[..again.len()]);
        if let Frame::Missing(missing) = frame {
            check_missing(&missing, memory_pages);
        }
        return Ok(());
    }
    let len = RunList::descriptors_len(&header)?;
    let Some((descriptors, data)) = payload.split_at_checked(len) else {
        return Ok(());
    };
    let list = RunList::decode(&header, descriptors, memory_pages)?;
    assert!(list.runs().len() <= MAX_RUNS && list.data_pages() as usize <= MAX_DATA_PAGES);
    assert_eq!(len + list.data_bytes(), header.payload_len as usize);
    let of_kind = |kind: RunKind| list.runs().iter().filter(move |run| run.kind == kind);
    let confirmed: u64 = of_kind(RunKind::Confirmed)
        .map(|run| u64::from(run.pages))
        .sum();
    assert_eq!(confirmed, u64::from(list.confirmed_pages()));
    assert!(confirmed <= MAX_CONFIRMED_PAGES as u64);
    let mut end = 0;
    let mut bytes_of_data = 0;
    for run in list.runs() {
        assert!(run.pages > 0 && run.first.0 >= end && run.end() <= memory_pages);
        end = run.end();
        bytes_of_data += if run.kind == RunKind::Data {
            run.data_bytes()
        } else {
            0
        };
    }
    assert_eq!(bytes_of_data, list.data_bytes());
    let mut hasher = header.hasher();
    hasher.update(descriptors);
    hasher.update(data);
    hasher.verify()
}

/// The runs ascend, do not touch and lie in memory. Splitting them gives the same pages.
fn check_missing(missing: &MissingRuns, memory_pages: u64) {
    let runs = &missing.runs;
    assert!((1..=MAX_MISSING_RUNS).contains(&runs.len()) && missing.base <= runs[0].start);
    assert!(
        runs.iter()
            .all(|run| run.start < run.end && run.end <= memory_pages)
    );
    assert!(runs.windows(2).all(|pair| pair[0].end < pair[1].start));
    let again: Vec<_> = MissingRuns::frames(runs.iter().cloned()).collect();
    assert_eq!(
        again.iter().map(MissingRuns::pages).sum::<u64>(),
        missing.pages()
    );
    assert_eq!(
        again
            .into_iter()
            .flat_map(|part| part.runs)
            .collect::<Vec<_>>(),
        *runs
    );
}

/// Makes magic and checksums fit; `None` for what is shorter than a header.
fn seal(frame: &mut [u8]) -> Option<()> {
    let (head, payload) = frame.split_first_chunk_mut::<HEADER_BYTES>()?;
    head[..4].copy_from_slice(b"PGFR");
    if head[4..6] == FrameType::Pages.number().to_le_bytes() {
        let count = head[12..16]
            .iter()
            .rev()
            .fold(0, |sum, &byte| sum << 8 | usize::from(byte));
        let len = (count.min(MAX_RUNS) * DESCRIPTOR_BYTES).min(payload.len());
        let checksum = xxh3_64(&[&head[..16], &payload[..len]].concat());
        head[16..24].copy_from_slice(&checksum.to_le_bytes());
    } else {
        // A length that fits, as the fuzzer cannot guess it.
        head[8..12].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    }
    let checksum = xxh3_64(&[&head[..24], payload].concat());
    head[24..].copy_from_slice(&checksum.to_le_bytes());
    Some(())
}
