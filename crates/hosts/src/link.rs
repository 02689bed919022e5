//! The description of a shaped link, and what `tc` is told for it.
//!
//! **Guarantee.** Each direction carries at most [`Link::rate`], headers of Ethernet included.
//!
//! **Mechanism.** [`Queue::OneFifo`] is tbf, which holds a bfifo. The other queues are htb with
//! [`CLASSES`] classes. A classic BPF program puts a TCP packet into the class that the sum of its
//! two ports selects. This works on every kernel with htb and cls_bpf, so a flow is treated alike
//! everywhere: fq, sfq and the flow classifier are often missing. Two flows share a class when
//! their sums agree modulo [`CLASSES`]. The kernel gives ports to successive connections in
//! sequence, so these rarely do.
//!
//! **Neighbours.** [`TwoHosts`](crate::TwoHosts) applies the program to both ends.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;
use std::time::Duration;

/// Classes of a link with a queue for each flow. A power of two.
const CLASSES: u32 = 1024;

/// The minor number of the first of these classes.
const FIRST_CLASS: u32 = 0x100;

/// The network device of each host.
pub(super) const DEVICE: &str = "eth0";

/// Bits a second. Text is as in `tc`: `800kbit`, `100mbit`, `1gbit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rate(u64);

impl Rate {
    /// A rate in bits a second, at least 8000.
    #[must_use]
    pub fn bits(bits: u64) -> Self {
        Self(bits.max(8000))
    }

    /// A rate in millions of bits a second.
    #[must_use]
    pub fn mbit(millions: u64) -> Self {
        Self::bits(millions * 1_000_000)
    }

    /// Bytes a second.
    #[must_use]
    pub const fn bytes_per_second(self) -> u64 {
        self.0 / 8
    }
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
            "bit" => Some(1),
            "kbit" => Some(1000),
            "mbit" => Some(1_000_000),
            "gbit" => Some(1_000_000_000),
            _ => None,
        };
        let number: Option<u64> = digits.parse().ok();
        match factor.zip(number).and_then(|(f, n)| n.checked_mul(f)) {
            Some(bits @ 8000..=400_000_000_000) => Ok(Self(bits)),
            Some(_) => Err(format!("rate '{text}': expected from 8kbit to 400gbit")),
            None => Err(format!(
                "rate '{text}': expected a whole number with bit, kbit, mbit or gbit"
            )),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1_000_000_000, "gbit"), (1_000_000, "mbit"), (1000, "kbit")];
        let fitting = units
            .into_iter()
            .find(|(unit, _)| self.0.is_multiple_of(*unit));
        let (unit, name) = fitting.unwrap_or((1, "bit"));
        write!(f, "{}{name}", self.0 / unit)
    }
}

/// How packets wait for the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// All packets wait in one queue.
    OneFifo,
    /// Each TCP flow has its queue. The queues that are not empty share the rate evenly.
    Fair,
    /// As `Fair`, and no flow gets more than this rate.
    PerFlow(Rate),
}

/// A link between two hosts. Both directions are alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// The rate of each direction.
    pub rate: Rate,
    /// How packets wait.
    pub queue: Queue,
    /// Bytes that may pass at once after an idle time. A packet that TCP has not cut yet is up to
    /// 64 KiB. With one queue, a packet that is larger when it is cut is dropped without a word.
    pub burst: u32,
    /// Bytes that a queue holds. It drops packets beyond.
    pub limit: u32,
    /// The congestion control of TCP on both hosts, if not the machine's.
    pub congestion: Option<String>,
    /// The MTU of both hosts in bytes, 68 to 65 535.
    pub mtu: u32,
    /// The time that each packet takes in one direction.
    pub delay: Duration,
    /// Each packet takes up to so much longer. None overtakes another.
    pub jitter: Duration,
    /// With a delay: so many packets in a row are lost, of so many.
    pub losses: Option<(u64, u64)>,
}

impl Link {
    /// A link with one queue of 1 MiB, bursts of 128 KiB and an MTU of 1500 bytes.
    #[must_use]
    pub fn new(rate: Rate) -> Self {
        Self {
            rate,
            queue: Queue::OneFifo,
            burst: 128 << 10,
            limit: 1 << 20,
            congestion: None,
            mtu: 1500,
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            losses: None,
        }
    }

    /// The same link. Each packet takes `delay` in one direction, and up to `jitter` more.
    #[must_use]
    pub fn delayed(self, delay: Duration, jitter: Duration) -> Self {
        Self {
            delay,
            jitter,
            ..self
        }
    }

    /// The same link with a delay, which loses the last `burst` of each `packets` of a direction.
    #[must_use]
    pub fn losing(self, burst: u64, packets: u64) -> Self {
        Self {
            losses: Some((burst, packets)),
            ..self
        }
    }

    /// The same link with another queue.
    #[must_use]
    pub fn queue(self, queue: Queue) -> Self {
        Self { queue, ..self }
    }

    /// The same link, whose hosts believe that it carries packets of `mtu` bytes.
    #[must_use]
    pub fn mtu(self, mtu: u32) -> Self {
        Self { mtu, ..self }
    }

    /// The same link, which drops packets above `bytes` without a word, as a path does where a
    /// tunnel takes a part of the MTU.
    #[must_use]
    pub fn drops_above(self, bytes: u32) -> Self {
        // The header of Ethernet counts too.
        let burst = bytes + 14;
        let queue = Queue::OneFifo;
        Self {
            burst,
            queue,
            ..self
        }
    }

    /// The commands for `tc -batch` of one host. They replace a shape with another `handle` in one
    /// step: no packet passes unshaped.
    pub(super) fn program(&self, handle: u16) -> String {
        match self.queue {
            Queue::OneFifo => self.one_fifo(handle),
            Queue::Fair => self.classes(handle, self.rate),
            Queue::PerFlow(most) => self.classes(handle, most.min(self.rate)),
        }
    }

    fn one_fifo(&self, handle: u16) -> String {
        let Self { burst, limit, .. } = self;
        let rate = self.rate.0;
        format!(
            "qdisc replace dev {DEVICE} root handle {handle:x}: \
             tbf rate {rate}bit burst {burst} limit {limit}\n"
        )
    }

    /// Each class is assured a small share. It borrows the rest from the link, up to `most`. A
    /// packet without a class is dropped, so none passes before its class is there.
    fn classes(&self, handle: u16, most: Rate) -> String {
        let (rate, limit) = (self.rate.0, self.limit);
        // The quantum is the turn of a class that borrows: one packet that TCP has not cut yet.
        let bursts = format!("burst {0} cburst {0} quantum 65536", self.burst);
        let assured = (rate / u64::from(CLASSES)).max(8);
        let mut text = format!(
            "qdisc replace dev {DEVICE} root handle {handle:x}: htb default ffff direct_qlen 0\n\
             class add dev {DEVICE} parent {handle:x}: classid {handle:x}:1 \
             htb rate {rate}bit ceil {rate}bit {bursts}\n"
        );
        let flows = (FIRST_CLASS..FIRST_CLASS + CLASSES).map(|class| (class, most.0));
        for (class, most) in flows.chain([(0xffff, rate)]) {
            let _ = writeln!(
                text,
                "class add dev {DEVICE} parent {handle:x}:1 classid {handle:x}:{class:x} \
                 htb rate {assured}bit ceil {most}bit {bursts}\n\
                 qdisc add dev {DEVICE} parent {handle:x}:{class:x} bfifo limit {limit}"
            );
        }
        let _ = writeln!(
            text,
            "filter add dev {DEVICE} parent {handle:x}: protocol all prio 1 bpf bytecode \"{}\"",
            classifier(handle)
        );
        text
    }
}

/// The classic BPF program that returns the class of a packet below `handle`: `code jt jf k`, as
/// `tc` reads it. Codes are those of linux/bpf_common.h. Zero means the default class.
fn classifier(handle: u16) -> String {
    let first = (u32::from(handle) << 16) + FIRST_CLASS;
    let mask = CLASSES - 1;
    let steps = [
        "40 0 0 12".to_owned(),    // ldh [12]: the type of the frame
        "21 0 11 2048".to_owned(), // jeq IPv4, else the end
        "48 0 0 23".to_owned(),    // ldb [23]: the protocol
        "21 0 9 6".to_owned(),     // jeq TCP, else the end
        "177 0 0 14".to_owned(),   // ldxb 4*([14]&0xf): the length of the IP header
        "72 0 0 14".to_owned(),    // ldh [x + 14]: the source port
        "2 0 0 0".to_owned(),      // st M[0]
        "72 0 0 16".to_owned(),    // ldh [x + 16]: the destination port
        "97 0 0 0".to_owned(),     // ldx M[0]
        "12 0 0 0".to_owned(),     // add x
        format!("84 0 0 {mask}"),  // and
        format!("4 0 0 {first}"),  // add
        "22 0 0 0".to_owned(),     // ret a
        "6 0 0 0".to_owned(),      // ret 0
    ];
    format!("{},{}", steps.len(), steps.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_read_and_print_alike() {
        for text in ["8kbit", "1500bit", "100mbit", "1gbit", "2500mbit"] {
            let Ok(rate) = text.parse::<Rate>() else {
                assert_eq!(text, "1500bit");
                continue;
            };
            assert_eq!(rate.to_string(), text);
        }
        for text in [
            "",
            "1",
            "gbit",
            "1gb",
            "-1gbit",
            "1.5gbit",
            "7kbit",
            "99999999999gbit",
        ] {
            assert!(text.parse::<Rate>().is_err(), "{text}");
        }
        assert_eq!(Rate::mbit(8).bytes_per_second(), 1_000_000);
    }
}
