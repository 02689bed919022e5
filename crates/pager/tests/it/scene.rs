//! A pager, a memory file, and a double that it serves.

use pageferry_pager::{Name, Pager, Phase, Restore, Settings, Status, VmStatus};
use pageferry_testkit::firecracker::{
    Config, Double, Fields, PAGE_BYTES, Task, page_contents, write_memory_file,
};
use pageferry_testkit::wait_until;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use std::fs::File;
use std::io::IoSliceMut;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

pub(crate) const MIB: u64 = 1 << 20;

/// A directory that ends with its test, and one for the state of a pager. That one is in memory if
/// the host has `/dev/shm`: on a busy disk, each rename may take seconds.
pub(crate) struct Scratch {
    files: PathBuf,
    state: PathBuf,
}

impl Scratch {
    pub(crate) fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("pageferry-pager-{}-{number}-{name}", std::process::id());
        let files = std::env::temp_dir().join(&name);
        std::fs::create_dir(&files).expect("a directory");
        let memory = Path::new("/dev/shm");
        let state = if memory.is_dir() {
            memory.join(name)
        } else {
            files.join("state")
        };
        Self { files, state }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.files.join(name)
    }

    /// The directory of a pager.
    pub(crate) fn state(&self) -> PathBuf {
        self.state.clone()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.state);
        let _ = std::fs::remove_dir_all(&self.files);
    }
}

/// A VM of 7 MiB in three regions, without a balloon.
pub(crate) fn config(seed: u64) -> Config {
    Config {
        seed,
        regions: vec![4 * MIB, MIB, 2 * MIB],
        vcpus: 4,
        ..Config::default()
    }
}

/// The number of pages of 4 KiB.
pub(crate) fn pages(config: &Config) -> u64 {
    config.regions.iter().sum::<u64>() / PAGE_BYTES
}

/// The pages of a VM's memory file that are not zero.
pub(crate) fn data_pages(config: &Config) -> impl Iterator<Item = u64> {
    let seed = config.seed;
    (0..pages(config)).filter(move |page| page_contents(seed, *page) != [0; 4096])
}

pub(crate) fn name(text: &str) -> Name {
    text.parse().expect("a name")
}

/// The files of a pager's directory.
pub(crate) fn files(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).expect("a directory");
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        entry.expect("an entry").file_name().into_string()
    };
    let mut files: Vec<_> = entries.map(|entry| name(entry).expect("UTF-8")).collect();
    files.sort();
    files
}

/// Writes the memory file of a VM to the disk, so that it can be dropped from the page cache.
pub(crate) fn write_memory(path: &Path, config: &Config) {
    write_memory_file(path, config.seed, pages(config)).expect("a file");
    let file = File::open(path).expect("a file");
    file.sync_all().expect("a disk");
}

/// Drops a file from the page cache.
pub(crate) fn drop_from_cache(path: &Path) {
    let file = File::open(path).expect("a file");
    fadvise(&file, 0, None, Advice::DontNeed).expect("advice");
}

/// Whether a page of a file is not in the page cache. A source would read the file.
pub(crate) fn is_cold(path: &Path, page: u64) -> bool {
    let file = File::open(path).expect("a file");
    let mut bytes = [0; 4096];
    let mut parts = [IoSliceMut::new(&mut bytes)];
    let read = preadv2(&file, &mut parts, page * PAGE_BYTES, ReadWriteFlags::NOWAIT);
    read == Err(Errno::AGAIN)
}

/// A pager in this process, with one VM.
pub(crate) struct Scene {
    pub(crate) pager: Pager,
    pub(crate) config: Config,
    pub(crate) scratch: Scratch,
}

impl Scene {
    pub(crate) fn new(name: &str, config: Config) -> Self {
        let scratch = Scratch::new(name);
        let memory = scratch.path("memory");
        write_memory(&memory, &config);
        let settings = Settings {
            directory: scratch.state(),
            ..Settings::default()
        };
        Self {
            pager: Pager::start(settings).expect("a pager"),
            config,
            scratch,
        }
    }

    pub(crate) fn memory(&self) -> PathBuf {
        self.scratch.path("memory")
    }

    /// A request with defaults.
    pub(crate) fn request(&self) -> Restore {
        Restore::new(self.memory(), self.scratch.path("socket"))
    }

    /// Lets a double connect, and waits until it is served. `None` if that is not possible here.
    #[track_caller]
    pub(crate) fn serve(&self, restore: &Restore, fields: Fields) -> Option<Double> {
        let mut double = Double::start(&self.config)?;
        self.pager
            .restore(&name("vm"), restore.clone())
            .expect("a restore");
        assert_eq!(self.status().phase, Phase::Waiting);
        double.connect(&restore.socket, fields).expect("connected");
        self.wait_served();
        Some(double)
    }

    #[track_caller]
    pub(crate) fn wait_served(&self) {
        wait_until("the VM to be served", || {
            let status = self.status();
            assert_eq!(status.fault, None);
            status.phase == Phase::Serving
        });
    }

    #[track_caller]
    pub(crate) fn status(&self) -> Status {
        self.pager.status(&name("vm")).expect("a restore")
    }

    #[track_caller]
    pub(crate) fn vm(&self) -> VmStatus {
        self.status().vm.expect("a VM")
    }

    /// The VMM has ended: waits until the pager has forgotten it.
    #[track_caller]
    pub(crate) fn assert_ended(&self) {
        assert!(self.pager.wait_ended(&name("vm"), pageferry_testkit::LIMIT));
        assert_eq!(self.status().phase, Phase::Ended);
        assert_eq!(files(&self.scratch.state()), ["lock"]);
        assert!(!self.scratch.path("socket").exists());
    }
}

/// Lets a double's threads touch pages, each `touches` times.
#[track_caller]
pub(crate) fn run(double: &mut Double, touches: u64) {
    let before = double.status();
    double.run();
    wait_until("touches", || {
        let now = double.status().touches;
        let mut both = now.iter().zip(&before.touches);
        both.all(|(now, before)| *now >= before + touches)
    });
    double.pause();
}

/// Checks all pages, and all checks so far.
#[track_caller]
pub(crate) fn verify(double: &mut Double) {
    double.perform(Task::VerifyAll);
    let status = double.status();
    assert_eq!(status.wrong, 0, "{:?}", status.first_wrong);
}
