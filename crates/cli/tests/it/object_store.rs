//! `pageferry pager` with memory in an object store.

use crate::support::{Dir, PAGEFERRY, Process};
use pageferry_testkit::firecracker::{
    Config, Double, Fields, Task, page_contents, write_memory_file,
};
use pageferry_testkit::wait_until;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const PAGES: u64 = 512;

/// The keys and bytes of the objects in `bucket`.
pub(crate) type Objects = Vec<(&'static str, Vec<u8>)>;

/// A server with these objects, which counts the requests for their bytes.
pub(crate) fn serve(objects: Objects) -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let gets = Arc::new(AtomicU64::new(0));
    let (own, objects) = (gets.clone(), Arc::new(objects));
    // It ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().map(Result::unwrap) {
            let (own, objects) = (own.clone(), objects.clone());
            std::thread::spawn(move || answer(stream, &objects, &own));
        }
    });
    (port, gets)
}

/// A command that finds this server.
pub(crate) fn command(port: u16) -> Command {
    let mut command = Command::new(PAGEFERRY);
    command
        .env("AWS_ENDPOINT", format!("http://127.0.0.1:{port}"))
        .env("AWS_ALLOW_HTTP", "true")
        .env("AWS_ACCESS_KEY_ID", "pageferry")
        .env("AWS_SECRET_ACCESS_KEY", "not-a-secret");
    command
}

fn answer(mut stream: TcpStream, objects: &Objects, gets: &AtomicU64) {
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let head = BufReader::new(&stream).lines().map_while(Result::ok);
    let head: Vec<_> = head.take_while(|line| !line.is_empty()).collect();
    let first = head.first().map_or("", String::as_str);
    let asked = |key: &str| first.contains(&format!(" /bucket/{key} "));
    let found = objects.iter().find(|(key, _)| asked(key));
    let object = found.map_or(&[][..], |(_, object)| object);
    let all = object.len();
    let range = head.iter().find_map(|line| {
        let line = line.to_ascii_lowercase();
        let (from, to) = line.strip_prefix("range: bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()?))
    });
    let (status, more, body) = match range {
        _ if found.is_none() => ("404 Not Found", String::new(), &[][..]),
        Some((from, to)) => {
            gets.fetch_add(1, Ordering::Relaxed);
            let more = format!("Content-Range: bytes {from}-{to}/{all}\r\n");
            ("206 Partial Content", more, &object[from..=to])
        }
        None => ("200 OK", String::new(), object),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\n{more}Content-Length: {}\r\nETag: \"one\"\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    // A client that went away asks again.
    let _ = stream.write_all(head.as_bytes());
    if !first.starts_with("HEAD") {
        let _ = stream.write_all(body);
    }
}

#[test]
fn a_vm_starts_from_an_object_and_the_next_one_from_the_cache() {
    let dir = Dir::new();
    let memory = dir.path("memory");
    write_memory_file(&memory, 31, PAGES).unwrap();
    let (port, gets) = serve(vec![("web/memory", std::fs::read(&memory).unwrap())]);
    std::fs::remove_file(memory).unwrap();
    let (socket, cache) = (dir.path("vm.sock"), dir.path("cache"));
    let pager = |address: &str| {
        let (socket, cache) = (socket.to_str().unwrap(), cache.to_str().unwrap());
        let args = ["pager", "run", "--memory", address, "--socket", socket];
        let cached = ["--cache", cache, "--cache-bytes", "64M"];
        Process::start_by(command(port), &[&args[..], &cached[..]].concat(), &dir)
    };
    let mut asked = 0;
    for round in 0..2 {
        let Some(mut double) = Double::start(&Config {
            seed: 31,
            regions: vec![PAGES * 4096],
            vcpus: 2,
            ..Config::default()
        }) else {
            return;
        };
        let pager = pager("s3://bucket/web/memory");
        pager.wait_until_said("waiting for a VMM at ");
        double.connect(&socket, Fields::Both).unwrap();
        double.perform(Task::VerifyAll);
        let status = double.status();
        assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
        assert!(double.quit().success());
        pager.end().assert_ok();
        match round {
            0 => asked = gets.load(Ordering::Relaxed),
            _ => assert_eq!(gets.load(Ordering::Relaxed), asked),
        }
    }
    assert!((1..=PAGES / 64).contains(&asked), "{asked} requests");
    wait_until("blocks in the cache", || {
        std::fs::metadata(cache.join("blocks")).is_ok_and(|file| file.len() >= PAGES * 2048)
    });
    assert_ne!(
        page_contents(31, 0),
        [0; 4096],
        "there is something to read"
    );
    for (address, why) in [
        ("s3://bucket/web/absent", "not found"),
        ("s3://bucket", "expected SCHEME://BUCKET/KEY"),
        ("ftp://bucket/key", "expected a path, or one of s3://"),
    ] {
        pager(address).end().assert_failed(2, why);
    }
}
