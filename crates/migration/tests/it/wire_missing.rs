//! Missing frames: runs of pages against a plain bitmap, and each mistake of their encoding.
#![expect(
    clippy::single_range_in_vec_init,
    reason = "lists of runs, some of them with one"
)]

use crate::wire_common::*;
use core::ops::Range;
use pageferry_migration::wire::*;
use proptest::collection::vec;
use proptest::prelude::*;

/// Decodes a payload with this header.
fn decode_with(count: u32, base: u64, payload: &[u8], memory: u64) -> Result<Frame, WireError> {
    let len = payload.len() as u32;
    let header = FrameHeader::unsealed(FrameType::Missing, len, count, base);
    let mut bytes = header.to_bytes().to_vec();
    let mut hasher = header.hasher();
    hasher.update(payload);
    hasher.seal(&mut bytes);
    bytes.extend(payload);
    match parse(&bytes, Side::Destination, memory)? {
        Parsed::Frame(frame) => {
            assert_eq!(encode(&frame), bytes, "one encoding per message");
            Ok(frame)
        }
        pages => panic!("{pages:?}"),
    }
}

fn decode(count: u32, payload: &[u8]) -> Result<Vec<Range<u64>>, WireError> {
    decode_with(count, 100, payload, MEMORY_PAGES).map(|frame| match frame {
        Frame::Missing(missing) => missing.runs,
        other => panic!("{other:?}"),
    })
}

fn bad(field: &'static str, value: u64) -> WireError {
    let what = "Missing";
    WireError::BadField { what, field, value }
}

fn range(field: &'static str, value: u64, min: u64, max: u64) -> WireError {
    WireError::OutOfRange {
        what: "Missing",
        field,
        value,
        min,
        max,
    }
}

fn length(len: u64, expected: u64) -> WireError {
    let what = "Missing";
    WireError::WrongLength {
        what,
        len,
        expected,
    }
}

#[test]
fn gaps_count_from_the_base_and_from_the_run_before() {
    assert_eq!(decode(1, &[0, 1]), Ok(vec![100..101]));
    assert_eq!(decode(2, &[0, 5, 1, 2]), Ok(vec![100..105, 106..108]));
    assert_eq!(decode(1, &[0, 0x84, 7]), Ok(vec![100..1000]));
    assert_eq!(decode(1, &[0x83, 7, 1]), Ok(vec![999..1000]));
}

#[test]
fn numbers_are_minimal_and_fit_64_bits() {
    assert_eq!(decode(1, &[0x80, 0, 1]), Err(bad("gap", 0)));
    assert_eq!(decode(1, &[5, 0x81, 0]), Err(bad("length", 0)));
    assert_eq!(decode(1, &[5, 0x81, 0x80, 0]), Err(bad("length", 0)));
    let largest = [&[0xff; 9][..], &[1, 1]].concat();
    assert_eq!(decode(1, &largest), Err(range("gap", u64::MAX, 0, 899)));
    for last in [2, 0x7f, 0x80, 0x81, 0xff] {
        let larger = [&[0xff; 9][..], &[last, 1]].concat();
        assert_eq!(decode(1, &larger), Err(bad("gap", last.into())));
        let larger = [&[0], &larger[..10]].concat();
        assert_eq!(decode(1, &larger), Err(bad("length", last.into())));
    }
}

#[test]
fn runs_ascend_do_not_touch_and_lie_in_memory() {
    assert_eq!(decode(1, &[0, 0]), Err(range("length", 0, 1, 900)));
    assert_eq!(decode(2, &[0, 5, 0, 1]), Err(range("gap", 0, 1, 894)));
    assert_eq!(decode(1, &[0, 0x85, 7]), Err(range("length", 901, 1, 900)));
    assert_eq!(decode(1, &[0x84, 7, 1]), Err(range("gap", 900, 0, 899)));
    // The first run reaches the end of memory.
    let behind = [0, 0x84, 7, 1, 1];
    assert_eq!(decode(2, &behind), Err(range("gap", 1, 1, 0)));
    let most = [&[3][..], &[0xff; 9], &[1]].concat();
    assert_eq!(decode(1, &most), Err(range("length", u64::MAX, 1, 897)));
    for (base, memory) in [(1000, 1000), (u64::MAX, 1000), (1, 0)] {
        let max = memory - u64::from(memory > 0);
        let error = decode_with(1, base, &[0, 1], memory).unwrap_err();
        assert_eq!(error, range("base", base, 0, max));
    }
    let error = decode_with(1, 0, &[0, 1], 0).unwrap_err();
    assert_eq!(error, range("length", 1, 1, 0));
    let all = [&[0][..], &[0xff; 9], &[1]].concat();
    assert!(decode_with(1, 0, &all, u64::MAX).is_ok());
}

#[test]
fn the_payload_has_the_announced_runs_and_nothing_else() {
    for count in [0, MAX_MISSING_RUNS as u32 + 1, u32::MAX] {
        let error = range("count", count.into(), 1, MAX_MISSING_RUNS as u64);
        assert_eq!(decode(count, &[0, 1]), Err(error));
    }
    assert_eq!(decode(2, &[0, 1]), Err(length(2, 4)));
    assert_eq!(decode(65_536, &[0, 1, 1, 1]), Err(length(4, 131_072)));
    assert_eq!(decode(2, &[0x80, 1, 1, 1]), Err(length(4, 5)));
    assert_eq!(decode(2, &[0x80, 1, 1, 0x81]), Err(length(4, 6)));
    assert_eq!(decode(1, &[0, 0x81]), Err(length(2, 3)));
    assert_eq!(decode(1, &[0, 1, 1]), Err(length(3, 2)));
    assert_eq!(decode(1, &[0, 1, 1, 1]), Err(length(4, 2)));
}

#[test]
fn runs_that_break_the_rules_are_not_sent() {
    let refused = |base, runs: &[Range<u64>]| {
        let runs = runs.to_vec();
        let frame = Frame::Missing(MissingRuns { base, runs });
        frame.encode(&mut Vec::new()).unwrap_err()
    };
    assert_eq!(refused(0, &[]), range("count", 0, 1, 65_536));
    let last = u64::MAX - 1;
    assert_eq!(refused(5, &[4..9]), range("run.first", 4, 5, last));
    assert_eq!(refused(5, &[5..9, 9..10]), range("run.first", 9, 10, last));
    assert_eq!(refused(5, &[5..9, 2..3]), range("run.first", 2, 10, last));
    assert_eq!(refused(5, &[7..7]), range("run.end", 7, 8, u64::MAX));
    assert_eq!(
        refused(5, &[Range { start: 9, end: 7 }]),
        range("run.end", 7, 10, u64::MAX)
    );
    let at_the_end = u64::MAX..u64::MAX;
    assert_eq!(
        refused(5, &[at_the_end]),
        range("run.first", u64::MAX, 5, last)
    );
    let many: Vec<_> = (0..65_537).map(|run| 2 * run..2 * run + 1).collect();
    assert_eq!(refused(0, &many), range("count", 65_537, 1, 65_536));
    let wide: Vec<_> = (1..65_537)
        .map(|run| run << 40..(run << 40) + (1 << 36))
        .collect();
    assert!(matches!(
        refused(0, &wide),
        WireError::TooLong { max: 524_288, .. }
    ));
}

/// Encodes and decodes the frames of these runs. Returns the runs of all frames.
fn through_the_wire(runs: &[Range<u64>], memory: u64) -> Vec<Vec<Range<u64>>> {
    let mut all = Vec::new();
    for missing in MissingRuns::frames(runs.iter().cloned()) {
        let bytes = encode(&Frame::Missing(missing.clone()));
        assert!(bytes.len() <= HEADER_BYTES + MAX_MISSING_BYTES);
        let pages: u64 = missing.runs.iter().map(|run| run.end - run.start).sum();
        assert_eq!(missing.pages(), pages);
        let parsed = parse(&bytes, Side::Source, memory);
        assert_eq!(parsed, Ok(Parsed::Frame(Frame::Missing(missing.clone()))));
        all.push(missing.runs);
    }
    all
}

#[test]
fn no_missing_page_gives_no_frame() {
    assert_eq!(through_the_wire(&[], 10).len(), 0);
    assert_eq!(through_the_wire(&[3..3, 7..7], 10).len(), 0);
}

#[test]
fn runs_that_touch_are_joined_and_many_are_split() {
    assert_eq!(through_the_wire(&[2..4, 4..4, 4..5, 5..9], 9), [[2..9]]);
    let short: Vec<_> = (0..200_000).map(|run| 2 * run..2 * run + 1).collect();
    let frames = through_the_wire(&short, 400_000);
    let lengths: Vec<usize> = frames.iter().map(Vec::len).collect();
    assert_eq!(lengths, [65_536, 65_536, 65_536, 3_392]);
    assert_eq!(frames.concat(), short);
    // Six bytes for each number but the first of a frame: the bytes are the limit.
    let wide: Vec<_> = (1..65_537)
        .map(|run| run << 37..(run << 37) + (1 << 36))
        .collect();
    let frames = through_the_wire(&wide, u64::MAX);
    assert_eq!(
        frames.iter().map(Vec::len).max(),
        Some(MAX_MISSING_BYTES / 12 + 1)
    );
    assert_eq!(frames.concat(), wide);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn the_runs_of_a_bitmap_give_the_bitmap_back(
        bits in vec(prop_oneof![Just(false), Just(true), any::<bool>()], 1..3000),
        cuts in vec(1u64..100, 1..20),
        shift in 0u64..1 << 40,
    ) {
        // The runs are cut in pieces, as a search with a limit gives them.
        let mut runs: Vec<Range<u64>> = Vec::new();
        let mut limits = cuts.iter().cycle();
        let mut left = 0;
        for (page, _) in bits.iter().enumerate().filter(|(_, missing)| **missing) {
            let page = page as u64 + shift;
            match runs.last_mut() {
                Some(run) if run.end == page && left > 0 => run.end += 1,
                _ => {
                    runs.push(page..page + 1);
                    left = *limits.next().unwrap();
                }
            }
            left -= 1;
        }
        let memory = shift + bits.len() as u64;
        let mut again = vec![false; bits.len()];
        for page in through_the_wire(&runs, memory).concat().into_iter().flatten() {
            prop_assert!(!again[(page - shift) as usize]);
            again[(page - shift) as usize] = true;
        }
        prop_assert_eq!(again, bits);
    }

    #[test]
    fn any_payload_is_refused_or_comes_back(
        count in 1u32..8,
        base in 0u64..2000,
        payload in vec(prop_oneof![0u8..4, 0x80u8..0x84, any::<u8>()], 2..40),
        memory in prop_oneof![0u64..2000, any::<u64>()],
    ) {
        // `decode_with` compares the encoding.
        if let Ok(Frame::Missing(missing)) = decode_with(count, base, &payload, memory) {
            prop_assert_eq!(missing.runs.len(), count as usize);
            prop_assert!(missing.runs.iter().all(|run| run.start < run.end && run.end <= memory));
            prop_assert!(missing.runs.windows(2).all(|pair| pair[0].end < pair[1].start));
        }
    }
}
