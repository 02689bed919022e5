//! The memory that a table costs, and when it gives memory back.

use crate::allocator::{bytes_of, live, uncounted};
use pageferry_addr::{Gfn, Hva};
use pageferry_memslot::{Limits, Request, SlotWriter};
use pageferry_testkit::{LIMIT, Random, sized};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

fn request<D: Default>(id: u16) -> Request<D> {
    let number = u64::from(id);
    Request {
        gpa: Gfn(number * 8).gpa(),
        size: 4 << 12,
        hva: Hva((number * 40_503 % 32_771) << 12),
        ..Request::delete(0, id)
    }
}

#[test]
fn an_empty_table_takes_less_than_a_kibibyte() {
    let (bytes, writer) = bytes_of(|| SlotWriter::<u64>::new(Limits::default()));
    println!(
        "empty: {bytes} bytes, said to be {}",
        writer.metadata_bytes()
    );
    assert!(bytes < 1024 && writer.metadata_bytes() < 1024);
    let (reader, _reader) = bytes_of(|| writer.table().reader());
    assert!(reader <= 256, "a reader takes {reader} bytes");
    let mut writer = writer;
    let (refused, _) = bytes_of(|| writer.set(Request::delete(0, 0)).unwrap_err());
    assert_eq!(refused, 0, "a refusal leaves memory behind");
}

/// The bytes that the table has allocated, and the bytes that it reports. Nothing waits for
/// readers.
fn measured(writer: &mut SlotWriter<()>, before: isize) -> (usize, usize) {
    assert_eq!(writer.reclaim(), 0);
    let live = usize::try_from(live() - before).unwrap();
    (live, writer.metadata_bytes())
}

#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn a_slot_takes_less_than_256_bytes() {
    for slots in [10, 30, 50, 100, 509, 8194, 32_764_u16] {
        let before = live();
        let mut writer = SlotWriter::<()>::new(Limits::default());
        for id in 0..slots {
            writer.set(request(id)).unwrap();
        }
        let (ordered, said_ordered) = measured(&mut writer, before);
        // Half of the slots go and come again at random, several times. Some move.
        let mut random = Random::new(1);
        let mut gone = Vec::new();
        for _ in 0..sized(3, 6) {
            while gone.len() < usize::from(slots / 2) {
                let id = random.below(u64::from(slots)) as u16;
                if writer.set(Request::delete(0, id)).is_ok() {
                    gone.push(id);
                }
            }
            while !gone.is_empty() {
                let id = gone.swap_remove(random.below(gone.len() as u64) as usize);
                writer.set(request(id)).unwrap();
            }
        }
        drop(gone);
        let (churned, said_churned) = measured(&mut writer, before);
        let each = |bytes: usize| bytes as f64 / f64::from(slots);
        uncounted(|| {
            println!(
                "{slots} slots: {:.1} bytes each in order, {:.1} after churn; said to be {:.1} and {:.1}",
                each(ordered),
                each(churned),
                each(said_ordered),
                each(said_churned)
            );
        });
        // With few slots, some nodes that are not full or are kept for reuse cost more than the
        // slots.
        assert!(ordered.max(churned) < 256 * usize::from(slots) + (16 << 10));
        if slots >= 509 {
            assert!(each(ordered) < 256.0 && each(churned) < 256.0);
        }
        for (live, said) in [(ordered, said_ordered), (churned, said_churned)] {
            // The report leaves out the lists of things that wait.
            assert!(said <= live && live - said < 64 << 10, "{live} and {said}");
        }
        for id in 0..slots {
            writer.set(Request::delete(0, id)).unwrap();
        }
        let (emptied, _) = measured(&mut writer, before);
        uncounted(|| println!("{slots} slots: {emptied} bytes when all have gone"));
        drop(writer);
        assert_eq!(live(), before, "the table leaves memory behind");
    }
}

static RELAXED: AtomicU64 = AtomicU64::new(0);

/// While a reader holds its guard, the writer continues until too much waits. Then it waits for
/// that guard, even if other guards come and go.
#[test]
#[cfg_attr(miri, ignore = "too slow there")]
fn a_guard_that_is_held_bounds_what_waits() {
    const MOST: usize = 500;
    // A bound of the things that do not count against the limit yet, and of those that one
    // operation adds.
    const SLACK: usize = 200;
    let mut writer = SlotWriter::<()>::new(Limits {
        max_retired: MOST,
        ..Limits::default()
    })
    .with_relax(|| {
        RELAXED.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
    });
    for id in 0..100 {
        writer.set(request(id)).unwrap();
    }
    let table = writer.table();
    let mut holder = table.reader();
    let guard = holder.pin();
    let slot = guard.lookup(Gfn(8)).unwrap();
    let (done, finished) = channel();
    let progress = Arc::new(AtomicUsize::new(0));
    let worker = {
        let progress = Arc::clone(&progress);
        thread::spawn(move || {
            let mut most = 0;
            for round in 0..1000_u16 {
                let id = round / 2 % 100;
                let asked = if round % 2 == 0 {
                    Request::delete(0, id)
                } else {
                    request(id)
                };
                writer.set(asked).unwrap();
                most = most.max(writer.retired());
                progress.fetch_add(1, Ordering::Relaxed);
            }
            done.send(most).unwrap();
            writer
        })
    };
    let waited = std::time::Instant::now();
    while RELAXED.load(Ordering::Relaxed) < 100 {
        assert!(waited.elapsed() < LIMIT, "the writer never waits");
        // The end of another guard does not let it continue.
        drop(table.reader().pin());
        thread::yield_now();
    }
    let stuck = progress.load(Ordering::Relaxed);
    assert!(stuck < 1000 && finished.try_recv().is_err());
    thread::sleep(Duration::from_millis(20));
    assert_eq!(progress.load(Ordering::Relaxed), stuck, "it waits");
    // The slot that the guard found is still alive, and invalid by now.
    assert!(slot.id == 1 && slot.is_invalid());
    drop(guard);
    let most = finished
        .recv_timeout(LIMIT)
        .expect("the writer waits for nobody");
    assert!(most <= MOST + SLACK, "{most} waited");
    assert!(
        stuck * 12 > MOST,
        "it waited after {stuck} operations already"
    );
    let mut writer = worker.join().unwrap();
    assert_eq!(writer.reclaim(), 0);
    assert_eq!(writer.retired(), 0);
}

/// `reclaim` drops the data of deleted slots, unless a reader may still see it.
#[test]
fn reclaim_drops_the_data_of_slots_that_have_gone() {
    let mut writer = SlotWriter::<Option<Arc<()>>>::new(Limits::default());
    let (counted, mut reader) = (Arc::new(()), writer.table().reader());
    for id in 0..200 {
        let data = Some(Arc::clone(&counted));
        writer
            .set(Request {
                data,
                ..request(id)
            })
            .unwrap();
    }
    assert_eq!(Arc::strong_count(&counted), 201);
    let guard = reader.pin();
    for id in 0..150 {
        writer.set(Request::delete(0, id)).unwrap();
    }
    assert!(writer.reclaim() >= 150 && writer.retired() >= 150);
    assert_eq!(
        Arc::strong_count(&counted),
        201,
        "a reader may still see all of them"
    );
    drop(guard);
    assert_eq!(writer.reclaim(), 0);
    assert_eq!(Arc::strong_count(&counted), 51);
    // The data of an aborted update goes with the update. That of a forgotten one goes with the
    // next operation or the writer.
    let data = Some(Arc::clone(&counted));
    let update = writer.begin(Request { data, ..request(0) }).unwrap();
    std::mem::forget(update);
    assert_eq!(Arc::strong_count(&counted), 52);
    writer.set(Request::delete(0, 160)).unwrap();
    writer.reclaim();
    assert_eq!(Arc::strong_count(&counted), 50);
    let data = Some(Arc::clone(&counted));
    std::mem::forget(writer.begin(Request { data, ..request(0) }).unwrap());
    // The drop of the writer frees it too.
    drop(writer);
    assert_eq!(
        Arc::strong_count(&counted),
        50,
        "the reader keeps the table"
    );
    drop(reader);
    assert_eq!(Arc::strong_count(&counted), 1);
}

/// The writer empties the shared last-used places before a slot's memory serves another address
/// space.
#[test]
fn a_shared_last_used_slot_is_not_found_in_memory_that_is_used_again() {
    for moves in 0..9 {
        let mut writer = SlotWriter::<()>::new(Limits {
            address_spaces: 2,
            shared_last_used: true,
            ..Limits::default()
        });
        let frame = Gfn(8);
        writer.set(request(1)).unwrap();
        let table = writer.table();
        assert!(table.reader().pin().lookup(frame).is_some());
        writer.set(Request::delete(0, 1)).unwrap();
        assert_eq!(writer.reclaim(), 0);
        let other = Request {
            address_space: 1,
            ..request(1)
        };
        writer.set(other).unwrap();
        for id in 2..2 + moves {
            // Leave something to reclaim, so that the epoch moves.
            writer.set(request(id)).unwrap();
            writer.set(Request::delete(0, id)).unwrap();
            assert!(writer.retired() > 0);
            assert_eq!(writer.reclaim(), 0);
            let mut reader = table.reader();
            let guard = reader.pin();
            assert!(guard.lookup(frame).is_none(), "after {id}");
            assert!(guard.lookup_in(1, frame).is_some());
        }
    }
}
