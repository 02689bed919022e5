//! `--metrics`: figures of a live migration and after it, and clients that break the rules.

use crate::support::{
    Destination, Dir, Process, Source, held_link, pageferry, status, wait_during,
};
use pageferry_testkit::{LIMIT, wait_for};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A destination on TCP that serves metrics on a free port, and the address of these.
fn destination() -> (Destination, String) {
    let destination = Destination::start_on_tcp(&["--metrics", "127.0.0.1:0"]);
    let said = destination.process.wait_until_said("metrics on http://");
    let (address, _) = said.split_once("/metrics").unwrap();
    (destination, address.to_owned())
}

/// Sends bytes, and returns all that comes back.
fn exchange(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("a listener");
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(bytes).expect("a reader");
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// A page of metrics.
struct Page(String);

impl Page {
    #[track_caller]
    fn of(answer: &str) -> Self {
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        assert!(head.contains("text/plain; version=0.0.4"), "{head}");
        assert!(head.contains(&format!("Content-Length: {}", body.len())));
        for line in body.lines().filter(|line| !line.starts_with("# ")) {
            let (name, value) = line.rsplit_once(' ').expect("a sample");
            assert!(name.starts_with("pageferry_"), "{line}");
            value.parse::<f64>().expect("a number");
        }
        Self(body.into())
    }

    fn scrape(address: &str) -> Self {
        Self::of(&exchange(
            address,
            b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
        ))
    }

    #[track_caller]
    fn get(&self, name: &str) -> f64 {
        let mut samples = self.0.lines().filter_map(|line| line.rsplit_once(' '));
        let found = samples.find(|(sample, _)| sample.strip_prefix("pageferry_") == Some(name));
        let (_, value) = found.unwrap_or_else(|| panic!("no {name} in\n{}", self.0));
        value.parse().unwrap()
    }
}

#[test]
fn metrics_tell_of_a_migration_and_after_it() {
    let source = Source::start("16M");
    let (destination, address) = destination();
    let before = Page::scrape(&address);
    assert_eq!(before.get("vm_state{state=\"waiting\"}"), 1.0);
    assert_eq!(before.get("session_state{state=\"none\"}"), 1.0);
    let shaper = held_link(&destination.address);
    source.wait_until_all_is_written();
    let to = shaper.addr().to_string();
    let mut migrate = source.migrate_with(&to, &["--precopy-passes", "0"]);
    let live = wait_during(&mut migrate, "a live migration with a rate", || {
        let page = Page::scrape(&address);
        let runs = page.get("session_state{state=\"running\"}") == 1.0;
        let rate = page.get("page_rate_bytes_per_second") > 0.0;
        let left = page.0.contains("pageferry_time_left_seconds ");
        (runs && rate && left && page.get("stall_seconds_count") > 0.0).then_some(page)
    });
    shaper.throttle(None);
    assert!(live.get("pages_left") > 0.0);
    assert_eq!(live.get("left_bytes"), live.get("pages_left") * 4096.0);
    assert_eq!(live.get("session_connected"), 1.0);
    assert_eq!(live.get("channels{role=\"bulk\"}"), 1.0);
    assert_eq!(live.get("channels{role=\"urgent\"}"), 1.0);
    migrate.end().assert_ok();
    source.process.end().assert_ok();

    wait_for("the whole VM", || {
        status(&destination.socket).filter(|s| s["state"] == "running")
    });
    let after = wait_for("the end of the session", || {
        let page = Page::scrape(&address);
        (page.get("session_state{state=\"completed\"}") == 1.0).then_some(page)
    });
    assert_eq!(after.get("vm_state{state=\"running\"}"), 1.0);
    assert_eq!(after.get("pages_left"), 0.0);
    assert_eq!(after.get("time_left_seconds"), 0.0);
    assert_eq!(after.get("page_rate_bytes_per_second"), 0.0);
    assert!(after.get("page_bytes_total") > live.get("page_bytes_total"));
    let stalls = after.get("stall_seconds_count");
    assert!(stalls >= live.get("stall_seconds_count"));
    assert_eq!(after.get("stall_seconds_bucket{le=\"+Inf\"}"), stalls);
    let of_vcpus: f64 = ["0", "1", "event"]
        .map(|vcpu| after.get(&format!("vcpu_stall_seconds_count{{vcpu=\"{vcpu}\"}}")))
        .iter()
        .sum();
    assert_eq!(of_vcpus, stalls);
    for stage in [
        "to-sent",
        "at-source",
        "wire-and-queue",
        "install",
        "resume",
    ] {
        let count = after.get(&format!("stall_stage_seconds_count{{stage=\"{stage}\"}}"));
        let sum = after.get(&format!("stall_stage_seconds_sum{{stage=\"{stage}\"}}"));
        assert!(count > 0.0 && count <= stalls, "{stage}: {count}");
        assert!(
            sum > 0.0 && sum <= after.get("stall_seconds_sum"),
            "{stage}"
        );
    }
    // The record outlives the migration on the control socket too.
    let session = status(&destination.socket).unwrap()["session"].clone();
    assert_eq!(session["stage"], "completed", "{session}");
    assert_eq!(
        session["page_bytes"].as_f64(),
        Some(after.get("page_bytes_total"))
    );
    let socket = destination.socket.to_str().unwrap();
    let late = pageferry(&["watch", "--json", "--vm", socket]);
    late.assert_ok();
    assert_eq!(late.stdout.lines().count(), 1, "{}", late.stdout);
    assert_eq!(late.json()["session"]["stage"], "completed");
}

#[test]
fn a_failed_migration_stays_in_the_metrics_of_the_source() {
    let dir = Dir::new();
    let (control, metrics) = (dir.path("vm"), dir.path("metrics"));
    let address = format!("unix:{}", metrics.display());
    let vm = [
        "run",
        "--engine",
        "soft",
        "--vcpus",
        "1",
        "--memory",
        "16M",
        "--control",
    ];
    let vm = [&vm[..], &[control.to_str().unwrap(), "--metrics", &address]].concat();
    let process = Process::start(&vm, &dir);
    wait_for("the VM", || {
        status(&control).filter(|s| s["state"] == "running")
    });
    let scrape = || {
        let mut stream = UnixStream::connect(&metrics).expect("a listener");
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        Page::of(&answer)
    };
    assert_eq!(scrape().get("vm_state{state=\"running\"}"), 1.0);
    let (_taken, nobody) = crate::support::peer::nobody();
    let migrate = [
        "migrate",
        "--vm",
        control.to_str().unwrap(),
        "--to",
        &nobody,
    ];
    pageferry(&migrate).assert_failed(6, "nobody listens there");
    let page = scrape();
    assert_eq!(page.get("session_state{state=\"kept\"}"), 1.0);
    assert_eq!(page.get("session_connected"), 0.0);
    assert_eq!(page.get("vm_state{state=\"running\"}"), 1.0);
    assert_eq!(status(&control).unwrap()["session"]["stage"], "kept");
    process.interrupt();
    process.end().assert_ok();
    dir.assert_empty();
}

#[test]
fn bad_requests_are_refused_and_slow_ones_hold_up_nobody() {
    let (_destination, address) = destination();
    let long = format!("GET /metrics HTTP/1.1\r\na: {}", "b".repeat(9000));
    for (bytes, expected) in [
        ("nonsense\r\n\r\n", "400"),
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("GET /metrics HTTP/9\r\n\r\n", "400"),
        (&long, "400"),
    ] {
        let answer = exchange(&address, bytes.as_bytes());
        let status = format!("HTTP/1.1 {expected} ");
        assert!(answer.starts_with(&status), "{bytes:.40}: {answer}");
    }
    let began = Instant::now();
    let mut slow = TcpStream::connect(&address).unwrap();
    slow.write_all(b"GET /metrics").unwrap();
    Page::scrape(&address);
    slow.set_read_timeout(Some(LIMIT)).unwrap();
    let cut = slow.read(&mut [0; 64]);
    assert!(matches!(cut, Ok(0) | Err(_)), "{cut:?}");
    let took = began.elapsed();
    assert!(took > Duration::from_secs(1) && took < LIMIT, "{took:?}");
    Page::scrape(&address);
}

#[test]
fn idle_clients_do_not_keep_a_scraper_out() {
    let (destination, address) = destination();
    let idle: Vec<TcpStream> = (0..40)
        .map(|_| TcpStream::connect(&address).expect("a listener"))
        .collect();
    for _ in 0..3 {
        Page::scrape(&address);
    }
    // They cost few threads and descriptors.
    let count = |what: &str| {
        let path = format!("/proc/{}/{what}", destination.process.pid());
        std::fs::read_dir(path).unwrap().count()
    };
    assert!(count("task") < 40, "{} threads", count("task"));
    assert!(count("fd") < 40, "{} descriptors", count("fd"));
    drop(idle);
}

#[test]
fn metrics_for_other_hosts_are_refused() {
    let dir = Dir::new();
    let listen = format!("unix:{}", dir.path("in").display());
    for address in ["0.0.0.0:0", "[::]:0", "192.0.2.1:9464"] {
        pageferry(&["receive", "--listen", &listen, "--metrics", address])
            .assert_failed(2, "no loopback address");
    }
}
