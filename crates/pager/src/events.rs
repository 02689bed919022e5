//! The events of restores, for those who watch.
//!
//! **Guarantee.** Events have numbers without gaps. The last [`KEPT`] are kept, so a gap tells a
//! reader that it came too late. No event waits for a reader.

use crate::name::Name;
use crate::vm::locked;
use serde::Serialize;
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// The events that are kept.
const KEPT: usize = 4096;
/// The most readers that wait at once. One more gets its answer without a wait.
const READERS: usize = 8;

/// Something that happened to a restore. As JSON it is a line of `GET /events`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Event {
    /// Its number, from 1.
    pub number: u64,
    /// The time, in milliseconds since 1970.
    pub at_ms: u64,
    /// The name of the restore.
    pub id: String,
    /// Its kind.
    #[serde(flatten)]
    pub happened: Happened,
}

/// The kinds of events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Happened {
    /// The restore waits for its VMM.
    Waiting,
    /// A VMM was refused.
    Refused {
        /// The reason.
        why: String,
    },
    /// Its VM is served.
    Serving {
        /// The process id of the VMM.
        pid: i32,
        /// All pages of the VM.
        pages: u64,
        /// Whether another pager served the VM before.
        taken_over: bool,
    },
    /// All pages of a recording were placed, or touched before.
    Replayed {
        /// The pages that the recording brought.
        pages: u64,
    },
    /// All memory was loaded.
    Loaded {
        /// The pages that came in the background.
        pages: u64,
    },
    /// A page cannot be read.
    Lost {
        /// The reason.
        why: String,
    },
    /// The memory can be read again.
    Found,
    /// The VM cannot be served any more.
    Failed {
        /// The reason.
        why: String,
    },
    /// The restore has ended.
    Ended,
}

/// The last events of a pager.
#[derive(Debug, Default)]
pub(crate) struct Events {
    log: Mutex<Log>,
    grown: Condvar,
}

#[derive(Debug, Default)]
struct Log {
    last: u64,
    kept: VecDeque<Event>,
    readers: usize,
}

impl Events {
    pub(crate) fn add(&self, name: &Name, happened: Happened) {
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let at_ms = at.map_or(0, |at| u64::try_from(at.as_millis()).unwrap_or(u64::MAX));
        let mut log = locked(&self.log);
        log.last += 1;
        let event = Event {
            number: log.last,
            at_ms,
            id: name.as_str().to_owned(),
            happened,
        };
        if log.kept.len() == KEPT {
            log.kept.pop_front();
        }
        log.kept.push_back(event);
        drop(log);
        self.grown.notify_all();
    }

    /// The events behind number `after`. If there is none, it waits for the next, at most `limit`.
    pub(crate) fn after(&self, after: u64, limit: Duration) -> Vec<Event> {
        let deadline = Instant::now() + limit;
        let mut log = locked(&self.log);
        log.readers += 1;
        while log.last <= after && log.readers <= READERS {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let woken = self.grown.wait_timeout(log, left);
            (log, _) = woken.unwrap_or_else(PoisonError::into_inner);
        }
        log.readers -= 1;
        let behind = log.kept.partition_point(|event| event.number <= after);
        log.kept.range(behind..).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_tell_a_late_reader_of_its_gap() {
        let (events, name) = (Events::default(), "web".parse().unwrap());
        assert_eq!(events.after(0, Duration::from_millis(1)), []);
        for _ in 0..KEPT + 10 {
            events.add(&name, Happened::Found);
        }
        let all = events.after(0, Duration::ZERO);
        assert_eq!((all.len(), all[0].number), (KEPT, 11));
        let last = events.after(KEPT as u64 + 9, Duration::ZERO);
        assert_eq!((last.len(), last[0].number), (1, KEPT as u64 + 10));
        assert_eq!(events.after(u64::MAX, Duration::ZERO), []);
        let line = serde_json::to_value(&last[0]).unwrap();
        assert_eq!(
            (&line["event"], &line["id"]),
            (&"found".into(), &"web".into())
        );
    }

    #[test]
    fn a_reader_waits_for_the_next_event() {
        let (events, name) = (Events::default(), "web".parse().unwrap());
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| events.after(0, Duration::from_secs(60)));
            while locked(&events.log).readers == 0 {
                std::thread::yield_now();
            }
            events.add(&name, Happened::Waiting);
            assert_eq!(reader.join().unwrap().len(), 1);
        });
        locked(&events.log).readers = READERS;
        assert_eq!(
            events.after(1, Duration::from_secs(60)),
            [],
            "it does not wait"
        );
    }
}
