//! Shared by the tests: a directory, memory of all kinds, and the calls with their usual options.

use pageferry_snapshot::{
    Compression, Figures, Input, Options, PackError, Snapshot, What, open_input, pack, unpack,
};
use pageferry_testkit::Random;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const PAGE: usize = 4096;

/// A directory that goes with its contents.
pub(crate) struct Dir(PathBuf);

impl Dir {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pf-snapshot-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(&self.0).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// Writes a memory file.
    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Writes a sparse file: `pages` of `memory` are data, the rest is one hole.
    pub(crate) fn write_pages(&self, name: &str, memory: &[u8], pages: &[usize]) -> PathBuf {
        let path = self.path(name);
        let file = File::create(&path).unwrap();
        file.set_len(memory.len() as u64).unwrap();
        for page in pages {
            let at = page * PAGE;
            file.write_all_at(&memory[at..at + PAGE], at as u64)
                .unwrap();
        }
        path
    }

    /// Unpacks a snapshot and returns the bytes of the file.
    pub(crate) fn unpacked(&self, snapshot: &Snapshot, what: What) -> Vec<u8> {
        let path = self.path("unpacked");
        unpack(snapshot, &path, what, &mut go_on).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        bytes
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

pub(crate) fn try_pack(
    memory: &Path,
    output: &Path,
    options: Options<'_>,
) -> Result<Figures, PackError> {
    let file = open_input(memory).unwrap();
    pack(Input::File(&file), output, options, &mut go_on)
}

/// Packs a memory file.
#[track_caller]
pub(crate) fn packed(memory: &Path, output: &Path, options: Options<'_>) -> Figures {
    try_pack(memory, output, options).unwrap()
}

/// Options with small chunks.
pub(crate) fn small(chunk_bytes: u32, compression: Compression) -> Options<'static> {
    Options {
        chunk_bytes: Some(chunk_bytes),
        compression,
        ..Options::default()
    }
}

/// Options of a sparse diff on `base`.
pub(crate) fn sparse_on(base: &Snapshot) -> Options<'_> {
    Options {
        base: Some(base),
        holes_as_base: true,
        ..Options::default()
    }
}

/// All compressions of this build.
pub(crate) fn compressions() -> Vec<Compression> {
    vec![
        Compression::None,
        Compression::Lz4,
        #[cfg(feature = "zstd")]
        Compression::Zstd(3),
    ]
}

/// Bytes that do not compress.
pub(crate) fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let words = (0..bytes.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
    words.take(bytes).collect()
}

/// Bytes that compress, and differ for each seed.
pub(crate) fn text(seed: u64, bytes: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut text = Vec::new();
    while text.len() < bytes {
        text.extend_from_slice(format!("page {} of a guest; ", random.below(1000)).as_bytes());
    }
    text.truncate(bytes);
    text
}

/// All bytes of memory, read chunk by chunk.
#[track_caller]
pub(crate) fn all_of(snapshot: &Snapshot) -> Vec<u8> {
    let mut all = Vec::new();
    for index in 0..snapshot.chunks() {
        let mut chunk = vec![0xee; snapshot.chunk_len(index)];
        snapshot.read_chunk(index, &mut chunk).unwrap();
        all.extend(chunk);
    }
    all
}
