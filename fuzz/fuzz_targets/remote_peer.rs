//! Both sides of the protocol for snapshots of other hosts, with a peer of any bytes: no panic, no
//! large allocation, and nothing that the peer did not send becomes contents.

use pageferry_pager::stores::peer::Shares;
use pageferry_pager::stores::peer::answer::{Awaits, Limited, answer};
use pageferry_pager::stores::peer::talk::Talk;
use pageferry_pager::stores::peer::wire::{HEADER_BYTES, MAX_BODY, Reply};
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::OnceLock;

const BYTES: usize = 4096;

/// A peer that says these bytes, and what it hears.
struct Peer<'a> {
    says: &'a [u8],
    heard: Vec<u8>,
}

impl Read for Peer<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.says.read(buffer)
    }
}

impl Write for Peer<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Bounded as the input is: a request has 24 bytes, and a reply at most this file.
        self.heard.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Limited for Peer<'_> {
    fn limit(&mut self, _: Awaits) {}
}

/// A file, shared as `a`.
fn shares() -> &'static Shares {
    static SHARES: OnceLock<Shares> = OnceLock::new();
    SHARES.get_or_init(|| {
        let path: PathBuf = std::env::temp_dir().join(format!("pf-fuzz-{}", std::process::id()));
        std::fs::write(&path, vec![7; BYTES]).unwrap();
        Shares::of_files([("a".to_owned(), path)]).unwrap()
    })
}

/// A client of a server that says `bytes`.
fn client(bytes: &[u8]) {
    let mut talk = Talk::new(Peer {
        says: bytes,
        heard: Vec::new(),
    });
    if let Ok(opened) = talk.open("a") {
        assert!(!opened.identity.contains(char::is_control));
        let Ok(extents) = talk.extents(opened.bytes, 1000) else {
            return;
        };
        let mut at = 0;
        for (start, end) in extents {
            assert!(at <= start && start < end && end <= opened.bytes);
            at = end;
        }
    }
    let mut page = [0; 4096];
    let left = talk.stream().says;
    if talk.read(0, &mut page).is_ok() {
        let sent = &left[HEADER_BYTES..HEADER_BYTES + 4096];
        assert_eq!(page, sent);
    }
}

/// A server of a client that says `bytes`.
fn server(bytes: &[u8]) {
    let mut peer = Peer {
        says: bytes,
        heard: Vec::new(),
    };
    // An error ends the connection, and all before it was answered.
    let _ = answer(&mut peer, shares());
    let mut heard = &peer.heard[..];
    while let Some((header, rest)) = heard.split_first_chunk::<HEADER_BYTES>() {
        let reply = Reply::decode(header).unwrap();
        assert!(reply.len <= MAX_BODY);
        let (body, rest) = rest.split_at(reply.len as usize);
        reply.check(body).unwrap();
        heard = rest;
    }
    assert!(heard.is_empty());
}

pub(crate) fn run(bytes: &[u8]) {
    match bytes.split_first() {
        Some((side, rest)) if side % 2 == 0 => client(rest),
        Some((_, rest)) => server(rest),
        None => {}
    }
}
