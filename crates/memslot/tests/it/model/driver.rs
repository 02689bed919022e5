//! A table and its model, changed step by step.

use super::plain::{Kind, Model, Plain, assert_change};
use pageferry_memslot::{Limits, Request, SlotReader, SlotWriter};
use std::mem;

/// The end of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Set,
    Commit,
    Drop,
    Forget,
}

pub(crate) struct Pair {
    pub(crate) writer: SlotWriter<u32>,
    pub(crate) reader: SlotReader<u32>,
    pub(crate) model: Model,
    /// Whether an update was forgotten.
    pub(crate) pending: bool,
}

impl Pair {
    pub(crate) fn new(limits: Limits) -> Self {
        let writer = SlotWriter::new(limits);
        Self {
            reader: writer.table().reader(),
            writer,
            model: Model::new(limits),
            pending: false,
        }
    }

    /// Makes the same request to both, and compares the results. Returns whether anything changed.
    pub(crate) fn step(&mut self, request: Request<u32>, end: End) -> bool {
        if mem::take(&mut self.pending) {
            // The call aborts an update that was forgotten before.
            self.model.give_up();
        }
        let plan = self.model.plan(&request);
        let old = self.model.get(request.address_space, request.id).copied();
        if end == End::Set {
            match (self.writer.set(request), plan) {
                (Ok(change), Some(kind)) => assert_change(change, kind, old, &request),
                (Err(_), None) => {}
                (Ok(change), None) => panic!("{request:?} must be refused, not {change:?}"),
                (Err(error), Some(kind)) => panic!("{kind:?} by {request:?}: {error}"),
            }
            return self.done(&request, plan);
        }
        let done = self.update(&request, end, plan, old);
        self.done(&request, done)
    }

    /// Begins and ends an update. Returns its effect.
    fn update(
        &mut self,
        request: &Request<u32>,
        end: End,
        plan: Option<Kind>,
        old: Option<Plain>,
    ) -> Option<Kind> {
        let update = match (self.writer.begin(*request), plan) {
            (Ok(update), Some(_)) => update,
            (Err(_), None) => return None,
            (Ok(update), None) => panic!("{request:?} must be refused: {:?}", update.change()),
            (Err(error), Some(kind)) => panic!("{kind:?} by {request:?}: {error}"),
        };
        let kind = plan?;
        assert_change(update.change(), kind, old, request);
        let begun = kind != Kind::Nothing;
        let hidden = matches!(kind, Kind::Deleted | Kind::Moved);
        meanwhile(&mut self.reader, &self.model, old, begun, hidden);
        match end {
            End::Set | End::Commit => {
                assert_change(update.commit(), kind, old, request);
                return plan;
            }
            End::Drop => {
                drop(update);
                if begun {
                    self.model.give_up();
                }
                meanwhile(&mut self.reader, &self.model, old, false, false);
            }
            End::Forget => {
                mem::forget(update);
                meanwhile(&mut self.reader, &self.model, old, begun, hidden);
                self.pending = begun;
            }
        }
        None
    }

    fn done(&mut self, request: &Request<u32>, kind: Option<Kind>) -> bool {
        if let Some(kind) = kind {
            self.model.apply(request, kind);
        }
        let generation = self.writer.generation();
        assert_eq!(generation.number(), self.model.generation());
        assert_eq!(generation.in_progress(), self.pending);
        assert_eq!(self.writer.table().generation(), generation);
        assert_eq!(self.writer.len(), self.model.slots().len());
        assert_eq!(self.writer.is_empty(), self.model.slots().next().is_none());
        !matches!(kind, None | Some(Kind::Nothing))
    }
}

/// Checks that a reader finds the slot `old` of a pending update at its place, marked if the update
/// deletes or moves it.
fn meanwhile(
    reader: &mut SlotReader<u32>,
    model: &Model,
    old: Option<Plain>,
    begun: bool,
    hidden: bool,
) {
    let guard = reader.pin();
    assert_eq!(guard.generation().in_progress(), begun);
    assert_eq!(guard.generation().number(), model.generation());
    let Some(old) = old else { return };
    let view = guard.view().space(old.space).unwrap();
    let gfn = pageferry_addr::Gfn(old.start);
    let found = [
        view.by_id(old.id),
        view.lookup(gfn),
        guard.lookup_in(old.space, gfn),
    ];
    for slot in found {
        let slot = slot.expect("nothing was committed");
        assert_eq!(Plain::of(slot), old);
        assert_eq!(slot.is_invalid(), hidden);
    }
}
