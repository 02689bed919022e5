//! Object stores, the cache and peers, against servers that fail in many ways.

mod bounds;
mod cache;
mod contents;
mod frames;
mod liar;
mod loss;
mod object;
mod peer_restore;
mod restore;
mod s3s;
mod scene;
mod server;
mod trust;

use pageferry_pager::stores::{Cache, ObjectStores, Patience};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// A directory that ends with its test.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageferry-stores-{}-{number}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bytes that differ everywhere, with a part of zeros.
pub(crate) fn contents(len: usize) -> Vec<u8> {
    let word = |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    let words = (0..len as u64).map(|at| word(at / 8)[at as usize % 8]);
    let mut bytes: Vec<u8> = words.collect();
    let zeros = len / 3..len / 2;
    bytes[zeros].fill(0);
    bytes
}

/// A patience that a busy machine does not use up.
pub(crate) const PATIENT: Patience = Patience {
    answer: Duration::from_secs(30),
    read: pageferry_testkit::LIMIT,
};

/// The patience of tests in which answers come late.
pub(crate) const HASTY: Patience = Patience {
    answer: Duration::from_millis(400),
    ..PATIENT
};

/// Stores at a server on this host.
pub(crate) fn stores(port: u16, cache: Cache, patience: Patience) -> ObjectStores {
    let endpoint = format!("http://127.0.0.1:{port}");
    let variables = [
        ("AWS_ENDPOINT", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_ACCESS_KEY_ID", "pageferry"),
        ("AWS_SECRET_ACCESS_KEY", "not-a-secret"),
        ("AWS_REGION", "us-east-1"),
        ("PATH", "/passed/over"),
    ];
    let variables = variables.map(|(key, value)| (key.to_owned(), value.to_owned()));
    ObjectStores::new(variables, cache, patience).expect("settings")
}
