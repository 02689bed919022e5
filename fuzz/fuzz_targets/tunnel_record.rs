//! An end of a tunnel with a peer of any bytes: no panic, and what it keeps is bounded. What a VMM
//! is given is what came.

use pageferry_bridge::tunnel::Limits;
use pageferry_bridge::tunnel::end::{End, LEAST_SHARE, READ_BYTES, Side};
use pageferry_bridge::tunnel::record::{
    Decoder, Delivered, Ending, MAX_PAYLOAD, MAX_STREAMS, Record, Start,
};
use std::time::Duration;

const WINDOW: u64 = 1 << 20;

/// The next bytes of the input, zeros behind its end.
struct Input<'a>(&'a [u8]);

impl Input<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((byte, rest)) => {
                self.0 = rest;
                *byte
            }
            None => 0,
        }
    }

    /// A number that is often small, and sometimes huge.
    fn number(&mut self) -> u64 {
        let byte = self.byte();
        match byte {
            0..=250 => byte.into(),
            _ => u64::MAX >> (u32::from(self.byte()) % 64),
        }
    }
}

fn start() -> Start {
    Start {
        route: "vm".parse().unwrap(),
        window: WINDOW,
        dead_after: Duration::from_secs(1),
    }
}

/// A record of the peer, as a peer that keeps to the format may send it.
fn record(input: &mut Input<'_>) -> Record {
    let stream = 1 + input.byte() as u32 % MAX_STREAMS;
    let end = [None, Some(Ending::Finished), Some(Ending::Broken)][usize::from(input.byte() % 3)];
    match input.byte() % 5 {
        0 => Record::Start(start()),
        1 => Record::Data {
            stream,
            at: input.number() % (u64::MAX >> 1),
            bytes: vec![input.byte(); usize::from(input.byte()) + usize::from(end.is_none())]
                .into(),
            end,
        },
        2 => Record::Delivered(Delivered {
            stream,
            until: input.number(),
            ended: end.is_some(),
            stopped: input.byte() % 2 == 1,
        }),
        3 => Record::Received {
            records: input.number(),
            streams: stream,
        },
        _ => Record::Bye {
            reason: "so".into(),
        },
    }
}

pub(crate) fn run(data: &[u8]) {
    // The bytes as they are.
    let mut decoder = Decoder::default();
    decoder.push(data);
    while let Ok(Some(record)) = decoder.take() {
        let payload = record.payload();
        assert!(payload.len() <= MAX_PAYLOAD);
        let _ = record.header(&payload);
    }
    let mut input = Input(data);
    let side = [Side::Near, Side::Far][usize::from(input.byte() % 2)];
    let limits = Limits {
        window: WINDOW,
        urgent: None,
    };
    let mut end = End::new(side, start(), limits);
    end.link_up(1, true);
    if input.byte() % 8 > 0 {
        end.record(1, Record::Start(start())).unwrap();
    }
    while !input.0.is_empty() {
        let stream = u32::from(input.byte() % 4) + 1;
        match input.byte() % 9 {
            0 if side == Side::Near => drop(end.opened()),
            1 if end.wants(stream) > 0 => {
                let length = usize::from(input.byte()).min(end.wants(stream));
                end.bytes(stream, vec![1; length].into());
            }
            2 if end.is_open(stream) => end.finished(stream, Ending::Finished),
            3 => end.stopped(stream),
            4 => {
                let taken = end.front(stream).map(|front| front.len());
                taken.into_iter().for_each(|taken| end.wrote(stream, taken));
            }
            5 if end.next_end(stream).is_some() => end.ended(stream),
            6 => {
                end.link_down(1);
                end.link_up(1, true);
                end.record(1, Record::Start(start())).unwrap();
            }
            7 => while end.next(1, usize::from(input.byte())).is_some() {},
            _ => {
                if end.record(1, record(&mut input)).is_err() {
                    return;
                }
            }
        }
        let (kept, held) = end.kept();
        let shares = u64::from(end.count()) * (LEAST_SHARE + MAX_PAYLOAD as u64);
        assert!(kept <= WINDOW + shares + READ_BYTES as u64);
        assert!(held <= WINDOW + shares);
    }
}
