//! A real server of S3: the program `s3s-fs`, which `.ci/slow` installs and names in
//! `PAGEFERRY_S3S`.

use crate::stores::object::put_packed;
use crate::stores::restore::{config, memory, restore};
use crate::stores::server::{Behaviour, Fault, Server};
use crate::stores::{HASTY, PATIENT, Scratch, contents, stores};
use pageferry_pager::stores::Cache;
use pageferry_pager::{Format, Store, Stores};
use pageferry_testkit::{skip, wait_until};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// The program, serving a directory.
struct S3s {
    child: Child,
    port: u16,
}

impl S3s {
    /// `None` if there is no such program here.
    fn start(root: &std::path::Path) -> Option<Self> {
        let Some(program) = std::env::var_os("PAGEFERRY_S3S") else {
            skip(
                "s3s",
                "PAGEFERRY_S3S names no program: .ci/slow installs it",
            );
            return None;
        };
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let child = Command::new(program)
            .args(["--host", "127.0.0.1", "--port", &port.to_string()])
            .args(["--access-key", "pageferry", "--secret-key", "not-a-secret"])
            .arg(root)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process");
        wait_until("the server", || {
            std::thread::sleep(Duration::from_millis(20));
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Some(Self { child, port })
    }
}

impl Drop for S3s {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
#[ignore = "it needs the program s3s-fs"]
fn every_page_of_a_vm_comes_from_a_real_server_over_a_proxy_that_fails() {
    let scratch = Scratch::new("s3s");
    let config = config(11);
    let memory = memory(&scratch, &config);
    // The proxy packs, too: its objects become files of the real server.
    let proxy = Server::start(Behaviour::default());
    put_packed(&proxy, &scratch, &memory);
    let root = scratch.path("root");
    std::fs::create_dir_all(root.join("bucket/web")).unwrap();
    for name in ["memory", "base", "packed"] {
        std::fs::copy(scratch.path(name), root.join("bucket/web").join(name)).unwrap();
    }
    let Some(real) = S3s::start(&root) else {
        return;
    };
    // Without faults first, and without a cache: what is signed and asked is what S3 knows.
    let plain = stores(real.port, Cache::in_memory(), PATIENT);
    let source = plain.open("s3://bucket/web/memory").unwrap();
    assert_eq!(source.bytes(), memory.len() as u64);
    let mut all = vec![0; memory.len()];
    source.read(0, &mut all).unwrap();
    assert!(all == memory);
    assert!(plain.open("s3://bucket/web/absent").is_err());
    std::fs::write(root.join("bucket/web/memory"), contents(memory.len())).unwrap();
    let other = plain.open("s3://bucket/web/memory").unwrap();
    assert_ne!(other.identity(), source.identity());
    let mut page = [0; 4096];
    other.read(0, &mut page).unwrap();
    assert_eq!(page, contents(memory.len())[..4096]);
    std::fs::write(root.join("bucket/web/memory"), &memory).unwrap();

    proxy.behave(|behaviour| {
        *behaviour = Behaviour {
            delay: Duration::from_millis(20),
            every: 3,
            faults: vec![
                Fault::Busy,
                Fault::Drop,
                Fault::Truncate,
                Fault::Short,
                Fault::Late,
            ],
            upstream: Some(real.port),
            ..Behaviour::default()
        };
    });
    let cache = Cache::at(&scratch.path("cache"), 64 << 20).unwrap();
    let stores = Stores::new([Arc::new(stores(proxy.port, cache, HASTY)) as Arc<dyn Store>]);
    let raw = "s3://bucket/web/memory";
    assert!(restore(&scratch, &stores, &config, raw, Format::Raw));
    proxy.behave(|behaviour| behaviour.faults.push(Fault::Corrupt));
    let packed = "s3://bucket/web/packed";
    assert!(restore(&scratch, &stores, &config, packed, Format::Packed));
}
