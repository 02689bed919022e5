//! The network device, on a tap device of the host.
//!
//! It offers no offloads: each frame comes whole, behind a header of zeroes. While it is paused,
//! the host's kernel keeps frames or drops them.
//!
//! A VM that has arrived is announced: switches learn the way to its address from a frame that it
//! sends (RARP, RFC 903). QEMU does so five times, as frames get lost; so does this device.

use super::{Chain, Fault, Tap, VirtioDevice};
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::str::FromStr;
use std::time::{Duration, Instant};

const MAC: u64 = 1 << 5;
/// The bytes of the header of a frame.
const HEADER: usize = 12;
/// The longest frame: 1500 bytes, an Ethernet header, and VLAN tags.
const FRAME: usize = 1522;
const RECEIVE: usize = 0;
const ANNOUNCEMENTS: u8 = 5;
const BETWEEN: Duration = Duration::from_millis(100);

/// An Ethernet address: six pairs of hexadecimal digits, with colons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mac([u8; 6]);

impl Mac {
    /// A random address that is administered locally.
    ///
    /// # Errors
    /// The error of getrandom(2).
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 6];
        pageferry_machine::fill_random(&mut bytes)?;
        bytes[0] = bytes[0] & !1 | 2;
        Ok(Self(bytes))
    }
}

impl FromStr for Mac {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refused = || format!("{text:?} is no address of a host, expected as 02:00:00:00:00:01");
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2);
            let part = part.filter(|part| part.bytes().all(|digit| digit.is_ascii_hexdigit()));
            let digits = part.ok_or_else(refused)?;
            *byte = u8::from_str_radix(digits, 16).map_err(|_| refused())?;
        }
        // The lowest bit of the first byte means a group of hosts.
        match parts.next().is_none() && bytes[0] & 1 == 0 && bytes != [0; 6] {
            true => Ok(Self(bytes)),
            false => Err(refused()),
        }
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// The network device.
pub struct Net {
    tap: Tap,
    mac: Mac,
    /// A frame that waits for a page of its request.
    held: Option<Vec<u8>>,
    /// When the next announcement is due, and how many.
    announcements: Option<(Instant, u8)>,
}

impl Net {
    /// The device of a guest that has the address `mac`. That of a VM which arrives replaces it.
    #[must_use]
    pub fn new(tap: Tap, mac: Mac) -> Self {
        Self {
            tap,
            mac,
            held: None,
            announcements: None,
        }
    }

    fn receive(&mut self, chain: &Chain) -> Result<Option<u32>, Fault> {
        let room = chain.writable();
        if room < HEADER as u64 {
            return Err(Fault::Broken);
        }
        let frame = match self.held.take() {
            Some(frame) => frame,
            None => {
                let mut frame = vec![0; HEADER + FRAME];
                // A tap that is down has no frames.
                let received = self.tap.receive(&mut frame[HEADER..]).unwrap_or(None);
                let Some(bytes) = received else {
                    return Ok(None);
                };
                frame.truncate(HEADER + bytes);
                frame[HEADER - 2] = 1; // The number of buffers.
                frame
            }
        };
        let bytes = frame.len() as u32;
        if u64::from(bytes) > room {
            return Ok(Some(0)); // The frame is lost, as in a network.
        }
        match chain.write(0, &frame) {
            Ok(()) => Ok(Some(bytes)),
            Err(fault) => {
                self.held = Some(frame);
                Err(fault)
            }
        }
    }

    fn send(&self, chain: &Chain) -> Result<Option<u32>, Fault> {
        let bytes = chain.readable();
        // Longer frames than the longest, and those without an Ethernet header, are lost.
        if let Some(bytes) = bytes.checked_sub(HEADER as u64)
            && (14..=FRAME as u64).contains(&bytes)
        {
            let mut frame = vec![0; bytes as usize];
            chain.read(HEADER as u64, &mut frame)?;
            // So is one that the host does not take.
            let _ = self.tap.send(&frame);
        }
        Ok(Some(0))
    }

    /// RARP's request for its own address, to all hosts.
    fn announcement(&self) -> [u8; 60] {
        let mac = self.mac.0;
        let mut frame = [0; 60];
        frame[..6].fill(0xff);
        frame[6..12].copy_from_slice(&mac);
        frame[12..22].copy_from_slice(&[0x80, 0x35, 0, 1, 8, 0, 6, 4, 0, 3]);
        frame[22..28].copy_from_slice(&mac);
        frame[32..38].copy_from_slice(&mac);
        frame
    }
}

impl VirtioDevice for Net {
    fn id(&self) -> u32 {
        1
    }

    fn queues(&self) -> usize {
        2
    }

    fn features(&self) -> u64 {
        MAC
    }

    fn config(&self) -> Vec<u8> {
        self.mac.0.to_vec()
    }

    fn serve(&mut self, queue: usize, chain: &Chain) -> Result<Option<u32>, Fault> {
        match queue {
            RECEIVE => self.receive(chain),
            _ => self.send(chain),
        }
    }

    fn input(&self) -> Option<BorrowedFd<'_>> {
        Some(self.tap.as_fd())
    }

    fn tick(&mut self) -> Option<Duration> {
        let (due, left) = self.announcements?;
        let wait = due.saturating_duration_since(Instant::now());
        if !wait.is_zero() {
            return Some(wait);
        }
        let _ = self.tap.send(&self.announcement());
        self.announcements = (left > 1).then(|| (Instant::now() + BETWEEN, left - 1));
        self.announcements.map(|_| BETWEEN)
    }

    fn pause(&mut self) -> io::Result<()> {
        self.announcements = None;
        Ok(())
    }

    fn resume(&mut self, arrived: bool) {
        self.announcements = arrived.then(|| (Instant::now(), ANNOUNCEMENTS));
    }

    fn state(&self) -> Vec<u8> {
        self.mac.0.to_vec()
    }

    fn check(&self, state: &[u8]) -> Result<(), String> {
        let len = state.len();
        match len == self.mac.0.len() && state[0] & 1 == 0 {
            true => Ok(()),
            false => Err(format!("{len} bytes, expected an address of a host, 6")),
        }
    }

    fn apply(&mut self, state: &[u8]) {
        if let Ok(mac) = state.try_into() {
            self.mac = Mac(mac);
        }
    }
}
