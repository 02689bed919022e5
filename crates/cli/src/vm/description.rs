//! The description of a VM's guest, in the bytes that travel with a migration.
//!
//! Twenty bytes, little-endian: `PFGD`; version (u16, 1); program (u8, 1: the workload, 2: Linux);
//! instruction set (u8, 1: x86-64, 2: RV64); vCPUs (u32); RAM in bytes (u64). The destination plans
//! the same workload from them, so that it can check every page. Of Linux it knows no contents.

use crate::exit::{Exit, Failure};
use crate::size;
use pageferry_guest::{GuestError, Isa, Workload};
use pageferry_harness::isa_of;
use pageferry_machine::{Engine, RamLayout};
use pageferry_migration::Offer;

const MAGIC: [u8; 4] = *b"PFGD";
const VERSION: u16 = 1;
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GuestDescription {
    /// The program.
    pub(crate) program: GuestProgram,
    /// The instruction set.
    pub(crate) isa: Isa,
    /// The number of vCPUs.
    pub(crate) vcpus: u32,
    /// The size of RAM in bytes.
    pub(crate) memory_bytes: u64,
}

impl GuestDescription {
    /// The workload for a machine of `engine`.
    pub(crate) fn new(engine: Engine, vcpus: u32, memory_bytes: u64) -> Self {
        Self {
            program: GuestProgram::Workload,
            isa: isa_of(engine),
            vcpus,
            memory_bytes,
        }
    }

    /// Linux for a machine of the soft engine.
    pub(crate) const fn linux(vcpus: u32, memory_bytes: u64) -> Self {
        Self {
            program: GuestProgram::Linux,
            isa: Isa::Rv64,
            vcpus,
            memory_bytes,
        }
    }

    /// The engine that runs it.
    pub(crate) fn engine(&self) -> Engine {
        match self.isa {
            Isa::X86_64 => Engine::Kvm,
            Isa::Rv64 => Engine::Soft,
        }
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
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let isa = match self.isa {
            Isa::X86_64 => 1,
            Isa::Rv64 => 2,
        };
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend([self.program as u8, isa]);
        bytes.extend(self.vcpus.to_le_bytes());
        bytes.extend(self.memory_bytes.to_le_bytes());
        bytes
    }

    /// Decodes the description of an offered VM and checks that it fits the rest of the offer.
    ///
    /// # Errors
    /// [`Exit::Refused`] with the fault.
    pub(crate) fn of_offer(offer: &Offer) -> Result<Self, Failure> {
        let refuse =
            |why: String| Failure::new(Exit::Refused, format!("the offered VM is refused: {why}"));
        let bytes: &[u8; BYTES] = offer.guest.as_slice().try_into().map_err(|_| {
            refuse(format!(
                "its guest description has {} bytes, not {BYTES}",
                offer.guest.len()
            ))
        })?;
        if bytes[..4] != MAGIC {
            return Err(refuse("its guest description is not Pageferry's".into()));
        }
        let version = u16::from_le_bytes([bytes[4], bytes[5]]);
        if version != VERSION {
            return Err(refuse(format!(
                "its guest description has version {version}, expected {VERSION}"
            )));
        }
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
        };
        let engine = offer.kind.engine.as_str().parse().map_err(refuse)?;
        let offered = Self {
            program,
            ..Self::new(engine, offer.vcpus, offer.memory_bytes)
        };
        if found != offered {
            return Err(refuse(
                "its guest description and its machine differ".into(),
            ));
        }
        if program == GuestProgram::Linux && isa != Isa::Rv64 {
            return Err(refuse(
                "it runs Linux on x86-64, expected Linux on RV64".into(),
            ));
        }
        found.workload().map_err(|e| refuse(e.message))?;
        Ok(found)
    }
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
    fn linux_survives_the_move_on_rv64_only() {
        let ours = GuestDescription::linux(2, 32 << 20);
        let of_offer = |offer: &Offer| GuestDescription::of_offer(offer);
        assert_eq!(of_offer(&offer(ours.to_bytes())).unwrap(), ours);
        let x86 = GuestDescription {
            isa: Isa::X86_64,
            ..ours
        };
        let mut x86 = offer(x86.to_bytes());
        x86.kind = kind_of(Engine::Kvm);
        let failure = of_offer(&x86).expect_err("no such Linux");
        assert!(failure.message.contains("x86-64"), "{failure}");
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
            let failure = GuestDescription::of_offer(&offer(vec![0x50; len])).expect_err("length");
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
