//! A VM goes to disk: `run --snapshot-to`.
//!
//! **Guarantee.** A directory with a snapshot appears whole or not at all, and never in the place
//! of other files. If it cannot be written, the VM runs on.
//!
//! **Mechanism.** The directory has `memory`, a packed snapshot, or with `--raw` the pages of RAM in
//! order with holes for zeros, and `state` (`migration::SavedVm`). The state names the memory by its
//! id, and has marks of the disks. The VM stands still while it is written.

use crate::exit::{Exit, Failure};
use crate::pager::beside;
use crate::progress::with_progress;
use crate::signals::Interrupts;
use crate::snapshot::{of_open, of_pack};
use crate::vm::{Disk, SavedFiles, Vm};
use pageferry_addr::{PAGE_SIZE, RamPage};
use pageferry_machine::GuestRam;
use pageferry_migration::Stopped;
use pageferry_snapshot::{
    Blob, Compression, Input, Options, PackError, Progress, Snapshot, SnapshotId, pack, raw_id,
};
use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

/// The file with the pages of RAM.
pub(crate) const MEMORY: &str = "memory";
/// The file with the states of vCPUs and devices.
pub(crate) const STATE: &str = "state";
/// The pages that are read at once.
const STEP: u64 = 256;

/// The directory while it is written.
fn unfinished(directory: &Path) -> PathBuf {
    beside(directory, ".new")
}

/// Checks that a snapshot can be written to a directory, before its VM runs.
///
/// # Errors
/// [`Exit::Usage`] if there is something, or its parent cannot be written.
pub(crate) fn check_target(directory: &Path) -> Result<(), Failure> {
    let usage = |why: String| {
        let directory = directory.display();
        Failure::new(
            Exit::Usage,
            format!("no snapshot can go to {directory}: {why}"),
        )
    };
    match std::fs::symlink_metadata(directory) {
        Err(why) if why.kind() == ErrorKind::NotFound => {}
        Err(why) => return Err(usage(why.to_string())),
        Ok(_) => return Err(usage("it is there already: name a new directory".into())),
    }
    // Only making it tells whether this file system takes it.
    let fresh = unfinished(directory);
    make(&fresh)
        .and_then(|()| std::fs::remove_dir(&fresh))
        .map_err(|why| usage(format!("cannot make {}: {why}", fresh.display())))
}

fn make(directory: &Path) -> io::Result<()> {
    // The memory of a VM is for its owner alone.
    DirBuilder::new().mode(0o700).create(directory)
}

/// Stops a VM and writes it to a directory. If this works, the VM must not run on.
///
/// # Errors
/// The VM runs on, and nothing is left of the directory.
pub(crate) fn save(
    vm: &Vm,
    directory: &Path,
    raw: bool,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let stopped = Stopped::new(vm.running())?;
    let fresh = unfinished(directory);
    make(&fresh).map_err(|why| failed(&fresh, &why))?;
    let written = write(vm, &stopped, &fresh, raw, interrupts).and_then(|()| {
        let moved = rename_new(&fresh, directory);
        moved.map_err(|why| failed(directory, &why))
    });
    if written.is_err() {
        for name in [MEMORY, STATE] {
            let _ = std::fs::remove_file(fresh.join(name));
        }
        let _ = std::fs::remove_dir(&fresh);
        return written;
    }
    // It is on disk now, and must not run here too: the process ends without resuming it.
    std::mem::forget(stopped);
    Ok(())
}

/// Renames a directory to a name that must be free.
fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?;
    let parent = to.parent().filter(|path| !path.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
}

fn failed(path: &Path, why: &dyn std::fmt::Display) -> Failure {
    let path = path.display();
    Failure::new(
        Exit::Usage,
        format!("cannot write the snapshot {path}: {why}"),
    )
}

fn write(
    vm: &Vm,
    stopped: &Stopped<'_>,
    fresh: &Path,
    raw: bool,
    interrupts: &Interrupts,
) -> Result<(), Failure> {
    let io = |why: io::Error| failed(fresh, &why);
    let ram = vm.running().machine.ram();
    let path = fresh.join(MEMORY);
    let asked = interrupts.count();
    let stop = || interrupts.count() > asked;
    let (memory, _) = with_progress("saving memory", &stop, |progress| match raw {
        true => copy(ram, &path, progress),
        false => pack_to(ram, &path, progress),
    });
    let disks = vm.disks().iter().map(Disk::mark);
    let files = SavedFiles {
        is_packed: !raw,
        memory: memory?,
        disks: disks.collect::<Result<_, _>>()?,
    };
    let about = [files.to_bytes(), vm.guest().to_bytes()].concat();
    let states = stopped.save(&about)?.encode()?;
    let file = File::create_new(fresh.join(STATE)).map_err(io)?;
    file.write_all_at(&states, 0).map_err(io)?;
    file.sync_all().map_err(io)?;
    File::open(fresh).and_then(|dir| dir.sync_all()).map_err(io)
}

fn cancelled() -> Failure {
    Failure::new(Exit::Cancelled, "the snapshot was cancelled")
}

/// The memory of a VM that stands still.
struct Ram<'a>(&'a GuestRam);

impl Blob for Ram<'_> {
    fn bytes(&self) -> io::Result<u64> {
        Ok(self.0.pages() * PAGE_SIZE)
    }

    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        buffer.fill(0);
        let (first, pages) = (offset / PAGE_SIZE, buffer.len() as u64 / PAGE_SIZE);
        let end = first + pages;
        let mut from = first;
        while let Some(found) = self
            .0
            .next_allocated(RamPage(from), end - from)
            .map_err(io::Error::other)?
            && found.start < end
        {
            from = found.end.min(end);
            let part = [found.start, from].map(|page| ((page - first) * PAGE_SIZE) as usize);
            self.0
                .try_read(RamPage(found.start), &mut buffer[part[0]..part[1]])
                .map_err(io::Error::other)?;
            if from == end {
                break;
            }
        }
        Ok(())
    }
}

/// Packs memory that stands still. Returns its id.
fn pack_to(
    ram: &GuestRam,
    path: &Path,
    progress: &mut Progress<'_>,
) -> Result<SnapshotId, Failure> {
    let options = Options {
        compression: Compression::Zstd(1),
        ..Options::default()
    };
    pack(Input::Blob(&Ram(ram)), path, options, progress).map_err(|why| match why {
        PackError::Cancelled => cancelled(),
        why => of_pack(&why),
    })?;
    Ok(Snapshot::open(path).map_err(|why| of_open(&why))?.id())
}

/// Copies memory that stands still. Returns its id.
fn copy(ram: &GuestRam, path: &Path, progress: &mut Progress<'_>) -> Result<SnapshotId, Failure> {
    let io = |why| Failure::os("cannot write the VM's memory", why);
    let bytes = ram.pages() * PAGE_SIZE;
    let mut options = File::options();
    let file = options
        .read(true)
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(io)?;
    file.set_len(bytes).map_err(io)?;
    let mut buffer = vec![0; (STEP * PAGE_SIZE) as usize];
    let mut from = 0;
    while let Some(pages) = ram.next_allocated(RamPage(from), STEP)? {
        let part = &mut buffer[..((pages.end - pages.start) * PAGE_SIZE) as usize];
        ram.try_read(RamPage(pages.start), part)?;
        let zero = |at: usize| {
            part[at..at + PAGE_SIZE as usize]
                .iter()
                .all(|&byte| byte == 0)
        };
        let places = (0..part.len())
            .step_by(PAGE_SIZE as usize)
            .collect::<Vec<_>>();
        for run in places.chunk_by(|&a, &b| zero(a) == zero(b)) {
            let (first, end) = (run[0], run[run.len() - 1] + PAGE_SIZE as usize);
            if !zero(first) {
                let at = pages.start * PAGE_SIZE + first as u64;
                file.write_all_at(&part[first..end], at).map_err(io)?;
            }
        }
        from = pages.end;
        if progress(from * PAGE_SIZE, bytes).is_break() {
            return Err(cancelled());
        }
    }
    file.sync_all().map_err(io)?;
    raw_id(&file, &mut |_, _| ControlFlow::Continue(())).map_err(|why| of_pack(&why))
}
