//! The moves that are possible in a state.

use super::world::{
    Balloon, Memory, Message, Page, Pager, Phase, Reader, Rule, Vcpu, Without, Worker, World, pages,
};

/// One step of one thread. The first number of those below `Touch` is the pager's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    // These need not happen.
    Touch(Page),
    Remove,
    Prefetch(usize, usize, Page),
    Kill(usize),
    Start(usize),
    // These are due.
    BalloonRunsOn,
    Drop,
    EnterRead(usize),
    Dequeue(usize, Message),
    CopyMessage(usize),
    EndRead(usize),
    Handle(usize),
    Serve(usize, usize, Page),
    EnterPlacing(usize, usize),
    EndPlacing(usize, usize),
    Mark(usize, usize),
    WakePage(usize, usize),
    TakeOver(usize),
}

/// The moves that are possible: those that are due at some time, and those that need not happen.
/// The check that nothing goes round for ever takes the first one that is due.
pub(super) fn moves(without: Without, world: &World) -> (Vec<Move>, Vec<Move>) {
    let (mut due, mut free) = (Vec::new(), Vec::new());
    for ((page, vcpu), memory) in pages().zip(&world.vcpus).zip(&world.memory) {
        // A touch of a page that is there changes nothing.
        if (*vcpu, *memory) == (Vcpu::Runs, Memory::Missing) {
            free.push(Move::Touch(page));
        }
    }
    match world.balloon {
        Balloon::Runs if pages().contains(&world.dropped) => free.push(Move::Remove),
        Balloon::Read => due.push(Move::BalloonRunsOn),
        Balloon::Drops => due.push(Move::Drop),
        _ => {}
    }
    let there = |pager: &&Pager| !matches!(pager.phase, Phase::NotStarted | Phase::Gone);
    let few = world.pagers.iter().filter(there).count() < 2;
    let next = world
        .pagers
        .iter()
        .position(|pager| pager.phase == Phase::NotStarted);
    free.extend(next.filter(|_| few).map(Move::Start));
    for (number, pager) in world.pagers.iter().enumerate() {
        if there(&pager) && pager.phase != Phase::Dies && world.deaths_left > 0 {
            free.push(Move::Kill(number));
        }
        match pager.phase {
            Phase::NotStarted | Phase::Gone => {}
            Phase::WaitsForFence => {
                if without == Some(Rule::Fence) || !world.pagers.iter().any(Pager::is_inside) {
                    due.push(Move::TakeOver(number));
                }
            }
            Phase::Serves | Phase::Dies => {
                worker_moves(without, world, number, &mut due, &mut free);
                reader_moves(without, world, number, &mut due);
            }
            _ => due.push(Move::TakeOver(number)),
        }
    }
    if without != Some(Rule::ReaderFirst) {
        due.sort_by_key(|each| matches!(each, Move::EnterPlacing(..)));
    }
    (due, free)
}

fn reader_moves(without: Without, world: &World, number: usize, due: &mut Vec<Move>) {
    let pager = &world.pagers[number];
    match pager.reader {
        Reader::Idle => {
            let free = without == Some(Rule::Gate) || !pager.gate_is_shared();
            if pager.phase == Phase::Serves && free && world.queue().next().is_some() {
                due.push(Move::EnterRead(number));
            }
        }
        Reader::Reads(Some(_), _) => due.push(Move::CopyMessage(number)),
        Reader::Reads(None, copied) => {
            if usize::from(copied) < world.ring.len() {
                due.extend(world.queue().map(|message| Move::Dequeue(number, message)));
            }
            if copied > 0 || world.queue().next().is_none() {
                due.push(Move::EndRead(number));
            }
        }
        Reader::Handles(..) => due.push(Move::Handle(number)),
    }
}

fn worker_moves(
    without: Without,
    world: &World,
    number: usize,
    due: &mut Vec<Move>,
    free: &mut Vec<Move>,
) {
    let pager = &world.pagers[number];
    for (at, worker) in pager.workers.iter().enumerate() {
        match worker {
            // Idle workers are alike: the first one stands for all.
            Worker::Idle if pager.phase == Phase::Serves && at == 0 => {
                for (page, placed) in pages().zip(world.placed) {
                    if pager.wanted[usize::from(page)] {
                        due.push(Move::Serve(number, at, page));
                    } else if !placed {
                        free.push(Move::Prefetch(number, at, page));
                    }
                }
            }
            Worker::Idle => {}
            Worker::Waits(..) => {
                if without == Some(Rule::Gate) || !pager.gate_is_exclusive(without) {
                    due.push(Move::EnterPlacing(number, at));
                }
            }
            Worker::Places(..) => due.push(Move::EndPlacing(number, at)),
            Worker::Marks(_) => due.push(Move::Mark(number, at)),
            Worker::Wakes(_) => due.push(Move::WakePage(number, at)),
        }
    }
}
