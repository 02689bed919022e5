//! A VMM that touches page after page, slowly, and tells how long touches take.

use super::vmm::Restored;
use crate::BenchError;
use crate::peer::{Peer, read_line, send_line};
use pageferry_addr::PAGE_SIZE;
use std::time::Duration;

/// The multiplier that scatters touches over memory. It is odd, so each page comes once in turn.
const SCATTER: u64 = 40_503;

/// A VMM and its pace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Paced {
    /// The VMM.
    pub vm: Restored,
    /// The time between two touches.
    pub pace: Duration,
}

/// The touches of a VMM between two lines.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touches {
    pub(super) p99: Duration,
    pub(super) longest: Duration,
}

impl Paced {
    /// The words of its role.
    #[must_use]
    pub fn to_words(&self) -> Vec<String> {
        let pace = self.pace.as_micros().to_string();
        [pace].into_iter().chain(self.vm.to_words()).collect()
    }

    /// Parses [`Paced::to_words`]. `None` for other words.
    #[must_use]
    pub fn from_words(words: &[&str]) -> Option<Self> {
        let (pace, vm) = words.split_first()?;
        Some(Self {
            vm: Restored::from_words(vm)?,
            pace: Duration::from_micros(pace.parse().ok()?),
        })
    }

    /// Plays the VMM: it touches pages until a second line comes. Touches before the first line do
    /// not count.
    pub(crate) fn play(&self) -> Result<(), BenchError> {
        let (touch, _held) = self.vm.held()?;
        send_line("ready")?;
        let (asked, end) = std::sync::mpsc::channel();
        let reader = std::thread::spawn(move || {
            for _ in 0..2 {
                read_line()?;
                // The other end goes only together with this process.
                let _ = asked.send(());
            }
            Ok::<_, BenchError>(())
        });
        let pages = self.vm.bytes / PAGE_SIZE;
        let mut counted = None;
        for touched in 0.. {
            let took = touch(touched * SCATTER % pages)?;
            if let Some(times) = &mut counted {
                Vec::push(times, took);
            }
            match (end.recv_timeout(self.pace), &counted) {
                (Ok(()), None) => counted = Some(Vec::new()),
                (Ok(()), Some(_)) => break,
                (Err(_), _) => {}
            }
        }
        reader.join().expect("it only reads")?;
        let mut times = counted.unwrap_or_default();
        times.sort_unstable();
        let at = |q: f64| {
            let index = times.len().saturating_sub(1) as f64 * q;
            times.get(index as usize).map_or(0, Duration::as_nanos)
        };
        send_line(&format!("touches {} {}", at(0.99), at(1.0)))
    }
}

/// Ends a VMM, and returns its touches.
pub(super) fn end(vmm: &mut Peer) -> Result<Touches, BenchError> {
    vmm.send_line("end")?;
    let line = vmm.next_line()?;
    let numbers = line.strip_prefix("touches ").and_then(|rest| {
        let (p99, longest) = rest.split_once(' ')?;
        Some((p99.parse().ok()?, longest.parse().ok()?))
    });
    let (p99, longest) =
        numbers.ok_or_else(|| BenchError::Peer(format!("'{line}' has no figures")))?;
    Ok(Touches {
        p99: Duration::from_nanos(p99),
        longest: Duration::from_nanos(longest),
    })
}
