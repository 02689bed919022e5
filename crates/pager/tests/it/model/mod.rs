//! An exhaustive search over the deaths of pagers that serve one VM.
//!
//! **Guarantee.** Within the bounds below, no order of events breaks a property:
//!
//! 1. A page that was removed never shows its old contents.
//! 2. Two pagers never place pages at once.
//! 3. While a pager serves, every thread that sleeps on a page or on a removal is woken.
//!
//! **Mechanism.** `World` is the state of everything: the VM's memory and threads, the kernel's
//! queue, the state file, and up to three pagers. A `Move` is one step of one thread. `moves` lists
//! those that are possible, and the pure function `step` makes one. Each `Rule` can be switched
//! off, and each search without one finds a breach. `docs/pager-states.md` has the argument.
//!
//! **Bounds.** Two pages with a vCPU's thread each, and a balloon that removes one page after the
//! other. One death, and two in the slow tests. A pager has one thread that reads and two that
//! place. Touches have no bound. A thread that places waits for the source's answer and for the
//! gate in one state: an answer that comes late is a gate that is taken late.
//!
//! **Kernel.** A dequeued message is copied to the ring later, but the copy is always made: SIGKILL
//! acts when a system call returns. A removal makes placing fail (EAGAIN) from its beginning until
//! its thread runs on. Its page is dropped some time after that.

mod moves;
mod search;
mod step;
mod world;

use pageferry_testkit::sized;
use search::search;
use world::{Breach, Rule};

#[test]
fn no_order_of_deaths_breaks_a_property() {
    use Breach::{GoesRound, Sleeps, Stale, TwoPlace};
    let deaths = sized(1, 2) as u8;
    let findings = search(None, deaths, &[Stale, TwoPlace, Sleeps, GoesRound]);
    if let Some((breach, trace)) = findings.broken {
        panic!("{breach:?}:\n{trace}");
    }
    let least = [0, 350_000, 550_000][usize::from(deaths)];
    assert!(findings.states > least, "{} states", findings.states);
}

#[test]
fn each_rule_is_needed() {
    for (rule, breach) in [
        (Rule::Ring, Breach::Stale),
        (Rule::RecordFirst, Breach::Stale),
        (Rule::Gate, Breach::Stale),
        (Rule::ReaderFirst, Breach::GoesRound),
        (Rule::RecordInGate, Breach::Stale),
        (Rule::CheckAtPlacing, Breach::Stale),
        (Rule::Fence, Breach::Stale),
        (Rule::Fence, Breach::TwoPlace),
        (Rule::Replay, Breach::Stale),
        (Rule::Wake, Breach::Sleeps),
    ] {
        let found = search(Some(rule), 1, &[breach]).broken;
        let found = found.map(|(breach, _)| breach);
        assert_eq!(found, Some(breach), "without {rule:?}");
    }
}
