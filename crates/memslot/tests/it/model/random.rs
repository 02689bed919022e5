//! Random requests. Each run makes the same ones.

use super::plain::{Model, Plain};
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{Request, SlotFlags};
use pageferry_testkit::Random;
use std::collections::VecDeque;

pub(crate) fn shuffle<T>(random: &mut Random, things: &mut [T]) {
    for i in (1..things.len()).rev() {
        things.swap(i, random.below(i as u64 + 1) as usize);
    }
}

/// The range of random requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) ids: u16,
    pub(crate) frames: u64,
    pub(crate) host_pages: u64,
    /// The largest size. Most slots have up to 3 pages. One in eight has up to this many, so that
    /// it covers the starts of many others.
    pub(crate) most_pages: u64,
}

/// Makes random requests, most of which are allowed.
pub(crate) struct Churn {
    pub(crate) shape: Shape,
    pub(crate) random: Random,
    /// Slots as they were before recent deletions and moves.
    past: VecDeque<Plain>,
}

impl Churn {
    pub(crate) fn new(shape: Shape, seed: u64) -> Self {
        Self {
            shape,
            random: Random::new(seed),
            past: VecDeque::new(),
        }
    }

    /// Makes a request. Of eight, `creations` create, and the others delete, move or change flags.
    /// Half of the creations ask for a slot that existed some changes ago.
    pub(crate) fn request(
        &mut self,
        model: &Model,
        creations: u64,
        deletions: u64,
    ) -> Request<u32> {
        let choice = self.random.below(8);
        let index = self.random.below(model.slots().len().max(1) as u64);
        match model.slots().nth(index as usize) {
            Some(old) if choice >= creations => {
                self.past.truncate(5);
                self.past.push_front(*old);
                if choice < creations + deletions {
                    return Request::delete(old.space, old.id);
                }
                self.changed(*old)
            }
            _ if !self.past.is_empty() && self.random.below(2) == 0 => {
                let index = self.random.below(self.past.len() as u64);
                self.again(self.past[index as usize])
            }
            _ => self.created(),
        }
    }

    /// Asks for the slot `past` again. If the slot exists, this moves it.
    fn again(&mut self, past: Plain) -> Request<u32> {
        Request {
            gpa: Gfn(past.start).gpa(),
            size: past.pages * 4096,
            hva: Hva(past.hva),
            flags: SlotFlags(past.flags),
            data: self.random.next() as u32,
            ..Request::delete(past.space, past.id)
        }
    }

    pub(crate) fn created(&mut self) -> Request<u32> {
        let random = &mut self.random;
        let most = if random.below(8) == 0 {
            self.shape.most_pages
        } else {
            3
        };
        Request {
            gpa: Gfn(random.below(self.shape.frames)).gpa(),
            size: (1 + random.below(most)) * 4096,
            hva: Hva(random.below(self.shape.host_pages) * 4096),
            data: random.next() as u32,
            ..Request::delete(0, random.below(u64::from(self.shape.ids)) as u16)
        }
    }

    /// Asks for the slot `old` a little away, far away, or with other flags.
    pub(crate) fn changed(&mut self, old: Plain) -> Request<u32> {
        let random = &mut self.random;
        let start = match random.below(4) {
            0 => old.start + random.below(4),
            1 => old.start.saturating_sub(random.below(4)),
            2 => random.below(self.shape.frames),
            _ => old.start,
        };
        let flags = [old.flags, old.flags ^ 1][random.below(2) as usize];
        self.again(Plain {
            start,
            flags,
            ..old
        })
    }
}
