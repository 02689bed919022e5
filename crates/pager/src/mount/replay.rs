//! The pages of a recording, brought into the page cache ahead of the VMs.
//!
//! **Guarantee.** No fault waits longer because of it. It starts when a file is opened, and does
//! nothing for files that nobody uses.
//!
//! **Mechanism.** A thread reads a block of the source in the order of first touches, so that the
//! source has it at hand. Then it advises the kernel that the recorded parts will be needed
//! (`POSIX_FADV_WILLNEED`). The kernel asks for those that are not cached, and waits for none.
//! `FUSE_NOTIFY_STORE` would wait for pages whose reads are under way. A pager that is killed while
//! it waits for its own replies could not end.

use super::file::File;
use super::serve::Shared;
use crate::pool::on_threads;
use rustix::fs::{Advice, fadvise};
use std::collections::HashMap;
use std::num::NonZeroU64;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Starts to bring the pages of a file's recording, unless that has been done.
pub(super) fn start(shared: &Arc<Shared>, file: &Arc<File>) {
    if file.recording.is_none() || file.replayed.swap(true, Ordering::Relaxed) {
        return;
    }
    shared.replays.fetch_add(1, Ordering::Relaxed);
    let own = (shared.clone(), file.clone());
    let thread = std::thread::Builder::new().name(format!("load-{}", file.name));
    let spawned = thread.spawn(move || {
        let (shared, file) = own;
        replay(&shared, &file);
        shared.replays.fetch_sub(1, Ordering::Release);
    });
    if let Err(why) = spawned {
        shared.replays.fetch_sub(1, Ordering::Relaxed);
        // Faults bring the pages all the same.
        tracing::warn!(file = %file.name, "no thread to load pages: {why}");
    }
}

fn replay(shared: &Shared, file: &File) {
    let path = shared.target.join(file.name.as_str());
    let opened = std::fs::File::open(&path);
    let mounted = match opened.and_then(|opened| Ok((opened.metadata()?.ino(), opened))) {
        Ok((node, mounted)) if node == file.node => mounted,
        // Something was mounted over it.
        Ok(_) => return,
        Err(why) => {
            tracing::warn!(file = %file.name, "cannot load its recording: {why}");
            return;
        }
    };
    let blocks = blocks_of(file);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut buffer = Vec::new();
        while let Some(parts) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) {
            let (Some(first), Some(last)) = (parts.first(), parts.last()) else {
                continue;
            };
            if shared.is_ending() {
                return;
            }
            buffer.resize((last.1 - first.0) as usize, 0);
            // A part that cannot be read is no loss here: readers of it decide.
            if file.source.read(first.0, &mut buffer).is_err() {
                continue;
            }
            for (start, end) in parts {
                let len = NonZeroU64::new(end - start);
                // A refusal costs nothing but speed.
                let _ = fadvise(&mounted, *start, len, Advice::WillNeed);
                file.figures.replayed.add(end - start);
            }
        }
    };
    on_threads(&file.name, file.source.reads().min(blocks.len()), work);
}

/// The recorded parts of each block of the source, sorted, in the order of the first touches. What
/// one fault brings is taken whole.
fn blocks_of(file: &File) -> Vec<Vec<(u64, u64)>> {
    let (bytes, unit) = (file.source.bytes(), u64::from(super::READAHEAD));
    let block = file.source.block().max(unit);
    let mut blocks: Vec<Vec<(u64, u64)>> = Vec::new();
    let mut places = HashMap::new();
    let recorded = file.recording.iter().flat_map(|all| all.offsets());
    for offset in recorded.filter(|offset| *offset < bytes) {
        let at = *places.entry(offset / block).or_insert_with(|| {
            blocks.push(Vec::new());
            blocks.len() - 1
        });
        let start = offset / unit * unit;
        blocks[at].push((start, (start + unit).min(bytes)));
    }
    for parts in &mut blocks {
        parts.sort_unstable();
        parts.dedup_by(|next, last| {
            let joins = next.0 <= last.1;
            if joins {
                last.1 = last.1.max(next.1);
            }
            joins
        });
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Owner;
    use crate::recording::Recording;
    use crate::source::{Source, SourceError};

    #[derive(Debug)]
    struct Nothing;

    impl Source for Nothing {
        fn bytes(&self) -> u64 {
            (200 << 10) + 5
        }

        fn block(&self) -> u64 {
            64 << 10
        }

        fn is_zero(&self, _: u64, _: u64) -> bool {
            true
        }

        fn read_now(&self, _: u64, _: &mut [u8]) -> Result<bool, SourceError> {
            Ok(false)
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), SourceError> {
            Ok(())
        }

        fn identity(&self) -> String {
            "nothing".to_owned()
        }
    }

    #[test]
    fn parts_are_joined_in_their_block_and_blocks_keep_their_order() {
        const KIB: u64 = 1 << 10;
        let touched = [
            140 * KIB,
            20 * KIB,
            0,
            60 * KIB,
            24 * KIB,
            200 * KIB,
            900 * KIB,
        ];
        let file = File::new(
            "web".parse().unwrap(),
            Arc::new(Nothing),
            Owner::default(),
            Some(Recording::of(touched)),
        );
        let kib = |parts: &[(u64, u64)]| -> Vec<(u64, u64)> {
            let all = parts.iter().map(|(start, end)| (start / KIB, end / KIB));
            all.collect()
        };
        let blocks = blocks_of(&file);
        let blocks: Vec<_> = blocks.iter().map(|parts| kib(parts)).collect();
        assert_eq!(
            blocks,
            [vec![(128, 144)], vec![(0, 32), (48, 64)], vec![(192, 200)]]
        );
    }
}
