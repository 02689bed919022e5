//! Whole restores over a server that fails: every page right.

use crate::stores::object::put_packed;
use crate::stores::server::{Behaviour, Fault, Server};
use crate::stores::{HASTY, PATIENT, Scratch, stores};
use pageferry_pager::stores::Cache;
use pageferry_pager::{Format, Name, Pager, Phase, Recording, Restore, Settings, Store, Stores};
use pageferry_testkit::firecracker::{Config, Double, Fields, PAGE_BYTES, Task, write_memory_file};
use pageferry_testkit::wait_until;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;

pub(crate) fn config(seed: u64) -> Config {
    Config {
        seed,
        regions: vec![4 * MIB, MIB, 2 * MIB],
        vcpus: 4,
        balloon_us: Some(20_000),
        ..Config::default()
    }
}

pub(crate) fn memory(scratch: &Scratch, config: &Config) -> Vec<u8> {
    let pages = config.regions.iter().sum::<u64>() / PAGE_BYTES;
    let path = scratch.path("memory");
    write_memory_file(&path, config.seed, pages).expect("a file");
    std::fs::read(path).expect("a file")
}

/// Restores a VM from an address, lets it run, and checks all its pages. Returns false if that is
/// not possible here.
pub(crate) fn restore(
    scratch: &Scratch,
    stores: &Stores,
    config: &Config,
    address: &str,
    format: Format,
) -> bool {
    let Some(mut double) = Double::start(config) else {
        return false;
    };
    let pager = Pager::start(Settings {
        directory: scratch.path("state"),
        stores: stores.clone(),
        ..Settings::default()
    })
    .expect("a pager");
    let name: Name = "vm".parse().expect("a name");
    let mut restore = Restore::new(address, scratch.path("socket"));
    restore.format = format;
    pager.restore(&name, restore.clone()).expect("a restore");
    double
        .connect(&restore.socket, Fields::Both)
        .expect("connected");
    wait_until("the VM to be served", || {
        let status = pager.status(&name).expect("a restore");
        assert_eq!(status.fault, None);
        status.phase == Phase::Serving
    });
    double.run();
    wait_until("touches", || {
        double
            .status()
            .touches
            .iter()
            .all(|touches| *touches >= 300)
    });
    double.pause();
    double.perform(Task::VerifyAll);
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
    let vm = pager.status(&name).expect("a restore").vm.expect("a VM");
    assert_eq!(vm.source_errors, 0, "repeated requests are no errors yet");
    drop(double);
    assert!(pager.wait_ended(&name, pageferry_testkit::LIMIT));
    drop(pager);
    std::fs::remove_dir_all(scratch.path("state")).expect("a directory");
    true
}

#[test]
fn every_page_of_a_vm_comes_over_a_server_that_fails() {
    let scratch = Scratch::new("restore");
    let config = config(7);
    let memory = memory(&scratch, &config);
    let server = Server::start(Behaviour {
        delay: Duration::from_millis(5),
        every: 3,
        faults: vec![
            Fault::Busy,
            Fault::Drop,
            Fault::Truncate,
            Fault::Short,
            Fault::Late,
        ],
        ..Behaviour::default()
    });
    server.put("bucket/web/memory", memory.clone());
    put_packed(&server, &scratch, &memory);
    let cache = Cache::at(&scratch.path("cache"), 64 * MIB).unwrap();
    let stores = Arc::new(stores(server.port, cache.clone(), HASTY));
    let stores = Stores::new([stores as Arc<dyn Store>]);
    let raw = "s3://bucket/web/memory";
    if !restore(&scratch, &stores, &config, raw, Format::Raw) {
        return;
    }
    cache.flush();
    // The second VM asks the server for nothing.
    let gets = server.gets().len();
    assert!(restore(&scratch, &stores, &config, raw, Format::Raw));
    assert_eq!(server.gets().len(), gets);
    // Chunks have checksums: bytes that were damaged on their way are found, too.
    server.behave(|behaviour| behaviour.faults.push(Fault::Corrupt));
    let packed = "s3://bucket/web/packed";
    assert!(restore(&scratch, &stores, &config, packed, Format::Packed));
    assert!(!Path::new(&scratch.path("socket")).exists());
}

/// The time until a VM has touched all its pages, without a cache on disk.
fn touch_all(
    scratch: &Scratch,
    server: &Server,
    config: &Config,
    replay: Option<std::path::PathBuf>,
) -> Option<Duration> {
    let mut double = Double::start(config)?;
    let stores = stores(server.port, Cache::in_memory(), PATIENT);
    let pager = Pager::start(Settings {
        directory: scratch.path("state"),
        stores: Stores::new([Arc::new(stores) as Arc<dyn Store>]),
        ..Settings::default()
    })
    .expect("a pager");
    let mut restore = Restore::new("s3://bucket/web/memory", scratch.path("socket"));
    restore.replay = replay;
    let name: Name = "vm".parse().expect("a name");
    pager.restore(&name, restore.clone()).expect("a restore");
    let began = Instant::now();
    double
        .connect(&restore.socket, Fields::Both)
        .expect("connected");
    double.perform(Task::VerifyAll);
    let took = began.elapsed();
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
    drop(double);
    assert!(pager.wait_ended(&name, pageferry_testkit::LIMIT));
    Some(took)
}

#[test]
fn a_recording_hides_the_latency_of_a_store() {
    let scratch = Scratch::new("replay");
    let config = Config {
        regions: vec![12 * MIB],
        balloon_us: None,
        ..config(3)
    };
    let memory = memory(&scratch, &config);
    let server = Server::start(Behaviour {
        delay: Duration::from_millis(20),
        ..Behaviour::default()
    });
    let bytes = memory.len() as u64;
    server.put("bucket/web/memory", memory);
    let Some(on_demand) = touch_all(&scratch, &server, &config, None) else {
        return;
    };
    assert_eq!(server.most_at_once(), 1, "a fault is behind the other");
    let recording = scratch.path("recording");
    Recording::of((0..bytes).step_by(4096))
        .save(&recording)
        .expect("a recording");
    let replayed = touch_all(&scratch, &server, &config, Some(recording)).expect("as before");
    println!("on demand {on_demand:?}, replayed {replayed:?}");
    let most = server.most_at_once();
    assert!(most >= 8, "{most} reads at once");
}
