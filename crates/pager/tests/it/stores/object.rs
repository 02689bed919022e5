//! Reads of objects.

use crate::stores::server::{Behaviour, Fault, Server};
use crate::stores::{HASTY, PATIENT, Scratch, contents, stores};
use hyper::StatusCode;
use pageferry_pager::stores::cache::BLOCK;
use pageferry_pager::stores::{Cache, ObjectStores, Patience};
use pageferry_pager::{Format, Source, SourceError, Store, Stores};
use pageferry_snapshot::{Input, Options, Snapshot, pack};
use std::fs::File;
use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

const MEMORY: &str = "s3://bucket/web/memory";

/// The patience of tests in which reads fail.
const SHORT: Patience = Patience {
    answer: Duration::from_millis(200),
    read: Duration::from_secs(2),
};

fn open(server: &Server) -> Arc<dyn Source> {
    open_with(server, PATIENT)
}

fn open_with(server: &Server, patience: Patience) -> Arc<dyn Source> {
    stores(server.port, Cache::in_memory(), patience)
        .open(MEMORY)
        .expect("an object")
}

fn read(source: &dyn Source, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    source.read(offset, &mut bytes).expect("a read");
    bytes
}

#[test]
fn an_object_reads_as_its_bytes() {
    let server = Server::start(Behaviour::default());
    let memory = contents(5 * BLOCK as usize + 4096);
    server.put("bucket/web/memory", memory.clone());
    let source = open(&server);
    assert_eq!(source.bytes(), memory.len() as u64);
    assert!(source.identity().contains("version-1"));
    assert!(!source.is_zero(0, 4096));
    for (offset, len) in [
        (0, 4096),
        (BLOCK - 1, 2),
        (3 * BLOCK + 17, 2 * BLOCK as usize),
        (5 * BLOCK, 4096),
        (0, memory.len()),
        (7, 0),
    ] {
        let at = offset as usize;
        assert!(
            read(&*source, offset, len) == memory[at..at + len],
            "{offset}"
        );
    }
    let mut page = [0; 4096];
    let error = source.read(5 * BLOCK + 1, &mut page).unwrap_err();
    assert!(matches!(error, SourceError::Short { .. }), "{error}");
    let error = source.read(u64::MAX, &mut page).unwrap_err();
    assert!(matches!(error, SourceError::Short { .. }), "{error}");
    assert!(!source.read_now(u64::MAX, &mut page).unwrap());
}

#[test]
fn reads_of_the_same_block_are_one_request() {
    let server = Server::start(Behaviour {
        delay: Duration::from_millis(100),
        ..Behaviour::default()
    });
    let memory = contents(4 * BLOCK as usize);
    server.put("bucket/web/memory", memory.clone());
    // Two restores: the store knows that they have the same object.
    let stores = stores(server.port, Cache::in_memory(), PATIENT);
    let sources = [stores.open(MEMORY).unwrap(), stores.open(MEMORY).unwrap()];
    let barrier = Barrier::new(16);
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (source, barrier, memory) = (&sources[number % 2], &barrier, &memory);
            scope.spawn(move || {
                barrier.wait();
                let at = number * 4096;
                assert_eq!(read(&**source, at as u64, 4096), memory[at..at + 4096]);
            });
        }
    });
    let gets = server.gets();
    assert!(gets.len() == 1 && gets[0] == (0..BLOCK), "{gets:?}");
    // What is in memory comes at once.
    let mut page = [0; 4096];
    assert!(sources[1].read_now(BLOCK - 4096, &mut page).unwrap());
    assert_eq!(page, memory[BLOCK as usize - 4096..BLOCK as usize]);
    assert!(!sources[1].read_now(BLOCK, &mut page).unwrap());
}

#[test]
fn missing_blocks_in_a_row_are_one_request() {
    let server = Server::start(Behaviour::default());
    let memory = contents(8 * BLOCK as usize);
    server.put("bucket/web/memory", memory.clone());
    let source = open(&server);
    read(&*source, 3 * BLOCK, 1);
    assert_eq!(
        read(&*source, 1, memory.len() - 2),
        memory[1..memory.len() - 1]
    );
    assert_eq!(
        server.gets(),
        [3 * BLOCK..4 * BLOCK, 0..3 * BLOCK, 4 * BLOCK..8 * BLOCK]
    );
}

#[test]
fn a_server_that_fails_every_other_time_costs_time_only() {
    for fault in [
        Fault::Busy,
        Fault::Drop,
        Fault::Truncate,
        Fault::Short,
        Fault::Long,
        Fault::Late,
    ] {
        let server = Server::start(Behaviour {
            every: 2,
            faults: vec![fault],
            ..Behaviour::default()
        });
        let memory = contents(3 * BLOCK as usize);
        server.put("bucket/web/memory", memory.clone());
        let patience = if fault == Fault::Late { HASTY } else { PATIENT };
        let source = open_with(&server, patience);
        for block in 0..3 {
            let at = (block * BLOCK) as usize;
            let bytes = read(&*source, block * BLOCK, BLOCK as usize);
            assert!(bytes == memory[at..at + BLOCK as usize], "{fault:?}");
        }
        let gets = server.gets();
        assert!(gets.len() >= 4, "{fault:?}: {gets:?}");
        if fault == Fault::Short {
            let again = BLOCK + BLOCK / 2..2 * BLOCK;
            assert!(gets.contains(&again), "it goes on where it was: {gets:?}");
        }
    }
}

#[test]
fn an_object_that_was_replaced_is_an_error() {
    for ignores_conditions in [false, true] {
        let server = Server::start(Behaviour {
            ignores_conditions,
            ..Behaviour::default()
        });
        server.put("bucket/web/memory", contents(1 << 20));
        let source = open(&server);
        read(&*source, 0, 4096);
        server.put("bucket/web/memory", vec![7; 1 << 20]);
        let error = source.read(BLOCK, &mut [0; 4096]).unwrap_err();
        assert!(matches!(error, SourceError::Changed { .. }), "{error}");
        assert!(error.to_string().contains("version-1"), "{error}");
        // Another restore gets the new one, and no block of the old one.
        assert_eq!(read(&*open(&server), 0, 4096), [7; 4096]);
    }
}

#[test]
fn a_server_that_never_answers_ends_a_read_in_time() {
    for fault in [Fault::Busy, Fault::Late] {
        let server = Server::start(Behaviour::default());
        server.put("bucket/web/memory", contents(1 << 20));
        let source = open_with(&server, SHORT);
        server.behave(|behaviour| {
            behaviour.every = 1;
            behaviour.faults = vec![fault];
        });
        let began = Instant::now();
        let error = source.read(0, &mut [0; 4096]).unwrap_err();
        let SourceError::Failed { why, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(why.kind(), ErrorKind::TimedOut, "{error}");
        assert!(error.to_string().contains("given up after"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(60), "{fault:?}");
        assert!(server.gets().len() > 2, "{fault:?}");
        server.behave(|behaviour| behaviour.every = 0);
        assert_eq!(read(&*source, 0, 4096), contents(1 << 20)[..4096]);
    }
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let server = Server::start(Behaviour::default());
    let stores = stores(server.port, Cache::in_memory(), SHORT);
    drop(server);
    let error = stores.open(MEMORY).unwrap_err().to_string();
    assert!(
        error.contains("given up after") && error.contains("refused"),
        "{error}"
    );
}

#[test]
fn objects_that_cannot_be_had_are_refused_at_once() {
    let server = Server::start(Behaviour::default());
    let stores = stores(server.port, Cache::in_memory(), PATIENT);
    let refused = |address: &str, kind: ErrorKind| {
        let error = stores.open(address).unwrap_err();
        let SourceError::Failed { why, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(why.kind(), kind, "{error}");
        let what = address.strip_prefix("file://").unwrap_or(address);
        assert!(error.to_string().contains(what), "{error}");
    };
    refused(MEMORY, ErrorKind::NotFound);
    server.behave(|behaviour| behaviour.head = Some(StatusCode::FORBIDDEN));
    refused(MEMORY, ErrorKind::PermissionDenied);
    for address in [
        "s3://bucket",
        "s3://bucket/",
        "s3:///key",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "file://host/memory",
        "az://container/blob",
    ] {
        refused(address, ErrorKind::InvalidInput);
    }
    refused("file:///absent/memory", ErrorKind::NotFound);
}

#[test]
fn a_file_has_an_address_too() {
    let scratch = Scratch::new("file");
    std::fs::write(scratch.path("memory"), contents(8192)).unwrap();
    let server = Server::start(Behaviour::default());
    let stores = stores(server.port, Cache::in_memory(), PATIENT);
    let address = format!("file://{}", scratch.path("memory").display());
    let source = stores.open(&address).unwrap();
    assert_eq!(read(&*source, 4096, 4096), contents(8192)[4096..]);
}

/// Packs `memory` with a base, and stores both.
pub(crate) fn put_packed(server: &Server, scratch: &Scratch, memory: &[u8]) {
    let mut former = memory.to_vec();
    let half = former.len() / 2;
    former[half..].fill(3);
    let put = |name: &str, bytes: &[u8], base: Option<&Snapshot>| {
        let (raw, packed) = (scratch.path("raw"), scratch.path(name));
        std::fs::write(&raw, bytes).unwrap();
        let options = Options {
            base,
            ..Options::default()
        };
        let on = &mut |_, _| ControlFlow::Continue(());
        pack(
            Input::File(&File::open(&raw).unwrap()),
            &packed,
            options,
            on,
        )
        .unwrap();
        server.put(
            &format!("bucket/web/{name}"),
            std::fs::read(&packed).unwrap(),
        );
        Snapshot::open(&packed).unwrap()
    };
    let base = put("base", &former, None);
    put("packed", memory, Some(&base));
}

#[test]
fn a_chunk_that_was_damaged_on_its_way_is_fetched_again() {
    let scratch = Scratch::new("packed");
    let server = Server::start(Behaviour::default());
    let memory = contents(4 << 20);
    put_packed(&server, &scratch, &memory);
    server.behave(|behaviour| {
        behaviour.every = 2;
        behaviour.faults = vec![Fault::Corrupt];
    });
    let cache = Cache::at(&scratch.path("cache"), 64 << 20).unwrap();
    let stores = Arc::new(stores(server.port, cache.clone(), PATIENT));
    let stores = Stores::new([stores as Arc<dyn Store>]);
    let path = Path::new("s3://bucket/web/packed");
    for _ in 0..2 {
        let source = stores.open(path, Format::Packed).unwrap();
        for at in (0..memory.len()).step_by(64 << 10) {
            let page = read(&*source, at as u64, 4096);
            assert!(page == memory[at..at + 4096], "byte {at}");
        }
        drop(source);
        cache.flush();
    }
    // Damaged blocks may have been written to disk: all of them were found by their chunks.
    let gets = server.gets().len();
    server.behave(|behaviour| behaviour.every = 0);
    let source = stores.open(path, Format::Packed).unwrap();
    assert!(read(&*source, 0, memory.len()) == memory);
    assert_eq!(server.gets().len(), gets);
}

/// Each is final: an answer that will not change is told at once, with what to set.
#[test]
fn first_mistakes_are_told_at_once() {
    let server = Server::start(Behaviour::default());
    server.put("bucket/web/memory", contents(BLOCK as usize));
    let xml = |code: &str| format!("<Error><Code>{code}</Code></Error>").leak() as &'static str;
    let region =
        "<Error><Code>AuthorizationHeaderMalformed</Code><Region>eu-west-9</Region></Error>";
    let key = "<Error><Code>InvalidRequest</Code><Message>The object was stored using a form of \
               Server Side Encryption.</Message></Error>";
    for (status, body, advice) in [
        (403, xml("RequestTimeTooSkewed"), "clock of this host"),
        (400, xml("ExpiredToken"), "renew AWS_SESSION_TOKEN"),
        (403, xml("InvalidAccessKeyId"), "AWS_ACCESS_KEY_ID"),
        (403, xml("SignatureDoesNotMatch"), "AWS_SECRET_ACCESS_KEY"),
        (400, region, "set AWS_REGION=eu-west-9"),
        (301, "", "set AWS_REGION"),
        (403, xml("InvalidObjectState"), "in an archive"),
        (400, key, "SSE-C"),
        (403, xml("AccessDenied"), "s3:GetObject"),
        (404, xml("NoSuchBucket"), "no such bucket"),
        (404, xml("NoSuchKey"), "no such object"),
        (403, "", "refuses these credentials"),
    ] {
        server.behave(|behaviour| behaviour.refusal = Some((status, body)));
        let began = Instant::now();
        let refused = stores(server.port, Cache::in_memory(), PATIENT).open(MEMORY);
        let refused = refused.expect_err("a refusal").to_string();
        assert!(refused.contains(advice), "{status} {body}: {refused}");
        assert!(began.elapsed() < Duration::from_secs(5), "{status} {body}");
    }
}

/// HEAD alone says little of what a page fault needs.
#[test]
fn an_object_that_cannot_be_read_in_parts_is_refused() {
    let behaviours: [fn(&mut Behaviour); 2] = [
        |behaviour| behaviour.has_no_parts = true,
        |behaviour| behaviour.changes = true,
    ];
    for change in behaviours {
        let server = Server::start(Behaviour::default());
        server.put("bucket/web/memory", contents(2 * BLOCK as usize));
        server.behave(change);
        let store: Arc<dyn Store> = Arc::new(stores(server.port, Cache::in_memory(), PATIENT));
        let refused = Stores::new([store]).open(Path::new(MEMORY), Format::Raw);
        let refused = refused.expect_err("a refusal").to_string();
        let known = ["gives no parts", "has changed"];
        assert!(known.iter().any(|why| refused.contains(why)), "{refused}");
    }
}

#[test]
fn keys_that_mean_other_objects_are_refused() {
    let stores = stores(1, Cache::in_memory(), HASTY);
    for key in ["s3://b//lead", "s3://b/trail/", "s3://b/two//slashes"] {
        let refused = stores.open(key).expect_err("a refusal").to_string();
        assert!(refused.contains("a key without a slash"), "{refused}");
    }
}

#[test]
fn a_server_with_another_scheme_is_told_with_the_variable_to_set() {
    let server = Server::start(Behaviour::default());
    server.put("bucket/web/memory", contents(BLOCK as usize));
    for (endpoint, allow, advice) in [
        ("http", "false", "AWS_ALLOW_HTTP=true"),
        ("https", "true", "speaks no TLS"),
    ] {
        let variables = [
            (
                "AWS_ENDPOINT",
                format!("{endpoint}://127.0.0.1:{}", server.port),
            ),
            ("AWS_ALLOW_HTTP", allow.to_owned()),
            ("AWS_ACCESS_KEY_ID", "pageferry".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "not-a-secret".to_owned()),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value));
        let stores = ObjectStores::new(variables, Cache::in_memory(), PATIENT).expect("settings");
        let refused = stores.open(MEMORY).expect_err("a refusal").to_string();
        assert!(refused.contains(advice), "{refused}");
    }
}
