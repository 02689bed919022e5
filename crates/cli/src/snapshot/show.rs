//! Results as tables and as JSON.

use crate::output;
use pageferry_harness::size::human;
use pageferry_snapshot::{Figures, Snapshot};
use serde_json::{Value, json};
use std::fmt::Write;
use std::time::Duration;

/// Rows of two columns.
#[derive(Default)]
pub(super) struct Table(String);

impl Table {
    pub(super) fn row(&mut self, name: &str, value: impl std::fmt::Display) -> &mut Self {
        // Writing to a string cannot fail.
        let value = output::plain(&value.to_string());
        let _ = writeln!(self.0, "  {name:<12}{value}");
        self
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }
}

/// A snapshot and its parts, for people.
pub(super) fn contents(snapshot: &Snapshot, figures: &Figures) -> Table {
    let mut table = Table::default();
    let chunk = human(snapshot.chunk_bytes().into());
    table
        .row("id", snapshot.id())
        .row("memory", human(snapshot.len()))
        .row("file", human(figures.file_bytes))
        .row("chunks", format!("{} of {chunk}", figures.chunks));
    for (name, count) in [
        ("zero", figures.zero),
        ("in bases", figures.in_bases),
        ("repeated", figures.repeated),
        ("raw", figures.raw),
        ("lz4", figures.lz4),
        ("zstd", figures.zstd),
    ] {
        if count > 0 {
            table.row(&format!("  {name}"), count);
        }
    }
    table
}

/// A snapshot and its parts, for programs.
pub(super) fn contents_json(snapshot: &Snapshot, figures: &Figures) -> Value {
    json!({
        "id": snapshot.id().to_string(),
        "memory_bytes": snapshot.len(),
        "file_bytes": figures.file_bytes,
        "stored_bytes": figures.stored_bytes,
        "chunk_bytes": snapshot.chunk_bytes(),
        "chunks": {
            "all": figures.chunks,
            "zero": figures.zero,
            "in_bases": figures.in_bases,
            "repeated": figures.repeated,
            "raw": figures.raw,
            "lz4": figures.lz4,
            "zstd": figures.zstd,
        },
    })
}

pub(super) fn ms(took: Duration) -> f64 {
    (took.as_secs_f64() * 1e6).round() / 1e3
}

/// A time, and the memory that was done in a second of it.
pub(super) fn took(took: Duration, bytes: u64) -> String {
    let seconds = took.as_secs_f64();
    let rate = (bytes as f64 / seconds.max(1e-9)) as u64;
    format!("{seconds:.2} s, {}/s of memory", human(rate))
}
