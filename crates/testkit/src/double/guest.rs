//! The accesses of a guest to its memory, and the exact knowledge of what each page must contain.
//!
//! **Guarantee.** At any time, each page has one state that says its contents. A page that another
//! thread changes is not checked. Every other page is checked whole, and a wrong one is reported.
//!
//! **Mechanism.** A state is one word: a version, whether it is zeros, and whether a thread changes
//! it right now. A thread that writes or removes a page sets that bit first, so changes exclude
//! each other. Reads take no lock: a read counts if the state is the same before and after it. So
//! threads also sleep on pages that the balloon removes.

use super::contents::{Contents, Words, bytes, in_file, written};
use super::memory::Memory;
use super::{Done, Status, Task, lock};
use crate::Random;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// A page had the wrong contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wrong {
    /// The index of the page in the memory file.
    pub page: u64,
    /// The right contents.
    pub expected: Contents,
    /// Those that the page had.
    pub found: Contents,
}

/// The most wrong pages that are remembered. All are counted.
const MOST_REMEMBERED: usize = 16;
/// The most pages of the mapping that the balloon removes at once.
const MOST_REMOVED: u64 = 16;
/// The time after which a thread looks again at something that another thread changes.
const MOMENT: Duration = Duration::from_micros(100);
/// The touches of a vCPU between two rests of a [`MOMENT`]. They leave the cores to what is tested.
const BURST: u64 = 16;

/// The state of a page. The upper bits are the version.
#[derive(Clone, Copy, PartialEq, Eq)]
struct State(u64);

impl State {
    const CHANGING: u64 = 1;
    const ZEROS: u64 = 2;

    fn version(self) -> u64 {
        self.0 >> 2
    }

    fn is_changing(self) -> bool {
        self.0 & Self::CHANGING != 0
    }

    /// The next state, by a write or by a removal.
    fn next(self, removed: bool) -> Self {
        let zeros = if removed { Self::ZEROS } else { 0 };
        Self((self.version() + 1) << 2 | zeros)
    }
}

/// The way in which a page is written.
#[derive(Clone, Copy)]
enum Writer {
    /// The thread stores a word first.
    Stores,
    /// The kernel stores the first half.
    Kernel,
}

/// A pipe of one thread. Each page that enters it is taken out again.
struct Pipe(std::io::PipeReader, std::io::PipeWriter);

impl Pipe {
    fn new() -> Self {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        Self(reader, writer)
    }
}

/// The properties of a guest. State files and messages between doubles have them as JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    /// The sizes of the regions in bytes.
    pub(crate) regions: Vec<u64>,
    pub(crate) vcpus: usize,
    /// The time between two removals.
    pub(crate) balloon_us: Option<u64>,
    /// What each page contains. Further pages have the memory file's contents.
    pub(crate) states: Vec<u64>,
}

impl Plan {
    /// The state of a page of zeros.
    pub(crate) const ZEROS: u64 = State::ZEROS;
}

/// The memory of a double, and what its threads have done.
pub(crate) struct Guest {
    pub(crate) memory: Memory,
    plan: Plan,
    states: Vec<AtomicU64>,
    /// Whether vCPUs and the balloon go on.
    running: AtomicBool,
    /// The number of vCPUs and balloons that are at work right now.
    active: AtomicU32,
    /// The number of threads of tasks that have not ended.
    tasks: AtomicU32,
    /// The accesses of each vCPU.
    touches: Vec<AtomicU64>,
    removals: AtomicU64,
    pub(crate) wrong: AtomicU64,
    remembered: Mutex<Vec<Wrong>>,
}

impl Guest {
    /// A guest whose threads wait.
    pub(crate) fn start(memory: Memory, mut plan: Plan) -> Arc<Self> {
        let mut states = std::mem::take(&mut plan.states);
        states.resize(memory.pages() as usize, 0);
        let guest = Arc::new(Self {
            states: states.into_iter().map(AtomicU64::new).collect(),
            memory,
            running: AtomicBool::new(false),
            active: AtomicU32::new(0),
            tasks: AtomicU32::new(0),
            touches: (0..plan.vcpus).map(|_| AtomicU64::new(0)).collect(),
            removals: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            remembered: Mutex::default(),
            plan,
        });
        for number in 0..guest.plan.vcpus {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || guest.vcpu(number));
        }
        if let Some(us) = guest.plan.balloon_us {
            let guest = Arc::clone(&guest);
            std::thread::spawn(move || guest.balloon(Duration::from_micros(us)));
        }
        guest
    }

    /// The plan of this guest as it is now, if it is paused.
    pub(crate) fn plan(&self) -> Plan {
        let states = self.states.iter();
        Plan {
            states: states.map(|state| state.load(Ordering::SeqCst)).collect(),
            ..self.plan.clone()
        }
    }

    /// Writes all pages, but for zeros.
    pub(crate) fn fill(&self) {
        for page in 0..self.memory.pages() {
            let words = self.expected(page, State(self.state(page).load(Ordering::SeqCst)));
            if words != [0; 512] {
                for (word, value) in self.memory.words(page).iter().zip(words) {
                    word.store(value, Ordering::Relaxed);
                }
            }
        }
    }

    pub(crate) fn vcpus(&self) -> usize {
        self.touches.len()
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    pub(crate) fn run(&self) {
        self.running.store(true, Ordering::SeqCst);
    }

    /// Stops all threads, which may be within their last access for a while.
    pub(crate) fn stop(&self) {
        self.running.store(false, Ordering::SeqCst);
    }

    /// Whether no thread is within an access. If the guest is stopped, none will be.
    pub(crate) fn is_still(&self) -> bool {
        self.active.load(Ordering::SeqCst) == 0
    }

    /// Its part of a status.
    pub(crate) fn status(&self) -> Status {
        let touches = self.touches.iter();
        Status {
            active: self.active.load(Ordering::SeqCst),
            tasks: self.tasks.load(Ordering::SeqCst),
            removals: self.removals.load(Ordering::Relaxed),
            wrong: self.wrong.load(Ordering::SeqCst),
            touches: touches.map(|each| each.load(Ordering::Relaxed)).collect(),
            first_wrong: lock(&self.remembered).clone(),
            ..Status::default()
        }
    }

    /// Begins a task, on a thread of its own or on one for each vCPU.
    pub(crate) fn begin(self: &Arc<Self>, task: Task) -> Done {
        let pages = self.memory.pages();
        match task {
            Task::VerifyAll => {
                let threads = self.vcpus().max(1);
                for number in 0..threads {
                    self.spawn(move |guest| {
                        let pages = (number as u64..pages).step_by(threads);
                        pages.for_each(|page| guest.read(page));
                    });
                }
            }
            Task::Read(page) if page < pages => self.spawn(move |guest| guest.read(page)),
            Task::Write(page) if page < pages => self.spawn(move |guest| {
                guest.write_locked(page, guest.lock(page), Writer::Stores, &Pipe::new());
            }),
            Task::Remove {
                first,
                pages: count,
            } if first < pages => {
                let end = first.saturating_add(count);
                let unit = self.memory.unit();
                if end > self.memory.run_end(first, count) || end == first {
                    return Err("the pages do not lie in one region".into());
                }
                if first % unit != 0 || end % unit != 0 {
                    return Err("the pages are no whole huge pages".into());
                }
                self.spawn(move |guest| guest.remove(first, end));
            }
            _ => return Err(format!("{task:?} is outside the guest").into()),
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, work: impl FnOnce(&Self) + Send + 'static) {
        let guest = Arc::clone(self);
        guest.tasks.fetch_add(1, Ordering::SeqCst);
        std::thread::spawn(move || {
            work(&guest);
            guest.tasks.fetch_sub(1, Ordering::SeqCst);
        });
    }

    fn state(&self, page: u64) -> &AtomicU64 {
        &self.states[page as usize]
    }

    /// The contents that a page in `state` must have.
    fn expected(&self, page: u64, state: State) -> Words {
        match state.version() {
            _ if state.0 & State::ZEROS != 0 => [0; 512],
            0 => in_file(self.plan.seed, page),
            version => written(self.plan.seed, page, version),
        }
    }

    fn check(&self, page: u64, expected: &Words, found: &Words) {
        if expected == found {
            return;
        }
        self.wrong.fetch_add(1, Ordering::Relaxed);
        let mut remembered = lock(&self.remembered);
        if remembered.len() < MOST_REMEMBERED {
            remembered.push(Wrong {
                page,
                expected: Contents::of(self.plan.seed, page, expected),
                found: Contents::of(self.plan.seed, page, found),
            });
        }
    }

    /// Reads a page whole and checks it. Returns false, without a check, if its state changed.
    fn try_read(&self, page: u64) -> bool {
        let before = State(self.state(page).load(Ordering::Acquire));
        let found = self.memory.load(page);
        fence(Ordering::Acquire);
        let after = State(self.state(page).load(Ordering::Relaxed));
        let counts = before == after && !before.is_changing();
        if counts {
            self.check(page, &self.expected(page, before), &found);
        }
        counts
    }

    pub(crate) fn read(&self, page: u64) {
        while !self.try_read(page) {
            std::thread::sleep(MOMENT);
        }
    }

    /// Makes this thread the only one that changes the page, unless another one is.
    fn try_lock(&self, page: u64) -> Option<State> {
        let state = State(self.state(page).load(Ordering::Relaxed));
        let changing = state.0 | State::CHANGING;
        let free = !state.is_changing()
            && self
                .state(page)
                .compare_exchange(state.0, changing, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok();
        free.then_some(state)
    }

    fn lock(&self, page: u64) -> State {
        loop {
            if let Some(state) = self.try_lock(page) {
                return state;
            }
            std::thread::sleep(MOMENT);
        }
    }

    fn unlock(&self, page: u64, state: State) {
        self.state(page).store(state.0, Ordering::Release);
    }

    /// Gives the locked page its next contents, and checks the rest of the old ones.
    fn write_locked(&self, page: u64, state: State, writer: Writer, pipe: &Pipe) {
        let next = state.next(false);
        let new = self.expected(page, next);
        // The first access is a write, so a missing page is a write fault.
        let first = match writer {
            Writer::Stores => {
                self.memory.words(page)[0].store(new[0], Ordering::Relaxed);
                1
            }
            Writer::Kernel => {
                let half = &bytes(&new)[..2048];
                assert_eq!(rustix::io::write(&pipe.1, half), Ok(2048));
                assert_eq!(self.memory.receive(page, 2048, &pipe.0), Ok(2048));
                256
            }
        };
        let mut expected = self.expected(page, state);
        expected[..first].copy_from_slice(&new[..first]);
        self.check(page, &expected, &self.memory.load(page));
        let words = self.memory.words(page);
        for (word, value) in words.iter().zip(new).skip(first) {
            word.store(value, Ordering::Relaxed);
        }
        self.unlock(page, next);
    }

    /// Lets the kernel read the locked page, and checks it.
    fn kernel_read_locked(&self, page: u64, state: State, pipe: &Pipe) {
        assert_eq!(self.memory.send(page, &pipe.1), Ok(4096));
        let mut found = [0; 4096];
        assert_eq!(rustix::io::read(&pipe.0, &mut found[..]), Ok(4096));
        let expected = self.expected(page, state);
        let words = found.as_chunks::<8>().0;
        self.check(
            page,
            &expected,
            &std::array::from_fn(|word| u64::from_ne_bytes(words[word])),
        );
        self.unlock(page, state);
    }

    /// Makes an access of a vCPU to a page. Pages that change are skipped.
    fn touch(&self, random: &mut Random, pipe: &Pipe) {
        let page = random.below(self.memory.pages());
        match random.below(20) {
            0..12 => {
                self.try_read(page);
            }
            kind => {
                let Some(state) = self.try_lock(page) else {
                    return;
                };
                match kind {
                    12..17 => self.write_locked(page, state, Writer::Stores, pipe),
                    17 => self.write_locked(page, state, Writer::Kernel, pipe),
                    _ => self.kernel_read_locked(page, state, pipe),
                }
            }
        }
    }

    /// Removes the pages `first..end`, which lie in one region.
    fn remove(&self, first: u64, end: u64) {
        // Only one thread at a time locks several pages, so no two wait for each other.
        static TURN: Mutex<()> = Mutex::new(());
        let turn = lock(&TURN);
        let states: Vec<State> = (first..end).map(|page| self.lock(page)).collect();
        self.memory.remove(first, end).expect("removed");
        for (page, state) in (first..end).zip(states) {
            self.unlock(page, state.next(true));
        }
        drop(turn);
        self.removals.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until the guest runs, does `work`, and so on for ever.
    fn work(&self, mut work: impl FnMut()) {
        loop {
            self.active.fetch_add(1, Ordering::SeqCst);
            let running = self.is_running();
            if running {
                work();
            }
            self.active.fetch_sub(1, Ordering::SeqCst);
            if !running {
                std::thread::sleep(MOMENT * 20);
            }
        }
    }

    /// The life of a thread that stands for a vCPU.
    fn vcpu(&self, number: usize) {
        let mut random = Random::new(self.plan.seed ^ (number as u64 + 1) << 32);
        let pipe = Pipe::new();
        self.work(|| {
            self.touch(&mut random, &pipe);
            let before = self.touches[number].fetch_add(1, Ordering::Relaxed);
            if before % BURST == BURST - 1 {
                std::thread::sleep(MOMENT);
            }
        });
    }

    /// The life of the balloon's thread.
    fn balloon(&self, pause: Duration) {
        let mut random = Random::new(!self.plan.seed);
        let unit = self.memory.unit();
        self.work(|| {
            let first = random.below(self.memory.pages() / unit) * unit;
            let end = self.memory.run_end(first, 1 + random.below(MOST_REMOVED));
            self.remove(first, end);
            std::thread::sleep(pause);
        });
    }
}
