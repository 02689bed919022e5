//! The copied array compared with a plain model, and both schemes with each other.
#![expect(
    unsafe_code,
    reason = "implements a scheme that forgets a frame, which the benchmark must notice"
)]

use super::array_copy::{ArrayCopy, ArrayReader, ArrayUpdate};
use super::split::BASE;
use super::test_vm::{self, TestVm};
use super::{MemslotSetting, Split, Test, memslot, trial};
use crate::BenchError;
use pageferry_addr::{Gfn, GfnRange, Hva};
use pageferry_hypervisor::{Begun, Found, MemslotReader, Memslots, Scalable, SlotData};
use pageferry_memslot::rules::{Plan, check};
use pageferry_memslot::{Limits, Request, Slot, SlotError, SlotFlags};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const IDS: u16 = 12;
/// All slots lie below this frame, so that they often overlap.
const FRAMES: u64 = 40;
/// All host memory lies below this page.
const HOST_PAGES: u64 = 24;

type Model = BTreeMap<u16, Slot<u32>>;

fn limits() -> Limits {
    Limits {
        max_slots: IDS,
        gfn_limit: Gfn(FRAMES),
        ..Limits::default()
    }
}

/// One action of a history.
#[derive(Clone, Debug)]
enum Action {
    /// Any request.
    Any(Request<u32>),
    /// An existing slot moves to another frame. The flag says whether the change is abandoned.
    Move(usize, u64, bool),
    /// An existing slot gets other flags.
    Flags(usize, u32),
    /// An existing slot is deleted. The flag says whether the change is abandoned.
    Delete(usize, bool),
    /// A reader looks up every frame.
    Look(usize),
    /// The writer frees retired slots.
    Free,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let whatever = (
        0..IDS + 1,
        0..FRAMES + 2,
        0..HOST_PAGES,
        prop_oneof![1 => Just(0u64), 6 => 1..6u64],
        prop_oneof![6 => Just(0u32), 2 => 0..4u32, 1 => 0..32u32],
        any::<u32>(),
    )
        .prop_map(|(id, gfn, page, pages, flags, data)| Request {
            address_space: 0,
            id,
            gpa: Gfn(gfn).gpa(),
            size: pages << 12,
            hva: Hva(page << 12),
            flags: SlotFlags(flags),
            userfault_bitmap: Some(Hva(0x1000)),
            data,
        });
    let action = prop_oneof![
        6 => whatever.prop_map(Action::Any),
        4 => (any::<usize>(), 0..FRAMES, any::<bool>()).prop_map(|(i, gfn, up)| Action::Move(i, gfn, up)),
        2 => (any::<usize>(), 0..16u32).prop_map(|(i, flags)| Action::Flags(i, flags)),
        1 => (any::<usize>(), any::<bool>()).prop_map(|(i, up)| Action::Delete(i, up)),
        3 => (0..3usize).prop_map(Action::Look),
        1 => Just(Action::Free),
    ];
    prop::collection::vec(action, 1..80)
}

/// The request of an action, and whether its change is abandoned.
fn request(action: &Action, model: &Model) -> Option<(Request<u32>, bool)> {
    let there = |index: usize| {
        let slot = model.values().nth(index % model.len().max(1))?;
        Some(Request {
            address_space: 0,
            id: slot.id,
            gpa: slot.range.start().gpa(),
            size: slot.range.pages() << 12,
            hva: slot.hva,
            flags: slot.flags,
            userfault_bitmap: Some(Hva(0x1000)),
            data: slot.data.wrapping_add(1),
        })
    };
    Some(match *action {
        Action::Any(request) => (request, false),
        Action::Move(index, gfn, up) => {
            let gpa = Gfn(gfn).gpa();
            (
                Request {
                    gpa,
                    ..there(index)?
                },
                up,
            )
        }
        Action::Flags(index, flags) => {
            let flags = SlotFlags(flags);
            (
                Request {
                    flags,
                    ..there(index)?
                },
                false,
            )
        }
        Action::Delete(index, up) => (Request::delete(0, there(index)?.id), up),
        Action::Look(_) | Action::Free => return None,
    })
}

/// The verdict of the rules on a request, given the model's slots.
fn plan(model: &Model, request: &Request<u32>) -> Result<Plan, SlotError> {
    check(
        &limits(),
        request,
        model.values().map(|slot| slot.range.pages()).sum(),
        |_, id| model.get(&id),
        |_, range, id| {
            let mut others: Vec<_> = model.values().filter(|slot| slot.id != id).collect();
            others.sort_by_key(|slot| slot.range.start());
            let other = others
                .into_iter()
                .find(|slot| slot.range.intersection(range).is_some())?;
            Some((other.id, other.range))
        },
    )
}

fn begun(model: &Model, plan: Plan, request: &Request<u32>) -> Begun {
    let old = || &model[&request.id];
    match plan {
        Plan::Nothing => Begun::Nothing,
        Plan::Create(new) => Begun::Created { new },
        Plan::Delete => Begun::Deleted { old: old().range },
        Plan::Move(new) => Begun::Moved {
            old: old().range,
            new,
        },
        Plan::Flags => Begun::FlagsChanged {
            range: old().range,
            old: old().flags,
            new: request.flags,
        },
    }
}

fn apply(model: &mut Model, plan: Plan, request: Request<u32>) {
    let range = match plan {
        Plan::Nothing => return,
        Plan::Delete => {
            model.remove(&request.id);
            return;
        }
        Plan::Create(range) | Plan::Move(range) => range,
        Plan::Flags => model[&request.id].range,
    };
    model.insert(request.id, Slot::new(request, range));
}

/// The contents of a slot.
fn facts(slot: &Slot<u32>) -> (u16, GfnRange, Hva, SlotFlags, u32) {
    (slot.id, slot.range, slot.hva, slot.flags, slot.data)
}

/// Looks up all frames by a reader. `invalid` is the range of a slot that is being changed.
fn look(reader: &mut ArrayReader<u32>, model: &Model, invalid: Option<GfnRange>) {
    for gfn in (0..FRAMES + 4).map(Gfn) {
        let expected = model.values().find(|slot| slot.range.contains(gfn));
        reader.find(gfn, |found| {
            let marked = invalid.is_some_and(|range| range.contains(gfn));
            let expected = expected.map(|slot| (facts(slot), marked));
            let found = found.map(|(slot, invalid)| (facts(slot), invalid));
            assert_eq!(found, expected, "at {gfn:?}");
        });
    }
}

/// The writer's own look-ups.
fn look_as_writer(slots: &ArrayCopy<u32>, model: &Model) {
    assert_eq!(slots.len(), model.len());
    for id in 0..IDS + 2 {
        assert_eq!(slots.find_id(id).map(facts), model.get(&id).map(facts));
    }
    for start in 0..HOST_PAGES + 8 {
        for range in [
            Hva(start << 12)..Hva((start << 12) + 1),
            Hva(start << 12)..Hva((start + 3) << 12),
        ] {
            let mut found = Vec::new();
            slots.find_hva(&range, |slot| found.push(facts(slot)));
            let mut expected: Vec<_> = model
                .values()
                .filter(|slot| slot.frames_in_hva(range.clone()).is_some())
                .map(facts)
                .collect();
            expected.sort_by_key(|slot| slot.1.start());
            assert_eq!(found, expected, "in {range:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_array_is_a_plain_map(history in actions()) {
        let mut slots = ArrayCopy::with_limits(limits());
        let mut model = Model::new();
        let mut readers: Vec<_> = (0..3).map(|_| slots.new_reader()).collect();
        for action in &history {
            match *action {
                Action::Look(index) => look(&mut readers[index], &model, None),
                Action::Free => slots.free_retired(),
                _ => {}
            }
            let Some((request, given_up)) = request(action, &model) else { continue };
            let plan = plan(&model, &request);
            let (update, plan) = match (slots.start(request), plan) {
                (Err(found), Err(expected)) => {
                    prop_assert_eq!(found, expected);
                    continue;
                }
                (Ok(update), Ok(plan)) => {
                    let expected = begun(&model, plan, &request);
                    prop_assert_eq!(update.what(), expected);
                    let old = match expected {
                        Begun::Deleted { old } | Begun::Moved { old, .. } => Some(old),
                        _ => None,
                    };
                    look(&mut readers[0], &model, old);
                    (update, plan)
                }
                (found, expected) => panic!("{:?}, by the rules {expected:?}", found.map(|u| u.what())),
            };
            if given_up {
                drop(update);
            } else {
                update.finish();
                apply(&mut model, plan, request);
            }
            look(&mut readers[1], &model, None);
            look_as_writer(&slots, &model);
        }
        for reader in &mut readers {
            look(reader, &model, None);
        }
    }
}

/// Data that records its drop, and counts the live instances.
struct Canary {
    value: AtomicU64,
    alive: Arc<AtomicU64>,
}

impl Canary {
    fn new(value: u64, alive: &Arc<AtomicU64>) -> Self {
        alive.fetch_add(1, Ordering::Relaxed);
        Self {
            value: AtomicU64::new(value),
            alive: Arc::clone(alive),
        }
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.value.store(u64::MAX, Ordering::Relaxed);
        self.alive.fetch_sub(1, Ordering::Relaxed);
    }
}

fn canary(id: u16, gfn: u64, alive: &Arc<AtomicU64>) -> Request<Canary> {
    Request {
        address_space: 0,
        id,
        gpa: Gfn(gfn).gpa(),
        size: 4 << 12,
        hva: Hva(u64::from(id) << 20),
        flags: SlotFlags::EMPTY,
        userfault_bitmap: None,
        data: Canary::new(gfn, alive),
    }
}

#[test]
fn readers_never_see_a_slot_that_was_freed() {
    const SLOTS: u16 = 64;
    let alive = Arc::new(AtomicU64::new(0));
    let mut slots = ArrayCopy::with_limits(Limits::default());
    for id in 0..SLOTS {
        slots
            .start(canary(id, u64::from(id) * 16, &alive))
            .expect("free frames")
            .finish();
    }
    let stop = AtomicBool::new(false);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for seed in 1..3u64 {
            let (mut reader, stop) = (slots.new_reader(), &stop);
            scope.spawn(move || {
                let mut gfn = seed;
                while !stop.load(Ordering::Relaxed) {
                    gfn = (gfn * 13 + 7) % (u64::from(SLOTS) * 16);
                    reader.find(Gfn(gfn), |found| {
                        let Some((slot, _)) = found else { return };
                        assert!(slot.range.contains(Gfn(gfn)));
                        let value = slot.data.value.load(Ordering::Relaxed);
                        assert_eq!(value, slot.range.start().0);
                    });
                }
            });
        }
        let mut round = 0;
        while began.elapsed() < Duration::from_millis(300) {
            round += 1;
            let id = (round * 7 % u64::from(SLOTS)) as u16;
            // Each slot has its own 16 frames, and moves among them.
            let gfn = u64::from(id) * 16 + round / u64::from(SLOTS) % 4 * 4;
            let update = slots.start(canary(id, gfn, &alive)).expect("free frames");
            update.finish();
            slots.free_retired();
        }
        stop.store(true, Ordering::Relaxed);
        assert!(round > 100);
    });
    slots.free_retired();
    assert_eq!(alive.load(Ordering::Relaxed), u64::from(SLOTS));
    let late = slots.new_reader();
    drop(slots);
    assert_eq!(
        alive.load(Ordering::Relaxed),
        u64::from(SLOTS),
        "a reader still exists"
    );
    drop(late);
    assert_eq!(alive.load(Ordering::Relaxed), 0);
}

#[test]
fn a_reader_that_stays_behind_keeps_what_it_can_find() {
    let alive = Arc::new(AtomicU64::new(0));
    let mut slots = ArrayCopy::with_limits(Limits::default());
    slots.start(canary(0, 0, &alive)).expect("free").finish();
    let mut reader = slots.new_reader();
    for gfn in [16, 32, 48] {
        slots.start(canary(0, gfn, &alive)).expect("free").finish();
        slots.free_retired();
    }
    assert_eq!(alive.load(Ordering::Relaxed), 4);
    reader.take_newest();
    slots.free_retired();
    assert_eq!(alive.load(Ordering::Relaxed), 1);
}

/// The first words of some pages of the test's memory after a sample of `test`.
fn memory_after<M: Memslots>(test: Test, slots: u32) -> Result<Vec<u64>, BenchError> {
    let host = test_vm::host(test.pages())?;
    let split = Split::new(slots, test.pages()).expect("a test that is possible");
    let test_vm = TestVm::<M>::new(&host, split)?;
    trial::sample(&test_vm, test, Duration::from_millis(1))?;
    let pages = trial::touched(test, split);
    Ok(pages
        .flat_map(|page| [0, 8, 1024].map(|at| test_vm.word(page, at).load(Ordering::Relaxed)))
        .collect())
}

#[test]
fn guests_have_the_same_memory_with_both_schemes() {
    for slots in [3, 10, 100] {
        for test in Test::ALL {
            let copied = memory_after::<ArrayCopy<SlotData>>(test, slots).expect("copied array");
            let ours = memory_after::<Scalable>(test, slots).expect("scalable");
            assert!(copied == ours, "{test:?} with {slots} slots");
            assert!(
                copied.iter().any(|&word| word != 0),
                "{test:?} wrote nothing"
            );
        }
    }
}

/// A scheme that finds no slot for the fourth page of the tests' memory. It is safe, but wrong.
struct Forgetful(ArrayCopy<SlotData>);
struct ForgetfulReader(ArrayReader<SlotData>);

// SAFETY: every answer is that of `ArrayCopy`, except that one frame has no slot.
unsafe impl Memslots for Forgetful {
    type Reader = ForgetfulReader;
    type Update<'a> = ArrayUpdate<'a, SlotData>;

    fn new(limits: Limits) -> Self {
        Self(ArrayCopy::with_limits(limits))
    }
    fn reader(&self) -> Self::Reader {
        ForgetfulReader(self.0.new_reader())
    }
    fn begin(&mut self, request: Request<SlotData>) -> Result<Self::Update<'_>, SlotError> {
        self.0.start(request)
    }
    fn by_id(&self, id: u16) -> Option<&Slot<SlotData>> {
        self.0.find_id(id)
    }
    fn for_each_in_hva<'a>(&'a self, hva: Range<Hva>, f: impl FnMut(&'a Slot<SlotData>)) {
        self.0.find_hva(&hva, f);
    }
    fn metadata_bytes(&self) -> usize {
        self.0.bytes()
    }
}

impl MemslotReader for ForgetfulReader {
    fn lookup<R>(&mut self, gfn: Gfn, f: impl FnOnce(Found<'_>) -> R) -> R {
        if gfn == Gfn(BASE.gfn().0 + 3) {
            f(Found::Nothing)
        } else {
            self.0.lookup(gfn, f)
        }
    }
}

#[test]
fn a_scheme_that_forgets_a_page_is_noticed() {
    let found = memory_after::<Forgetful>(Test::Map, 10);
    assert!(matches!(found, Err(BenchError::WrongValue(_))), "{found:?}");
}

#[test]
fn a_short_run_has_every_figure() {
    let setting = MemslotSetting {
        sizes: vec![10, 33],
        sample: Duration::from_millis(1),
        spend: Duration::ZERO,
        ..MemslotSetting::quick(1)
    };
    let report = memslot(&setting, &mut |_| {}).expect("a run");
    assert_eq!(report.cells.len(), 12);
    assert_eq!((report.calls.len(), report.verdicts.len()), (4, 3));
    assert!(report.cells.iter().all(|cell| cell.scalable.median > 0.0));
    assert!(report.cells.iter().all(|cell| cell.array_copy.samples == 1));
    let measured = report.calls.iter().all(|call| call.kvm.is_some());
    assert!(measured || report.kvm_absent.is_some());
    if let Some(why) = report.kvm_absent {
        pageferry_testkit::skip("kvm", why);
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for sizes in [vec![], vec![2], vec![10, 32_765]] {
        let setting = MemslotSetting {
            sizes,
            ..MemslotSetting::quick(1)
        };
        assert!(matches!(
            memslot(&setting, &mut |_| {}),
            Err(BenchError::Setting(_))
        ));
    }
    assert!(Test::Map.possible(8194) && !Test::Map.possible(8195));
    assert!(Test::ALL.iter().all(|test| test.possible(3)));
}

#[test]
fn kvm_that_is_asked_for_and_absent_is_an_error() {
    use pageferry_machine::MachineError::EngineUnavailable;
    let absent = super::required::<()>(&Err("no device".into()));
    assert!(
        matches!(absent, Err(BenchError::Machine(EngineUnavailable(why))) if why == "no device")
    );
    assert!(super::required(&Ok(())).is_ok());
}
