//! The effects of a move.

use super::moves::Move;
use super::world::{
    Balloon, Job, Memory, Message, PAGES, Phase, Reader, Rule, Vcpu, Without, Worker, World, jobs,
    next_job, pages,
};

/// Makes a move.
pub(super) fn step(without: Without, before: &World, next: Move) -> World {
    let mut world = before.clone();
    match next {
        Move::Touch(page) => world.vcpus[usize::from(page)] = Vcpu::Queued,
        Move::Remove => world.balloon = Balloon::Queued,
        Move::BalloonRunsOn => world.balloon = Balloon::Drops,
        Move::Drop => {
            world.memory[usize::from(world.dropped)] = Memory::Missing;
            world.dropped += 1;
            world.balloon = Balloon::Runs;
        }
        Move::Start(number) => world.pagers[number].phase = Phase::WaitsForFence,
        Move::Kill(number) => kill(&mut world, number),
        Move::TakeOver(number) => take_over(without, &mut world, number),
        Move::EnterRead(number) => world.pagers[number].reader = Reader::Reads(None, 0),
        Move::Dequeue(number, message) => {
            match message {
                Message::Fault(page) => world.vcpus[usize::from(page)] = Vcpu::Read,
                Message::Removal(_) => world.balloon = Balloon::Read,
            }
            let Reader::Reads(None, copied) = world.pagers[number].reader else {
                unreachable!("only a reader in read(2) dequeues")
            };
            world.pagers[number].reader = Reader::Reads(Some(message), copied);
        }
        Move::CopyMessage(number) => {
            let Reader::Reads(message, copied) = world.pagers[number].reader else {
                unreachable!("only a reader in read(2) copies")
            };
            world.ring[usize::from(copied)] = message;
            world.pagers[number].reader = Reader::Reads(None, copied + 1);
        }
        Move::EndRead(number) => {
            world.pagers[number].reader = match world.pagers[number].phase {
                Phase::Dies => Reader::Idle,
                _ => Reader::Handles(next_job(without, &world.ring, 0), world.ring),
            };
        }
        Move::Handle(number) => handle(without, &mut world, number),
        Move::Prefetch(number, at, page) | Move::Serve(number, at, page) => {
            // The flag stays clear if nobody uses it, so that there are fewer states.
            let early = without == Some(Rule::CheckAtPlacing) && world.removed[usize::from(page)];
            world.pagers[number].wanted[usize::from(page)] = false;
            world.pagers[number].workers[at] = Worker::Waits(page, early);
        }
        Move::EnterPlacing(number, at)
        | Move::EndPlacing(number, at)
        | Move::Mark(number, at)
        | Move::WakePage(number, at) => work(without, &mut world, number, at),
    }
    for pager in &mut world.pagers {
        let died = pager.phase == Phase::Dies;
        pager.bury();
        if died && pager.phase == Phase::Gone && without == Some(Rule::Ring) {
            // The messages were in the pager's own memory.
            world.ring = [None; 2];
        }
        // Workers are alike: one order stands for both.
        pager.workers.sort();
    }
    world
}

/// Ends all threads of a pager that are not in a system call.
fn kill(world: &mut World, number: usize) {
    world.deaths_left -= 1;
    let pager = &mut world.pagers[number];
    if pager.phase == Phase::WaitsForFence {
        pager.phase = Phase::Gone;
        return;
    }
    pager.phase = Phase::Dies;
    pager.wanted = [false; PAGES];
    if !matches!(pager.reader, Reader::Reads(..)) {
        pager.reader = Reader::Idle;
    }
    for worker in &mut pager.workers {
        if !matches!(worker, Worker::Places(..)) {
            *worker = Worker::Idle;
        }
    }
}

/// Makes the next step of a take-over.
fn take_over(without: Without, world: &mut World, number: usize) {
    world.pagers[number].phase = match world.pagers[number].phase {
        // It takes the descriptor too, which nobody can see.
        Phase::WaitsForFence if without == Some(Rule::Replay) => Phase::ClearsRing,
        Phase::WaitsForFence => Phase::Replays(0),
        Phase::Replays(slot) => {
            if let Some(Message::Removal(page)) = world.ring[usize::from(slot)] {
                world.removed[usize::from(page)] = true;
            }
            match slot + 1 {
                next if usize::from(next) < world.ring.len() => Phase::Replays(next),
                _ => Phase::ClearsRing,
            }
        }
        Phase::ClearsRing => {
            world.ring = [None; 2];
            Phase::WakesAll
        }
        Phase::WakesAll => {
            if without != Some(Rule::Wake) {
                pages().for_each(|page| world.wake(page));
            }
            Phase::Serves
        }
        phase => unreachable!("{phase:?} is no step of a take-over"),
    };
}

/// Does the next job of a reader.
fn handle(without: Without, world: &mut World, number: usize) {
    let pager = &mut world.pagers[number];
    let Reader::Handles(done, batch) = pager.reader else {
        unreachable!("only a reader with a batch handles it")
    };
    match jobs(without)[usize::from(done)] {
        Job::Record(slot) => match batch[slot] {
            Some(Message::Removal(page)) => world.removed[usize::from(page)] = true,
            Some(Message::Fault(page)) => pager.wanted[usize::from(page)] = true,
            None => {}
        },
        Job::ClearRing => world.ring = [None; 2],
        Job::OpenGate => {}
    }
    pager.reader = match next_job(without, &batch, done + 1) {
        4 => Reader::Idle,
        done => Reader::Handles(done, batch),
    };
}

/// Makes the next step of a worker.
fn work(without: Without, world: &mut World, number: usize, at: usize) {
    let worker = world.pagers[number].workers[at];
    let next = match worker {
        Worker::Waits(page, _) if without != Some(Rule::CheckAtPlacing) => {
            Worker::Places(page, world.removed[usize::from(page)])
        }
        Worker::Waits(page, early) => Worker::Places(page, early),
        Worker::Places(page, zeros) => {
            let changing = world.is_changing();
            let memory = &mut world.memory[usize::from(page)];
            if changing {
                Worker::Waits(page, zeros && without == Some(Rule::CheckAtPlacing))
            } else if *memory == Memory::Missing {
                *memory = if zeros { Memory::Zeros } else { Memory::Old };
                world.wake(page);
                Worker::Marks(page)
            } else {
                Worker::Wakes(page)
            }
        }
        Worker::Marks(page) => {
            world.placed[usize::from(page)] = true;
            Worker::Idle
        }
        Worker::Wakes(page) => {
            world.wake(page);
            Worker::Idle
        }
        Worker::Idle => unreachable!("an idle worker gets work from another move"),
    };
    let dies = world.pagers[number].phase == Phase::Dies;
    world.pagers[number].workers[at] = if dies { Worker::Idle } else { next };
}
