#![expect(unsafe_code, reason = "rustix has no call that makes a TAP device")]
//! A link whose packets take time.
//!
//! **Guarantee.** Each packet takes the delay, and up to the jitter more. None overtakes another.
//! Nothing is lost but the bursts of [`Link::losses`], and while [`WAITING`] packets are on the
//! way.
//!
//! **Mechanism.** Each host has a TAP device in place of an end of a veth pair, and a thread for
//! each direction takes packets from one and gives them to the other. So this needs no `netem`,
//! which some kernels lack. On a busy machine the threads add some 100 us of their own.
//!
//! Source: Linux's `Documentation/networking/tuntap.rst`.

use crate::link::{DEVICE, Link};
use crate::{Error, netns};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, read, write};
use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::num::NonZeroU64;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The packets that may be on the way in one direction. A link of 1 Gbit/s and 100 ms has 8000 of
/// 1500 bytes.
const WAITING: usize = 32_768;
/// The largest packet, with the header of Ethernet.
const MOST: usize = 66_000;
/// The longest time until a thread looks whether it is to end.
const NAP: Duration = Duration::from_millis(100);

/// The threads of a link.
#[derive(Debug)]
pub(super) struct Delayed {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Delayed {
    /// Makes the devices of two hosts, and joins them.
    pub(super) fn start(hosts: [&str; 2], link: &Link) -> Result<Self, Error> {
        let [a, b] = hosts.map(|host| {
            let made = netns::within(host, tap).and_then(|made| made);
            made.map(Arc::new)
                .map_err(|why| Error::Unusable(format!("cannot make a TAP device: {why}")))
        });
        let (a, b) = (a?, b?);
        let ends = Arc::new(AtomicBool::new(false));
        let ways = [(Arc::clone(&a), Arc::clone(&b)), (b, a)];
        let threads = ways.into_iter().zip(1..).map(|((from, to), seed)| {
            let ends = Arc::clone(&ends);
            let mut way = Way {
                link: link.clone(),
                seen: 0,
                random: seed,
                waiting: VecDeque::new(),
            };
            std::thread::spawn(move || {
                // A refusal costs 50 us a packet.
                let _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
                let mut packet = vec![0; MOST];
                while !ends.load(Ordering::Relaxed) && way.carry(&from, &to, &mut packet).is_ok() {}
            })
        });
        let threads = threads.collect();
        Ok(Self { ends, threads })
    }
}

impl Drop for Delayed {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // Its panic has been printed.
            let _ = thread.join();
        }
    }
}

/// Makes the device of the calling thread's namespace. It goes when the file is closed.
fn tap() -> std::io::Result<File> {
    /// `struct ifreq` of `include/uapi/linux/if.h`: a name, and here flags.
    #[repr(C)]
    struct Request {
        name: [u8; 16],
        flags: u16,
        rest: [u8; 22],
    }
    /// `TUNSETIFF`, `IFF_TAP` and `IFF_NO_PI` of `include/uapi/linux/if_tun.h`.
    const SET: rustix::ioctl::Opcode = rustix::ioctl::opcode::write::<i32>(b'T', 202);
    const FLAGS: u16 = 0x0002 | 0x1000;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open("/dev/net/tun")?;
    let mut name = [0; 16];
    name[..DEVICE.len()].copy_from_slice(DEVICE.as_bytes());
    let mut request = Request {
        name,
        flags: FLAGS,
        rest: [0; 22],
    };
    // SAFETY: the call reads and writes a `struct ifreq`, and the request is one.
    unsafe {
        rustix::ioctl::ioctl(
            &file,
            rustix::ioctl::Updater::<SET, Request>::new(&mut request),
        )?;
    }
    Ok(file)
}

/// One direction.
struct Way {
    link: Link,
    /// The packets so far.
    seen: u64,
    random: u64,
    /// Packets, and when each is due.
    waiting: VecDeque<(Instant, Box<[u8]>)>,
}

impl Way {
    /// Takes the packets that are there, by way of `packet`, and gives those that are due.
    fn carry(&mut self, from: &File, to: &File, packet: &mut [u8]) -> Result<(), Errno> {
        loop {
            match read(from, &mut *packet) {
                Ok(bytes) => self.take(&packet[..bytes]),
                Err(Errno::AGAIN) => break,
                Err(why) => return Err(why),
            }
            if self
                .waiting
                .front()
                .is_some_and(|(due, _)| *due <= Instant::now())
            {
                break;
            }
        }
        while let Some((due, packet)) = self.waiting.front() {
            let left = due.saturating_duration_since(Instant::now());
            if left > Duration::ZERO {
                return wait(from, left.min(NAP));
            }
            match write(to, packet) {
                // The host's device is down: the packet is lost, as on an unplugged link.
                Ok(_) | Err(Errno::IO) => {}
                Err(why) => return Err(why),
            }
            self.waiting.pop_front();
        }
        wait(from, NAP)
    }

    fn take(&mut self, packet: &[u8]) {
        self.seen += 1;
        let losses = self.link.losses;
        let is_lost = losses.is_some_and(|(burst, of)| self.seen % of >= of - burst);
        if is_lost || self.waiting.len() == WAITING {
            return;
        }
        // The constants of Knuth's MMIX.
        self.random = self
            .random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let part = (self.random >> 40) as f64 / (1 << 24) as f64;
        let due = Instant::now() + self.link.delay + self.link.jitter.mul_f64(part);
        let last = self.waiting.back().map_or(due, |(last, _)| *last);
        self.waiting.push_back((due.max(last), packet.into()));
    }
}

/// Waits until there is a packet, or the time is over.
fn wait(from: &File, time: Duration) -> Result<(), Errno> {
    let time = Timespec::try_from(time).expect("it is short");
    match poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&time)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(why) => Err(why),
    }
}
