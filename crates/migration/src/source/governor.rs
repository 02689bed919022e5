//! How much of the background push may be under way on the channels of a session.
//!
//! **Guarantee.** Bytes under way stay below the measured rate times the *free round trip* and the
//! allowed queue, but for one frame. They exceed it for a few round trips while the governor looks
//! for more rate, or after the rate has fallen. A channel with work and nothing under way may
//! always send a page. So urgent pages wait about the allowed queue on a link that they share with
//! the push, and a link whose delay varies stays busy. The less the guest asks, the more of the
//! link the push takes: a request waits for a queue of at most 1/[`IDLE_SHARE`] of the time before
//! it in which nobody asked. That queue is no longer than a free round trip, or [`IDLE_QUEUE`].
//!
//! **Mechanism.** Each frame has a receipt, so the governor needs nothing from the kernel. It works
//! over every kind of connection, and counts what TLS or a tunnel holds back too. A frame's receipt
//! tells its round trip, and that its bytes were delivered.
//!
//! - The *rate* is the largest of the samples of the last half to whole [`WINDOW`]. A sample is the
//!   bytes delivered in [`SAMPLE`], or in a round trip if that is longer. Time with nothing under
//!   way does not count: the sender had no pages, or gave way to urgent ones.
//! - The *least round trip* is that of one page on empty channels. Every [`PROBE_INTERVAL`] the
//!   governor lets the channels run empty and measures it again. So it follows a route that gets
//!   longer, or a peer that gets busy.
//! - The *free round trip* is what a frame takes without a queue: the least one and the jitter
//!   beyond the allowed queue. Frames keep their order, so the late ones hold up those behind them,
//!   and a busy link has nearly its longest delay all the time. The longest is as far above the
//!   median of the last [`TRIPS`] on empty channels as the shortest of the last half of them is
//!   below: a busy host makes some long ones that say nothing of the link, and the frames of one
//!   measurement may all be late. Frames right behind an urgent page do not count. A push that has
//!   become too slow sends most of its frames on empty channels. So it learns of the jitter that
//!   slows it.
//! - While the queue drains between frames, there may be more rate than the bound lets show. The
//!   bound then grows with each round trip: twofold at first, later by a quarter.
//!
//! The rate and the least round trip are those of BBR (Cardwell et al., ACM Queue 2016); the bound
//! has the jitter and the allowed queue in place of BBR's factor of two.
//!
//! One governor has all channels: with one for each, the queues of the others would be jitter.
//!
//! **Neighbours.** `bulk` asks for room before each frame, and reports frames and receipts.

#[cfg(all(test, not(shuttle)))]
mod tests;

use crate::wire::PAGE_BYTES;
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// The largest frame.
pub(super) const FRAME_BYTES: u64 = 64 * PAGE_BYTES as u64;
/// The smallest frame.
const LEAST_FRAME: u64 = PAGE_BYTES as u64;
/// The bound before the first receipt.
const FIRST_BOUND: u64 = 8 * PAGE_BYTES as u64;
/// The largest bound: 256 MiB.
const MOST: u64 = 1 << 28;
/// The longest time for which one frame occupies the link.
const FRAME_TIME: u64 = 250_000;
/// The frames that make up the bound. With fewer, the link would run empty before a receipt.
const FRAMES: u64 = 2;
/// The least length of a sample of the rate. A link may let a burst of some 100 KiB pass at once,
/// and says nothing of its rate by that.
const SAMPLE: u64 = 10_000_000;
/// The age at which samples of the rate are forgotten.
const WINDOW: u64 = 500_000_000;
/// The interval between measurements of the least round trip, and its least multiple of it.
const PROBE_INTERVAL: u64 = 1_000_000_000;
const PROBE_ROUND_TRIPS: u64 = 200;
/// The part of the least round trip that a queue may have while the bound doubles: that of HyStart
/// (Ha and Rhee, 2011).
const FAST_QUEUE: u64 = 8;
/// The round trips after which a bound stops to double if the rate has not grown.
const ROUNDS_WITHOUT_GAIN: u32 = 3;
/// The frames of a measurement.
const PROBE_FRAMES: u32 = 3;
/// The round trips on empty channels that tell the jitter.
const TRIPS: usize = 16;
/// The part of the interval between measurements while there are fewer round trips.
const SOONER: u64 = 4;
/// The part of a time in which nobody asks that a queue may have after it.
const IDLE_SHARE: u64 = 8;
/// The longest such queue, if a free round trip is shorter. It outlasts the pauses of a busy host.
const IDLE_QUEUE: u64 = 5_000_000;

/// A frame without a receipt.
#[derive(Clone, Copy, Debug)]
struct Sent {
    bytes: u64,
    at: u64,
    /// The bytes delivered when it was sent.
    delivered: u64,
    probe: bool,
    /// Whether the channels were empty, and no urgent page was just ahead.
    alone: bool,
}

#[derive(Clone, Debug, Default)]
struct Channel {
    frames: VecDeque<Sent>,
    under_way: u64,
}

/// The governor of some channels. Times are in nanoseconds of one clock.
#[derive(Debug)]
pub struct Governor {
    queue: u64,
    /// The time of the last request for a page.
    asked: u64,
    channels: Vec<Channel>,
    under_way: u64,
    delivered: u64,
    /// The bytes of the current sample, and the time with bytes under way in it.
    sample: (u64, u64),
    /// The end of the part of that time that is counted.
    counted_until: u64,
    /// The largest samples of the current and of the last half of the window.
    rates: [u64; 2],
    half_began: u64,
    round_trip: Option<u64>,
    /// The last round trips on empty channels.
    trips: VecDeque<u64>,
    /// The median of these, without the time of their own bytes.
    usual: u64,
    bound: u64,
    growth: Growth,
    /// The shortest queue in the current round trip, and the delivered bytes that end it.
    standing: u64,
    round_ends: u64,
    /// The most bytes under way in the current round trip.
    peak: u64,
    /// The rate when it last grew by a quarter, and the round trips since then.
    best: u64,
    rounds_without_gain: u32,
    probe: Probe,
    probed_at: u64,
}

/// How the bound grows beyond the one that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Growth {
    Off,
    /// By a quarter in a round trip.
    Slow,
    /// It doubles in a round trip: until there is a queue, or the rate stops to grow.
    Fast,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Probe {
    Off,
    /// The channels run empty. Then this number of frames is measured.
    Draining,
    Measuring {
        left: u32,
        least: u64,
    },
}

impl Governor {
    /// The governor of channels on which nothing was sent. `queue` is the allowed queue.
    #[must_use]
    pub fn new(queue: Duration, channels: usize) -> Self {
        Self {
            queue: u64::try_from(queue.as_nanos()).unwrap_or(u64::MAX),
            asked: 0,
            channels: vec![Channel::default(); channels],
            under_way: 0,
            delivered: 0,
            sample: (0, 0),
            counted_until: 0,
            rates: [0; 2],
            half_began: 0,
            round_trip: None,
            trips: VecDeque::new(),
            usual: 0,
            bound: FIRST_BOUND,
            growth: Growth::Fast,
            standing: u64::MAX,
            round_ends: 0,
            peak: 0,
            best: 0,
            rounds_without_gain: 0,
            probe: Probe::Draining,
            probed_at: 0,
        }
    }

    /// A push begins. The rate of what was sent before counts, and not its round trips: they
    /// contain queues.
    pub fn begin(&mut self, now: u64) {
        self.asked(now);
        (self.probe, self.growth) = (Probe::Draining, Growth::Fast);
        (self.round_trip, self.usual) = (None, 0);
        self.trips.clear();
        self.best = self.rate();
        self.bound = FIRST_BOUND;
        (self.standing, self.peak, self.rounds_without_gain) = (u64::MAX, 0, 0);
        self.round_ends = self.delivered + self.under_way;
    }

    /// Notes that a vCPU asked for a page at that time, last.
    pub fn asked(&mut self, at: u64) {
        self.asked = self.asked.max(at);
    }

    /// The bytes of pages that the next frame of a channel may have, or `None` if a receipt must
    /// come first.
    ///
    /// # Panics
    /// If there is no such channel. All methods that take one do.
    #[must_use]
    pub fn room(&self, channel: usize) -> Option<u64> {
        let frame = self.frame();
        let left = self.bound.saturating_sub(self.under_way) / LEAST_FRAME * LEAST_FRAME;
        // Half a frame may fill the rest, but small frames cost the peer more than they bring.
        if self.probe == Probe::Off && left >= (frame / 2).max(LEAST_FRAME) {
            return Some(frame.min(left));
        }
        (self.channels[channel].under_way == 0).then_some(LEAST_FRAME)
    }

    /// Notes a frame of which `bytes` are sent now.
    pub fn sent(&mut self, now: u64, channel: usize, bytes: u64) {
        if self.under_way == 0 {
            self.counted_until = now;
        }
        // Each channel may send a page at any time, so fewer than one of each are no load.
        let alone =
            bytes >= LEAST_FRAME && self.under_way < LEAST_FRAME * self.channels.len() as u64;
        let probe = alone && self.probe != Probe::Off;
        let urgent = self.queue.min(time_of(2 * LEAST_FRAME, self.rate()));
        let alone = alone && now.saturating_sub(self.asked) > urgent;
        if probe && self.probe == Probe::Draining {
            self.probe = Probe::Measuring {
                left: PROBE_FRAMES,
                least: u64::MAX,
            };
        }
        let channel = &mut self.channels[channel];
        channel.under_way += bytes;
        channel.frames.push_back(Sent {
            bytes,
            at: now,
            delivered: self.delivered,
            probe,
            alone,
        });
        self.under_way += bytes;
        self.peak = self.peak.max(self.under_way);
    }

    /// Notes the receipts of the next `frames` frames of a channel. Returns whether the least round
    /// trip was measured anew.
    pub fn receipts(&mut self, now: u64, channel: usize, frames: u64) -> bool {
        let probed_at = self.probed_at;
        for _ in 0..frames {
            let channel = &mut self.channels[channel];
            let Some(frame) = channel.frames.pop_front() else {
                break;
            };
            channel.under_way -= frame.bytes;
            self.receipt(now, frame);
        }
        self.probed_at != probed_at
    }

    /// Forgets the frames without a receipt of a channel that was lost.
    pub fn lost(&mut self, channel: usize) {
        self.under_way -= std::mem::take(&mut self.channels[channel]).under_way;
        if let Probe::Measuring { .. } = self.probe {
            self.probe = Probe::Draining;
        }
    }

    fn receipt(&mut self, now: u64, frame: Sent) {
        self.under_way -= frame.bytes;
        self.delivered += frame.bytes;
        self.count(now, frame.bytes);
        let round_trip = now.saturating_sub(frame.at).max(1);
        if frame.bytes >= LEAST_FRAME {
            self.round_trip = Some(self.round_trip.map_or(round_trip, |t| t.min(round_trip)));
        }
        self.note_probe(now, frame, round_trip);
        if frame.alone {
            self.note_trip(frame, round_trip);
        }
        self.adjust(now, frame, round_trip);
    }

    /// Learns the jitter.
    fn note_trip(&mut self, frame: Sent, round_trip: u64) {
        if self.trips.len() == TRIPS {
            self.trips.pop_front();
        }
        self.trips
            .push_back(round_trip.saturating_sub(self.own_time(frame)));
        let mut trips: Vec<u64> = self.trips.iter().copied().collect();
        trips.sort_unstable();
        self.usual = trips[trips.len() / 2];
    }

    /// The jitter that the allowed queue has no room for, beyond the least round trip as it is now.
    /// The frames of the last measurement may all have been late. So the shortest is of several.
    fn jitter(&self) -> u64 {
        let least = self.round_trip.unwrap_or(self.usual);
        let recent = self.trips.iter().rev().take(TRIPS / 2).copied();
        let shortest = recent.min().map_or(least, |recent| recent.min(least));
        let longest = (2 * self.usual).saturating_sub(shortest);
        longest.saturating_sub(least).saturating_sub(self.queue)
    }

    /// The time that the bytes of a frame take, beyond those of a page.
    fn own_time(&self, frame: Sent) -> u64 {
        time_of(frame.bytes.saturating_sub(LEAST_FRAME), self.rate())
    }

    /// Counts delivered bytes to the current sample. It ends when it is long enough.
    fn count(&mut self, now: u64, bytes: u64) {
        let (all, time) = &mut self.sample;
        let took = now.saturating_sub(self.counted_until);
        self.counted_until = now;
        if bytes < LEAST_FRAME {
            // Zero pages take the peer's time, not the link's.
            return;
        }
        *all += bytes;
        *time += took;
        if *time < self.round_trip.map_or(SAMPLE, |least| SAMPLE.max(least)) {
            return;
        }
        let rate = per_second(*all, *time);
        self.sample = (0, 0);
        if now.saturating_sub(self.half_began) > WINDOW / 2 {
            self.half_began = now;
            self.rates = [0, self.rates[0]];
        }
        self.rates[0] = self.rates[0].max(rate);
    }

    fn note_probe(&mut self, now: u64, frame: Sent, round_trip: u64) {
        match self.probe {
            Probe::Measuring { left, least } if frame.probe => {
                let least = least.min(round_trip);
                if left > 1 {
                    let left = left - 1;
                    self.probe = Probe::Measuring { left, least };
                } else {
                    self.round_trip = Some(least);
                    self.probe = Probe::Off;
                    self.probed_at = now;
                }
            }
            Probe::Off if self.growth != Growth::Fast => {
                let round_trips = PROBE_ROUND_TRIPS * self.round_trip.unwrap_or(0);
                let mut interval = round_trips.max(PROBE_INTERVAL);
                if self.trips.len() < TRIPS {
                    interval /= SOONER;
                }
                if now.saturating_sub(self.probed_at) > interval {
                    self.probe = Probe::Draining;
                }
            }
            _ => {}
        }
    }

    /// Sets the bound anew.
    fn adjust(&mut self, now: u64, frame: Sent, round_trip: u64) {
        let Some(least) = self.round_trip else {
            return;
        };
        let rate = self.rate();
        let free = least.saturating_add(self.jitter());
        // A vCPU that waits all the time asks again after a round trip.
        let idle = now.saturating_sub(self.asked.saturating_add(free));
        let allowed = (idle / IDLE_SHARE).min(free.max(IDLE_QUEUE));
        let allowed = self.queue.max(allowed);
        let queued = round_trip.saturating_sub(free + self.own_time(frame));
        if !frame.probe {
            self.standing = self.standing.min(queued);
        }
        // A sender that leaves half of the bound unused says nothing of a larger one.
        let is_used = 2 * self.peak >= self.bound;
        if frame.delivered >= self.round_ends && self.standing < u64::MAX {
            // A round trip is over. The shortest queue in it is one that never drains.
            // Few round trips tell little of the jitter, so fast growth takes a longer queue to end.
            let queue = match self.growth {
                Growth::Fast => (allowed / 2).max(least / FAST_QUEUE),
                _ => allowed / 2,
            };
            if self.standing > queue {
                self.growth = Growth::Off;
            } else if self.standing < allowed / 4 && self.growth == Growth::Off && is_used {
                self.growth = Growth::Slow;
            }
            if rate > self.best / 4 * 5 {
                (self.best, self.rounds_without_gain) = (rate, 0);
            } else if is_used {
                self.rounds_without_gain += 1;
            }
            if self.growth == Growth::Fast && self.rounds_without_gain == ROUNDS_WITHOUT_GAIN {
                self.growth = Growth::Off;
            }
            self.standing = u64::MAX;
            self.peak = self.under_way;
            self.round_ends = self.delivered + self.under_way;
        }
        // With fewer whole pages than this the link would be idle between them.
        let busy = bytes_in(rate, free).next_multiple_of(LEAST_FRAME);
        let target = bytes_in(rate, free.saturating_add(allowed)).max(busy);
        let more = if is_used { frame.bytes } else { 0 };
        self.bound = match self.growth {
            Growth::Off => target,
            Growth::Slow => {
                let most = (target / 4 * 5).max(target + LEAST_FRAME);
                (self.bound + more / 4).clamp(target, most)
            }
            Growth::Fast => (self.bound + more).clamp(target, (2 * target).max(FIRST_BOUND)),
        };
        self.bound = self.bound.clamp(LEAST_FRAME, MOST);
    }

    /// The measured rate in bytes a second. 0 before the first receipt.
    #[must_use]
    pub fn rate(&self) -> u64 {
        self.rates[0].max(self.rates[1])
    }

    fn frame(&self) -> u64 {
        let most = match self.rate() {
            0 => LEAST_FRAME,
            rate => bytes_in(rate, FRAME_TIME).min(self.bound / FRAMES),
        };
        (most / LEAST_FRAME * LEAST_FRAME).clamp(LEAST_FRAME, FRAME_BYTES)
    }
}

impl fmt::Display for Governor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, bound) = (self.rate(), self.bound);
        let [us, jitter] = [self.round_trip.unwrap_or(0), self.jitter()].map(|ns| ns / 1000);
        write!(
            f,
            "{rate} B/s, {us} to {} us a round trip, at most {bound} B under way",
            us + jitter
        )
    }
}

/// Bytes a second.
fn per_second(bytes: u64, ns: u64) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(ns)).unwrap_or(u64::MAX)
}

/// The time in nanoseconds that bytes take at `rate`.
fn time_of(bytes: u64, rate: u64) -> u64 {
    let ns = u128::from(bytes) * 1_000_000_000 / u128::from(rate.max(1));
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// The bytes that pass in `ns` at `rate`.
fn bytes_in(rate: u64, ns: u64) -> u64 {
    u64::try_from(u128::from(rate) * u128::from(ns) / 1_000_000_000).unwrap_or(u64::MAX)
}
