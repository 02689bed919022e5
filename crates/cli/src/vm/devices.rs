//! The virtio devices of a VM: those that the user named, and a source of random bytes.
//! A guest of the soft engine has the latter only beside others.
//!
//! A description of each travels before the guest stops, so that a destination with others refuses
//! in time. Disks come first, in their order, and then networks.

use super::disk::Disk;
use crate::exit::{Exit, Failure};
use clap::Args;
use pageferry_devices::{Block, Entropy, Mac, MmioBus, Net, Tap, VirtioDevice};
use pageferry_harness::size;
use std::path::PathBuf;
use std::str::FromStr;

/// The devices that the user named.
#[derive(Debug, Default, Args)]
pub(crate) struct DeviceArgs {
    /// A virtio disk of a Linux: a raw file, or a block device of this host, and whether the guest
    /// may only read it. May be repeated. The file is locked. For a VM that comes from another
    /// host: the same disks as there, in the same order, on storage that both hosts see
    #[arg(long = "disk", value_name = "FILE[,readonly]")]
    disks: Vec<DiskArg>,
    /// A virtio network of a Linux: a tap device of this host, and the guest's address. May be
    /// repeated. A VM that comes from another host keeps its address [default: a random address]
    #[arg(long = "net", value_name = "TAP[,mac=ADDRESS]")]
    nets: Vec<NetArg>,
}

#[derive(Clone, Debug)]
struct DiskArg {
    path: PathBuf,
    is_read_only: bool,
}

impl FromStr for DiskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (path, is_read_only) = match text.strip_suffix(",readonly") {
            Some(path) => (path, true),
            None => (text, false),
        };
        match path {
            "" => Err("expected a file's name".into()),
            path => Ok(Self {
                path: path.into(),
                is_read_only,
            }),
        }
    }
}

#[derive(Clone, Debug)]
struct NetArg {
    tap: String,
    mac: Option<Mac>,
}

impl FromStr for NetArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (tap, mac) = match text.split_once(',') {
            None => (text, None),
            Some((tap, option)) => {
                let mac = option.strip_prefix("mac=");
                let mac = mac.ok_or_else(|| format!("unknown option {option}, expected mac="))?;
                (tap, Some(mac.parse()?))
            }
        };
        let tap = tap.to_owned();
        Ok(Self { tap, mac })
    }
}

/// A virtio device, as the other end of a move must have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DeviceKind {
    /// A disk of so many bytes.
    Disk { bytes: u64, is_read_only: bool },
    /// A network.
    Net,
    /// A source of random bytes.
    Entropy,
}

impl DeviceKind {
    /// The length of [`Self::to_bytes`].
    pub(super) const BYTES: usize = 9;

    /// The kind (u8, 1: disk, 2: disk that is only read, 3: network, 4: random bytes), and the size
    /// of a disk in bytes (u64).
    pub(super) fn to_bytes(self) -> Vec<u8> {
        let (kind, size) = match self {
            Self::Disk {
                bytes,
                is_read_only: false,
            } => (1, bytes),
            Self::Disk { bytes, .. } => (2, bytes),
            Self::Net => (3, 0),
            Self::Entropy => (4, 0),
        };
        let mut bytes = vec![kind];
        bytes.extend(u64::to_le_bytes(size));
        bytes
    }

    /// # Errors
    /// The words say what was wrong, and what would be right.
    pub(super) fn decode(bytes: [u8; Self::BYTES]) -> Result<Self, String> {
        let [kind, size @ ..] = bytes;
        let bytes = u64::from_le_bytes(size);
        match kind {
            1 | 2 => Ok(Self::Disk {
                bytes,
                is_read_only: kind == 2,
            }),
            3 if bytes == 0 => Ok(Self::Net),
            4 if bytes == 0 => Ok(Self::Entropy),
            3 | 4 => Err(format!("device {kind} has a size of {bytes}, expected 0")),
            _ => Err(format!("it has a device {kind}, expected 1 to 4")),
        }
    }
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Disk {
                bytes,
                is_read_only,
            } => {
                let only = if *is_read_only { ", readonly" } else { "" };
                write!(f, "a disk of {}{only}", size::show(*bytes))
            }
            Self::Net => f.write_str("a network"),
            Self::Entropy => f.write_str("random bytes"),
        }
    }
}

/// Devices that are open.
#[derive(Default)]
pub(crate) struct Devices {
    pub(crate) devices: Vec<Box<dyn VirtioDevice>>,
    pub(crate) kinds: Vec<DeviceKind>,
    /// Those that the guest may write.
    pub(crate) disks: Vec<Disk>,
}

/// Whether a disk is there at first.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disks {
    /// This process has it alone.
    Ours,
    /// Another host has it until the VM comes.
    Elsewhere,
}

impl DeviceArgs {
    /// Whether the user named any.
    pub(crate) fn is_empty(&self) -> bool {
        self.disks.is_empty() && self.nets.is_empty()
    }

    /// Checks that there are none, for a guest that cannot have them.
    ///
    /// # Errors
    /// [`Exit::Usage`].
    pub(crate) fn check_none(&self, guest: &str) -> Result<(), Failure> {
        match self.is_empty() {
            true => Ok(()),
            false => Err(Failure::new(
                Exit::Usage,
                format!(
                    "{guest} has no virtio devices: give --disk and --net to a Linux (--kernel)"
                ),
            )),
        }
    }

    /// Checks that the disks can be opened, which are not locked.
    ///
    /// # Errors
    /// [`Exit::Usage`], as for [`Self::open`].
    pub(crate) fn check_disks(&self) -> Result<(), Failure> {
        self.disks.iter().try_for_each(|disk| {
            disk.open(Disks::Elsewhere)?;
            Ok(())
        })
    }

    /// Opens the devices, and adds a source of random bytes.
    ///
    /// # Errors
    /// [`Exit::Usage`] if one cannot be opened, or there are too many.
    pub(crate) fn open(&self, disks: Disks) -> Result<Devices, Failure> {
        let named = self.disks.len() + self.nets.len();
        let most = MmioBus::MOST - 1;
        if named > most {
            return Err(Failure::new(
                Exit::Usage,
                format!("{named} disks and networks, expected at most {most}"),
            ));
        }
        let mut open = Devices::default();
        for arg in &self.disks {
            let disk = arg.open(disks)?;
            if !arg.is_read_only {
                let kept = Disk::new(&arg.path, &disk);
                open.disks.push(kept.map_err(|why| arg.refused(&why))?);
            }
            let kind = DeviceKind::Disk {
                bytes: disk.bytes(),
                is_read_only: arg.is_read_only,
            };
            open.add(kind, disk);
        }
        for NetArg { tap, mac } in &self.nets {
            let refused = |why| {
                let why = format!("the tap device {tap} cannot be used: {why}");
                Failure::new(Exit::Usage, why)
            };
            let mac = mac.map_or_else(Mac::random, Ok).map_err(refused)?;
            open.add(
                DeviceKind::Net,
                Net::new(Tap::open(tap).map_err(refused)?, mac),
            );
        }
        open.add(DeviceKind::Entropy, Entropy);
        Ok(open)
    }
}

impl DiskArg {
    fn open(&self, disks: Disks) -> Result<Block, Failure> {
        let open = match disks {
            Disks::Ours => Block::open,
            Disks::Elsewhere => Block::open_unlocked,
        };
        open(&self.path, self.is_read_only).map_err(|why| self.refused(&why))
    }

    fn refused(&self, why: &std::io::Error) -> Failure {
        let why = format!("the disk {} cannot be used: {why}", self.path.display());
        Failure::new(Exit::Usage, why)
    }
}

impl Devices {
    fn add(&mut self, kind: DeviceKind, device: impl VirtioDevice + 'static) {
        self.kinds.push(kind);
        self.devices.push(Box::new(device));
    }

    /// Checks that they are those of a VM that comes.
    ///
    /// # Errors
    /// [`Exit::Refused`], with both lists.
    pub(crate) fn check(&self, offered: &[DeviceKind]) -> Result<(), Failure> {
        if self.kinds == offered {
            return Ok(());
        }
        let list = |kinds: &[DeviceKind]| {
            let words: Vec<String> = kinds.iter().map(ToString::to_string).collect();
            words.join("; ")
        };
        Err(Failure::new(
            Exit::Refused,
            format!(
                "the VM has other devices than this command has ({}; here: {}): give the same \
                 --disk and --net in the same order",
                list(offered),
                list(&self.kinds)
            ),
        ))
    }
}
