//! A snapshot directory of Cloud Hypervisor: the Config, the State and the places of pages in it.
//!
//! **Guarantee.** Lengths are checked before bytes are read. A snapshot that is taken has each page
//! of its VM once, and memory that a receiving process takes. Anything else is one sentence.
//!
//! **Mechanism.** Cloud Hypervisor writes three files. `config.json` is the VM's configuration.
//! `state.json` is the tree of states that also travels as State. The node `memory-manager` in it
//! has the mappings of guest RAM, and a table of ranges. `memory-ranges` has the bytes of these
//! ranges, one after the other. Config of a migration has the configuration, the CPUID entries and
//! the node's text. All three are in the files (`VmMigrationConfig` and `Snapshot` in its sources
//! of August 2026). Fields that are not known here are ignored: the texts go on as they are.
//!
//! **Neighbours.** `wire` has the mappings. `restore` gives all this to a process.

use super::wire::{MAX_MAPPINGS, MAX_STATE_BYTES, Mapping, boot_vcpus, mappings};
use pageferry_addr::PAGE_SIZE;
use pageferry_pager::{Format, Source, SourceError, Stores};
use serde::Deserialize;
use std::path::Path;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_128;

/// The longest `config.json`, in bytes.
const MAX_CONFIG_BYTES: usize = 1 << 20;
const CONFIG: &str = "config.json";
const STATE: &str = "state.json";
const MEMORY: &str = "memory-ranges";

/// The refusal of a snapshot.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// A file cannot be read.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// A VM that a receiving process does not take, or whose memory is not all there.
    #[error("{0}")]
    Unfit(String),
    /// Files that are none of a snapshot.
    #[error("{0}")]
    Wrong(String),
}

/// A part of guest RAM, in pages, and its place in `memory-ranges`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) first: u64,
    pub(super) pages: u64,
    pub(super) offset: u64,
}

/// The parts of a snapshot that describe its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub(super) config: Vec<u8>,
    pub(super) state: Vec<u8>,
    pub(super) mappings: Vec<Mapping>,
    /// In the order of pages, without gaps.
    pub(super) parts: Vec<Part>,
}

#[derive(Deserialize)]
struct VmConfig {
    memory: Memory,
}

#[derive(Deserialize)]
struct Memory {
    #[serde(flatten)]
    all: Zone,
    zones: Option<Vec<Zone>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Zone {
    shared: bool,
    hugepages: bool,
    prefault: bool,
}

#[derive(Deserialize)]
struct Node<C> {
    snapshots: C,
    snapshot_data: Data,
}

#[derive(Deserialize)]
struct Children {
    #[serde(rename = "memory-manager")]
    memory_manager: Node<serde::de::IgnoredAny>,
}

/// A state, whose text is JSON again.
#[derive(Deserialize)]
struct Data {
    state: String,
}

#[derive(Deserialize)]
struct VmState {
    /// Only on x86-64.
    common_cpuid: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct MemoryManager {
    memory_ranges: Table,
}

#[derive(Deserialize)]
struct Table {
    data: Vec<SavedRange>,
}

#[derive(Clone, Copy, Deserialize)]
struct SavedRange {
    gpa: u64,
    length: u64,
}

fn wrong(why: String) -> SnapshotError {
    SnapshotError::Wrong(why)
}

fn json<'a, T: Deserialize<'a>>(file: &'static str, text: &'a [u8]) -> Result<T, SnapshotError> {
    serde_json::from_slice(text)
        .map_err(|why| wrong(format!("{file} is none of Cloud Hypervisor: {why}")))
}

impl Snapshot {
    /// Bytes that no other snapshot has, with the identity of its memory's source.
    pub(super) fn record(&self, memory: &str) -> Vec<u8> {
        let sums = [&self.config, &self.state].map(|text| xxh3_128(text).to_le_bytes());
        [b"PFRESTO\x01", &sums[0][..], &sums[1], memory.as_bytes()].concat()
    }

    /// Reads `config.json` and `state.json`.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn parse(config: &[u8], state: Vec<u8>) -> Result<Self, SnapshotError> {
        check_length(CONFIG, config.len() as u64, MAX_CONFIG_BYTES)?;
        check_length(STATE, state.len() as u64, MAX_STATE_BYTES)?;
        let VmConfig { memory } = json(CONFIG, config)?;
        check_memory(&memory)?;
        let root: Node<Children> = json(STATE, &state)?;
        let manager = root.snapshots.memory_manager.snapshot_data.state;
        let MemoryManager { memory_ranges } = json(STATE, manager.as_bytes())?;
        let vm: VmState = json(STATE, root.snapshot_data.state.as_bytes())?;
        let cpuid = vm
            .common_cpuid
            .map(|cpuid| format!(r#""common_cpuid":{cpuid},"#));
        let mut whole = br#"{"vm_config":"#.to_vec();
        whole.extend_from_slice(config);
        let rest = cpuid.unwrap_or_default();
        whole.extend_from_slice(format!(r#",{rest}"memory_manager_data":{manager}}}"#).as_bytes());
        let mappings = mappings(&whole).map_err(|why| wrong(format!("{STATE}: {why}")))?;
        Ok(Self {
            parts: parts(&mappings, &memory_ranges.data)?,
            config: whole,
            state,
            mappings,
        })
    }

    /// Reads a snapshot, in a directory or below an address of a store, and opens its memory.
    /// `format` is that of `memory-ranges`.
    ///
    /// # Errors
    /// [`SnapshotError`].
    pub fn open(
        directory: &Path,
        stores: &Stores,
        format: Format,
    ) -> Result<(Self, Arc<dyn Source>), SnapshotError> {
        let read = |file: &'static str, most: usize| {
            let source = stores.open(&directory.join(file), Format::Raw)?;
            check_length(file, source.bytes(), most)?;
            let mut bytes = vec![0; source.bytes() as usize];
            source.read(0, &mut bytes)?;
            Ok::<_, SnapshotError>(bytes)
        };
        let config = read(CONFIG, MAX_CONFIG_BYTES)?;
        let snapshot = Self::parse(&config, read(STATE, MAX_STATE_BYTES)?)?;
        let memory = stores.open(&directory.join(MEMORY), format)?;
        let (found, expected) = (memory.bytes(), snapshot.memory_bytes());
        if found != expected {
            let why = format!("{MEMORY} has {found} bytes: its table in {STATE} has {expected}");
            return Err(wrong(why));
        }
        Ok((snapshot, memory))
    }

    /// The bytes of the VM's memory.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.pages * PAGE_SIZE).sum()
    }

    /// The number of the VM's vCPUs, for people.
    #[must_use]
    pub fn vcpus(&self) -> Option<u32> {
        boot_vcpus(&self.config)
    }
}

fn check_length(file: &'static str, bytes: u64, most: usize) -> Result<(), SnapshotError> {
    match (1..=most as u64).contains(&bytes) {
        true => Ok(()),
        false => Err(wrong(format!(
            "{file} has {bytes} bytes: expected 1 to {most}"
        ))),
    }
}

/// Memory of other kinds would not fault, or fault by larger pages than ours.
fn check_memory(memory: &Memory) -> Result<(), SnapshotError> {
    let zones = memory.zones.as_deref().filter(|zones| !zones.is_empty());
    let zones = zones.unwrap_or(std::slice::from_ref(&memory.all));
    let prefault = memory.all.prefault || zones.iter().any(|zone| zone.prefault);
    let options = [
        (zones.iter().any(|zone| !zone.shared), "shared", "off", "on"),
        (
            zones.iter().any(|zone| zone.hugepages),
            "hugepages",
            "on",
            "off",
        ),
        (prefault, "prefault", "on", "off"),
    ];
    match options.iter().find(|(is_unfit, ..)| *is_unfit) {
        Some((_, option, found, expected)) => Err(SnapshotError::Unfit(format!(
            "the VM of the snapshot has memory with {option}={found}: expected {option}={expected}"
        ))),
        None => Ok(()),
    }
}

/// The places of all pages.
fn parts(mappings: &[Mapping], ranges: &[SavedRange]) -> Result<Vec<Part>, SnapshotError> {
    // Cloud Hypervisor has one range for a mapping, or none.
    if ranges.is_empty() || ranges.len() > MAX_MAPPINGS {
        let count = ranges.len();
        let why = format!("{STATE} has {count} ranges of memory: expected 1 to {MAX_MAPPINGS}");
        return Err(wrong(why));
    }
    let refused = |gpa, length, why| {
        wrong(format!(
            "{STATE} has a range of {length} bytes at {gpa:#x}: {why}"
        ))
    };
    let (mut offset, mut places) = (0_u64, Vec::with_capacity(ranges.len()));
    for &SavedRange { gpa, length } in ranges {
        let refused = |why| refused(gpa, length, why);
        if length == 0 || !(gpa | length).is_multiple_of(PAGE_SIZE) {
            return Err(refused("it is no whole pages"));
        }
        let first = page_at(mappings, gpa, length);
        let first = first.ok_or_else(|| refused("it does not lie in one mapping of guest RAM"))?;
        let pages = length / PAGE_SIZE;
        places.push((
            Part {
                first,
                pages,
                offset,
            },
            gpa,
        ));
        let end = offset.checked_add(length);
        offset = end.ok_or_else(|| refused("all ranges end beyond 2^64"))?;
    }
    places.sort_unstable_by_key(|(part, _)| part.first);
    let mut next = 0;
    for &(part, gpa) in &places {
        if part.first < next {
            let why = "another range has the same memory";
            return Err(refused(gpa, part.pages * PAGE_SIZE, why));
        }
        if part.first > next {
            break;
        }
        next += part.pages;
    }
    let mut before = 0;
    for mapping in mappings {
        let pages = mapping.size / PAGE_SIZE;
        if next < before + pages {
            let gpa = mapping.gpa + (next - before) * PAGE_SIZE;
            return Err(SnapshotError::Unfit(format!(
                "the snapshot lacks the memory at {gpa:#x}: Cloud Hypervisor leaves out zones \
                 with a file of their own"
            )));
        }
        before += pages;
    }
    Ok(places.into_iter().map(|(part, _)| part).collect())
}

/// The number of the page at an address, if a mapping has all `length` bytes behind it. Pages are
/// numbered through all mappings.
fn page_at(mappings: &[Mapping], gpa: u64, length: u64) -> Option<u64> {
    let mut before = 0;
    for mapping in mappings {
        if let Some(inside) = gpa.checked_sub(mapping.gpa)
            && inside < mapping.size
            && length <= mapping.size - inside
        {
            return Some(before + inside / PAGE_SIZE);
        }
        before += mapping.size / PAGE_SIZE;
    }
    None
}
