//! The state of everything: the VM, the kernel's queue, the state file and the pagers.

pub(super) const PAGES: usize = 2;
pub(super) const PAGERS: usize = 3;
pub(super) const WORKERS: usize = 2;

/// The properties, and what their breach is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breach {
    /// A removed page shows its old contents.
    Stale,
    /// Two pagers place pages at once.
    TwoPlace,
    /// A thread sleeps for ever, although a pager serves.
    Sleeps,
    /// Without any further event, threads go round for ever.
    GoesRound,
}

/// The rules of the pager. All hold, but in searches that show that each is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// `read(2)` puts messages into the state file.
    Ring,
    /// A slot is cleared after its removal is recorded.
    RecordFirst,
    /// Reading excludes placing.
    Gate,
    /// A reader that waits for the gate gets it before a thread that places.
    ReaderFirst,
    /// A removal is recorded before the gate opens, so before any answer.
    RecordInGate,
    /// `removed` is checked when a page is placed, and not when it is requested.
    CheckAtPlacing,
    /// A pager waits until no thread of its predecessor is left.
    Fence,
    /// A successor records the removals in the ring.
    Replay,
    /// A successor wakes all threads that sleep.
    Wake,
}

/// The rule that is switched off.
pub(super) type Without = Option<Rule>;

/// The index of a page. It is small, as there are many states.
pub(super) type Page = u8;

pub(super) fn pages() -> std::ops::Range<Page> {
    0..2
}

/// A message of the userfaultfd about a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Message {
    Fault(Page),
    Removal(Page),
}

pub(super) type Batch = [Option<Message>; 2];

/// The memory of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Memory {
    Missing,
    /// The contents of the snapshot.
    Old,
    Zeros,
}

/// A vCPU's thread, which touches one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Vcpu {
    /// It may touch its page at any time. So does a thread that was woken.
    Runs,
    /// It sleeps, and its fault waits in the kernel's queue.
    Queued,
    /// It sleeps, and its fault was read. The kernel does not send it again.
    Read,
}

/// The balloon's thread, within the removal of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Balloon {
    Runs,
    /// It sleeps, and its message waits in the kernel's queue.
    Queued,
    /// Its message was read, and it has not run on yet.
    Read,
    /// It runs on, and is about to drop the page.
    Drops,
}

/// The thread of a pager that reads messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Reader {
    Idle,
    /// In `read(2)`: the message that is dequeued and not copied yet, and the copied ones.
    Reads(Option<Message>, u8),
    /// It has made this many of its jobs for a batch.
    Handles(u8, Batch),
}

/// The jobs of a reader after `read(2)`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Job {
    /// Records the removal, or notes the fault, of one message.
    Record(usize),
    ClearRing,
    OpenGate,
}

/// A thread of a pager that places pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Worker {
    Idle,
    /// It waits for the source's answer, and then for the gate. The flag is `removed` at the time
    /// of the request.
    Waits(Page, bool),
    /// In `UFFDIO_COPY`, or in `UFFDIO_ZEROPAGE` if the flag is set. It holds the gate.
    Places(Page, bool),
    /// It marks the page as placed, and then opens the gate.
    Marks(Page),
    /// The page was there. It wakes the threads that sleep on it.
    Wakes(Page),
}

/// The steps of a pager's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Phase {
    NotStarted,
    WaitsForFence,
    Replays(u8),
    ClearsRing,
    WakesAll,
    Serves,
    /// It was killed. Threads in system calls are still there.
    Dies,
    Gone,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pager {
    pub(super) phase: Phase,
    pub(super) reader: Reader,
    pub(super) workers: [Worker; WORKERS],
    /// The pages with a fault that nobody serves yet.
    pub(super) wanted: [bool; PAGES],
}

impl Pager {
    pub(super) fn new(phase: Phase) -> Self {
        Self {
            phase,
            reader: Reader::Idle,
            workers: [Worker::Idle; WORKERS],
            wanted: [false; PAGES],
        }
    }

    /// Whether it has passed the fence, and has threads.
    pub(super) fn is_inside(&self) -> bool {
        use Phase::{Gone, NotStarted, WaitsForFence};
        !matches!(self.phase, NotStarted | WaitsForFence | Gone)
    }

    pub(super) fn gate_is_shared(&self) -> bool {
        let holds = |worker: &Worker| {
            matches!(
                worker,
                Worker::Places(..) | Worker::Marks(_) | Worker::Wakes(_)
            )
        };
        self.workers.iter().any(holds)
    }

    pub(super) fn gate_is_exclusive(&self, without: Without) -> bool {
        match self.reader {
            Reader::Idle => false,
            Reader::Reads(..) => true,
            Reader::Handles(done, _) => {
                !jobs(without)[..usize::from(done)].contains(&Job::OpenGate)
            }
        }
    }

    /// Takes a killed pager's last thread away.
    pub(super) fn bury(&mut self) {
        let in_call = |worker: &Worker| matches!(worker, Worker::Places(..));
        let reads = matches!(self.reader, Reader::Reads(..));
        if self.phase == Phase::Dies && !reads && !self.workers.iter().any(in_call) {
            *self = Self::new(Phase::Gone);
        }
    }
}

/// The number of the next job after the first `done`. A slot without a message is no work.
pub(super) fn next_job(without: Without, batch: &Batch, done: u8) -> u8 {
    let is_work = |job: &u8| match jobs(without)[usize::from(*job)] {
        Job::Record(slot) => batch[slot].is_some(),
        Job::ClearRing | Job::OpenGate => true,
    };
    (done..4).find(is_work).unwrap_or(4)
}

/// The order of a reader's jobs.
pub(super) fn jobs(without: Without) -> [Job; 4] {
    use Job::{ClearRing, OpenGate, Record};
    match without {
        Some(Rule::RecordFirst) => [ClearRing, Record(0), Record(1), OpenGate],
        Some(Rule::RecordInGate) => [OpenGate, Record(0), Record(1), ClearRing],
        _ => [Record(0), Record(1), ClearRing, OpenGate],
    }
}

/// The state of everything.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) memory: [Memory; PAGES],
    pub(super) vcpus: [Vcpu; PAGES],
    pub(super) balloon: Balloon,
    /// The pages that the balloon has dropped: those before this one.
    pub(super) dropped: Page,
    /// The state file: it outlives pagers.
    pub(super) ring: Batch,
    pub(super) removed: [bool; PAGES],
    pub(super) placed: [bool; PAGES],
    pub(super) pagers: [Pager; PAGERS],
    pub(super) deaths_left: u8,
}

impl World {
    pub(super) fn new(deaths_left: u8) -> Self {
        let mut pagers = std::array::from_fn(|_| Pager::new(Phase::NotStarted));
        pagers[0].phase = Phase::Serves;
        Self {
            memory: [Memory::Missing; PAGES],
            vcpus: [Vcpu::Runs; PAGES],
            balloon: Balloon::Runs,
            dropped: 0,
            ring: [None; 2],
            removed: [false; PAGES],
            placed: [false; PAGES],
            pagers,
            deaths_left,
        }
    }

    /// The messages in the kernel's queue. Any of them may come first.
    pub(super) fn queue(&self) -> impl Iterator<Item = Message> {
        let faults = pages().filter(|page| self.vcpus[usize::from(*page)] == Vcpu::Queued);
        let removal = (self.balloon == Balloon::Queued).then_some(Message::Removal(self.dropped));
        faults.map(Message::Fault).chain(removal)
    }

    /// Whether the kernel answers EAGAIN.
    pub(super) fn is_changing(&self) -> bool {
        matches!(self.balloon, Balloon::Queued | Balloon::Read)
    }

    pub(super) fn wake(&mut self, page: Page) {
        let vcpu = &mut self.vcpus[usize::from(page)];
        if matches!(vcpu, Vcpu::Queued | Vcpu::Read) {
            *vcpu = Vcpu::Runs;
        }
    }

    pub(super) fn is_stale(&self) -> bool {
        self.memory[..usize::from(self.dropped)].contains(&Memory::Old)
    }

    pub(super) fn two_place(&self) -> bool {
        let places = |pager: &&Pager| {
            let mut workers = pager.workers.iter();
            workers.any(|worker| matches!(worker, Worker::Places(..)))
        };
        self.pagers.iter().filter(places).count() > 1
    }

    /// Whether a thread sleeps although a pager serves.
    pub(super) fn sleeps_while_served(&self) -> bool {
        let served = self.pagers.iter().any(|pager| pager.phase == Phase::Serves);
        let sleeps = |vcpu: &Vcpu| matches!(vcpu, Vcpu::Queued | Vcpu::Read);
        served && (self.vcpus.iter().any(sleeps) || self.balloon == Balloon::Queued)
    }
}
