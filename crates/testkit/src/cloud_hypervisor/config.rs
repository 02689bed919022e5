//! The configuration of a double.

use crate::double;
use pageferry_userfault::uffd::Features;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The properties of a double.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    /// The path of its API socket.
    pub api: PathBuf,
    /// The seed of what the vCPUs write and touch.
    pub seed: u64,
    /// The sizes of the regions of RAM in bytes. Empty: the double has no VM, and can receive one.
    pub regions: Vec<u64>,
    /// The number of threads that stand for vCPUs.
    pub vcpus: usize,
    /// What it does wrong.
    pub quirk: Quirk,
}

/// What a double does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Quirk {
    /// Nothing.
    Right,
    /// Start has version 7.
    Version,
    /// It is v53.0, which asks for no page that lies in the page cache.
    OldVersion,
    /// It sends a command that does not exist.
    Command,
    /// It sends Config before Start.
    ConfigFirst,
    /// It sends no memfd: its memory is not shared.
    NotShared,
    /// It sends memory inline, before Config.
    Inline,
    /// The last memfd is shorter than its region.
    ShortMemfd,
    /// The memfds are sealed against writing.
    SealedMemfd,
    /// The last descriptor is no memfd.
    NoMemfd,
    /// MemoryFd comes without a descriptor.
    NoDescriptor,
    /// The last memfd comes twice.
    TwiceMemfd,
    /// A memfd comes that Config does not map.
    ExtraMemfd,
    /// Config maps a slot without a memfd.
    ExtraMapping,
    /// Config maps a page twice.
    Overlap,
    /// Config is no JSON.
    NoJson,
    /// Config says that it is longer than any Config.
    LongConfig,
    /// It gives up while it waits for the answer to Config.
    Abandon,
    /// It sends something else than State.
    NoState,
    /// State says that it is longer than any State.
    LongState,
    /// It dies 0.2 s after Config.
    DieAtConfig,
    /// It dies when its Config is answered.
    DieAtPause,
    /// It dies after State.
    DieAtState,
    /// It dies after Complete.
    DieAtComplete,
    /// As a receiver, it does not ask for pages that lie in the page cache, whatever its version.
    MissingOnly,
    /// As a receiver, it has asked for all pages when it answers State.
    AllFirst,
    /// As a receiver, it refuses Config.
    RefuseConfig,
    /// As a receiver, it refuses State.
    RefuseState,
    /// A disk is missing: it opens its devices behind its vCPUs.
    RefuseDisk,
    /// A disk is locked: it takes its locks last.
    RefuseLock,
    /// As a receiver, it dies when it has Config.
    ReceiverDiesAtConfig,
    /// As a receiver, it dies when it has State.
    ReceiverDiesAtState,
    /// As a receiver, it dies when it has asked for 64 pages, and its VM runs.
    ReceiverDiesAtFaults,
    /// As a receiver, it asks for a page outside RAM before it is told to run its VM, or right
    /// then.
    EarlyFault,
    /// As a receiver, it asks for a page outside RAM when its VM runs.
    WrongFault,
    /// As a receiver, it sends another command on the connection for page faults then.
    WrongCommand,
}

impl double::Config for Config {
    const ENTRY: &'static str = "cloud_hypervisor_double";

    fn needs(&self) -> Option<Features> {
        Some(Features::MISSING_SHMEM | Features::MINOR_SHMEM)
    }

    fn api(&self) -> Option<PathBuf> {
        Some(self.api.clone())
    }
}
