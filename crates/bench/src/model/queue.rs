//! The simulation itself: vCPUs that by turns work on their own and pass through one shared thing.
//!
//! **Guarantee.** First come, first served, exactly: an event is handled only when no earlier one
//! can come any more. The same [`System`] gives the same [`Outcome`], on every host.
//!
//! **Mechanism.** A closed queue with one server, event by event. The only events are vCPUs asking
//! for the server, kept in a heap by time. Handling one tells when the vCPU is served, when it lets
//! go, and when it asks again, which is never earlier; so the heap's first is the next to be
//! served. Time is in whole picoseconds.
//!
//! **Neighbours.** It knows vCPUs, steps and a lock, and nothing of pages, hosts or how times were
//! measured.

use super::random::draw;
use crate::kit::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One visit of a vCPU to the MMU: work of its own, then work under the MMU lock. Means, in
/// nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Step {
    /// Work that vCPUs do side by side before they ask for the lock.
    pub own_ns: f64,
    /// Work under the lock.
    pub held_ns: f64,
}

/// What the MMU lock is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lock {
    /// Held by one vCPU at a time, in the order in which they asked.
    Exclusive {
        /// Taking and releasing it where nobody else has used it since this vCPU did.
        alone_ns: f64,
        /// Added where it is free and another vCPU had it last: its cache line comes over.
        line_ns: f64,
        /// From the release to the next holder's start, where vCPUs wait. The same for two waiters
        /// and for hundreds, as with a queued lock.
        handover_ns: f64,
    },
    /// Held by any number: the work under it runs side by side. What is left in common is one cache
    /// line, which every `every`th step of a vCPU writes; its transfers queue.
    Shared {
        /// One transfer of the line.
        line_ns: f64,
        /// After how many steps a vCPU writes it once.
        every: u32,
    },
}

/// How single times lie around their mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Spread {
    /// All equal.
    Constant,
    /// Evenly from a half to one and a half of it.
    Uniform,
    /// Exponentially: the case with a closed form.
    Exponential,
}

/// What is simulated.
#[derive(Clone, Debug)]
pub struct System {
    /// How many vCPUs, each on a core of its own.
    pub vcpus: u32,
    /// How often each does all of `steps`.
    pub pages: u32,
    /// What a page takes, in order.
    pub steps: Vec<Step>,
    /// The MMU lock.
    pub lock: Lock,
    /// How times vary.
    pub spread: Spread,
    /// Names the sequence of random numbers.
    pub seed: u64,
}

/// What came out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// From the common start to the end of the last vCPU, nanoseconds.
    pub elapsed_ns: f64,
    /// The time all vCPUs together waited for the lock, nanoseconds.
    pub waited_ns: f64,
    /// The time all vCPUs together ran or waited, nanoseconds.
    pub vcpu_ns: f64,
    /// The pages all did together.
    pub pages: u64,
}

impl Outcome {
    /// Pages a second, all vCPUs together.
    #[must_use]
    pub fn pages_per_s(&self) -> f64 {
        self.pages as f64 * 1e9 / self.elapsed_ns
    }

    /// How much of the vCPUs' time was waiting for the lock, in percent.
    #[must_use]
    pub fn waiting_percent(&self) -> f64 {
        100.0 * self.waited_ns / self.vcpu_ns
    }
}

const PS: f64 = 1000.0;

fn ps(ns: f64) -> u64 {
    (ns * PS).round() as u64
}

/// The one thing that vCPUs pass through in turns.
struct Server {
    free_at: u64,
    last: u32,
}

/// Where a vCPU is.
#[derive(Clone, Copy)]
struct Place {
    /// The index of the step it asks for the lock in.
    step: usize,
    pages_left: u32,
    visits: u32,
}

impl System {
    /// Runs it to the end. Takes time in proportion to `vcpus`, `pages` and the number of steps.
    ///
    /// # Panics
    /// If there is no vCPU, no page or no step, or a time is negative or not a number.
    #[must_use]
    pub fn run(&self) -> Outcome {
        assert!(self.vcpus > 0 && self.pages > 0 && !self.steps.is_empty());
        let sane = |ns: f64| ns.is_finite() && ns >= 0.0;
        assert!(
            self.steps
                .iter()
                .all(|step| sane(step.own_ns) && sane(step.held_ns)),
            "a time is no time: {:?}",
            self.steps
        );
        let mut random = Random::new(self.seed);
        // Where each is in its tables: not all of them need a new one at the same moment.
        let every = match self.lock {
            Lock::Shared { every, .. } => every,
            Lock::Exclusive { .. } => 0,
        };
        let mut places: Vec<Place> = (0..self.vcpus)
            .map(|_| Place {
                step: 0,
                pages_left: self.pages,
                visits: random.below(u64::from(every.max(1))) as u32,
            })
            .collect();
        let mut draw = |mean: f64| ps(draw(&mut random, mean, self.spread));
        let mut asking: BinaryHeap<Reverse<(u64, u32)>> = (0..self.vcpus)
            .map(|vcpu| Reverse((draw(self.steps[0].own_ns), vcpu)))
            .collect();
        let mut server = Server {
            free_at: 0,
            last: u32::MAX,
        };
        let (mut elapsed, mut waited, mut all) = (0, 0, 0);
        while let Some(Reverse((asked, vcpu))) = asking.pop() {
            let place = &mut places[vcpu as usize];
            place.visits += 1;
            let work = draw(self.steps[place.step].held_ns);
            let (wait, done) = self.pass(&mut server, asked, vcpu, place.visits, work);
            waited += wait;
            place.step += 1;
            if place.step == self.steps.len() {
                place.step = 0;
                place.pages_left -= 1;
            }
            if place.pages_left == 0 {
                elapsed = elapsed.max(done);
                all += done;
            } else {
                let again = done + draw(self.steps[place.step].own_ns);
                asking.push(Reverse((again, vcpu)));
            }
        }
        Outcome {
            elapsed_ns: elapsed as f64 / PS,
            waited_ns: waited as f64 / PS,
            vcpu_ns: all as f64 / PS,
            pages: u64::from(self.vcpus) * u64::from(self.pages),
        }
    }

    /// How long the vCPU that asks at `asked` waits, and when it is done.
    fn pass(
        &self,
        server: &mut Server,
        asked: u64,
        vcpu: u32,
        visit: u32,
        work: u64,
    ) -> (u64, u64) {
        match self.lock {
            Lock::Exclusive {
                alone_ns,
                line_ns,
                handover_ns,
            } => {
                let begin = if asked < server.free_at {
                    server.free_at + ps(handover_ns)
                } else if server.last == vcpu || server.last == u32::MAX {
                    asked
                } else {
                    asked + ps(line_ns)
                };
                // A hand-over is the whole of taking and releasing where somebody waits.
                let taking = if asked < server.free_at {
                    0
                } else {
                    ps(alone_ns)
                };
                let done = begin + taking + work;
                *server = Server {
                    free_at: done,
                    last: vcpu,
                };
                (begin - asked, done)
            }
            Lock::Shared { line_ns, every } => {
                if every == 0 || !visit.is_multiple_of(every) {
                    return (0, asked + work);
                }
                let has_it = server.last == vcpu || server.last == u32::MAX;
                let begin = asked.max(server.free_at);
                let written = begin + if has_it { 0 } else { ps(line_ns) };
                *server = Server {
                    free_at: written,
                    last: vcpu,
                };
                (written - asked, written + work)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: Lock = Lock::Exclusive {
        alone_ns: 0.0,
        line_ns: 0.0,
        handover_ns: 0.0,
    };

    fn system(vcpus: u32, own_ns: f64, held_ns: f64, spread: Spread) -> System {
        System {
            vcpus,
            pages: 4000,
            steps: vec![Step { own_ns, held_ns }],
            lock: FREE,
            spread,
            seed: 42,
        }
    }

    /// Pages a nanosecond.
    fn rate(system: &System) -> f64 {
        system.run().pages_per_s() / 1e9
    }

    #[test]
    fn one_lock_bounds_the_throughput_and_constant_times_reach_the_bound() {
        let (own, held) = (300.0, 50.0);
        for vcpus in [1, 2, 3, 6, 7, 8, 20, 416] {
            let bound = f64::min(f64::from(vcpus) / (own + held), 1.0 / held);
            for spread in [Spread::Constant, Spread::Uniform, Spread::Exponential] {
                let rate = rate(&system(vcpus, own, held, spread));
                assert!(
                    rate <= bound * 1.03,
                    "{vcpus} {spread:?}: {rate} over {bound}"
                );
                if spread == Spread::Constant {
                    assert!(rate >= bound * 0.99, "{vcpus}: {rate} under {bound}");
                }
            }
        }
    }

    /// Mean value analysis of the closed queue with exponential times (Reiser and Lavenberg, 1980).
    fn exact_rate(vcpus: u32, own: f64, held: f64) -> f64 {
        let (mut queue, mut rate) = (0.0, 0.0);
        for n in 1..=vcpus {
            let response = held * (1.0 + queue);
            rate = f64::from(n) / (own + response);
            queue = rate * response;
        }
        rate
    }

    #[test]
    fn exponential_times_give_the_closed_form() {
        for vcpus in [1, 2, 4, 7, 10, 64] {
            let exact = exact_rate(vcpus, 300.0, 50.0);
            let simulated = rate(&System {
                pages: 40_000 / vcpus,
                ..system(vcpus, 300.0, 50.0, Spread::Exponential)
            });
            let error = (simulated / exact - 1.0).abs();
            assert!(
                error < 0.03,
                "{vcpus} vCPUs: {simulated} and exactly {exact}"
            );
        }
    }

    #[test]
    fn a_seed_names_one_outcome() {
        let once = |seed| {
            System {
                seed,
                ..system(9, 100.0, 30.0, Spread::Uniform)
            }
            .run()
        };
        assert_eq!(once(1), once(1));
        assert_ne!(once(1), once(2));
    }

    #[test]
    fn waiting_grows_as_the_closed_form_says() {
        // Beyond saturation each of N vCPUs has its lock for 1 / N of the time the others keep it
        // waiting.
        let outcome = system(100, 200.0, 50.0, Spread::Constant).run();
        let expected = 100.0 * (1.0 - (200.0 + 50.0) / (100.0 * 50.0));
        assert!((outcome.waiting_percent() - expected).abs() < 0.5);
        assert_eq!(
            system(1, 200.0, 50.0, Spread::Uniform).run().waited_ns,
            0.0,
            "one vCPU waits for nobody"
        );
    }

    #[test]
    fn handing_the_lock_over_costs_what_it_is_said_to() {
        let contended = System {
            lock: Lock::Exclusive {
                alone_ns: 5.0,
                line_ns: 40.0,
                handover_ns: 100.0,
            },
            ..system(50, 100.0, 50.0, Spread::Constant)
        };
        assert!((1.0 / rate(&contended) - 150.0).abs() < 1.5);
        let alone = System {
            vcpus: 1,
            ..contended.clone()
        };
        assert!((1.0 / rate(&alone) - 155.0).abs() < 0.1);
        // Two vCPUs: at worst each waits for the other every time.
        let two = System {
            vcpus: 2,
            ..contended
        };
        let per_page = 2.0 / rate(&two);
        assert!((195.0..=300.5).contains(&per_page), "{per_page}");
    }

    #[test]
    fn a_shared_lock_keeps_nobody_waiting_but_for_its_line() {
        let shared = |every, vcpus| System {
            lock: Lock::Shared {
                line_ns: 100.0,
                every,
            },
            ..system(vcpus, 300.0, 50.0, Spread::Constant)
        };
        let free = shared(0, 416).run();
        assert_eq!(free.waited_ns, 0.0);
        assert!((free.pages_per_s() / 1e9 - 416.0 / 350.0).abs() < 1e-6);
        assert_eq!(shared(1, 1).run().waited_ns, 0.0);
        // Each step writes the line: it is the bottleneck.
        assert!((rate(&shared(1, 416)) - 1.0 / 100.0).abs() < 1e-3);
        let seldom = shared(512, 416).run();
        assert!(seldom.waited_ns > 0.0 && seldom.waiting_percent() < 1.0);
    }

    #[test]
    fn a_page_of_two_steps_asks_twice() {
        let steps = |steps: &[(f64, f64)]| System {
            steps: steps
                .iter()
                .map(|&(own_ns, held_ns)| Step { own_ns, held_ns })
                .collect(),
            ..system(30, 0.0, 0.0, Spread::Constant)
        };
        let two = steps(&[(100.0, 20.0), (300.0, 50.0)]);
        assert!((1.0 / rate(&two) - 70.0).abs() < 1.0);
        let one = System { vcpus: 1, ..two };
        assert!((1.0 / rate(&one) - 470.0).abs() < 1.0);
    }
}
