//! The description of a VM's guest, in the bytes that travel with a migration.
//!
//! Twenty bytes, little-endian: `PFGD`; version (u16, 1); program (u8, 1: the workload, 2: Linux);
//! instruction set (u8, 1: x86-64, 2: RV64); vCPUs (u32); RAM in bytes (u64). The destination plans
//! the same workload from them, so that it can check every page. Of Linux it knows no contents.
//!
//! Version 2 is that of Linux on KVM, and of Linux with virtio devices on the soft engine. Behind
//! the twenty bytes are the number of virtio devices (u8, 8 at most), the devices,
//! [`DeviceKind::BYTES`] each, and on KVM the CPUID of the vCPUs ([`Cpuid::to_bytes`]). So a
//! destination that lacks a device or a feature refuses before the guest stops.

use super::{DeviceArgs, DeviceKind, Devices, Disks};
use crate::exit::{Exit, Failure};
use pageferry_devices::MmioBus;
use pageferry_guest::{GuestError, Isa, Workload};
use pageferry_harness::isa_of;
use pageferry_harness::size;
use pageferry_machine::{Cpuid, Engine, RamLayout};
use pageferry_migration::Offer;

const MAGIC: [u8; 4] = *b"PFGD";
const VERSION: u16 = 1;
const WITH_DEVICES: u16 = 2;
const BYTES: usize = 20;

/// What runs in a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestProgram {
    /// The test program, whose every page can be checked.
    Workload = 1,
    /// A kernel that the user chose.
    Linux = 2,
}

/// The guest program, and the size of the machine it was planned for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestDescription {
    /// The program.
    pub(crate) program: GuestProgram,
    /// The instruction set.
    pub(crate) isa: Isa,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// The size of RAM in bytes.
    pub(crate) memory_bytes: u64,
    /// The CPUID of the vCPUs of a PC. `None`: all that the host supports.
    pub(crate) cpuid: Option<Cpuid>,
    /// The virtio devices, of Linux only.
    pub(crate) devices: Vec<DeviceKind>,
}

impl GuestDescription {
    /// The workload for a machine of `engine`.
    pub(crate) fn new(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        Self {
            program: GuestProgram::Workload,
            isa: isa_of(engine),
            vcpus,
            memory_bytes,
            cpuid: None,
            devices: Vec::new(),
        }
    }

    /// Linux for a machine of `engine`.
    pub(crate) fn linux(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        Self {
            program: GuestProgram::Linux,
            ..Self::new(engine, vcpus, memory_bytes)
        }
    }

    /// The engine that runs it.
    pub(crate) fn engine(&self) -> Engine {
        match self.isa {
            Isa::X86_64 => Engine::Kvm,
            Isa::Rv64 => Engine::Soft,
        }
    }

    /// Whether its machine is a PC on KVM.
    pub(crate) fn is_pc(&self) -> bool {
        self.program == GuestProgram::Linux && self.engine() == Engine::Kvm
    }

    /// The version of its bytes.
    fn version(&self) -> u16 {
        let is_linux = self.program == GuestProgram::Linux;
        match self.is_pc() || is_linux && !self.devices.is_empty() {
            true => WITH_DEVICES,
            false => VERSION,
        }
    }

    /// Opens the virtio devices that it has, as the user named them here.
    ///
    /// # Errors
    /// [`Exit::Usage`] if one cannot be opened, [`Exit::Refused`] if they are others.
    pub(crate) fn open_devices(&self, args: &DeviceArgs, disks: Disks) -> Result<Devices, Failure> {
        if self.devices.is_empty() {
            args.check_none("the VM")?;
            return Ok(Devices::default());
        }
        let devices = args.open(disks)?;
        devices.check(&self.devices)?;
        Ok(devices)
    }

    /// Plans the workload. `None` if the guest is Linux.
    ///
    /// # Errors
    /// [`Exit::Usage`] when the sizes leave no room for it.
    pub(crate) fn workload(&self) -> Result<Option<Workload>, Failure> {
        RamLayout::for_memory(self.memory_bytes)
            .map_err(|e| Failure::new(Exit::Usage, e.to_string()))?;
        if self.program == GuestProgram::Linux {
            return Ok(None);
        }
        let planned = Workload::new(self.isa, self.vcpus, self.memory_bytes);
        planned.map(Some).map_err(|error| {
            let message = match error {
                GuestError::MemoryTooSmall {
                    bytes,
                    vcpus,
                    minimum,
                } => format!(
                    "{} of memory are too few for a guest with {vcpus} vCPUs: choose at least {}",
                    size::show(bytes),
                    size::show(minimum)
                ),
                GuestError::MemoryTooLarge { bytes } => format!(
                    "{} of memory are more than the guest program can use: choose at most {}",
                    size::show(bytes),
                    size::show(pageferry_guest::MAX_MEMORY_BYTES)
                ),
                other => other.to_string(),
            };
            Failure::new(Exit::Usage, message)
        })
    }

    /// The bytes that travel with a migration.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let isa = match self.isa {
            Isa::X86_64 => 1,
            Isa::Rv64 => 2,
        };
        let mut bytes = MAGIC.to_vec();
        let version = self.version();
        bytes.extend(version.to_le_bytes());
        bytes.extend([self.program as u8, isa]);
        bytes.extend(self.vcpus.to_le_bytes());
        bytes.extend(self.memory_bytes.to_le_bytes());
        if version == WITH_DEVICES {
            bytes.push(self.devices.len() as u8);
            bytes.extend(self.devices.iter().flat_map(|device| device.to_bytes()));
            bytes.extend(self.cpuid.iter().flat_map(Cpuid::to_bytes));
        }
        bytes
    }

    /// Decodes the description of an offered VM and checks that it fits the rest of the offer.
    ///
    /// # Errors
    /// [`Exit::Refused`] with the fault.
    pub(crate) fn of_offer(offer: &Offer) -> Result<Self, Failure> {
        let refuse =
            |why: String| Failure::new(Exit::Refused, format!("the offered VM is refused: {why}"));
        let len = offer.guest.len();
        let wrong_length = |expected: &str| {
            refuse(format!(
                "its guest description has {len} bytes, expected {expected}"
            ))
        };
        let (bytes, more) = offer
            .guest
            .split_first_chunk::<BYTES>()
            .ok_or_else(|| wrong_length("20 or more"))?;
        if bytes[..4] != MAGIC {
            return Err(refuse("its guest description is not Pageferry's".into()));
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        let (devices, cpuid) = match version {
            VERSION if more.is_empty() => (Vec::new(), None),
            VERSION => return Err(wrong_length("20 of version 1")),
            WITH_DEVICES => decode_more(more).map_err(refuse)?,
            _ => {
                return Err(refuse(format!(
                    "its guest description has version {version}, expected {VERSION} or {WITH_DEVICES}"
                )));
            }
        };
        let program = match bytes[6] {
            1 => GuestProgram::Workload,
            2 => GuestProgram::Linux,
            other => {
                return Err(refuse(format!(
                    "it runs guest program {other}, expected 1 or 2"
                )));
            }
        };
        let isa = match bytes[7] {
            1 => Isa::X86_64,
            2 => Isa::Rv64,
            other => {
                return Err(refuse(format!(
                    "it has instruction set {other}, expected 1 or 2"
                )));
            }
        };
        let found = Self {
            program,
            isa,
            vcpus: u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]),
            memory_bytes: u64::from_le_bytes(*bytes[12..].first_chunk().expect("8 of 20 bytes")),
            cpuid,
            devices,
        };
        let engine = offer.kind.engine.as_str().parse().map_err(refuse)?;
        let offered = Self {
            program,
            cpuid: found.cpuid.clone(),
            devices: found.devices.clone(),
            ..Self::new(engine, offer.vcpus, offer.memory_bytes)
        };
        let has_cpuid_of_other = found.cpuid.is_some() && !found.is_pc();
        if found != offered || found.version() != version || has_cpuid_of_other {
            return Err(refuse(
                "its guest description and its machine differ".into(),
            ));
        }
        found.workload().map_err(|e| refuse(e.message))?;
        Ok(found)
    }
}

/// Decodes what follows in version 2: the devices, and the CPUID.
fn decode_more(bytes: &[u8]) -> Result<(Vec<DeviceKind>, Option<Cpuid>), String> {
    let most = MmioBus::MOST;
    let (count, rest) = bytes.split_first().ok_or("it has no number of devices")?;
    let count = usize::from(*count);
    if count > most {
        return Err(format!("it has {count} devices, expected at most {most}"));
    }
    let (devices, cpuid) = rest
        .split_at_checked(count * DeviceKind::BYTES)
        .ok_or_else(|| format!("it has less than {count} devices in {} bytes", rest.len()))?;
    let devices = devices
        .as_chunks()
        .0
        .iter()
        .map(|device| DeviceKind::decode(*device));
    let cpuid = match cpuid {
        [] => None,
        cpuid => Some(Cpuid::from_bytes(cpuid).map_err(|why| why.to_string())?),
    };
    Ok((devices.collect::<Result<_, _>>()?, cpuid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pageferry_migration::Kind;

    fn kind_of(engine: Engine) -> Kind {
        let kind = engine.kind();
        Kind {
            engine: kind.engine.parse().unwrap(),
            isa: kind.isa.parse().unwrap(),
            state_format: kind.state_format.parse().unwrap(),
        }
    }

    fn offer(guest: Vec<u8>) -> Offer {
        Offer::new(kind_of(Engine::Soft), 2, 32 << 20, guest)
    }

    #[test]
    fn a_description_survives_the_move() {
        let ours = GuestDescription::new(Engine::Soft, 2, 32 << 20);
        assert_eq!(
            GuestDescription::of_offer(&offer(ours.to_bytes())).unwrap(),
            ours
        );
    }

    #[test]
    fn linux_survives_the_move_on_its_own_engine_only() {
        for (engine, other) in [(Engine::Soft, Engine::Kvm), (Engine::Kvm, Engine::Soft)] {
            let ours = GuestDescription::linux(engine, 2, 32 << 20);
            let mut offer = offer(ours.to_bytes());
            offer.kind = kind_of(engine);
            assert_eq!(GuestDescription::of_offer(&offer).unwrap(), ours);
            offer.kind = kind_of(other);
            let failure = GuestDescription::of_offer(&offer).expect_err("another processor");
            assert!(failure.message.contains("differ"), "{failure}");
        }
    }

    fn with_devices(engine: Engine) -> Offer {
        let mut ours = GuestDescription::linux(engine, 2, 32 << 20);
        ours.devices = vec![
            DeviceKind::Disk {
                bytes: 24 << 20,
                is_read_only: true,
            },
            DeviceKind::Net,
            DeviceKind::Entropy,
        ];
        let mut offer = offer(ours.to_bytes());
        offer.kind = kind_of(engine);
        offer
    }

    #[test]
    fn devices_survive_the_move() {
        let soft = with_devices(Engine::Soft);
        let found = GuestDescription::of_offer(&soft).unwrap();
        assert_eq!((found.devices.len(), &found.cpuid), (3, &None));
        assert_eq!(found.to_bytes(), soft.guest);
        let offer = with_devices(Engine::Kvm);
        let found = GuestDescription::of_offer(&offer).unwrap();
        assert_eq!(found.devices.len(), 3);
        assert_eq!(found.to_bytes(), offer.guest);
        let failure = found
            .open_devices(&DeviceArgs::default(), Disks::Elsewhere)
            .err()
            .expect("others");
        assert_eq!(failure.exit, Exit::Refused);
        let lists = "(a disk of 24M, readonly; a network; random bytes; here: random bytes)";
        assert!(failure.message.contains(lists), "{failure}");
        let differs = |guest: Vec<u8>| {
            let mut offer = with_devices(Engine::Soft);
            offer.guest = guest;
            let failure = GuestDescription::of_offer(&offer).expect_err("soft");
            assert!(failure.message.contains("differ"), "{failure}");
        };
        // Without devices it has the other version, and it never has a CPUID.
        differs([&soft.guest[..20], &[0]].concat());
        differs([soft.guest.clone(), vec![0; 28]].concat());
        // The test program has no devices.
        let mut workload = soft.guest;
        workload[6] = 1;
        differs(workload);
    }

    #[test]
    fn foreign_devices_are_refused() {
        let good = with_devices(Engine::Kvm).guest;
        let refused = |guest: Vec<u8>, part: &str| {
            let mut offer = with_devices(Engine::Kvm);
            offer.guest = guest;
            let failure = GuestDescription::of_offer(&offer).expect_err(part);
            assert_eq!(failure.exit, Exit::Refused);
            assert!(failure.message.contains(part), "{failure}");
        };
        for (at, value, part) in [
            (4, 1, "48 bytes, expected 20 of version 1"),
            (20, 9, "it has 9 devices, expected at most 8"),
            (20, 4, "less than 4 devices in 27 bytes"),
            (20, 2, "CPUID has 9 bytes"),
            (21, 0, "a device 0, expected 1 to 4"),
            (21, 5, "a device 5, expected 1 to 4"),
            (31, 1, "device 3 has a size of 1, expected 0"),
        ] {
            let mut bad = good.clone();
            bad[at] = value;
            refused(bad, part);
        }
        refused(good[..20].to_vec(), "no number of devices");
        for len in [21, 47] {
            refused(good[..len].to_vec(), "less than 3 devices");
        }
    }

    #[test]
    fn a_cpuid_survives_the_move() {
        let mut offer = with_devices(Engine::Kvm);
        // Leaf 7, whose index counts, with AVX2.
        let leaf = [7, 0, 1, 0, 0x20, 0, 0].map(u32::to_le_bytes).concat();
        offer.guest.extend(&leaf);
        let found = GuestDescription::of_offer(&offer).unwrap();
        assert_eq!(found.cpuid, Some(Cpuid::from_bytes(&leaf).unwrap()));
        assert_eq!(found.devices.len(), 3);
        assert_eq!(found.to_bytes(), offer.guest);
        offer.guest.pop();
        let failure = GuestDescription::of_offer(&offer).expect_err("a cut CPUID");
        assert!(failure.message.contains("CPUID has 27 bytes"), "{failure}");
    }

    #[test]
    fn foreign_descriptions_are_refused() {
        let good = GuestDescription::new(Engine::Soft, 2, 32 << 20).to_bytes();
        for (at, part) in [
            (0, "not Pageferry's"),
            (4, "version"),
            (6, "program"),
            (7, "instruction set"),
            (8, "differ"),
            (14, "differ"),
        ] {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            let failure = GuestDescription::of_offer(&offer(bad)).expect_err(part);
            assert_eq!(failure.exit, Exit::Refused);
            assert!(failure.message.contains(part), "{failure}");
        }
        for len in [0, 19, 21, 4096] {
            let mut bad = good.clone();
            bad.resize(len, 0x50);
            let failure = GuestDescription::of_offer(&offer(bad)).expect_err("length");
            assert!(failure.message.contains("bytes"), "{failure}");
        }
    }

    #[test]
    fn sizes_without_room_are_usage_errors() {
        let failure = GuestDescription::new(Engine::Soft, 4, 8192)
            .workload()
            .expect_err("too small");
        assert_eq!(failure.exit, Exit::Usage);
        assert!(failure.message.contains("at least"), "{failure}");
    }
}
