//! A VMM that touches page after page, slowly, and tells how long touches take.

use super::vmm::Restored;
use crate::peer::{Part, Peer, read_line, send, send_line};
use crate::{BenchError, Samples};
use pageferry_addr::PAGE_SIZE;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The multiplier that scatters touches over memory. It is odd, so each page comes once in turn.
const SCATTER: u64 = 40_503;

/// A VMM and its pace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Paced {
    /// The VMM.
    pub(crate) vm: Restored,
    /// The time between two touches.
    pub(crate) pace: Duration,
}

/// The touches of a VMM between two lines.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Touches {
    pub(super) p99_us: f64,
    pub(super) longest_us: f64,
}

impl Part for Paced {
    const NAME: &'static str = "paced";

    /// Plays the VMM: it touches pages until a second line comes. Touches before the first line do
    /// not count.
    fn play(&self) -> Result<(), BenchError> {
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
        let (mut lines, mut times) = (0, Samples::default());
        for touched in 0.. {
            let took_us = touch(touched * SCATTER % pages)?;
            if lines == 1 {
                times.push(took_us);
            }
            lines += u32::from(end.recv_timeout(self.pace).is_ok());
            if lines == 2 {
                break;
            }
        }
        reader.join().expect("it only reads")?;
        send(&Touches {
            p99_us: times.quantile(0.99),
            longest_us: times.quantile(1.0),
        })
    }
}

/// Ends a VMM, and returns its touches.
pub(super) fn end(vmm: &mut Peer) -> Result<Touches, BenchError> {
    vmm.send_line("end")?;
    vmm.figures()
}
