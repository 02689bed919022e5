//! The bytes of Cloud Hypervisor's migration protocol, version 0.
//!
//! **Guarantee.** A length is checked before its bytes are read. Bytes of another version, of an
//! unknown command or of a Config that does not fit are an error with one sentence.
//!
//! **Mechanism.** Everything is little-endian. A request has 16 bytes and a payload, and so has a
//! response. Config is JSON, of which only the table of guest RAM is read. Fields that are not
//! known here are ignored: the bytes travel as they came.
//!
//! **Neighbours.** `link` moves these messages over a Unix socket.

use crate::foreign::VmmError;
use pageferry_addr::PAGE_SIZE;
use pageferry_migration::MAX_DESCRIPTION_BYTES;
use serde::Deserialize;

/// The version of the protocol.
pub const VERSION: u16 = 0;
/// The length of a request, and of a response, in bytes.
pub const HEADER_BYTES: usize = 16;
/// The longest Config, in bytes. It travels as the description of an offer.
pub const MAX_CONFIG_BYTES: usize = MAX_DESCRIPTION_BYTES;
/// The longest State, in bytes. It travels as the state of one device.
pub const MAX_STATE_BYTES: usize = 16 << 20;
/// The most bytes of a page fault.
pub const MAX_FAULT_BYTES: u64 = 1 << 30;
/// The most mappings of guest RAM.
pub const MAX_MAPPINGS: usize = 64;
/// The number of an additional connection's kind: page faults.
pub const FAULT_CONNECTION: u16 = 2;

/// Bytes that are no message of this protocol, in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct WireError(String);

impl From<WireError> for VmmError {
    fn from(error: WireError) -> Self {
        Self::Wire(error.0)
    }
}

/// The command of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Command {
    /// Begins a migration, and names the version.
    Start = 1,
    /// The configuration of the VM.
    Config = 2,
    /// The state of the VM.
    State = 3,
    /// Ranges of memory, with their bytes.
    Memory = 4,
    /// The VM has moved, and runs.
    Complete = 5,
    /// The sender gives up.
    Abandon = 6,
    /// A memory slot, with its memfd.
    MemoryFd = 7,
    /// The VM has moved, and stays paused.
    CompletePaused = 8,
    /// The receiver needs a range of memory.
    PageFault = 9,
}

impl Command {
    const ALL: [Self; 9] = [
        Self::Start,
        Self::Config,
        Self::State,
        Self::Memory,
        Self::Complete,
        Self::Abandon,
        Self::MemoryFd,
        Self::CompletePaused,
        Self::PageFault,
    ];

    /// The least and the greatest length of the payload.
    const fn payload(self) -> (u64, u64) {
        match self {
            Self::Start | Self::Complete | Self::Abandon | Self::CompletePaused => (0, 0),
            Self::Config => (1, MAX_CONFIG_BYTES as u64),
            Self::State => (1, MAX_STATE_BYTES as u64),
            // It is refused by its name, with the flag that is lacking.
            Self::Memory => (0, u64::MAX),
            Self::MemoryFd => (4, 4),
            Self::PageFault => (16, 16),
        }
    }
}

/// A request, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The command.
    pub command: Command,
    /// The length of the payload that follows.
    pub length: u64,
}

impl Request {
    /// Reads a request.
    ///
    /// # Errors
    /// For an unknown command, a Start of another version, or a length out of bounds.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let number = u16::from_le_bytes([bytes[0], bytes[1]]);
        let command = Command::ALL
            .into_iter()
            .find(|command| *command as u16 == number)
            .ok_or_else(|| WireError(format!("unknown command {number}: expected 1 to 9")))?;
        let length = length_of(bytes);
        let (least, most) = command.payload();
        if !(least..=most).contains(&length) {
            return Err(WireError(format!(
                "{command:?} has a payload of {length} bytes: expected {least} to {most}"
            )));
        }
        let version = u16::from_le_bytes([bytes[2], bytes[3]]);
        if command == Command::Start && version != VERSION {
            return Err(WireError(format!(
                "migration protocol version {version}: expected {VERSION}"
            )));
        }
        Ok(Self { command, length })
    }

    /// The bytes of a request. The version of Start is 0, as all bytes between are.
    #[must_use]
    pub fn encode(command: Command, length: u64) -> [u8; HEADER_BYTES] {
        header(command as u16, length)
    }
}

/// The status of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Status {
    /// The request is carried out.
    Ok = 1,
    /// It is not. The sender then gives the migration up.
    Error = 2,
}

impl Status {
    /// # Errors
    /// [`VmmError::Refused`] to do `what`.
    pub(super) fn check(self, what: &'static str) -> Result<(), VmmError> {
        match self {
            Self::Ok => Ok(()),
            Self::Error => Err(VmmError::Refused(what, String::new())),
        }
    }

    /// Reads a response. None that we wait for has a payload.
    ///
    /// # Errors
    /// For an unknown status, or a payload.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let status = match u16::from_le_bytes([bytes[0], bytes[1]]) {
            1 => Self::Ok,
            2 => Self::Error,
            other => {
                let why = format!("unknown status {other}: expected 1 (ok) or 2 (error)");
                return Err(WireError(why));
            }
        };
        match length_of(bytes) {
            0 => Ok(status),
            other => Err(WireError(format!(
                "a response has a payload of {other} bytes: expected none"
            ))),
        }
    }

    /// The bytes of a response without a payload.
    #[must_use]
    pub fn encode(self) -> [u8; HEADER_BYTES] {
        header(self as u16, 0)
    }
}

fn header(number: u16, length: u64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..2].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(&length.to_le_bytes());
    bytes
}

fn length_of(bytes: &[u8; HEADER_BYTES]) -> u64 {
    let mut length = [0; 8];
    length.copy_from_slice(&bytes[8..]);
    u64::from_le_bytes(length)
}

/// The range of a page fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The guest-physical address.
    pub gpa: u64,
    /// The number of bytes.
    pub length: u64,
}

impl Range {
    /// Reads the payload of a page fault.
    ///
    /// # Errors
    /// When it is not whole pages, or too long.
    pub fn decode(bytes: [u8; 16]) -> Result<Self, WireError> {
        let number = u128::from_le_bytes(bytes);
        let (gpa, length) = (number as u64, (number >> 64) as u64);
        let pages = gpa.is_multiple_of(PAGE_SIZE) && length.is_multiple_of(PAGE_SIZE);
        if !pages || length == 0 || length > MAX_FAULT_BYTES || gpa.checked_add(length).is_none() {
            return Err(Self { gpa, length }.refusal());
        }
        Ok(Self { gpa, length })
    }

    /// The refusal of a page fault.
    pub(super) fn refusal(self) -> WireError {
        let Self { gpa, length } = self;
        WireError(format!(
            "a page fault names {length} bytes at {gpa:#x}: expected whole pages, \
             {MAX_FAULT_BYTES} bytes at most"
        ))
    }

    /// The payload of a page fault.
    #[must_use]
    pub fn encode(self) -> [u8; 16] {
        (u128::from(self.length) << 64 | u128::from(self.gpa)).to_le_bytes()
    }
}

/// A mapping of guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Mapping {
    /// The memory slot, which also numbers its memfd.
    pub slot: u32,
    /// The guest-physical address.
    pub gpa: u64,
    /// The size in bytes.
    pub size: u64,
    /// The place of its first byte in the memfd.
    pub file_offset: u64,
}

#[derive(Deserialize)]
struct Config {
    memory_manager_data: MemoryManager,
}

#[derive(Deserialize)]
struct MemoryManager {
    guest_ram_mappings: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(flatten)]
    mapping: Mapping,
    #[serde(default)]
    virtio_mem: bool,
}

/// Reads the table of guest RAM of a Config, in the order of addresses.
///
/// # Errors
/// When the bytes are not such JSON, or mappings overlap, are no whole pages, share a slot, or are
/// hot-pluggable.
pub fn mappings(config: &[u8]) -> Result<Vec<Mapping>, WireError> {
    const TABLE: &str = "memory_manager_data.guest_ram_mappings";
    let config = serde_json::from_slice::<Config>(config)
        .map_err(|why| WireError(format!("Config is no JSON with {TABLE}: {why}")))?;
    let entries = config.memory_manager_data.guest_ram_mappings;
    let count = entries.len();
    if !(1..=MAX_MAPPINGS).contains(&count) {
        return Err(WireError(format!(
            "Config has {count} mappings of guest RAM: expected 1 to {MAX_MAPPINGS}"
        )));
    }
    let refused = |Mapping { slot, gpa, .. }: &Mapping, why| {
        WireError(format!("Config maps slot {slot} at {gpa:#x}: {why}"))
    };
    // A receiving process asks for pages of other memory only. It decides before it knows which
    // blocks are plugged.
    if let Some(Entry { mapping, .. }) = entries.iter().find(|entry| entry.virtio_mem) {
        let why = "it is hot-pluggable (virtio-mem), which post-copy does not bring";
        return Err(refused(mapping, why));
    }
    let mut mappings: Vec<_> = entries.into_iter().map(|entry| entry.mapping).collect();
    mappings.sort_unstable_by_key(|mapping| mapping.gpa);
    for (index, mapping) in mappings.iter().enumerate() {
        let refused = |why| refused(mapping, why);
        let numbers = [mapping.gpa, mapping.size, mapping.file_offset];
        if mapping.size == 0 || numbers.iter().any(|n| !n.is_multiple_of(PAGE_SIZE)) {
            return Err(refused("it is no whole pages"));
        }
        // A file ends below 2^63.
        let end = |start: u64| start.checked_add(mapping.size).filter(|end| *end < 1 << 63);
        let (Some(end), Some(_)) = (end(mapping.gpa), end(mapping.file_offset)) else {
            return Err(refused("it ends beyond 2^63"));
        };
        if mappings.get(index + 1).is_some_and(|next| next.gpa < end) {
            return Err(refused("the next mapping begins inside it"));
        }
        if mappings[..index].iter().any(|m| m.slot == mapping.slot) {
            return Err(refused("another mapping has this slot"));
        }
    }
    Ok(mappings)
}

/// The files of the disks of a Config.
pub(super) fn disks(config: &[u8]) -> Vec<String> {
    let config: serde_json::Value = serde_json::from_slice(config).unwrap_or_default();
    let disks = config.pointer("/vm_config/disks");
    let disks = disks.and_then(serde_json::Value::as_array);
    let path = |disk: &serde_json::Value| Some(disk["path"].as_str()?.to_owned());
    disks.into_iter().flatten().filter_map(path).collect()
}

/// The number of vCPUs of a Config, for people. Nothing else depends on it.
#[must_use]
pub fn boot_vcpus(config: &[u8]) -> Option<u32> {
    let config: serde_json::Value = serde_json::from_slice(config).ok()?;
    let vcpus = config.pointer("/vm_config/cpus/boot_vcpus")?.as_u64()?;
    u32::try_from(vcpus).ok()
}
