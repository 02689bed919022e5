//! The encoding of a vCPU's state.
//!
//! ```text
//! u32 magic "PFKV" | u16 version | u16 number of sections | sections
//! section: u16 tag | u16 zero | u32 length of the body in bytes | body
//! ```
//!
//! All little-endian. The body of a section is the kernel's structure (Linux x86 UAPI) or an array
//! of such. A tag occurs at most once. An unknown tag is an error, since a part of a CPU's state
//! must not be left out. The mandatory tags are checked at the end.

use crate::kvm::x86::paging::Paging;
use crate::kvm::x86::plain::{Plain, array_from_bytes, bytes_of, from_bytes};
use crate::{Exit, VcpuState};
use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_MAX_MSR_ENTRIES, kvm_cpuid_entry2, kvm_debugregs, kvm_lapic_state,
    kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_xcrs,
};
use pageferry_addr::{Gpa, PAGE_SIZE};

/// "PFKV" as a little-endian word.
const MAGIC: u32 = u32::from_le_bytes(*b"PFKV");
const VERSION: u16 = 1;
/// Bounds of XSAVE areas: `struct kvm_xsave`, and more than AMX needs (11 KiB).
const XSAVE_BYTES: std::ops::RangeInclusive<usize> = 4096..=16384;
/// More than any instruction can leave behind.
pub(in crate::kvm::x86) const MAX_EXITS: usize = 16;
/// One for each model-specific register that names a page, and some to spare.
const MAX_PAGES: usize = 8;
/// u64 gpa | the bytes of the page
const SHARED_PAGE_BYTES: usize = 8 + PAGE_SIZE as usize;

/// A page that KVM itself accesses for the vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::kvm::x86) struct SharedPage {
    /// Its first byte.
    pub(in crate::kvm::x86) gpa: Gpa,
    pub(in crate::kvm::x86) bytes: Box<[u8; PAGE_SIZE as usize]>,
}

/// The tag of each section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum Tag {
    Regs = 1,
    Sregs = 2,
    Sregs2 = 3,
    Xcrs = 4,
    Xsave = 5,
    DebugRegs = 6,
    Events = 7,
    MpState = 8,
    Msrs = 9,
    Cpuid = 10,
    Lapic = 11,
    TscKhz = 12,
    Exits = 13,
    TscOffset = 14,
    Pages = 15,
}

impl Tag {
    /// The part of the state, in messages.
    fn part(self) -> &'static str {
        match self {
            Self::Regs => "registers",
            Self::Sregs | Self::Sregs2 => "special registers",
            Self::Xcrs => "extended control registers",
            Self::Xsave => "extended registers",
            Self::DebugRegs => "debug registers",
            Self::Events => "pending events",
            Self::MpState => "multiprocessing state",
            Self::Msrs => "model-specific registers",
            Self::Cpuid => "CPUID",
            Self::Lapic => "LAPIC",
            Self::TscKhz => "TSC frequency",
            Self::Exits => "exits to report",
            Self::TscOffset => "TSC offset",
            Self::Pages => "pages that KVM itself accesses",
        }
    }
}

/// Special registers, by the ioctl that the source's kernel has.
#[derive(Clone, Debug)]
pub(in crate::kvm::x86) enum Special {
    /// `KVM_GET_SREGS`
    V1(kvm_sregs),
    /// `KVM_GET_SREGS2`
    V2(kvm_sregs2),
}

impl Special {
    /// The part that both have.
    pub(in crate::kvm::x86) fn paging(&self) -> Paging {
        match self {
            Self::V1(s) => Paging {
                cr0: s.cr0,
                cr3: s.cr3,
                cr4: s.cr4,
                efer: s.efer,
                cpl: s.ss.dpl,
                idt_limit: s.idt.limit,
            },
            Self::V2(s) => Paging {
                cr0: s.cr0,
                cr3: s.cr3,
                cr4: s.cr4,
                efer: s.efer,
                cpl: s.ss.dpl,
                idt_limit: s.idt.limit,
            },
        }
    }
}

/// A decoded state.
#[derive(Clone, Debug)]
pub(in crate::kvm::x86) struct Parts {
    pub(in crate::kvm::x86) regs: kvm_regs,
    pub(in crate::kvm::x86) special: Special,
    pub(in crate::kvm::x86) xcrs: kvm_xcrs,
    pub(in crate::kvm::x86) xsave: Vec<u32>,
    pub(in crate::kvm::x86) debug: kvm_debugregs,
    pub(in crate::kvm::x86) events: kvm_vcpu_events,
    pub(in crate::kvm::x86) mp_state: kvm_mp_state,
    pub(in crate::kvm::x86) msrs: Vec<kvm_msr_entry>,
    pub(in crate::kvm::x86) cpuid: Vec<kvm_cpuid_entry2>,
    /// Present if the vCPU has an in-kernel LAPIC.
    pub(in crate::kvm::x86) lapic: Option<kvm_lapic_state>,
    /// The frequency of its TSC, 0 if the host does not report it.
    pub(in crate::kvm::x86) tsc_khz: u32,
    /// The difference of its TSC and its host's. Present if the vCPU has an in-kernel LAPIC, and
    /// the host tells it and does not scale.
    pub(in crate::kvm::x86) tsc_offset: Option<u64>,
    /// Exits that the vCPU has made and that `run` has not returned yet.
    pub(in crate::kvm::x86) exits: Vec<Exit>,
    /// The guest's clock, steal time and the like. Empty without an in-kernel LAPIC.
    pub(in crate::kvm::x86) pages: Vec<SharedPage>,
}

fn array_bytes<T: Plain>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(bytes_of).copied().collect()
}

impl Parts {
    /// Encodes the state.
    pub(in crate::kvm::x86) fn encode(&self) -> VcpuState {
        let mut sections = 0u16;
        let mut body = Vec::with_capacity(12 * 1024);
        let mut section = |tag: Tag, bytes: &[u8]| {
            sections += 1;
            body.extend_from_slice(&(tag as u16).to_le_bytes());
            body.extend_from_slice(&[0; 2]);
            body.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
            body.extend_from_slice(bytes);
        };
        section(Tag::Regs, bytes_of(&self.regs));
        match &self.special {
            Special::V1(sregs) => section(Tag::Sregs, bytes_of(sregs)),
            Special::V2(sregs) => section(Tag::Sregs2, bytes_of(sregs)),
        }
        section(Tag::Xcrs, bytes_of(&self.xcrs));
        let xsave: Vec<u8> = self
            .xsave
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        section(Tag::Xsave, &xsave);
        section(Tag::DebugRegs, bytes_of(&self.debug));
        section(Tag::Events, bytes_of(&self.events));
        section(Tag::MpState, bytes_of(&self.mp_state));
        section(Tag::Msrs, &array_bytes(&self.msrs));
        section(Tag::Cpuid, &array_bytes(&self.cpuid));
        if let Some(lapic) = &self.lapic {
            section(Tag::Lapic, bytes_of(lapic));
        }
        section(Tag::TscKhz, &self.tsc_khz.to_le_bytes());
        let exits: Vec<u8> = self.exits.iter().flat_map(encode_exit).collect();
        section(Tag::Exits, &exits);
        if let Some(offset) = self.tsc_offset {
            section(Tag::TscOffset, &offset.to_le_bytes());
        }
        if !self.pages.is_empty() {
            let page = |page: &SharedPage| [&page.gpa.0.to_le_bytes()[..], &*page.bytes].concat();
            let pages: Vec<u8> = self.pages.iter().flat_map(page).collect();
            section(Tag::Pages, &pages);
        }

        let mut state = Vec::with_capacity(8 + body.len());
        state.extend_from_slice(&MAGIC.to_le_bytes());
        state.extend_from_slice(&VERSION.to_le_bytes());
        state.extend_from_slice(&sections.to_le_bytes());
        state.append(&mut body);
        VcpuState(state)
    }

    /// Decodes a state.
    ///
    /// # Errors
    /// The first fault of the bytes.
    pub(in crate::kvm::x86) fn decode(state: &VcpuState) -> Result<Self, String> {
        let bytes = &state.0;
        if bytes.len() > VcpuState::MAX_BYTES {
            return Err(format!(
                "{} bytes are more than {}",
                bytes.len(),
                VcpuState::MAX_BYTES
            ));
        }
        let mut input = Input(bytes);
        let (magic, version, count) = (input.u32()?, input.u16()?, input.u16()?);
        if magic != MAGIC {
            return Err(format!(
                "it is not a state of the kvm engine (magic {magic:#010x}, expected {MAGIC:#010x})"
            ));
        }
        if version != VERSION {
            return Err(format!("its version is {version}, expected {VERSION}"));
        }
        let mut sections: Vec<(u16, &[u8])> = Vec::new();
        for _ in 0..count {
            let (tag, zero, len) = (input.u16()?, input.u16()?, input.u32()?);
            if zero != 0 || tag == 0 || tag > Tag::Pages as u16 {
                return Err(format!("section {tag} (flags {zero:#x}) is unknown"));
            }
            if sections.iter().any(|(other, _)| *other == tag) {
                return Err(format!("section {tag} occurs twice"));
            }
            sections.push((tag, input.take(len as usize)?));
        }
        if !input.0.is_empty() {
            return Err(format!("{} bytes follow the last section", input.0.len()));
        }
        Sections(sections).into_parts()
    }
}

/// The bytes still to decode.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self.0.split_at_checked(len).ok_or_else(|| {
            format!(
                "it ends early: {len} bytes are expected, {} are left",
                self.0.len()
            )
        })?;
        self.0 = tail;
        Ok(head)
    }

    fn u16(&mut self) -> Result<u16, String> {
        self.take(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
    }

    fn u32(&mut self) -> Result<u32, String> {
        self.take(4)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }
}

/// The bodies by tag, no tag twice.
struct Sections<'a>(Vec<(u16, &'a [u8])>);

impl<'a> Sections<'a> {
    fn find(&self, tag: Tag) -> Option<&'a [u8]> {
        self.0
            .iter()
            .find(|(t, _)| *t == tag as u16)
            .map(|(_, body)| *body)
    }

    fn need(&self, tag: Tag) -> Result<&'a [u8], String> {
        self.find(tag)
            .ok_or_else(|| format!("section {} ({}) is missing", tag as u16, tag.part()))
    }

    fn plain<T: Plain>(&self, tag: Tag) -> Result<T, String> {
        let body = self.need(tag)?;
        from_bytes(body).ok_or_else(|| wrong_size(tag, body))
    }

    fn array<T: Plain>(&self, tag: Tag, most: usize) -> Result<Vec<T>, String> {
        let body = self.need(tag)?;
        array_from_bytes(body, most).ok_or_else(|| wrong_size(tag, body))
    }

    fn special(&self) -> Result<Special, String> {
        match (self.find(Tag::Sregs), self.find(Tag::Sregs2)) {
            (Some(_), Some(_)) => Err("it has special registers twice (sections 2 and 3)".into()),
            (Some(_), None) => self.plain(Tag::Sregs).map(Special::V1),
            _ => self.plain(Tag::Sregs2).map(Special::V2),
        }
    }

    fn xsave(&self) -> Result<Vec<u32>, String> {
        let body = self.need(Tag::Xsave)?;
        if !XSAVE_BYTES.contains(&body.len()) {
            return Err(wrong_size(Tag::Xsave, body));
        }
        let (words, rest) = body.as_chunks::<4>();
        if !rest.is_empty() {
            return Err(wrong_size(Tag::Xsave, body));
        }
        Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
    }

    fn tsc_offset(&self) -> Result<Option<u64>, String> {
        let Some(body) = self.find(Tag::TscOffset) else {
            return Ok(None);
        };
        let bytes = body
            .try_into()
            .map_err(|_| wrong_size(Tag::TscOffset, body))?;
        Ok(Some(u64::from_le_bytes(bytes)))
    }

    fn pages(&self) -> Result<Vec<SharedPage>, String> {
        let body = self.find(Tag::Pages).unwrap_or_default();
        let (pages, rest) = body.as_chunks::<SHARED_PAGE_BYTES>();
        if !rest.is_empty() || pages.len() > MAX_PAGES {
            return Err(wrong_size(Tag::Pages, body));
        }
        let page = |page: &[u8; SHARED_PAGE_BYTES]| {
            let (gpa, bytes) = page.split_first_chunk().expect("longer than an address");
            let gpa = u64::from_le_bytes(*gpa);
            if gpa % PAGE_SIZE != 0 {
                return Err(format!("{gpa:#x} is not the address of a page"));
            }
            let bytes = Box::new(bytes.try_into().expect("the rest is a page"));
            Ok(SharedPage {
                gpa: Gpa(gpa),
                bytes,
            })
        };
        pages.iter().map(page).collect()
    }

    fn exits(&self) -> Result<Vec<Exit>, String> {
        let body = self.need(Tag::Exits)?;
        let (exits, rest) = body.as_chunks::<EXIT_BYTES>();
        if !rest.is_empty() || exits.len() > MAX_EXITS {
            return Err(wrong_size(Tag::Exits, body));
        }
        exits.iter().map(decode_exit).collect()
    }

    fn into_parts(self) -> Result<Parts, String> {
        let tsc_khz = self.need(Tag::TscKhz)?;
        let lapic = self
            .find(Tag::Lapic)
            .map(|_| self.plain(Tag::Lapic))
            .transpose()?;
        Ok(Parts {
            regs: self.plain(Tag::Regs)?,
            special: self.special()?,
            xcrs: self.plain(Tag::Xcrs)?,
            xsave: self.xsave()?,
            debug: self.plain(Tag::DebugRegs)?,
            events: self.plain(Tag::Events)?,
            mp_state: self.plain(Tag::MpState)?,
            msrs: self.array(Tag::Msrs, KVM_MAX_MSR_ENTRIES)?,
            cpuid: self.array(Tag::Cpuid, KVM_MAX_CPUID_ENTRIES)?,
            lapic,
            tsc_khz: u32::from_le_bytes(
                tsc_khz
                    .try_into()
                    .map_err(|_| wrong_size(Tag::TscKhz, tsc_khz))?,
            ),
            tsc_offset: self.tsc_offset()?,
            exits: self.exits()?,
            pages: self.pages()?,
        })
    }
}

fn wrong_size(tag: Tag, body: &[u8]) -> String {
    format!(
        "section {} ({}) has {} bytes, a wrong length",
        tag as u16,
        tag.part(),
        body.len()
    )
}

/// A u8, the kind (1 write, 2 read, 3 port write, 4 port read); a u8, the size; 6 zero bytes; a
/// u64, the gpa or port; a u64, the value.
const EXIT_BYTES: usize = 24;

fn encode_exit(exit: &Exit) -> [u8; EXIT_BYTES] {
    let (kind, size, gpa, value) = match *exit {
        Exit::MmioWrite { gpa, value, size } => (1, size, gpa, value),
        Exit::MmioRead { gpa, size } => (2, size, gpa, 0),
        Exit::PortWrite { port, value, size } => (3, size, Gpa(port.into()), value.into()),
        Exit::PortRead { port, size } => (4, size, Gpa(port.into()), 0),
        other => unreachable!("{other:?} is never put off"),
    };
    let mut bytes = [0; EXIT_BYTES];
    bytes[0] = kind;
    bytes[1] = size;
    bytes[8..16].copy_from_slice(&gpa.0.to_le_bytes());
    bytes[16..24].copy_from_slice(&value.to_le_bytes());
    bytes
}

fn decode_exit(bytes: &[u8; EXIT_BYTES]) -> Result<Exit, String> {
    let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let (size, gpa, value) = (bytes[1], Gpa(word(8)), word(16));
    match (bytes[0], size) {
        (1, 1..=8) => Ok(Exit::MmioWrite { gpa, value, size }),
        (2, 1..=8) if value == 0 => Ok(Exit::MmioRead { gpa, size }),
        (kind @ (3 | 4), 1 | 2 | 4) => match (kind, u16::try_from(gpa.0), u32::try_from(value)) {
            (3, Ok(port), Ok(value)) => Ok(Exit::PortWrite { port, value, size }),
            (4, Ok(port), Ok(0)) => Ok(Exit::PortRead { port, size }),
            _ => Err(format!(
                "an access to port {:#x} with value {value:#x} is impossible",
                gpa.0
            )),
        },
        (kind, _) => Err(format!(
            "an exit of kind {kind} and {size} bytes is unknown"
        )),
    }
}

#[cfg(test)]
mod tests;
