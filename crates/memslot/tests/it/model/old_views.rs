//! Views of old versions answer as they did when they were taken, after any number of changes.
//!
//! A separate thread keeps each view together with a copy of the model. The threads work one at a
//! time, on demand, so that every run is the same.

use super::driver::{End, Pair};
use super::plain::{Model, compare_all, compare_frame, compare_hva, compare_whole};
use super::random::{Churn, Shape};
use pageferry_memslot::{Limits, SlotReader, SlotView};
use pageferry_testkit::{LIMIT, Random};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

enum Order {
    /// Take a guard and a view of the model's present state.
    Open(Box<Model>),
    Check(u64),
    Close,
}

struct Keeper {
    orders: Sender<Order>,
    answers: Receiver<()>,
    thread: JoinHandle<()>,
    open: bool,
}

/// Compares a view with the model of its time. The number selects the part to compare.
type Compare = fn(SlotView<'_, u32>, &Model, Shape, u64);

fn keep(
    reader: &mut SlotReader<u32>,
    orders: &Receiver<Order>,
    answers: &Sender<()>,
    compare: impl Fn(SlotView<'_, u32>, &Model, u64),
) {
    while let Ok(Order::Open(model)) = orders.recv() {
        let guard = reader.pin();
        let view = guard.view();
        answers.send(()).unwrap();
        while let Ok(Order::Check(seed)) = orders.recv() {
            compare(view, &model, seed);
            answers.send(()).unwrap();
        }
        drop(guard);
        answers.send(()).unwrap();
    }
}

impl Keeper {
    fn new(pair: &Pair, shape: Shape, compare: Compare) -> Self {
        let mut reader = pair.writer.table().reader();
        let (orders, theirs) = channel();
        let (answer, answers) = channel();
        let thread = thread::spawn(move || {
            keep(&mut reader, &theirs, &answer, |view, model, seed| {
                compare(view, model, shape, seed);
            });
        });
        Self {
            orders,
            answers,
            thread,
            open: false,
        }
    }

    fn ask(&mut self, order: Order) {
        self.open = !matches!(order, Order::Close);
        // If the send fails, no answer comes.
        let _ = self.orders.send(order);
        self.answers
            .recv_timeout(LIMIT)
            .expect("the keeper has panicked: see above");
    }

    fn end(self) {
        drop(self.orders);
        self.thread.join().expect("all views are unchanged");
    }
}

struct Plan {
    shape: Shape,
    operations: u64,
    keepers: usize,
    /// The number of operations between two checks of old views.
    every: u64,
    compare: Compare,
}

/// Changes slots at random while views of all ages are kept. Phases that mostly create and mostly
/// delete alternate.
fn run(pair: &mut Pair, plan: &Plan, seed: u64) {
    let mut churn = Churn::new(plan.shape, seed);
    let mut dice = Random::new(!seed);
    let new_keeper = |_| Keeper::new(pair, plan.shape, plan.compare);
    let mut keepers: Vec<_> = (0..plan.keepers).map(new_keeper).collect();
    let (mut changes, mut freed_beside_views) = (0, 0);
    for operation in 0..plan.operations {
        if operation % plan.every == 0 {
            let keeper = &mut keepers[dice.below(plan.keepers as u64) as usize];
            match (keeper.open, dice.below(4)) {
                (false, _) => keeper.ask(Order::Open(Box::new(pair.model.clone()))),
                (true, 0) => {
                    keeper.ask(Order::Check(operation));
                    keeper.ask(Order::Close);
                }
                (true, _) => keeper.ask(Order::Check(operation)),
            }
        }
        let growing = operation / 150 % 2 == 0;
        let (creations, deletions) = if growing { (5, 1) } else { (1, 5) };
        let request = churn.request(&pair.model, creations, deletions);
        let end = match dice.below(12) {
            0..=5 => End::Set,
            6..=10 => End::Commit,
            _ => End::Drop,
        };
        let waiting = pair.writer.retired();
        changes += u64::from(pair.step(request, end));
        if operation % 16 == 0 {
            pair.writer.reclaim();
        }
        let some_open = keepers.iter().any(|keeper| keeper.open);
        freed_beside_views += usize::from(some_open && pair.writer.retired() < waiting);
    }
    assert!(changes > plan.operations / 4, "only {changes} were allowed");
    assert!(freed_beside_views > 0, "no memory was reused beside a view");
    for keeper in &mut keepers {
        if keeper.open {
            keeper.ask(Order::Check(plan.operations));
            keeper.ask(Order::Close);
        }
    }
    keepers.into_iter().for_each(Keeper::end);
    assert_eq!(pair.writer.reclaim(), 0);
}

fn limits(shape: Shape) -> Limits {
    Limits {
        max_slots: shape.ids,
        // The writer must never wait.
        max_retired: usize::MAX,
        ..Limits::default()
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn old_views_of_one_leaf() {
    let shape = Shape {
        ids: 14,
        frames: 48,
        host_pages: 16,
        most_pages: 9,
    };
    let plan = Plan {
        shape,
        operations: 900,
        keepers: 4,
        every: 3,
        compare: |view, model, shape, _| {
            compare_all(view, model, shape.frames + 9, shape.host_pages);
        },
    };
    for seed in 0..6 {
        run(&mut Pair::new(limits(shape)), &plan, seed);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn old_views_of_trees_that_grow_and_shrink() {
    let shape = Shape {
        ids: 260,
        frames: 900,
        host_pages: 40,
        most_pages: 30,
    };
    let plan = Plan {
        shape,
        operations: 1500,
        keepers: 5,
        every: 8,
        compare: |view, model, shape, _| {
            compare_all(view, model, shape.frames + 30, shape.host_pages);
        },
    };
    for seed in 10..13 {
        run(&mut Pair::new(limits(shape)), &plan, seed);
    }
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn old_views_of_many_slots() {
    let shape = Shape {
        ids: 6000,
        frames: 40_000,
        host_pages: 3000,
        most_pages: 400,
    };
    let mut pair = Pair::new(limits(shape));
    let mut churn = Churn::new(shape, 77);
    while pair.model.slots().len() < 3000 {
        let request = churn.created();
        pair.step(request, End::Set);
    }
    let plan = Plan {
        shape,
        operations: 1200,
        keepers: 5,
        every: 10,
        compare: |view, model, shape, seed| {
            compare_whole(view, model, 0);
            let mut random = Random::new(seed);
            for _ in 0..30 {
                compare_frame(view, model, 0, random.below(shape.frames));
                let page = random.below(shape.host_pages) * 4096;
                compare_hva(view, model, 0, page + 1, page + 0x1800);
            }
        },
    };
    run(&mut pair, &plan, 5);
}
