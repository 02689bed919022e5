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
use crate::Random;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

/// A page had the wrong contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
pub(super) enum Writer {
    /// The thread stores a word first.
    Stores,
    /// The kernel stores the first half.
    Kernel,
}

/// A pipe of one thread. Each page that enters it is taken out again.
pub(super) struct Pipe(std::io::PipeReader, std::io::PipeWriter);

impl Pipe {
    pub(super) fn new() -> Self {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        Self(reader, writer)
    }
}

/// The memory of a double, and what its threads have done.
pub(super) struct Guest {
    pub(super) memory: Memory,
    seed: u64,
    states: Vec<AtomicU64>,
    /// Whether vCPUs and the balloon go on.
    pub(super) running: AtomicBool,
    /// The number of vCPUs and balloons that are at work right now.
    pub(super) active: AtomicU32,
    /// The accesses of each vCPU.
    pub(super) touches: Vec<AtomicU64>,
    pub(super) removals: AtomicU64,
    pub(super) wrong: AtomicU64,
    pub(super) remembered: Mutex<Vec<Wrong>>,
    /// The time between two removals, for a VM that is saved.
    pub(super) balloon_us: Mutex<Option<u64>>,
}

impl Guest {
    pub(super) fn new(memory: Memory, seed: u64, vcpus: usize) -> Self {
        Self {
            states: (0..memory.pages()).map(|_| AtomicU64::new(0)).collect(),
            memory,
            seed,
            running: AtomicBool::new(false),
            active: AtomicU32::new(0),
            touches: (0..vcpus).map(|_| AtomicU64::new(0)).collect(),
            removals: AtomicU64::new(0),
            wrong: AtomicU64::new(0),
            remembered: Mutex::new(Vec::new()),
            balloon_us: Mutex::default(),
        }
    }

    pub(super) fn seed(&self) -> u64 {
        self.seed
    }

    /// Writes the memory file's contents to all pages.
    pub(super) fn fill(&self) {
        for page in 0..self.memory.pages() {
            let words = in_file(self.seed, page);
            for (word, value) in self.memory.words(page).iter().zip(words) {
                word.store(value, Ordering::Relaxed);
            }
        }
    }

    /// What each page contains, of a VM that is paused.
    pub(super) fn page_states(&self) -> Vec<u64> {
        let states = self.states.iter();
        states.map(|state| state.load(Ordering::SeqCst)).collect()
    }

    /// Takes over what each page contains. Nothing runs yet.
    pub(super) fn set_page_states(&self, states: &[u64]) {
        for (state, value) in self.states.iter().zip(states) {
            state.store(*value, Ordering::SeqCst);
        }
    }

    fn state(&self, page: u64) -> &AtomicU64 {
        &self.states[page as usize]
    }

    /// The contents that a page in `state` must have.
    fn expected(&self, page: u64, state: State) -> Words {
        match state.version() {
            _ if state.0 & State::ZEROS != 0 => [0; 512],
            0 => in_file(self.seed, page),
            version => written(self.seed, page, version),
        }
    }

    fn check(&self, page: u64, expected: &Words, found: &Words) {
        if expected == found {
            return;
        }
        self.wrong.fetch_add(1, Ordering::Relaxed);
        let mut remembered = self.remembered.lock().expect("no thread panics here");
        if remembered.len() < MOST_REMEMBERED {
            remembered.push(Wrong {
                page,
                expected: Contents::of(self.seed, page, expected),
                found: Contents::of(self.seed, page, found),
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

    pub(super) fn read(&self, page: u64) {
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

    pub(super) fn write(&self, page: u64, writer: Writer, pipe: &Pipe) {
        self.write_locked(page, self.lock(page), writer, pipe);
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
    pub(super) fn remove(&self, first: u64, end: u64) {
        // Only one thread at a time locks several pages, so no two wait for each other.
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().expect("no thread panics here");
        let states: Vec<State> = (first..end).map(|page| self.lock(page)).collect();
        self.memory.remove(first, end).expect("removed");
        for (page, state) in (first..end).zip(states) {
            self.unlock(page, state.next(true));
        }
        drop(turn);
        self.removals.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits until the guest runs, does `work`, and so on for ever.
    fn run(&self, mut work: impl FnMut()) {
        loop {
            self.active.fetch_add(1, Ordering::SeqCst);
            let running = self.running.load(Ordering::SeqCst);
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
    pub(super) fn vcpu(&self, number: usize) {
        let mut random = Random::new(self.seed ^ (number as u64 + 1) << 32);
        let pipe = Pipe::new();
        self.run(|| {
            self.touch(&mut random, &pipe);
            let before = self.touches[number].fetch_add(1, Ordering::Relaxed);
            if before % BURST == BURST - 1 {
                std::thread::sleep(MOMENT);
            }
        });
    }

    /// The life of the balloon's thread.
    pub(super) fn balloon(&self, pause: Duration) {
        let mut random = Random::new(!self.seed);
        let unit = self.memory.unit();
        self.run(|| {
            let first = random.below(self.memory.pages() / unit) * unit;
            let end = self.memory.run_end(first, 1 + random.below(MOST_REMOVED));
            self.remove(first, end);
            std::thread::sleep(pause);
        });
    }
}
