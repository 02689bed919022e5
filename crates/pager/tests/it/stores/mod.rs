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

pub(crate) use crate::scene::Scratch;
use pageferry_pager::stores::{Cache, ObjectStores, Patience};
use std::time::Duration;

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
