//! The cache, over a source in memory that counts its reads.

use crate::stores::{Scratch, contents};
use pageferry_pager::stores::Cache;
use pageferry_pager::stores::cache::BLOCK;
use pageferry_pager::{Source, SourceError};
use proptest::prelude::*;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

#[derive(Debug)]
struct Memory {
    bytes: Vec<u8>,
    reads: AtomicUsize,
    fails: AtomicBool,
    /// The identity.
    version: u64,
}

impl Memory {
    fn new(len: usize, version: u64) -> Arc<Self> {
        let mut bytes = contents(len);
        bytes[0] = version as u8;
        Arc::new(Self {
            bytes,
            reads: AtomicUsize::new(0),
            fails: AtomicBool::new(false),
            version,
        })
    }

    fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Source for Memory {
    fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn block(&self) -> u64 {
        4096
    }

    fn is_zero(&self, _offset: u64, _len: u64) -> bool {
        false
    }

    fn read_now(&self, _offset: u64, _buffer: &mut [u8]) -> Result<bool, SourceError> {
        Ok(false)
    }

    fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), SourceError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if self.fails.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_millis(50));
            return Err(SourceError::Failed {
                what: "memory".to_owned(),
                why: io::ErrorKind::BrokenPipe.into(),
            });
        }
        buffer.copy_from_slice(&self.bytes[offset as usize..][..buffer.len()]);
        Ok(())
    }

    fn identity(&self) -> String {
        format!("version {}", self.version)
    }
}

fn page(source: &dyn Source, block: u64) -> Vec<u8> {
    let mut page = vec![0; 4096];
    source.read(block * BLOCK, &mut page).expect("a page");
    page
}

fn size(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |file| file.len())
}

/// Whoever may write there could give a VM other bytes, with sums put right.
#[test]
fn a_directory_that_others_may_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let scratch = Scratch::new("open");
    let directory = scratch.path("cache");
    std::fs::create_dir(&directory).unwrap();
    for mode in [0o777, 0o770] {
        let open = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&directory, open).unwrap();
        let refused = Cache::at(&directory, 4 << 20).unwrap_err();
        assert!(refused.to_string().contains("mode 700"), "{refused}");
    }
    std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    Cache::at(&directory, 4 << 20).unwrap();
}

#[test]
fn blocks_on_disk_outlive_the_process_that_wrote_them() {
    let scratch = Scratch::new("restart");
    let directory = scratch.path("cache");
    let memory = Memory::new(3 * BLOCK as usize + 17, 1);
    for round in 0..3 {
        let cache = Cache::at(&directory, 4 << 20).unwrap();
        let source = cache.wrap("s3://a/b", memory.clone());
        let mut all = vec![0; memory.bytes.len()];
        source.read(0, &mut all).unwrap();
        assert!(all == memory.bytes);
        cache.flush();
        assert_eq!(memory.reads(), 1, "round {round}");
        if round > 0 {
            assert_eq!((cache.figures().hits, cache.figures().misses), (4, 0));
        }
    }
    // Another version of the same address shares nothing with it.
    let cache = Cache::at(&directory, 4 << 20).unwrap();
    let other = Memory::new(3 * BLOCK as usize + 17, 2);
    let source = cache.wrap("s3://a/b", other.clone());
    assert_eq!(page(&*source, 0)[0], 2);
    assert_eq!(other.reads(), 1);
    let mode = |name| {
        let file = std::fs::metadata(directory.join(name)).unwrap();
        std::os::unix::fs::MetadataExt::mode(&file) & 0o777
    };
    assert_eq!([mode("blocks"), mode("index"), mode("lock")], [0o600; 3]);
}

#[test]
fn a_block_on_disk_that_is_in_the_page_cache_comes_at_once() {
    let scratch = Scratch::new("now");
    let memory = Memory::new(2 * BLOCK as usize, 1);
    let cache = Cache::at(&scratch.path("cache"), 4 << 20).unwrap();
    page(&*cache.wrap("a", memory.clone()), 1);
    cache.flush();
    // A new source has nothing in memory.
    let source = cache.wrap("a", memory.clone());
    let mut bytes = [0; 4096];
    assert!(!source.read_now(0, &mut bytes).unwrap());
    assert!(source.read_now(BLOCK, &mut bytes).unwrap());
    assert_eq!(bytes, memory.bytes[BLOCK as usize..][..4096]);
    assert_eq!((memory.reads(), cache.figures().hits), (1, 1));
    assert!(source.read_now(BLOCK + 4096, &mut bytes).unwrap());
    assert_eq!(cache.figures().hits, 1, "it is in memory now");
}

#[test]
fn the_least_recently_used_blocks_go_and_the_bound_holds() {
    let scratch = Scratch::new("bound");
    let directory = scratch.path("cache");
    let memory = Memory::new(8 * BLOCK as usize, 1);
    let bound = 4 * BLOCK + 4 * 64;
    let cache = Cache::at(&directory, bound).unwrap();
    let fresh = || cache.wrap("a", memory.clone());
    let touch = |block| {
        page(&*fresh(), block);
        cache.flush();
    };
    for block in 0..4 {
        touch(block);
    }
    assert_eq!(memory.reads(), 4);
    touch(0);
    touch(4);
    touch(0);
    assert_eq!(memory.reads(), 5, "block 0 is still there");
    touch(1);
    assert_eq!(memory.reads(), 6, "block 1 went for block 4");
    for block in 0..8 {
        touch(block);
    }
    assert!(size(&directory.join("blocks")) + size(&directory.join("index")) <= bound);
    drop(cache);
    // A smaller bound holds at once.
    let smaller = BLOCK + 64;
    let cache = Cache::at(&directory, smaller).unwrap();
    assert!(size(&directory.join("blocks")) + size(&directory.join("index")) <= smaller);
    assert_eq!(
        page(&*cache.wrap("a", memory.clone()), 7),
        memory.bytes[7 * BLOCK as usize..][..4096]
    );
    assert!(Cache::at(&directory, BLOCK).is_err());
}

#[test]
fn damage_on_disk_is_a_miss() {
    let scratch = Scratch::new("damage");
    let directory = scratch.path("cache");
    let memory = Memory::new(2 * BLOCK as usize, 1);
    let cache = Cache::at(&directory, 4 << 20).unwrap();
    page(&*cache.wrap("a", memory.clone()), 0);
    cache.flush();
    let blocks = std::fs::OpenOptions::new()
        .write(true)
        .open(directory.join("blocks"))
        .unwrap();
    blocks.write_all_at(b"?", 77).unwrap();
    assert_eq!(
        page(&*cache.wrap("a", memory.clone()), 0),
        memory.bytes[..4096]
    );
    cache.flush();
    assert_eq!((memory.reads(), cache.figures().damaged), (2, 1));
    page(&*cache.wrap("a", memory.clone()), 0);
    assert_eq!(memory.reads(), 2, "it was written again");
    // A file that was cut off.
    blocks.set_len(100).unwrap();
    assert_eq!(
        page(&*cache.wrap("a", memory.clone()), 0),
        memory.bytes[..4096]
    );
    assert_eq!(memory.reads(), 3);
}

#[test]
fn a_block_that_is_forgotten_before_it_is_written_does_not_come_back() {
    let scratch = Scratch::new("forgotten");
    let memory = Memory::new(32 * BLOCK as usize, 1);
    let cache = Cache::at(&scratch.path("cache"), 64 << 20).unwrap();
    let source = cache.wrap("a", memory.clone());
    let blocks = memory.bytes() / BLOCK;
    for block in 0..blocks {
        page(&*source, block);
        // The write of the block has begun, or waits.
        source.forget(block * BLOCK, 1);
    }
    cache.flush();
    for block in 0..blocks {
        page(&*source, block);
    }
    assert_eq!(memory.reads() as u64, 2 * blocks);
}

#[test]
fn one_process_has_the_directory_and_the_next_takes_it_up() {
    let scratch = Scratch::new("lock");
    let directory = scratch.path("cache");
    let memory = Memory::new(2 * BLOCK as usize, 1);
    let first = Cache::at(&directory, 4 << 20).unwrap();
    page(&*first.wrap("a", memory.clone()), 0);
    first.flush();
    let second = Cache::at(&directory, 4 << 20).unwrap();
    page(&*second.wrap("a", memory.clone()), 0);
    second.flush();
    assert_eq!(memory.reads(), 2);
    assert_eq!((second.figures().stored, second.figures().hits), (0, 0));
    assert!(second.figures().failures > 0);
    drop(first);
    pageferry_testkit::wait_until("the lock", || {
        std::thread::sleep(Duration::from_millis(50));
        page(&*second.wrap("a", memory.clone()), 0);
        second.figures().hits > 0
    });
}

#[test]
fn a_disk_that_is_full_or_broken_fails_no_read() {
    for broken in ["full", "directory"] {
        let scratch = Scratch::new(broken);
        let directory = scratch.path("cache");
        std::fs::create_dir(&directory).unwrap();
        match broken {
            "full" => std::os::unix::fs::symlink("/dev/full", directory.join("blocks")).unwrap(),
            _ => std::fs::create_dir(directory.join("blocks")).unwrap(),
        }
        let memory = Memory::new(4 * BLOCK as usize, 1);
        let cache = Cache::at(&directory, 4 << 20).unwrap();
        for block in 0..4 {
            let expected = &memory.bytes[(block * BLOCK) as usize..][..4096];
            assert_eq!(page(&*cache.wrap("a", memory.clone()), block), expected);
        }
        cache.flush();
        let figures = cache.figures();
        assert_eq!((figures.stored, figures.hits), (0, 0), "{broken}");
        assert!(figures.failures > 0, "{broken}");
    }
}

#[test]
fn a_read_that_fails_is_not_kept() {
    let memory = Memory::new(2 * BLOCK as usize, 1);
    let source = Cache::in_memory().wrap("a", memory.clone());
    memory.fails.store(true, Ordering::Relaxed);
    let error = source.read(0, &mut [0; 4096]).unwrap_err();
    let SourceError::Failed { why, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(why.kind(), io::ErrorKind::BrokenPipe);
    // Threads that wait for another one's read get its error.
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for number in 0..8 {
            let (source, barrier) = (&source, &barrier);
            scope.spawn(move || {
                barrier.wait();
                let read = source.read(number * 4096, &mut [0; 4096]);
                assert!(read.unwrap_err().to_string().contains("broken pipe"));
            });
        }
    });
    memory.fails.store(false, Ordering::Relaxed);
    assert_eq!(page(&*source, 0), memory.bytes[..4096]);
}

#[derive(Clone, Debug)]
enum Step {
    Read {
        offset: u64,
        len: usize,
    },
    ReadNow {
        offset: u64,
        len: usize,
    },
    Forget {
        offset: u64,
        len: u64,
    },
    /// The source is opened anew: nothing of it is in memory.
    Reopen,
    Restart {
        blocks: u64,
    },
    Damage {
        name: &'static str,
        at: u64,
    },
    Fail(bool),
}

const LEN: u64 = 9 * BLOCK + 100;

fn step() -> impl Strategy<Value = Step> {
    let range = (0..LEN, 0..3 * BLOCK as usize);
    prop_oneof![
        4 => range.clone().prop_map(|(offset, len)| Step::Read { offset, len }),
        2 => range.clone().prop_map(|(offset, len)| Step::ReadNow { offset, len }),
        1 => range.prop_map(|(offset, len)| Step::Forget { offset, len: len as u64 }),
        2 => Just(Step::Reopen),
        1 => (1_u64..12).prop_map(|blocks| Step::Restart { blocks }),
        1 => (0..4 * BLOCK).prop_map(|at| Step::Damage { name: "blocks", at }),
        1 => (0_u64..256).prop_map(|at| Step::Damage { name: "index", at }),
        1 => any::<bool>().prop_map(Step::Fail),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: pageferry_testkit::sized(16, 48) as u32,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_read_has_the_bytes_of_the_source(steps in prop::collection::vec(step(), 1..30)) {
        let scratch = Scratch::new("model");
        let directory = scratch.path("cache");
        let memory = Memory::new(LEN as usize, 1);
        let mut bound = 4 * (BLOCK + 64);
        let mut cache = Cache::at(&directory, bound).unwrap();
        let mut source = cache.wrap("a", memory.clone());
        let mut buffer = Vec::new();
        for step in steps {
            match step {
                Step::Read { offset, len } => {
                    buffer.clear();
                    buffer.resize(len, 0xaa);
                    let inside = offset + len as u64 <= LEN;
                    match source.read(offset, &mut buffer) {
                        Ok(()) => {
                            prop_assert!(inside);
                            prop_assert!(buffer == memory.bytes[offset as usize..][..len]);
                        }
                        Err(SourceError::Short { .. }) => prop_assert!(!inside),
                        Err(why) => prop_assert!(memory.fails.load(Ordering::Relaxed), "{why}"),
                    }
                }
                Step::ReadNow { offset, len } => {
                    buffer.clear();
                    buffer.resize(len, 0xaa);
                    let reads = memory.reads();
                    if source.read_now(offset, &mut buffer).unwrap() {
                        prop_assert!(buffer == memory.bytes[offset as usize..][..len]);
                    }
                    prop_assert_eq!(memory.reads(), reads);
                }
                Step::Forget { offset, len } => source.forget(offset, len),
                Step::Reopen => {
                    drop(source);
                    source = cache.wrap("a", memory.clone());
                }
                Step::Restart { blocks } => {
                    drop((source, cache));
                    bound = blocks * (BLOCK + 64);
                    cache = Cache::at(&directory, bound).unwrap();
                    source = cache.wrap("a", memory.clone());
                }
                Step::Damage { name, at } => {
                    cache.flush();
                    let path = directory.join(name);
                    if at < size(&path) {
                        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
                        file.write_all_at(&[0x5a], at).unwrap();
                    }
                }
                Step::Fail(fails) => memory.fails.store(fails, Ordering::Relaxed),
            }
            cache.flush();
            let bytes = size(&directory.join("blocks")) + size(&directory.join("index"));
            prop_assert!(bytes <= bound, "{} bytes of {}", bytes, bound);
        }
    }
}
