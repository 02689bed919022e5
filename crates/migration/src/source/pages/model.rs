//! Confirmations against a plain model: whatever the guest writes before it stops, and whatever
//! gets lost, a page that the destination calls present has the bytes of the stop.
//!
//! The ledger, the hashes and the frames are the real ones. Two channels and a destination are
//! modelled: frames wait, arrive in order, or are lost with a part of their data in place.

use super::*;
use pageferry_machine::RamLayout;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::VecDeque;

const PAGES: usize = 12;
type Bytes = [u8; PAGE_BYTES];

/// A frame or an answer under way: each page with its kind and the source's bytes.
type Message = Vec<(usize, RunKind, Bytes)>;

struct World<'a> {
    ram: &'a GuestRam,
    ledger: Ledger,
    hashes: &'a SentHashes,
    frames: [PageFrame<'a>; 2],
    under_way: [VecDeque<Message>; 2],
    placed: [u64; 2],
    there: Vec<Bytes>,
    present: [bool; PAGES],
    /// The bytes of the stop.
    stopped: Option<Vec<Bytes>>,
    confirmed: usize,
}

impl<'a> World<'a> {
    fn new(ram: &'a GuestRam, hashes: &'a SentHashes) -> Self {
        let ledger = Ledger::try_new(PAGES, 2).unwrap();
        ledger.set_unsent(0..PAGES);
        let frame = || {
            let mut frame = PageFrame::new(ram);
            frame.compare_with(Some(hashes));
            frame
        };
        Self {
            ram,
            ledger,
            hashes,
            frames: [frame(), frame()],
            under_way: Default::default(),
            placed: [0; 2],
            there: vec![[0; PAGE_BYTES]; PAGES],
            present: [false; PAGES],
            stopped: None,
            confirmed: 0,
        }
    }

    fn bytes(&self, page: usize) -> Bytes {
        let mut bytes = [0; PAGE_BYTES];
        self.ram.try_read(RamPage(page as u64), &mut bytes).unwrap();
        bytes
    }

    /// As the thread of a bulk channel. `sends`: the mode does not change meanwhile.
    fn frame(&mut self, channel: usize, most: u32, sends: bool) {
        let frame = &mut self.frames[channel];
        let running = self.stopped.is_none();
        match running {
            true => frame.copy(&self.ledger, 0).unwrap(),
            // SAFETY: there are no vCPUs, and this thread alone writes. It writes no more.
            false => unsafe { frame.borrow(&self.ledger, 0, most) }.unwrap(),
        };
        frame.release_unchanged(&self.ledger);
        if !sends {
            return frame.give_back(&self.ledger);
        }
        if frame.list().is_empty() {
            return;
        }
        if running {
            frame.note_sent(self.hashes);
        }
        let mut copies = frame.copies.chunks_exact(PAGE_BYTES);
        let mut message = Message::new();
        let mut runs = Vec::new();
        for run in frame.list.runs() {
            runs.push(run.first.index()..run.end() as usize);
            for page in run.first.index()..run.end() as usize {
                let bytes = match (running, run.kind) {
                    (true, RunKind::Data) => *copies.next().unwrap().first_chunk().unwrap(),
                    (true, _) => [0; PAGE_BYTES],
                    // SAFETY: as above.
                    (false, _) => *unsafe { stopped_page(self.ram, RamPage(page as u64)) },
                };
                message.push((page, run.kind, bytes));
            }
        }
        self.ledger.sent(channel, runs, 0);
        self.under_way[channel].push_back(message);
    }

    /// As the thread of an urgent channel.
    fn answer(&mut self, channel: usize, page: usize) {
        let at = RamPage(page as u64);
        if self.stopped.is_none() || !self.ledger.claim(at) {
            return;
        }
        let bytes = self.bytes(page);
        let kind = match is_zero(&bytes) {
            true => RunKind::Zero,
            false if self.hashes.is(at, self.hashes.of(&bytes)) => RunKind::Confirmed,
            false => RunKind::Data,
        };
        self.ledger
            .sent(channel, std::iter::once(page..page + 1), 0);
        self.under_way[channel].push_back(vec![(page, kind, bytes)]);
    }

    fn arrive(&mut self, channel: usize) {
        let Some(message) = self.under_way[channel].pop_front() else {
            return;
        };
        for (page, kind, bytes) in message {
            match kind {
                RunKind::Confirmed => {
                    assert!(self.stopped.is_some(), "page {page} is confirmed too early");
                    let fits = self.there[page] == bytes;
                    assert!(fits, "page {page} has other bytes there");
                    self.confirmed += 1;
                }
                RunKind::Data | RunKind::Zero => self.there[page] = bytes,
            }
            if let Some(stopped) = &self.stopped {
                assert!(!self.present[page], "page {page} comes twice");
                self.present[page] = true;
                let fits = self.there[page] == stopped[page];
                assert!(fits, "page {page} is an old one");
            }
        }
        self.placed[channel] += 1;
    }

    fn receipt(&mut self, channel: usize) {
        self.ledger.receipt(channel, self.placed[channel]).unwrap();
    }

    /// A part of the data of the next message is in place, and no more comes.
    fn cut(&mut self, channel: usize, part: usize) {
        let torn = self.under_way[channel].drain(..).next();
        for (page, kind, bytes) in torn.into_iter().flatten().take(part) {
            if kind == RunKind::Data {
                self.there[page][..PAGE_BYTES / 2].copy_from_slice(&bytes[..PAGE_BYTES / 2]);
            }
        }
    }

    fn lose(&mut self, channel: usize, part: usize) {
        self.cut(channel, part);
        let placed = std::mem::take(&mut self.placed[channel]);
        self.ledger.reclaim(channel, placed).unwrap();
    }

    fn lose_all(&mut self, part: usize) {
        (0..2).for_each(|channel| self.cut(channel, part));
        self.placed = [0; 2];
        let missing = (0..PAGES).filter(|page| !self.present[*page]);
        let missing: Vec<_> = missing.map(|page| page as u64..page as u64 + 1).collect();
        self.ledger.adopt_missing(missing.into_iter()).unwrap();
    }

    /// All that is under way arrives.
    fn settle(&mut self) {
        for channel in 0..2 {
            while !self.under_way[channel].is_empty() {
                self.arrive(channel);
            }
            self.receipt(channel);
        }
    }

    fn stop(&mut self) {
        self.settle();
        assert_eq!(self.ledger.in_flight(), 0);
        self.ledger.set_unsent(0..PAGES);
        self.stopped = Some((0..PAGES).map(|page| self.bytes(page)).collect());
    }

    fn step(&mut self, (step, a, b): (u8, usize, usize)) {
        let (channel, page, running) = (a % 2, b % PAGES, self.stopped.is_none());
        match step {
            // Few contents, so that a page often gets back what was sent before.
            0..4 if running => {
                let bytes = [(a % 3) as u8; PAGE_BYTES];
                self.ram.try_write(RamPage(page as u64), &bytes).unwrap();
            }
            4..8 => self.frame(channel, 1 + (b % 4) as u32, b != 7),
            8..11 => self.arrive(channel),
            11 => self.receipt(channel),
            12 if running && self.ledger.unacknowledged() == 0 => {
                self.ledger.set_unsent(0..PAGES);
            }
            13 if running && b % 4 == 0 => self.stop(),
            14 if !running && b % 2 == 0 => self.lose(channel, b),
            14 if !running && b % 5 == 0 => self.lose_all(b),
            15 => self.answer(channel, page),
            _ => {}
        }
    }

    /// Sends and confirms all that is left.
    fn end(&mut self) {
        if self.stopped.is_none() {
            self.stop();
        }
        while self.ledger.unacknowledged() > 0 {
            self.frame(0, FRAME_PAGES, true);
            self.settle();
        }
        assert!(self.present.iter().all(|present| *present));
        assert!(Some(&self.there) == self.stopped.as_ref());
    }
}

fn world(run: impl FnOnce(&mut World<'_>)) -> usize {
    let layout = RamLayout::for_memory((PAGES * PAGE_BYTES) as u64).unwrap();
    let (ram, hashes) = (GuestRam::new(layout), SentHashes::try_new(PAGES));
    let (ram, hashes) = (ram.unwrap(), hashes.unwrap());
    let mut world = World::new(&ram, &hashes);
    run(&mut world);
    world.end();
    world.confirmed
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn a_present_page_has_the_bytes_of_the_stop(
        steps in vec((0u8..16, 0usize..64, 0usize..64), 0..200),
    ) {
        world(|world| steps.into_iter().for_each(|step| world.step(step)));
    }
}

/// A page that was sent, then sent as zero, and then got back its first bytes.
#[test]
fn a_page_is_not_confirmed_by_what_was_sent_before_the_last_time() {
    let write = |world: &World<'_>, byte| {
        world
            .ram
            .try_write(RamPage(3), &[byte; PAGE_BYTES])
            .unwrap();
    };
    let pass = |world: &mut World<'_>| {
        world.ledger.set_unsent(0..PAGES);
        world.frame(0, 1, true);
        world.settle();
        assert_eq!(world.ledger.unacknowledged(), 0);
    };
    for between in [0, 9] {
        let confirmed = world(|world| {
            for byte in [7, between] {
                write(world, byte);
                pass(world);
            }
            write(world, 7);
            world.stop();
        });
        assert_eq!(confirmed, 0, "{between}");
    }
    let confirmed = world(|world| {
        write(world, 7);
        (0..2).for_each(|_| pass(world));
    });
    assert_eq!(confirmed, 1);
}
