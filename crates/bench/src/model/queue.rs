//! The simulation: vCPUs alternate between work of their own and one shared server.
//!
//! **Guarantee.** Service is exactly first come, first served: an event is handled only when no
//! earlier event can arise. The same [`System`] gives the same [`QueueTimes`] on every host.
//!
//! **Mechanism.** A closed queue with one server, event by event. The only events are requests of
//! vCPUs for the server, in a heap by time. Handling a request determines the start of service, its
//! end, and the vCPU's next request, which is never earlier. So the first request in the heap is
//! the next one to serve. Time is in whole picoseconds.
//!
//! **Neighbours.** It knows vCPUs, steps and a lock. It knows nothing of pages, hosts or the origin
//! of the times.

use super::random::draw;
use crate::kit::Random;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// One fault of a vCPU: work of its own, then work under the MMU lock. Mean times.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(crate) struct Step {
    /// Work before the vCPU asks for the lock, in nanoseconds, at least 0. vCPUs do it in parallel.
    pub(crate) own_ns: f64,
    /// Work under the lock, in nanoseconds, at least 0.
    pub(crate) held_ns: f64,
}

/// The MMU lock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Lock {
    /// One vCPU at a time holds it, in the order of arrival.
    Exclusive {
        /// Taking and releasing it if no other vCPU has used it since, in nanoseconds.
        alone_ns: f64,
        /// Added if the lock is free and another vCPU had it last, in nanoseconds: the transfer of
        /// its cache line.
        line_ns: f64,
        /// From the release to the next holder's start if vCPUs wait, in nanoseconds. It does not
        /// depend on the number of waiters, as with a queued lock.
        handover_ns: f64,
    },
    /// Any number of vCPUs hold it, and work under it in parallel. They share one cache line. A
    /// vCPU writes it in every `every`th step, and its transfers queue.
    Shared {
        /// One transfer of the line, in nanoseconds.
        line_ns: f64,
        /// The steps of a vCPU per write of the line. 0: the line is never written.
        every: u32,
    },
}

/// The distribution of single times around their mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(test),
    expect(dead_code, reason = "the tests know closed forms of all")
)]
pub(crate) enum Spread {
    /// All times are equal to the mean.
    Constant,
    /// Uniform from half to one and a half of the mean.
    Uniform,
    /// Exponential. This case has a closed form.
    Exponential,
}

/// The simulated system.
#[derive(Clone, Debug)]
pub(crate) struct System {
    /// The number of vCPUs, each on its own core; at least 1.
    pub(crate) vcpus: u32,
    /// The number of times that each vCPU goes through `steps`; at least 1.
    pub(crate) pages: u32,
    /// The steps for one page, in order; at least one.
    pub(crate) steps: Vec<Step>,
    /// The MMU lock.
    pub(crate) lock: Lock,
    /// The distribution of times.
    pub(crate) spread: Spread,
    /// The seed of the random numbers.
    pub(crate) seed: u64,
}

/// The result of a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct QueueTimes {
    /// From the common start to the end of the last vCPU, in nanoseconds.
    pub(crate) elapsed_ns: f64,
    /// The sum of all vCPUs' waits for the lock, in nanoseconds.
    pub(crate) waited_ns: f64,
    /// The sum of all vCPUs' times from the start to their end, in nanoseconds.
    pub(crate) vcpu_ns: f64,
    /// The number of pages of all vCPUs.
    pub(crate) pages: u64,
}

impl QueueTimes {
    /// Pages per second of all vCPUs together.
    #[must_use]
    pub(crate) fn pages_per_s(&self) -> f64 {
        self.pages as f64 * 1e9 / self.elapsed_ns
    }

    /// The share of the vCPUs' time spent waiting for the lock, in percent.
    #[must_use]
    pub(crate) fn waiting_percent(&self) -> f64 {
        100.0 * self.waited_ns / self.vcpu_ns
    }
}

const PS: f64 = 1000.0;

fn ps(ns: f64) -> u64 {
    (ns * PS).round() as u64
}

/// The shared server: the lock, or its cache line. Times are in picoseconds.
struct Server {
    free_at: u64,
    last: u32,
}

/// The progress of a vCPU.
#[derive(Clone, Copy)]
struct Progress {
    /// The index of the step whose request for the lock is next.
    step: usize,
    pages_left: u32,
    visits: u32,
}

impl System {
    /// Runs the simulation to its end. Its cost is proportional to `vcpus`, `pages` and the number
    /// of steps.
    ///
    /// # Panics
    /// If there is no vCPU, no page or no step.
    #[must_use]
    pub(crate) fn run(&self) -> QueueTimes {
        assert!(self.vcpus > 0 && self.pages > 0 && !self.steps.is_empty());
        let mut random = Random::new(self.seed);
        // vCPUs begin at different progress in their tables, so that they do not all need a new one
        // at once.
        let every = match self.lock {
            Lock::Shared { every, .. } => every,
            Lock::Exclusive { .. } => 0,
        };
        let mut progress: Vec<Progress> = (0..self.vcpus)
            .map(|_| Progress {
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
            let this = &mut progress[vcpu as usize];
            this.visits += 1;
            let work = draw(self.steps[this.step].held_ns);
            let (wait, done) = self.pass(&mut server, asked, vcpu, this.visits, work);
            waited += wait;
            this.step += 1;
            if this.step == self.steps.len() {
                this.step = 0;
                this.pages_left -= 1;
            }
            if this.pages_left == 0 {
                elapsed = elapsed.max(done);
                all += done;
            } else {
                let again = done + draw(self.steps[this.step].own_ns);
                asking.push(Reverse((again, vcpu)));
            }
        }
        QueueTimes {
            elapsed_ns: elapsed as f64 / PS,
            waited_ns: waited as f64 / PS,
            vcpu_ns: all as f64 / PS,
            pages: u64::from(self.vcpus) * u64::from(self.pages),
        }
    }

    /// The wait of the vCPU that asks at `asked`, and the end of its work. All times are in
    /// picoseconds.
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
                // With waiters, the hand-over includes taking and releasing.
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

    /// Pages per nanosecond.
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
                "{vcpus} vCPUs: {simulated}, by the closed form {exact}"
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
        // At saturation, a cycle of one vCPU takes as long as N times the work under the lock. The
        // vCPU waits for all of it except its own step.
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
        // Two vCPUs: in the worst case each waits for the other every time.
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
        // Each step writes the line, so the line is the bottleneck.
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
